"""snippets/with_deepspeed/train_step.py: each ZeRO stage takes the step that one process takes."""

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: nox -s engines-test")

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from train_step import create_engine, gradient_divisor, train_step

from attention import sdpa
from model import Config, Decoder

CONFIG = Config(vocabulary=40, hidden=32, layers=1, heads=4, kv_heads=2, mlp=48)
RATE = 0.5
# valid labels of two replicas with two micro-batches each: first and second half of 32 tokens
KEPT = [[(7, 1), (16, 2)], [(1, 15), (0, 3)]]


def samples(dp_size):
    """[replica][micro-batch], the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for replica in range(dp_size):
        made.append([])
        for halves in KEPT[replica]:
            input_ids = torch.randint(CONFIG.vocabulary, (1, 32), generator=generator)
            labels = input_ids.clone()
            for half, kept in enumerate(halves):
                labels[:, 16 * half + 1 : 16 * half + 17 - kept] = -100
            made[-1].append({"input_ids": input_ids, "labels": labels})
    return made


def new_model():
    torch.manual_seed(0)
    return Decoder(CONFIG)


def one_process(steps, rate=RATE):
    """Losses and parameters of steps with the micro-batches of all replicas, without any part of the snippet."""
    model, losses = new_model(), []
    optimizer = torch.optim.SGD(model.parameters(), rate)
    for batches in steps:
        loss_sum, tokens = 0, 0
        for batch in batches:
            positions = torch.arange(32)[None]
            logits = model(batch["input_ids"], positions, sdpa)[0, :-1]
            labels = batch["labels"][0, 1:]
            loss_sum = loss_sum + F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            tokens += (labels != -100).sum()
        loss = loss_sum / tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [x.detach() for x in model.parameters()]


def new_engine(stage, sp_size, accumulation, *, rate=RATE, **config):
    deepspeed.init_distributed("gloo", verbose=False)
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **config},
    }
    return create_engine(model, optimizer, config, sp_size)


def check(stage, sp_size, accumulation, *, number_of_steps=1, **config):
    dp_size = dist.get_world_size() // sp_size
    data = samples(dp_size)
    per_step = [slice(i * accumulation, (i + 1) * accumulation) for i in range(number_of_steps)]
    losses, expected = one_process([[x for own in data for x in own[part]] for part in per_step])
    engine = new_engine(stage, sp_size, accumulation, **config)
    own = data[dist.get_rank() // sp_size]
    assert [train_step(engine, own[part]) for part in per_step] == pytest.approx(losses, rel=1e-6)
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        before = [x.detach() for x in new_model().parameters()]
        for x, y, start in zip(parameters, expected, before, strict=True):
            # the step, not the parameter: what the gradient did
            torch.testing.assert_close(x.detach() - start, y - start, rtol=1e-4, atol=3e-7)
            first = x.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(x, first), "ranks differ"


@pytest.mark.parametrize("stage", [3, 2, 1, 0])
@pytest.mark.distributed(world_size=4)
def test_each_stage_takes_the_step_of_one_process(stage):
    check(stage, sp_size=2, accumulation=2)


@pytest.mark.parametrize("stage", [3, 0])
@pytest.mark.distributed(world_size=4)
def test_two_steps_without_accumulation(stage):
    check(stage, sp_size=2, accumulation=1, number_of_steps=2)


@pytest.mark.distributed(world_size=2)
def test_one_replica():
    check(2, sp_size=2, accumulation=2)


@pytest.mark.distributed(world_size=4)
def test_stage_1_without_reduce_scatter():
    check(1, sp_size=2, accumulation=2, reduce_scatter=False)


@pytest.mark.distributed(world_size=2)
def test_stage_3_without_reduce_scatter_is_refused():
    engine = new_engine(3, 2, accumulation=1, reduce_scatter=False)
    with pytest.raises(ValueError, match="has one D for parameters that fit into reduce_bucket_size and another"):
        train_step(engine, samples(1)[0][:1])


@pytest.mark.distributed(world_size=4)
def test_sizes_in_the_config_alone_are_refused():
    deepspeed.init_distributed("gloo", verbose=False)
    model = new_model()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": 2,
        "data_parallel_size": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2},
    }
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    with pytest.raises(
        ValueError, match="ZeRO 2 reduces gradients over 2 of 4 ranks, so the ranks of an SP group drift"
    ):
        gradient_divisor(engine)
    with pytest.raises(ValueError, match="pass mpu=parallel_state_sp"):
        train_step(engine, samples(2)[0][:1])


@pytest.mark.distributed(world_size=2)
def test_another_number_of_micro_batches_is_refused():
    engine = new_engine(1, 2, accumulation=2)
    with pytest.raises(ValueError, match="1 micro-batches, but gradient_accumulation_steps is 2"):
        train_step(engine, samples(1)[0][:1])
