"""How long 4 ranks take that meet, all-reduce once and leave: torchrun, torch.multiprocessing.spawn, the test launcher.

In one run, in turn, so that a busy machine is busy for all three. Writes docs/_data/launcher.json.
"""

import os
import runpy
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.multiprocessing as mp

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
SCRIPT = str(HERE / "all_reduce_once.py")
RANKS, ROUNDS = 4, 9


def with_torchrun() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", SCRIPT]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def spawned(rank: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    runpy.run_path(SCRIPT)


def with_spawn() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(spawned, args=(port,), nprocs=RANKS)


def with_launcher() -> None:
    from rank_main import Script
    from ranks import run_on_ranks

    with tempfile.TemporaryDirectory() as directory:
        run_on_ranks(Script(SCRIPT, ()), world_size=RANKS, timeout=60, directory=Path(directory))


def main() -> None:
    from measured import write

    ways = {"torchrun": with_torchrun, "spawn": with_spawn, "launcher": with_launcher}
    with_launcher()  # starts the server, once for a whole suite
    seconds = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(times) for name, times in seconds.items()}
    write(
        "launcher",
        "cpu",
        ranks=RANKS,
        rounds=ROUNDS,
        torchrun_s=round(median["torchrun"], 3),
        spawn_s=round(median["spawn"], 3),
        launcher_s=round(median["launcher"], 3),
        torchrun_ratio=round(median["torchrun"] / median["launcher"], 1),
        spawn_ratio=round(median["spawn"] / median["launcher"], 1),
    )


if __name__ == "__main__":
    main()
