"""Starts ranks, waits for them, and reports where each stands when one fails.

Each rank is a fresh process, forked from a server that has imported torch already. The first rank that
fails decides; the others are ended.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import re
import signal
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby, takewhile
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
import torch
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
SHOWN_OUTPUT = 20_000  # bytes of each rank's output in a report, and characters of its traceback
SHOWN_TITLE = 500
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
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            cut = max(0, file.seek(0, os.SEEK_END) - SHOWN_OUTPUT)
            file.seek(cut)
            text = file.read(SHOWN_OUTPUT).decode("utf-8", errors="replace")
        return f"[… {cut} bytes]\n{text}" if cut else text

    def hear(self) -> None:
        """Takes what the rank has to say: a message, or its death, which may follow the message."""
        if self.state == "running" and self.connection.poll():
            try:
                self.state, self.summary, self.traceback, self.when = self.connection.recv()
                return
            except (EOFError, ConnectionError):
                self.process.join(GRACE)  # on its way out, unless its body closed the pipe
                if self.process.exitcode is None:
                    self._dies("closed the pipe through which it reports")
        if self.state != "died" and self.process.exitcode is not None:
            self._dies(_cause_of_death(self.process.exitcode, "before" if self.state == "running" else "after"))

    def _dies(self, cause: str) -> None:
        self.state, self.summary, self.when = "died", cause, time.monotonic()

    def kill(self) -> None:
        if self.process.pid is None:  # interrupted at its start
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # with all that the rank started
        self.process.kill()  # where it has no group of its own yet
        self.process.join()


def start_server() -> None:
    """Starts what ranks are forked from, unless it runs; it imports torch while the caller goes on."""
    cpu = os.environ.get("DS_ACCELERATOR") == "cpu"  # otherwise it might initialise CUDA
    _context.set_forkserver_preload([*PRELOAD, *(["preload_deepspeed", "preload_transformers"] if cpu else [])])
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
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}: a test needs at least 1 rank")
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
            ranks.append(Rank(number, process, ours, log, stacks))
            process.start()
            theirs.close()
        _wait_for(ranks, timeout)
        if all(rank.state == "skipped" for rank in ranks):
            raise pytest.skip.Exception(ranks[0].summary, _use_item_location=True)
        return [rank.output for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
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
        ends = [rank.connection for rank in running] + [rank.process.sentinel for rank in ranks]
        ready = wait(ends, deadline - time.monotonic())
        for rank in ranks:
            rank.hear()
        if not ready or any(rank.state in ("failed", "died") for rank in ranks):
            pytest.fail(_report(ranks, f"time limit of {timeout:g} s"), pytrace=False)
    if len({rank.state for rank in ranks}) > 1:
        pytest.fail(_report(ranks, "not skipped by all"), pytrace=False)

    for rank in ranks:
        with contextlib.suppress(ConnectionError):  # it has died since; its exit code says how
            rank.connection.send("everybody is done")
    deadline = time.monotonic() + GRACE
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))
    if failed := [rank for rank in ranks if rank.process.exitcode != 0]:
        for rank in failed:
            rank.hear()
            if rank.process.exitcode is None:
                rank.state = "running"
        pytest.fail(_report(ranks, f"{GRACE:g} s after the end of all bodies"), pytrace=False)


def _report(ranks: list[Rank], occasion: str) -> str:
    _ask_where_they_stand(ranks)
    # A rank that died took its connections along; what others raised after that is only the echo.
    died, failed = (
        sorted((rank for rank in ranks if rank.state == state), key=lambda rank: rank.when)
        for state in ("died", "failed")
    )
    if order := died + failed:
        first_line, _, _ = order[0].summary.partition("\n")
        title = _shortened(f"rank {order[0].number}: {first_line}", SHOWN_TITLE)
    else:
        groups = _by_progress(ranks)
        title = f"{occasion}: " + ", ".join(f"{_names(group)} {progress}" for progress, group in groups if group)
        order = [rank for _, group in groups for rank in group]
    order += [rank for rank in ranks if rank not in order]
    return "\n".join([title, *(_section(rank) for rank in order)])


def _by_progress(ranks: list[Rank]) -> list[tuple[str, list[Rank]]]:
    """Where nobody failed: first those that the others probably wait for."""
    states = ("skipped", "passed", "running")
    skipped, passed, running = ([rank for rank in ranks if rank.state == state] for state in states)
    late, place = _late(running)
    rest = [rank for rank in running if rank not in late]
    return [("skipped", skipped), ("had finished", passed), (place, late), ("did not finish", rest)]


def _late(running: list[Rank]) -> tuple[list[Rank], str]:
    """Ranks that stand outside of torch while others wait within; where several places are, those at the rarest.

    Of ranks that all wait within torch nobody can tell which is late: a race decides how far each comes.
    """
    groups = defaultdict(list)
    for rank in running:
        groups[_calls(rank)].append(rank)
    order = sorted((calls[-1:] == ("torch",), len(group), calls, group) for calls, group in groups.items())
    if len(order) < 2 or order[0][:2] == order[1][:2] or order[0][0]:
        return [], ""
    _, _, calls, late = order[0]
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(calls, order[1][2], strict=False)))
    return late, f"stood at {calls[min(common, len(calls) - 1)]}" if calls else "did not answer"


def _calls(rank: Rank) -> tuple[str, ...]:
    """`file:line` of the calls that the rank's main thread is in, outermost first; `torch` for those within torch."""
    main_thread = _stack(rank).split("\n\n")[-1]
    torch_files = str(Path(torch.__file__).parent)
    calls = [
        "torch" if file.startswith(torch_files) else f"{Path(file).name}:{line}"
        for file, line in re.findall(r'File "(.+)", line (\d+)', main_thread)[::-1]
    ]
    return tuple(call for call, _ in groupby(calls))


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
        parts.append(_stack(rank) or "(it did not answer)")
    if rank.traceback:
        parts.append(_shortened(rank.traceback, SHOWN_OUTPUT))
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
        running = [rank for rank in running if rank.state == "running" and not _is_whole(rank.stacks)]


def _is_whole(stacks: Path) -> bool:
    """Whether faulthandler came to the end: the main thread's outermost call, or where it cuts a deep stack."""
    return stacks.exists() and stacks.read_text().endswith(("in <module>\n", "  ...\n"))


def _stack(rank: Rank) -> str:
    """The rank's Python threads from the innermost call out, less the launcher's own thread and frames."""
    text = rank.stacks.read_text() if rank.stacks.exists() else ""
    threads = [thread for thread in text.split("\n\n") if "_end_with_parent" not in thread]
    return "\n\n".join(thread.split(f'\n  File "{rank_main.__file__}"')[0] for thread in threads).strip()


def _cause_of_death(exitcode: int, when: str) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode} {when} the end of its body"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-exitcode, f'signal {-exitcode}')}" + (" after its body" if when == "after" else "")


def _names(ranks: list[Rank]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(rank.number) for rank in ranks)


def _shortened(text: str, length: int) -> str:
    cut = len(text) - length
    return text if cut <= 0 else f"{text[: length // 2]} [… {cut} characters …] {text[-length // 2 :]}"
