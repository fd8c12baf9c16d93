"""snippets/with_transformers/ulysses_llama.py: each engine takes the step that one process takes."""

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: nox -s engines-test")

import torch
import torch.distributed as dist
from ulysses_llama import mean_loss, use_ulysses

from engine_gradients_transformers import GRIDS, new_model, of_the_step, references, whole_parameters
from process_groups import create_parallel_groups
from sharding import shard_batch

GRID = GRIDS[0]


def wrapped(model, engine):
    """The model in its engine, its optimizer, and D."""
    if engine == "DDP":
        model = torch.nn.parallel.DistributedDataParallel(model)
    elif engine == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def check(engine, stage=None):
    losses_and_gradients = references(GRID)
    loss_of_one, gradient_of_one = losses_and_gradients["tokens"]
    groups = create_parallel_groups(GRID.sp)
    model = new_model()
    before = torch.cat([x.detach().double().flatten() for x in model.parameters()])
    use_ulysses(model, groups.sp)
    sample = {name: x[None] for name, x in of_the_step(GRID)[groups.dp_rank].items()}
    shard = shard_batch(sample, groups.sp)
    tokens = (shard["shift_labels"] != -100).sum()
    if engine == "DeepSpeed":
        import deepspeed

        from engine_gradients import make_mpu
        from engine_gradients_transformers import divisor_of, zero_config

        deepspeed.init_distributed("gloo", verbose=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        running, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=zero_config(stage, GRID), mpu=make_mpu(GRID.sp, groups, "mpu")
        )
        loss = mean_loss(running, shard, tokens, gradient_divisor=divisor_of(stage, GRID))
        running.backward(loss)
        running.step()
        after = whole_parameters(running.module)
    else:
        running, optimizer = wrapped(model, engine)
        loss = mean_loss(running, shard, tokens, gradient_divisor=dist.get_world_size())
        loss.backward()
        optimizer.step()
        whole = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in running.parameters()]
        after = torch.cat([x.detach().double().flatten() for x in whole])
    assert loss.item() == pytest.approx(loss_of_one, rel=1e-5)
    torch.testing.assert_close(before - after, gradient_of_one, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
@pytest.mark.distributed(world_size=4)
def test_step_of_one_process(engine):
    check(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.distributed(world_size=4)
def test_step_of_one_process_on_deepspeed(stage):
    check("DeepSpeed", stage)


def logits_over_ranks(change=lambda model: None):
    """Of one sample: in one process, then this rank's slice of them."""
    model = new_model().eval()
    change(model)
    sample = {name: x[None] for name, x in of_the_step(GRID)[0].items()}
    shard = shard_batch(sample, None)
    with torch.no_grad():
        whole = model(sample["input_ids"], position_ids=sample["position_ids"]).logits
        use_ulysses(model, None)
        own = model(shard["input_ids"], position_ids=shard["position_ids"]).logits
    return whole.chunk(dist.get_world_size(), dim=1)[dist.get_rank()], own


def scale_differently(model):
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.5


@pytest.mark.distributed(world_size=2)
def test_another_scaling_is_kept():
    whole, own = logits_over_ranks(scale_differently)
    torch.testing.assert_close(own, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.distributed(world_size=2)
def test_not_causal_is_kept():
    """As in a model whose layers see the whole sequence; the causal one gives other logits."""
    import transformers

    query = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    model = new_model()
    use_ulysses(model, None)
    attend = transformers.AttentionInterface()["ulysses"]
    own = query.chunk(2, dim=2)[dist.get_rank()]
    module = torch.nn.Module()
    module.is_causal = False
    found, _ = attend(module, own, own, own, None)
    whole = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    torch.testing.assert_close(found, whole.transpose(1, 2).chunk(2, dim=1)[dist.get_rank()])


@pytest.mark.distributed(world_size=2)
def test_what_is_not_computed_is_refused():
    def drop(model):
        model.train()
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1

    with pytest.raises(ValueError, match=r"dropout=0.1: pass ulysses_attention an `attention` that computes it"):
        logits_over_ranks(drop)
