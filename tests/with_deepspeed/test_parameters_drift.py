"""snippets/with_deepspeed/parameters_drift.py: who has equal parameters after a step, and why the others have not."""

import re

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: nox -s engines-test")

import parameters_drift
import torch
import torch.distributed as dist
from deepspeed.utils import groups as deepspeed_groups
from parameters_drift import engine_after_a_step, weight_of

SCRIPT = parameters_drift.__file__


def weights_of_all(groups, stage):
    weight = weight_of(engine_after_a_step(groups, stage))
    everyone = [torch.empty_like(weight) for _ in range(4)]
    dist.all_gather(everyone, weight)
    return everyone


def one_process():
    """The weight after the step of one process with the whole sequence."""
    torch.manual_seed(0)
    model, sequence = torch.nn.Linear(4, 1), torch.randn(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(sequence).pow(2).mean().backward()
    optimizer.step()
    return model.weight.detach().flatten()


@pytest.mark.parametrize("groups", ["sizes", "mpu", "none"])
@pytest.mark.distributed(world_size=4, timeout=30)
def test_parameters_after_a_step(groups):
    """DeepSpeed keeps its groups for the life of a process: all stages of one kind in one."""
    parameters_drift.deepspeed.init_distributed("gloo")
    how = getattr(parameters_drift, groups)
    if groups == "mpu":  # once in a process
        made = how({})["mpu"]
        how = lambda config: {"config": config, "mpu": made}  # noqa: E731
    for stage in range(4):
        everyone = weights_of_all(how, stage)
        if groups == "sizes" and stage < 3:
            assert len({tuple(weight.tolist()) for weight in everyone}) > 1
            assert dist.get_world_size(deepspeed_groups._get_sequence_data_parallel_group()) == 1
        else:
            assert all(torch.equal(weight, everyone[0]) for weight in everyone)
            # the first step of Adam sees the sign of the gradient, not its size
            torch.testing.assert_close(everyone[0], one_process(), rtol=1e-5, atol=1e-6)


def test_the_group_is_the_one_that_the_page_names():
    """In deepspeed/utils/groups.py: without mpu, gradients meet over the data-parallel group of the mesh."""
    import inspect

    source = inspect.getsource(deepspeed_groups._get_sequence_data_parallel_group)
    assert re.search(r"if mpu is not None.*?return mpu\..*?return _get_data_parallel_group\(\)", source, re.S)
    source = inspect.getsource(deepspeed_groups._get_data_parallel_group)
    assert 'mesh_device.get_group(mesh_dim="data_parallel")' in source


@pytest.mark.parametrize("groups", ["sizes", "mpu"])
def test_the_script_prints_what_the_page_shows(groups, run_script, recorded, counts_as_run):
    outputs = run_script(SCRIPT, groups, world_size=4)
    lines = [line for line in outputs[0].splitlines() if re.match(r"rank \d: ", line)]
    text = "".join(f"{line}\n" for line in lines)
    different = len({line.partition(":")[2] for line in lines})
    if groups == "sizes":
        assert different > 1
        recorded("parameters-drift-sizes.txt", text)
    else:
        assert different == 1
        recorded("parameters-drift-mpu.txt", text)
