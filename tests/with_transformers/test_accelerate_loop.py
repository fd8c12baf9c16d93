"""snippets/with_transformers/accelerate_loop.py: Accelerate takes the step that one process takes."""

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: nox -s engines-test")
pytest.importorskip("accelerate", reason="accelerate is not installed: nox -s engines-test")
pytest.importorskip("transformers", reason="transformers is not installed: nox -s engines-test")

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate_loop import create_accelerator, gradient_divisor, train_step

from engine_gradients_transformers import (
    Grid,
    loader,
    new_model,
    parallelism,
    references,
    whole_parameters,
    zero_config,
)


def prepared(stage, grid, sync_with_dataloader=False):
    accelerator = create_accelerator(zero_config(stage, grid), grid.sp, grid.dp)
    if sync_with_dataloader:
        accelerator.gradient_state.plugin_kwargs["sync_with_dataloader"] = True
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return accelerator, *accelerator.prepare(model, optimizer, loader())


def check(stage, grid):
    loss, gradient = references(grid)["tokens"]
    accelerator, model, optimizer, batches = prepared(stage, grid)
    before = whole_parameters(model)
    step = [next(batches) for _ in range(grid.accumulation)]
    assert train_step(accelerator, model, optimizer, step) == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(before - whole_parameters(model), gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.distributed(world_size=4)
def test_step_of_one_process(stage):
    check(stage, Grid(2, 2, accumulation=2))


@pytest.mark.distributed(world_size=2)
def test_one_replica():
    check(1, Grid(1, 2, accumulation=2))


@pytest.mark.distributed(world_size=2)
def test_each_micro_batch_a_step_where_the_data_ends_is_refused():
    grid = Grid(1, 2, accumulation=2)
    accelerator, model, optimizer, batches = prepared(1, grid, sync_with_dataloader=True)
    step = [next(batches), next(batches)]
    with pytest.raises(ValueError, match=r"GradientAccumulationPlugin\(num_steps=2, sync_with_dataloader=False\)"):
        train_step(accelerator, model, optimizer, step)


@pytest.mark.distributed(world_size=2)
def test_another_number_of_micro_batches_is_refused():
    accelerator, model, optimizer, batches = prepared(1, Grid(1, 2, accumulation=2))
    with pytest.raises(ValueError, match="1 micro-batches, but gradient_accumulation_steps is 2"):
        train_step(accelerator, model, optimizer, [next(batches)])


@pytest.mark.distributed(world_size=4)
def test_zero_3_without_reduce_scatter_is_refused():
    class Engine:
        def zero_optimization_stage(self):
            return 3

        def zero_reduce_scatter(self):
            return False

    class Stub:
        gradient_accumulation_steps = 3
        parallelism_config = parallelism(Grid(2, 2))

    with pytest.raises(ValueError, match='ZeRO 3 with "reduce_scatter": false does not divide all gradients'):
        gradient_divisor(Stub, Engine())


@pytest.mark.distributed(world_size=2)
def test_on_gloo_accelerate_believes_to_be_alone_unless_told(monkeypatch):
    grid = Grid(1, 2)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero_config(1, grid)), parallelism_config=parallelism(grid)
    )
    assert (accelerator.num_processes, accelerator.is_main_process) == (1, True)
    assert dist.get_world_size() == 2
    with pytest.raises(ValueError, match=r"num_processes is 1, but there are 2 ranks: on gloo pass kwargs_handlers"):
        train_step(accelerator, None, None, [{}])


@pytest.mark.distributed(world_size=2)
def test_on_gloo_accelerate_knows_all_ranks_when_told():
    accelerator = create_accelerator(zero_config(1, Grid(1, 2)), 2, 1)
    assert (accelerator.num_processes, accelerator.process_index) == (2, dist.get_rank())
    # what its guide takes the SP group from
    assert accelerator.torch_device_mesh is None


@pytest.mark.distributed(world_size=2)
def test_the_loader_leaves_no_labels_for_the_models_own_loss():
    _, model, _, batches = prepared(1, Grid(1, 2))
    assert model(**next(batches)).loss is None
