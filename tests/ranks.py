"""Starts ranks, waits for them, and reports where each stands when one fails.

Each rank is a fresh process, forked from a server that has imported torch already. The first rank that
fails decides; the others are ended.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch.distributed as dist

import rank_main

# What the server imports before it forks: the rest of torch as well that torch.testing.assert_close, DDP, FSDP and
# meshes import at their first use, which would cost each rank a second. What a torch version lacks is passed over.
# None of it may initialise CUDA, which does not survive a fork.
PRELOAD = [
    "pytest",
    "rank_main",
    "torch._dynamo",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.nn.functional",
    "torch.testing._internal.distributed.fake_pg",
]
SHOWN_OUTPUT = 20_000  # characters of each rank's output in a report
GRACE = 5.0  # seconds in which all ranks say where they stand, or leave once everybody is done

_context = multiprocessing.get_context("forkserver")


@dataclass
class Rank:
    number: int
    process: multiprocessing.Process
    connection: Connection
    log: Path
    stacks: Path
    state: str = "running"  # passed, skipped, failed, died
    summary: str = ""
    traceback: str = ""
    when: float = 0.0  # on the clock that all processes of the machine share

    @property
    def output(self) -> str:
        text = self.log.read_text("utf-8", errors="replace") if self.log.exists() else ""
        cut = len(text) - SHOWN_OUTPUT
        return text if cut <= 0 else f"[… {cut} characters]\n{text[cut:]}"

    def hear(self) -> None:
        """Takes what the rank has to say: a message, or its death."""
        if self.connection.poll():
            with contextlib.suppress(EOFError, ConnectionError):
                self.state, self.summary, self.traceback, self.when = self.connection.recv()
                return
        if self.process.exitcode is not None:
            self.state, self.summary = "died", _cause_of_death(self.process.exitcode)

    def kill(self) -> None:
        for kill in (os.killpg, os.kill):  # the group, with all that the rank started; itself if it has none yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.process.pid, signal.SIGKILL)


def start_server() -> None:
    """Starts what ranks are forked from, unless it runs; it imports torch while the caller goes on."""
    _context.set_forkserver_preload(PRELOAD)
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([path] if path else [])])
    multiprocessing.forkserver.ensure_running()
    os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)


def run_on_ranks(work, *, world_size: int, timeout: float, directory: Path, tbstyle: str = "short") -> list[str]:
    """Runs `work` (a `rank_main.Body` or `Script`) on `world_size` ranks under torchrun's environment.

    Returns each rank's output. Where a rank fails this is `pytest.fail` with a report whose first line names
    the rank and its error; where all skip it is `pytest.skip`. No process outlives the call.
    """
    __tracebackhide__ = True
    start_server()
    directory.mkdir(parents=True, exist_ok=True)
    environment = dict(os.environ)
    if isinstance(work, rank_main.Script):
        # As torchrun does: the store is the parent's, its port the operating system's choice.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    ranks: list[Rank] = []
    try:
        for number in range(world_size):
            ours, theirs = _context.Pipe()
            log, stacks = directory / f"rank{number}.log", directory / f"rank{number}.stacks"
            own = environment | _rank_environment(number, world_size)
            process = _context.Process(target=rank_main.main, args=(work, own, theirs, str(log), str(stacks), tbstyle))
            process.start()
            theirs.close()
            ranks.append(Rank(number, process, ours, log, stacks))
        _wait_for(ranks, timeout)
        if all(rank.state == "skipped" for rank in ranks):
            pytest.skip(ranks[0].summary)
        return [rank.output for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.process.join()
            rank.connection.close()


def _rank_environment(rank: int, world_size: int) -> dict[str, str]:
    """What torchrun sets, and gloo's interface: all ranks are on this machine, whose name need not resolve."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo"),
    }


def _wait_for(ranks: list[Rank], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while running := [rank for rank in ranks if rank.state == "running"]:
        ready = wait(
            [end for rank in running for end in (rank.connection, rank.process.sentinel)], deadline - time.monotonic()
        )
        for rank in running:
            rank.hear()
        if not ready or any(rank.state in ("failed", "died") for rank in ranks):
            pytest.fail(_report(ranks, timeout), pytrace=False)
    if len({rank.state for rank in ranks}) > 1:
        pytest.fail(_report(ranks, timeout), pytrace=False)

    for rank in ranks:
        rank.connection.send("everybody is done")
    deadline = time.monotonic() + GRACE
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    if failed := [rank for rank in ranks if rank.process.exitcode != 0]:
        for rank in failed:
            rank.state = "running" if rank.process.exitcode is None else "died"
            rank.summary = "the body passed, but not the end of the process: "
            rank.summary += "still there" if rank.state == "running" else _cause_of_death(rank.process.exitcode)
        pytest.fail(_report(ranks, timeout), pytrace=False)


def _report(ranks: list[Rank], timeout: float) -> str:
    _ask_where_they_stand(ranks)
    # A rank that died took its connections along; what others raised after that is only the echo.
    failed = sorted((rank for rank in ranks if rank.state == "failed"), key=lambda rank: rank.when)
    culprits = [rank for rank in ranks if rank.state == "died"] + failed
    if culprits:
        first_line, _, _ = culprits[0].summary.partition("\n")
        title = f"rank {culprits[0].number}: {first_line}"
    elif running := [rank.number for rank in ranks if rank.state == "running"]:
        title = f"time limit of {timeout:g} s: {_names(running)} did not finish"
    else:
        skipped = [rank.number for rank in ranks if rank.state == "skipped"]
        title = f"{_names(skipped)} skipped the test, the others did not"
    order = culprits + [rank for rank in ranks if rank not in culprits]
    return "\n".join([title, *(_section(rank) for rank in order)])


def _section(rank: Rank) -> str:
    headline = {
        "running": "did not finish; it stood at",
        "passed": "had finished its body",
        "skipped": f"skipped: {rank.summary}",
        "failed": "failed",
        "died": rank.summary,
    }[rank.state]
    parts = [f" rank {rank.number}: {headline} ".center(80, "-")]
    if rank.state == "running":
        parts.append(_stack(rank))
    if rank.traceback:
        parts.append(rank.traceback)
    if output := rank.output.strip("\n"):
        parts += [f" rank {rank.number}: output ".center(80, "."), output]
    return "\n".join(parts)


def _ask_where_they_stand(ranks: list[Rank]) -> None:
    """Has each running rank write its stack; meanwhile deaths and failures that were under way are heard."""
    running = [rank for rank in ranks if rank.state == "running"]
    asked = []
    deadline = time.monotonic() + GRACE
    while running and time.monotonic() < deadline:
        for rank in running:
            # Before `faulthandler.register` the signal would end the process: wait for the file.
            if rank not in asked and rank.stacks.exists():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signal.SIGUSR1)
                asked.append(rank)
        time.sleep(0.02)
        for rank in running:
            rank.hear()
        running = [rank for rank in running if rank.state == "running" and not _stack(rank)]


def _stack(rank: Rank) -> str:
    """The rank's Python threads from the innermost call out, less the launcher's own thread and frames."""
    text = rank.stacks.read_text() if rank.stacks.exists() else ""
    threads = [thread for thread in text.split("\n\n") if "_end_with_parent" not in thread]
    return "\n\n".join(thread.split(f'\n  File "{rank_main.__file__}"')[0] for thread in threads).strip()


def _cause_of_death(exitcode: int) -> str:
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode} before the end of its body"


def _names(numbers: list[int]) -> str:
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))
