"""Each hang of the page: which ranks stand where, as the launcher reports it, and what torch says of it."""

import re
from pathlib import Path

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


@pytest.mark.needs_torch("2.3")  # save takes `checkpoint_id` from there on
def test_only_rank_0_saves(launch, device, tmp_path):
    report = where_ranks_stand(launch, saves_on_rank_0, device=device, folder=str(tmp_path))
    waits, *callers = re.findall(r" in (\w+)$", report.partition("rank 1:")[0], re.M)
    assert "gather" in waits or "scatter" in waits
    assert callers == ["save_model", "saves_on_rank_0"]


def logs_on_rank_0_and_sums(device):
    for step in (1, 2):
        log_mean_loss(step, torch.ones((), device=device))
        dist.all_reduce(torch.tensor(100.0, device=device))


def test_the_next_sum_is_taken_for_it(launch, recorded, device):
    """The losses are 1 on both ranks. Where the others' next collective fits, nothing hangs at first."""
    with pytest.raises(pytest.fail.Exception) as failure:
        launch(logs_on_rank_0_and_sums, world_size=2, timeout=3, device=device)
    report = str(failure.value)
    assert "rank 1: had finished its body" in report
    recorded("only-some-ranks-paired.txt", report[report.index("step 1") :].strip() + "\n")


# ------------------------------------------------------------------------------------------ what torch says

SCRIPT = """
import datetime, os, sys, time
import torch, torch.distributed as dist
import torch.distributed.checkpoint
sys.path.insert(0, {tests!r})
from test_only_some_ranks import *

if child := os.fork():  # the child may end before the other rank does
    os.waitpid(child, 0)
else:
    if {detail}:
        dist.set_debug_level(dist.DebugLevel.DETAIL)  # as TORCH_DISTRIBUTED_DEBUG=DETAIL does at the start
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={seconds} + 9 * rank))
    try:
        {call}
    except RuntimeError as error:
        print(str(error).strip())
    if {detail}:
        time.sleep(1)  # the other one compares as well
    os._exit(0)
"""


@pytest.fixture
def errors_of(run_script, tmp_path):
    """What each of two ranks says of a hang; rank 0's time is up first, and it ends."""

    def run(call, *, seconds, detail=False):
        script = tmp_path / f"{len(list(tmp_path.iterdir()))}.py"
        script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), call=call, seconds=seconds, detail=detail))
        return run_script(script, world_size=2, timeout=30)

    return run


CALLS = {
    "only rank 0 logs": "logs_on_rank_0('cpu')",
    "only rank 0 saves": "saves_on_rank_0(sys.argv[0] + '-saved', 'cpu')",
    "rank 1 has a batch fewer": "has_one_batch_fewer_on_rank_1('cpu')",
}


def test_the_first_rank_times_out_and_the_others_see_it_go(errors_of):
    first, second = errors_of(CALLS["only rank 0 logs"], seconds=1)
    assert re.search(r"Timed out waiting 1000ms for recv operation to complete", first)
    assert re.search(r"Connection (closed|reset) by peer", second)


@pytest.mark.needs_torch("2.3")
def test_in_detail_torch_names_both_collectives(errors_of, recorded):
    """What a rank says of itself; it reads the other's wrongly, as the page says."""
    lines = []
    for hang, call in CALLS.items():
        lines.append(hang)
        for rank, error in enumerate(errors_of(call, seconds=20, detail=True)):
            own = re.search(
                r"Detected mismatch between collectives on ranks. (Rank \d is running collective: )"
                r"CollectiveFingerPrint\((SequenceNumber=\d+),? ?(OpType=\w+)",
                error,
            )
            assert own[1].startswith(f"Rank {rank} ")
            if rank == 0:
                assert "but Rank 1 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)" in error
            lines.append(f"  {own[1]}{own[2]}, {own[3]}")
    recorded("only-some-ranks-detail.txt", "\n".join(lines) + "\n")


def test_in_detail_a_rank_that_comes_to_none_is_named(errors_of):
    first, _ = errors_of("dist.all_reduce(torch.ones(())) if rank == 0 else time.sleep(3)", seconds=1, detail=True)
    assert "Ranks 1 failed to pass monitoredBarrier in 1000 ms" in first
