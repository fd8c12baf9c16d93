"""The program: the same curve on 1, 2 and 4 ranks, and with other micro-batches; saved, resumed, stopped, evaluated."""

import functools
import hashlib
import itertools
import json
import shutil
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import train
from attention import sdpa
from process_groups import create_parallel_groups

SCRIPT = Path(train.__file__)
SMALL = ("--tokens", "48", "--global-batch", "8")


def assert_same_curve(actual, expected, rtol=1e-4):
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    assert [line["tokens"] for line in actual] == [line["tokens"] for line in expected]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in actual] == pytest.approx([line[name] for line in expected], rel=rtol, abs=0)


# ------------------------------------------------------------------------------------------ its parts, on ranks


def options_of(**changes):
    values = {
        "engine": "ddp",
        "steps": 3,
        "seed": 0,
        "global_batch": 8,
        "micro_batch": 2,
        "learning_rate": 3e-3,
        "max_norm": 1.0,
        "compile": False,
        "metrics": None,
        "checkpoint_dir": None,
        "save_every": 100,
        "resume": False,
    }
    return types.SimpleNamespace(**(values | changes))


def trained(sp_size, device, stopping=(), **changes):
    groups = create_parallel_groups(sp_size)
    attention = train.functools.partial(train.ulysses_attention, group=groups.sp)
    samples, _ = train.samples_of(48)
    model = train.train(options_of(**changes), samples, groups, attention, torch.device(device), [*stopping])
    return model, groups, attention


def plain_loop(steps, max_norm, device):
    """Loss and gradient norm of each step in one process: no engine, no micro-batches, no padding."""
    samples, _ = train.samples_of(48)
    loader = train.create_loader(samples, batch_size=8, dp_rank=0, dp_size=1, seed=0, collate_fn=list)
    torch.manual_seed(0)
    model = train.Decoder(train.Config()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    lines = []
    for batch in itertools.islice(loader, steps):
        total = 0
        for ids in (sample.to(device) for sample in batch):
            logits = model(ids[None], torch.arange(len(ids), device=device)[None], sdpa)[0, :-1]
            total = total + F.cross_entropy(logits, ids[1:], reduction="sum")
        loss = total / sum(len(sample) - 1 for sample in batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        tokens = sum(len(sample) - 1 for sample in batch)
        lines.append({"step": len(lines) + 1, "loss": loss.item(), "grad_norm": norm.item(), "tokens": tokens})
    return lines


@pytest.mark.parametrize(
    ("engine", "sp_size", "micro_batch"),
    [("ddp", 1, 1), ("ddp", 2, 2), ("ddp", 4, 4), pytest.param("fsdp2", 2, 2, marks=pytest.mark.needs_torch("2.6"))],
)
@pytest.mark.distributed(world_size=4)
def test_first_steps_are_those_of_a_plain_loop(engine, sp_size, micro_batch, tmp_path, device):
    """Two micro-batches in each step, and a gradient norm that is clipped in some."""
    metrics = tmp_path / "metrics.jsonl"
    trained(sp_size, device, engine=engine, micro_batch=micro_batch, metrics=metrics, steps=4)
    if dist.get_rank() == 0:  # it writes the metrics
        curve = [json.loads(line) for line in metrics.read_text().splitlines()]
        expected = plain_loop(4, 1.0, device)
        assert max(line["grad_norm"] for line in expected) > 1
        assert_same_curve(curve, expected, rtol=2e-5)


@pytest.mark.distributed(world_size=2)
def test_one_rank_that_is_stopped_ends_all_after_the_same_step(tmp_path, device):
    metrics = tmp_path / "metrics.jsonl"
    trained(2, device, metrics=metrics, stopping=[True] * dist.get_rank())
    dist.barrier()
    assert len(metrics.read_text().splitlines()) == 1


@pytest.mark.parametrize("sp_size", [1, 2, 4])
@pytest.mark.distributed(world_size=4)
def test_parameters_are_bitwise_equal_on_all_ranks(sp_size, device):
    model, *_ = trained(sp_size, device, steps=2)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    everyone = [None] * 4
    dist.all_gather_object(everyone, digest.hexdigest())
    assert len(set(everyone)) == 1


@pytest.mark.distributed(world_size=2)
def test_replicas_and_steps_have_different_numbers_of_tokens(device):
    groups = create_parallel_groups(1)
    samples, _ = train.samples_of(48)
    loader = train.create_loader(
        samples, batch_size=2, dp_rank=groups.dp_rank, dp_size=2, seed=0, collate_fn=train.collate
    )
    steps = train.batches_of_steps(loader, 2, 0)
    mine = [sum((batch["labels"][:, 1:] != -100).sum().item() for batch in next(steps)) for _ in range(20)]
    everyone = [None] * 2
    dist.all_gather_object(everyone, mine)
    assert everyone[0] != everyone[1]
    assert len(set(everyone[0])) > 3


@pytest.mark.distributed(world_size=4)
def test_a_step_has_the_same_samples_whatever_the_number_of_replicas():
    samples = [torch.tensor([i, i]) for i in range(53)]  # no multiple of anything
    rank = dist.get_rank()

    def steps_of(dp_size, micro_batch, first, count):
        if rank >= dp_size:
            return None
        loader = train.create_loader(
            samples, batch_size=micro_batch, dp_rank=rank, dp_size=dp_size, seed=3, collate_fn=train.collate
        )
        steps = train.batches_of_steps(loader, 8 // (dp_size * micro_batch), first)
        return [[i for batch in next(steps) for i in batch["input_ids"][:, 0].tolist()] for _ in range(count)]

    def of_all(dp_size, micro_batch, first=0, count=20):
        everyone = [None] * 4
        dist.all_gather_object(everyone, steps_of(dp_size, micro_batch, first, count))
        return [sorted(i for ids in own for i in ids) for own in zip(*everyone[:dp_size], strict=True)]

    expected = of_all(1, 8)
    assert all(len(set(step)) == 8 for step in expected)
    assert expected[:6] != expected[6:12]  # the second epoch's order is another one
    for dp_size, micro_batch in [(1, 2), (2, 1), (2, 4), (4, 2), (4, 1)]:
        assert of_all(dp_size, micro_batch) == expected
    for first in (1, 5, 6, 13):  # as after a resume
        assert of_all(2, 2, first, 3) == expected[first : first + 3]


@pytest.mark.parametrize("sp_size", [1, 2, 4])
@pytest.mark.distributed(world_size=4)
def test_evaluation_is_the_token_mean_of_one_process(sp_size, device):
    model, groups, attention = trained(sp_size, device, steps=1)
    _, held_out = train.samples_of(40)
    for count in (1, 3, 7, 18):  # fewer samples than replicas; replicas with different numbers of batches
        mine = train.evaluate(model, held_out[:count], groups, attention, 4, torch.device(device))
        everyone = [None] * 4
        dist.all_gather_object(everyone, mine)
        if dist.get_rank():
            continue
        total = tokens = 0
        with torch.no_grad():
            for sample in held_out[:count]:
                ids = sample.to(device)[None]
                logits = model(ids, torch.arange(ids.shape[1], device=device)[None], sdpa)[0, :-1]
                total += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
                tokens += ids.shape[1] - 1
        assert everyone == pytest.approx([total / tokens] * 4, rel=1e-5)


@pytest.mark.needs_torch("2.6")
@pytest.mark.distributed(world_size=2)
def test_a_replica_with_fewer_batches_takes_part(device):
    """Under FSDP2 the forward pass is collective; of five samples one replica has two batches, the other one."""
    groups = create_parallel_groups(1)
    sharded, whole = (model_and_optimizer(0, device, engine)[0] for engine in ("fsdp2", "ddp"))
    _, held_out = train.samples_of(40)
    evaluate = functools.partial(train.evaluate, samples=held_out[:5], groups=groups, attention=sdpa, device=device)
    assert evaluate(sharded, batch_size=2) == pytest.approx(evaluate(whole, batch_size=5), rel=1e-5)


@pytest.mark.distributed(world_size=1)
def test_evaluation_counts_every_token_of_many(device, monkeypatch):
    """fp32 has no 16,777,217."""
    counts = iter([2**24, 1, 1])
    losses = iter([0.0, 1.0, 1.0])
    monkeypatch.setattr(train, "loss_sum_of", lambda *_: torch.tensor(next(losses), device=device))
    monkeypatch.setattr(train, "valid", lambda _: torch.tensor(next(counts), device=device))
    samples = [torch.tensor([1, 2])] * 3
    mean = train.evaluate(None, samples, create_parallel_groups(1), None, 1, torch.device(device))
    assert mean == pytest.approx(2 / (2**24 + 2), rel=1e-9, abs=0)


@pytest.mark.distributed(world_size=2)
def test_generation_takes_the_likeliest_byte(device):
    torch.manual_seed(0)
    model = train.Decoder(train.Config()).to(device)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 20 if weight.dim() == 2 else 1  # so that the likeliest byte depends on all before it
        model.head.weight[128:] = 0  # ASCII alone
    text = train.generate(model, "The ", 12, torch.device(device))
    ids = text.encode()
    assert len(ids) == 16
    assert ids.startswith(b"The ")
    assert len(set(ids[4:])) > 6
    everyone = [None] * 2
    dist.all_gather_object(everyone, text)
    assert everyone[0] == everyone[1]
    with torch.no_grad():
        for place in range(4, 16):
            before = torch.tensor([list(ids[:place])], device=device)
            logits = model(before, torch.arange(place, device=device)[None], sdpa)[0, -1]
            assert logits.argmax().item() == ids[place]


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=pytest.mark.needs_torch("2.6"))])
@pytest.mark.distributed(world_size=2)
def test_gradients_are_clipped_to_the_norm_of_all(engine, device):
    torch.manual_seed(0)
    model = train.Decoder(train.Config()).to(device)
    reference = train.Decoder(train.Config()).to(device)
    reference.load_state_dict(model.state_dict())
    model = train.wrap(model, engine)
    ids = torch.arange(20, device=device)[None]
    for each in (model, reference):
        each(ids, ids, sdpa).pow(2).sum().backward()
    for max_norm in (1e6, 0.5):
        norm = train.clip_gradients(model, max_norm)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            mine, theirs = mine.grad, theirs.grad
            if engine == "fsdp2":  # cuts along the first dimension
                mine, theirs = mine.to_local(), theirs.chunk(2)[dist.get_rank()]
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-8)


# ------------------------------------------------------------------------------------------ saved and resumed


ENGINES = [
    pytest.param("ddp", marks=pytest.mark.needs_torch("2.3")),  # save takes `checkpoint_id` from there on
    pytest.param("fsdp2", marks=pytest.mark.needs_torch("2.6")),
]


def model_and_optimizer(seed, device, engine="ddp", learning_rate=1e-2):
    torch.manual_seed(seed)
    model = train.wrap(train.Decoder(train.Config(layers=1)).to(device), engine)
    return model, torch.optim.AdamW(model.parameters(), learning_rate)


def step(model, optimizer, device):
    ids = torch.arange(16, device=device)[None]
    model(ids, ids, sdpa).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model, optimizer):
    """Weights, then what the optimizer has for each, as this rank has them."""
    tensors = list(model.parameters())
    tensors += [optimizer.state[x][name] for x in model.parameters() for name in ("exp_avg", "exp_avg_sq", "step")]
    return [getattr(x, "to_local", lambda x=x: x)().detach().clone() for x in tensors]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.distributed(world_size=2)
def test_loaded_as_it_was_saved(engine, device, tmp_path):
    saved = model_and_optimizer(0, device, engine)
    for _ in range(3):
        step(*saved, device)
    train.save_checkpoint(tmp_path, 3, *saved)
    loaded = model_and_optimizer(1, device, engine, learning_rate=5.0)
    assert train.load_checkpoint(tmp_path, *loaded) == 3
    settings_are_loaded = torch.__version__ >= (2, 6)  # as the page says
    assert loaded[1].param_groups[0]["lr"] == (1e-2 if settings_are_loaded else 5.0)
    loaded[1].param_groups[0]["lr"] = 1e-2
    for _ in range(2):  # as it was loaded, and after one step more
        for mine, theirs in zip(state_of(*loaded), state_of(*saved), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        step(*loaded, device)
        step(*saved, device)


@pytest.mark.needs_torch("2.3")
@pytest.mark.distributed(world_size=2)
def test_a_checkpoint_has_its_name_once_it_is_whole(device, tmp_path, monkeypatch):
    from torch.distributed.checkpoint import FileSystemWriter

    names, rename, write = [], Path.rename, FileSystemWriter.write_data

    def slow_rename(*arguments):
        time.sleep(0.3)
        return rename(*arguments)

    def write_data(*arguments):
        names.append(sorted(path.name for path in tmp_path.iterdir()))
        return write(*arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)
    monkeypatch.setattr(Path, "rename", slow_rename)
    state = model_and_optimizer(0, device)
    step(*state, device)
    if dist.get_rank() == 0:  # what a killed run left, on more ranks
        (tmp_path / "step-1.partial").mkdir()
        (tmp_path / "step-1.partial" / "__3_0.distcp").touch()
    for times in (1, 2):  # the second takes the place of the first
        dist.barrier()
        train.save_checkpoint(tmp_path, 1, *state)
        assert names == [["step-1.partial"], ["step-1", "step-1.partial"]][:times]
        assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
        files = sorted(path.name for path in (tmp_path / "step-1").iterdir())
        assert files == [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.needs_torch("2.3")
@pytest.mark.distributed(world_size=2)
def test_the_newest_whole_checkpoint_is_loaded(device, tmp_path, monkeypatch):
    state = model_and_optimizer(0, device)
    before = state_of_weights(state[0])
    assert train.load_checkpoint(tmp_path / "none", *state) == 0
    assert all(map(torch.equal, state_of_weights(state[0]), before))
    for number in (9, 10):
        step(*state, device)
        train.save_checkpoint(tmp_path, number, *state)
    if dist.get_rank() == 0:
        shutil.copytree(tmp_path / "step-9", tmp_path / "step-11.partial")
    dist.barrier()
    if dist.get_rank() == 1:  # a shared file system may show it a little later there
        glob = Path.glob
        monkeypatch.setattr(Path, "glob", lambda *a: (path for path in glob(*a) if path.name != "step-10"))
    loaded = model_and_optimizer(1, device)
    assert train.load_checkpoint(tmp_path, *loaded) == 10
    assert all(map(torch.equal, state_of_weights(loaded[0]), state_of_weights(state[0])))


@pytest.mark.needs_torch("2.3")
@pytest.mark.distributed(world_size=2)
def test_a_part_that_is_missing_fails_on_every_rank(device, tmp_path):
    """As on disks that only one node sees."""
    state = model_and_optimizer(0, device)
    step(*state, device)
    train.save_checkpoint(tmp_path, 1, *state)
    if dist.get_rank() == 0:
        (tmp_path / "step-1" / "__1_0.distcp").unlink()
    dist.barrier()
    with pytest.raises(torch.distributed.checkpoint.CheckpointException, match=r"No such file or directory: .*__1_0"):
        train.load_checkpoint(tmp_path, *state)


def state_of_weights(model):
    return [x.detach().clone() for x in model.parameters()]


def prints_who_writes_what(engine, device, folder):
    """KiB of tensors in each rank's file, as torch's metadata has it."""
    from torch.distributed.checkpoint import FileSystemReader

    sp_size = min(2, dist.get_world_size())
    model, *_ = trained(sp_size, device, engine=engine, steps=1, checkpoint_dir=folder, save_every=1)
    if dist.get_rank() == 0:
        metadata = FileSystemReader(folder / "step-1").read_metadata()
        written = [0] * dist.get_world_size()
        for index, place in metadata.storage_data.items():
            for chunk in getattr(metadata.state_dict_metadata[index.fqn], "chunks", []):
                if chunk.offsets == index.offset:
                    written[int(place.relative_path.split("_")[2])] += 4 * chunk.sizes.numel()
        numbers = sum(x.numel() for x in model.parameters())  # AdamW has two more, and a step, for each
        assert sum(written) == 4 * (3 * numbers + len(list(model.parameters())))
        print(*(f"{size / 1024:.0f}" for size in written))


@pytest.mark.needs_torch("2.6")
def test_each_tensor_is_written_once(launch, recorded, device, tmp_path):
    lines = ["engine   ranks   KiB written by rank 0, 1, ..."]
    for engine, ranks in [("ddp", 1), ("ddp", 2), ("ddp", 4), ("fsdp2", 4)]:
        body = {"engine": engine, "device": device, "folder": tmp_path / f"{engine}-{ranks}"}
        outputs = launch(prints_who_writes_what, world_size=ranks, timeout=20, **body)
        written = outputs[0].splitlines()[-1].split()
        lines.append(f"{engine:9}{ranks}   " + "".join(f"{x:>8}" for x in written))
    recorded("save-and-resume-written.txt", "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"])  # torchrun's, DeepSpeed's
@pytest.mark.parametrize(("gpus", "backend"), [(2, "nccl"), (1, "gloo")])
def test_nccl_where_each_rank_has_a_gpu(name, gpus, backend, monkeypatch):
    """Two ranks on the node; torch is not asked for a GPU."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv(name, "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(train.torch.cuda, "device_count", lambda: gpus)
    chosen = []
    monkeypatch.setattr(train.torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(train.dist, "init_process_group", chosen.append)
    train.start("cuda")
    assert chosen == [1 % gpus, backend]


# ------------------------------------------------------------------------------------------ what does not fit


def test_a_global_batch_that_cannot_be_shared_out(run_script):
    with pytest.raises(pytest.fail.Exception) as failure:
        run_script(SCRIPT, "--global-batch", "12", "--micro-batch", "2", "--steps", "1", world_size=4)
    assert "global_batch 12 is no multiple of 8: micro_batch 2 on each of 4 replicas; use 8 or 16" in str(failure.value)
