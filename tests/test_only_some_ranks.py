"""Each hang of the page: which ranks stand where, as the launcher reports it, and that the right form ends."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint

from only_some_ranks import log_mean_loss, mean_loss, save_model

FRAME = re.compile(r'  File ".*?(torch/\S+|snippets/\S+|tests/\S+)", line \d+ in (\w+)')


def where_ranks_stand(launch, body, **arguments):
    """The launcher's report: of torch's frames the innermost, and without line numbers, as versions differ."""
    with pytest.raises(pytest.fail.Exception) as failure:
        launch(body, world_size=2, timeout=3, **arguments)
    lines, in_torch = [], False
    for line in str(failure.value).splitlines():
        if frame := FRAME.match(line):
            if frame[1].startswith("torch/") and in_torch:
                continue
            in_torch = frame[1].startswith("torch/")
            line = f"  File {frame[1]} in {frame[2]}"
        elif line.startswith("Current thread"):
            in_torch = False
            continue
        lines.append(line)
    return "\n".join(lines) + "\n"


def logs_on_rank_0(device):
    log_mean_loss(1, torch.ones((), device=device))
    dist.barrier()


def saves_on_rank_0(folder, device):
    save_model(folder, torch.nn.Linear(2, 2).to(device))
    dist.barrier()


def has_one_batch_fewer_on_rank_1(device):
    batches = [torch.ones((), device=device)] * (3 - dist.get_rank())
    mean_loss(batches, torch.clone)
    dist.barrier()


def assert_stand(report, ranks):
    parts = re.split(r"^-+ rank \d: did not finish; it stood at -+$", report, flags=re.M)
    assert parts[0] == "time limit of 3 s: ranks 0, 1 did not finish\n"
    for part, functions in zip(parts[1:], ranks, strict=True):
        assert re.findall(r" in (\w+)$", part, re.M)[: len(functions)] == functions


def test_only_rank_0_logs(launch, recorded, device):
    report = where_ranks_stand(launch, logs_on_rank_0, device=device)
    assert_stand(report, [["all_reduce", "log_mean_loss"], ["barrier", "logs_on_rank_0"]])
    recorded("only-some-ranks-log.txt", report)


def test_one_replica_has_a_batch_fewer(launch, recorded, device):
    report = where_ranks_stand(launch, has_one_batch_fewer_on_rank_1, device=device)
    assert_stand(report, [["all_reduce", "mean_loss"], ["barrier", "has_one_batch_fewer_on_rank_1"]])
    recorded("only-some-ranks-evaluate.txt", report)


@pytest.mark.needs_torch("2.6")  # on older ones saving stands elsewhere
def test_only_rank_0_saves(launch, device, tmp_path):
    report = where_ranks_stand(launch, saves_on_rank_0, device=device, folder=str(tmp_path))
    waits, *callers = re.findall(r" in (\w+)$", report.partition("rank 1:")[0], re.M)
    assert "gather" in waits or "scatter" in waits
    assert callers == ["save_model", "saves_on_rank_0"]
