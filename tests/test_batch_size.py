"""What a step holds, against what loaders give, what torch's counter counts, and what DeepSpeed takes."""

import functools
import re
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from attention import sdpa, ulysses_attention
from batch_size import (
    accumulation_steps,
    deepspeed_batch,
    matrix_parameters,
    mfu,
    model_flops,
    tokens_per_step,
    valid_tokens,
)
from model import Config, Decoder
from process_groups import create_parallel_groups
from same_batch import create_loader
from sharding import shard_batch

sp_sizes = pytest.mark.parametrize("sp_size", [1, 2, 4])


def over_all_ranks(number):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, number)
    return sum(everyone)


# -------------------------------------------------------------------------------------- samples and tokens


def test_accumulation_makes_up_the_global_batch():
    for dp_size in range(1, 5):
        for micro_batch in range(1, 5):
            for global_batch in range(1, 33):
                sizes = {"micro_batch": micro_batch, "dp_size": dp_size}
                if global_batch % (micro_batch * dp_size) == 0:
                    steps = accumulation_steps(global_batch=global_batch, **sizes)
                    assert steps * micro_batch * dp_size == global_batch
                    continue
                with pytest.raises(ValueError, match=f"^global_batch {global_batch} is no multiple of ") as error:
                    accumulation_steps(global_batch=global_batch, **sizes)
                offered = [int(number) for number in re.findall(r"\d+", str(error.value).partition("; use ")[2])]
                assert offered[-1] - micro_batch * dp_size < global_batch < offered[-1]
                for number in offered:
                    accumulation_steps(global_batch=number, **sizes)


def test_what_works_is_said():
    with pytest.raises(
        ValueError, match=r"12 is no multiple of 8: micro_batch 2 on each of 4 replicas; use 8 or 16, or another"
    ):
        accumulation_steps(global_batch=12, micro_batch=2, dp_size=4)
    with pytest.raises(
        ValueError, match=r"4 is no multiple of 8: micro_batch 2 on each of 4 replicas; use 8, or another"
    ):
        accumulation_steps(global_batch=4, micro_batch=2, dp_size=4)


@sp_sizes
@pytest.mark.distributed(world_size=4)
def test_a_step_of_the_loader_holds_as_many(sp_size, device):
    """Counted sample by sample and token by token, on all ranks."""
    groups = create_parallel_groups(sp_size)
    samples = [{"input_ids": torch.full((8,), number), "labels": torch.full((8,), number)} for number in range(27)]
    sizes = {"micro_batch": 2, "dp_size": groups.dp_size}
    accumulation = accumulation_steps(global_batch=8, **sizes)
    loader = create_loader(samples, batch_size=2, dp_rank=groups.dp_rank, dp_size=groups.dp_size)
    assert len(loader) // accumulation == 27 // 8  # steps of an epoch

    batches = [batch for batch, _ in zip(loader, range(accumulation), strict=False)]
    drawn = [number for batch in batches for number in batch["input_ids"][:, 0].tolist()]
    replicas = [None] * groups.dp_size
    dist.all_gather_object(replicas, drawn, group=groups.dp)
    together = [number for replica in replicas for number in replica]
    assert len(set(together)) == len(together) == 8
    assert deepspeed_batch(accumulation=accumulation, **sizes) == {
        "train_micro_batch_size_per_gpu": len(batches[0]["input_ids"]),
        "gradient_accumulation_steps": len(batches),
        "train_batch_size": len(together),
    }

    shards = [shard_batch({name: x.to(device) for name, x in batch.items()}, groups.sp) for batch in batches]
    on_this_rank = sum(shard["input_ids"].numel() for shard in shards)
    assert over_all_ranks(on_this_rank) == tokens_per_step(accumulation=accumulation, seq=8, **sizes) == 64


@sp_sizes
@pytest.mark.distributed(world_size=4)
def test_valid_tokens_are_those_of_one_process(sp_size, device):
    """Prompts of other lengths in each sample, and a micro-batch of which a rank has no valid label."""
    groups = create_parallel_groups(sp_size)
    labels = torch.arange(8 * 8).view(8, 8)  # four micro-batches of two samples
    for sample, prompt in enumerate([7, 0, 3, 5, 8, 1, 6, 2]):
        labels[sample, :prompt] = -100
    expected = (labels[:, 1:] != -100).sum().item()

    own = labels.split(2)[groups.dp_rank :: groups.dp_size]
    batches = [{"input_ids": x.to(device), "labels": x.to(device)} for x in own]
    slices = [shard_batch(batch, groups.sp)["shift_labels"] for batch in batches]
    assert valid_tokens(slices) == expected

    per_replica = sum((x[:, 1:] != -100).sum().item() for x in own)
    assert over_all_ranks(per_replica) == sp_size * expected  # each rank counts its whole samples


# --------------------------------------------------------------------------------------------------- FLOPs


def written_out(query, key, value, *, is_causal):
    """Attention as matrix products of [batch, heads, ...]: under a causal mask row by row, what it needs alone."""
    copies = query.shape[2] // key.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    key, value = (x.repeat_interleave(copies, dim=1) for x in (key, value))
    if not is_causal:
        return ((query @ key.mT / 4).softmax(-1) @ value).transpose(1, 2)
    rows = []
    for row in range(query.shape[2]):
        known = slice(row + 1)
        scores = query[:, :, row : row + 1] @ key[:, :, known].mT / 4
        rows.append(scores.softmax(-1) @ value[:, :, known])
    return torch.cat(rows, dim=2).transpose(1, 2)


def counted(model, input_ids, position_ids, attention):
    """By torch, of a forward and a backward pass."""
    counter = FlopCounterMode(display=False)
    with counter:
        model(input_ids, position_ids, attention).logsumexp(-1).sum().backward()
    return counter.get_total_flops()


def decoder(device, kv_heads=2):
    torch.manual_seed(0)
    config = Config(vocabulary=50, hidden=32, layers=2, heads=4, kv_heads=kv_heads, mlp=40)
    model = Decoder(config).to(device)
    return model, {"parameters": matrix_parameters(model), "layers": config.layers, "width": config.hidden}


def in_the_model(function, causal, *more):
    """Decoder itself always asks for a causal mask."""
    return lambda query, key, value, *, is_causal: function(query, key, value, *more, is_causal=causal)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.distributed(world_size=1)
def test_the_formula_counts_what_one_process_computes(is_causal, device):
    """Documents of five lengths, each computed on its own."""
    model, shape = decoder(device)
    attention = in_the_model(written_out, is_causal)
    total = 0
    for n in (1, 4, 7, 12, 3):
        ids = torch.arange(n, device=device)[None]
        total += counted(model, ids, ids, attention)
    assert total == model_flops(**shape, lengths=(n for n in (1, 4, 7, 12, 3)), is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [True, False])
@sp_sizes
@pytest.mark.distributed(world_size=4)
def test_the_ranks_share_what_one_process_computes(sp_size, is_causal, device):
    """Four samples: dp replicas have some each, and the ranks of a group share theirs."""
    groups = create_parallel_groups(sp_size)
    model, shape = decoder(device)
    ids = torch.arange(4 * 8, device=device).view(4, 8)
    position = torch.arange(8, device=device).expand(4, 8)
    alone = counted(model, ids, position, in_the_model(written_out, is_causal))

    own = [x.chunk(groups.dp_size)[groups.dp_rank].chunk(sp_size, dim=1)[groups.sp_rank] for x in (ids, position)]
    attention = in_the_model(functools.partial(ulysses_attention, attention=written_out), is_causal, groups.sp)
    mine = counted(model, *own, attention)
    assert mine * 4 == alone  # equal parts
    assert over_all_ranks(mine) == alone == model_flops(**shape, lengths=[8] * 4, is_causal=is_causal)


@pytest.mark.distributed(world_size=1)
def test_parameters_that_multiply_tokens(device):
    model, _ = decoder(device)
    looked_up_or_for_each_channel = 50 * 32 + (2 * 2 + 1) * 32
    everything = sum(x.numel() for x in model.parameters())
    assert matrix_parameters(model) == everything - looked_up_or_for_each_channel
    model.head.weight = model.embedding.weight  # tied: one tensor, and the head multiplies by it
    assert matrix_parameters(model) == everything - looked_up_or_for_each_channel


def test_all_ranks_are_in_the_denominator():
    """Two replicas of four ranks, each of which does half of what it could."""
    flops_of_a_rank, seconds, peak = 3e12, 6.0, 1e12
    assert mfu(8 * flops_of_a_rank, seconds, peak=peak, dp_size=2, sp_size=4) == pytest.approx(0.5)


def prints_what_is_counted_of_sdpa():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    model, shape = decoder("cpu")
    ids = torch.arange(24).view(2, 12)
    position = torch.arange(12).expand(2, 12)
    products = 6 * shape["parameters"] * 24
    causal, full = (model_flops(**shape, lengths=[12] * 2, is_causal=x) - products for x in (True, False))
    with sdpa_kernel(SDPBackend.MATH):
        as_math = counted(model, ids, position, sdpa) - products
    heads = (2, 4, 12, 8)  # batch, heads, seq, head_dim
    kernel = 2 * (sdpa_flop_count(*[heads] * 3) + sdpa_backward_flop_count(*[heads] * 4))
    print("FLOPs of causal attention, of those of all pairs")
    print(f"  model_flops, is_causal=False     {full / full:.3f}")
    print(f"  model_flops, is_causal=True      {causal / full:.3f}   12 tokens: 78 of 144 pairs")
    print(f"  counter, SDPA as matrix products {as_math / full:.3f}")
    print(f"  counter, SDPA as one kernel      {kernel / full:.3f}")


@pytest.mark.needs_torch("2.3")
def test_what_the_counter_counts_of_sdpa(launch, recorded):
    recorded("batch-size-counter.txt", launch(prints_what_is_counted_of_sdpa, world_size=1, timeout=20)[0])


@pytest.mark.needs_torch("2.3")  # before, SDPA on CPU is counted in part
@pytest.mark.distributed(world_size=1)
def test_a_kernel_counts_seven_products_of_six_or_nothing(device):
    """Of all pairs; the backward kernel computes the scores anew, and the mask is not looked at."""
    model, shape = decoder(device, kv_heads=4)  # torch 2.11 does not count fewer
    ids = torch.arange(24, device=device).view(2, 12)
    with torch.autocast(device, torch.bfloat16):
        found = counted(model, ids, torch.arange(12, device=device).expand(2, 12), sdpa)
    products = 6 * shape["parameters"] * 24
    full = model_flops(**shape, lengths=[12] * 2, is_causal=False) - products
    in_its_table = device == "cuda" or torch.__version__ >= (2, 15)
    assert 6 * (found - products) == (7 * full if in_its_table else 0)


# ----------------------------------------------------------------------------------- the table on the page


def prints_a_table():
    """Llama-3.1-8B's shapes on eight ranks."""
    config = Config(vocabulary=128_256, hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14_336)
    with torch.device("meta"):
        parameters = matrix_parameters(Decoder(config))
    shape = {"parameters": parameters, "layers": config.layers, "width": config.hidden}
    print("                                                            wrong, × sp:")
    print("sp   dp   accumulation   samples    tokens      FLOPs    MFU    samples    MFU")
    for sp_size in (1, 2, 4, 8):
        grid = {"dp_size": 8 // sp_size, "sp_size": sp_size}
        sizes = {"micro_batch": 2, "dp_size": grid["dp_size"]}
        accumulation = accumulation_steps(global_batch=16, **sizes)
        samples = deepspeed_batch(accumulation=accumulation, **sizes)["train_batch_size"]
        tokens = tokens_per_step(accumulation=accumulation, seq=32_768, **sizes)
        flops = model_flops(**shape, lengths=[32_768] * samples)
        right = mfu(flops, 10, peak=989e12, **grid)
        wrong = mfu(model_flops(**shape, lengths=[32_768] * samples * sp_size), 10, peak=989e12, **grid)
        print(
            f"{sp_size:2}{grid['dp_size']:5}{accumulation:15}{samples:10}{tokens:10,}{flops:11.2e}{right:7.0%}"
            f"{2 * accumulation * 8:11}{wrong:7.0%}"
        )


def test_the_table(launch, recorded):
    recorded("batch-size.txt", launch(prints_a_table, world_size=1, timeout=20)[0])


# ----------------------------------------------------------------------------------------------- DeepSpeed

RIGHT = deepspeed_batch(micro_batch=2, accumulation=2, dp_size=2)
WITHOUT = [(), *[(name,) for name in RIGHT]]  # DeepSpeed works out one of the three itself


def initialize(how, config, device, **options):
    """What a trainer does; returns DeepSpeed's engine and loader, on 4 ranks with sp 2."""
    deepspeed = pytest.importorskip("deepspeed")
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    deepspeed.init_distributed(dist_backend=dist.get_backend())
    if how == "mpu":
        if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
            parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size=2)
        options["mpu"] = parallel_state_sp
    if how == "sizes":
        config = config | {"sequence_parallel_size": 2, "data_parallel_size": 2}
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, **options)
    return engine, loader


def steps_and_samples(engine, micro_batches, device):
    for _ in range(micro_batches):
        engine.backward(engine(torch.ones(2, 2, device=device)).sum())
        engine.step()
    return engine.global_steps, engine.global_samples


@pytest.mark.parametrize("how", ["mpu", "sizes"])
@pytest.mark.distributed(world_size=4)
def test_deepspeed_counts_as_we_do(how, device):
    for left_out in WITHOUT:
        engine, _ = initialize(how, {name: RIGHT[name] for name in RIGHT if name not in left_out}, device)
        assert engine.train_batch_size() == RIGHT["train_batch_size"] == 8
        assert engine.gradient_accumulation_steps() == 2
        assert engine.train_micro_batch_size_per_gpu() == 2
        assert engine.tput_timer.batch_size == 8
        assert steps_and_samples(engine, 4, device) == (2, 16)
    if how == "mpu":  # the world is divided with "/"
        assert isinstance(engine.train_batch_size(), float)


@pytest.mark.distributed(world_size=4)
def test_without_the_accumulation_the_mistake_goes_through(device):
    """The same numbers as in the message, but for the accumulation: it doubles, and so does the batch."""
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}
    engine, _ = initialize("mpu", config, device)
    assert engine.gradient_accumulation_steps() == 4
    assert steps_and_samples(engine, 4, device) == (1, 16)


@pytest.mark.distributed(world_size=4)
def test_an_engine_that_knows_no_sp_counts_samples_sp_times(device):
    """8 samples a step are drawn, on 2 replicas."""
    engine, _ = initialize("neither", {name: RIGHT[name] for name in list(RIGHT)[:2]}, device)
    assert engine.train_batch_size() == 16
    assert steps_and_samples(engine, 8, device) == (4, 64)
    timer = engine.tput_timer  # leaves out two steps
    assert timer.avg_samples_per_sec() == pytest.approx(16 * 2 / timer.total_elapsed_time)


def prints_the_refusal(how, train_batch_size, device):
    try:
        initialize(how, RIGHT | {"train_batch_size": train_batch_size}, device)
    except AssertionError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        print(f"{'/'.join(Path(place.filename).parts[-3:])}, {place.name}\nAssertionError: {error}")


def test_deepspeeds_message(launch, recorded, device):
    titles = {
        ("mpu", 16): "mpu=parallel_state_sp, micro × accumulation × world:",
        ("sizes", 16): "sequence_parallel_size and data_parallel_size in the config, likewise:",
        ("neither", 8): "neither of them, micro × accumulation × dp:",
    }
    lines = []
    for (how, size), title in titles.items():
        outputs = launch(prints_the_refusal, world_size=4, timeout=20, how=how, train_batch_size=size, device=device)
        assert all("deepspeed/runtime/config.py, _batch_assertion\n" in output for output in outputs)
        (error,) = {re.search("AssertionError: .*", output)[0] for output in outputs}
        lines += [title, *("  " + part for part in error.replace(". ", ".\n").splitlines())]
    recorded("batch-size-deepspeed.txt", "\n".join(lines) + "\n")


@pytest.mark.distributed(world_size=4)
def test_deepspeeds_own_loader_does_not_take_the_groups(device):
    """What the page says of `training_data`."""
    samples = [torch.ones(2)] * 16
    with pytest.raises(AttributeError, match=r"parallel_state_sp' has no attribute 'get_data_parallel_world_size'"):
        initialize("mpu", RIGHT, device, training_data=samples)


@pytest.mark.distributed(world_size=4)
def test_nor_does_it_take_the_sizes(device):
    samples = [torch.ones(2)] * 16
    if dist.get_rank() < 2:
        _, loader = initialize("sizes", RIGHT, device, training_data=samples)
        assert (loader.data_sampler.rank, loader.data_sampler.num_replicas) == (dist.get_rank(), 2)  # in one SP group
    else:
        with pytest.raises(
            ValueError, match=rf"Invalid rank {dist.get_rank()}, rank should be in the interval \[0, 1\]"
        ):
            initialize("sizes", RIGHT, device, training_data=samples)
