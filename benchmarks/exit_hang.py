"""How often four ranks over gloo hang in destroy_process_group: at once after the last collective, and 0.1 s later.

Writes docs/_data/exit_hang/ for the torch that runs it. `nox -s bench` does not call it: it belongs to legacy torch, as
in `.nox/compat-test-torch-2-2-2/bin/python benchmarks/exit_hang.py`.
"""

import multiprocessing
import os
import tempfile
import time

import torch
import torch.distributed as dist

from measured import DATA, write

RUNS, RANKS, LIMIT = 250, 4, 4.0
context = multiprocessing.get_context("forkserver")


def rank_body(rank: int, rendezvous: str, pause: float) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    dist.all_reduce(torch.ones(2))
    for turn in range(RANKS):
        if turn == rank:
            print(rank, file=open(os.devnull, "w"))
        dist.barrier()
    time.sleep(pause)
    dist.destroy_process_group()


def hangs(pause: float) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        ranks = [context.Process(target=rank_body, args=(rank, f"{directory}/store", pause)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + LIMIT
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = any(process.is_alive() for process in ranks)
        for process in ranks:
            process.kill()
            process.join()
        return hung


if __name__ == "__main__":
    context.set_forkserver_preload(["torch.distributed"])
    (DATA / "exit_hang").mkdir(exist_ok=True)
    write(
        f"exit_hang/cpu-torch-{torch.__version__.split('+')[0]}",
        "cpu",
        runs=RUNS,
        ranks=RANKS,
        limit_s=LIMIT,
        hung=sum(hangs(0.0) for _ in range(RUNS)),
        hung_after_pause=sum(hangs(0.1) for _ in range(RUNS)),
    )
