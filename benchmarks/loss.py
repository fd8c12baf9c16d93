"""Loss and backward over 4 ranks: weighted_all_reduce against the functional all-gather recipe, in one run.

    python benchmarks/loss.py [--device cuda]

Writes docs/_data/loss.json, or loss_cuda.json.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "snippets"), str(ROOT / "tests")]
RANKS, WARM_UP, ROUNDS = 4, 20, 300


def on_each_rank(device: str) -> None:
    from launcher import backend_for
    from loss import weighted_all_reduce
    from loss_all_gather import all_gather_loss
    from measured import write

    warnings.simplefilter("ignore", FutureWarning)  # the recipe's function is deprecated
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend = backend_for(device, RANKS)
    dist.init_process_group(backend)
    weight = torch.tensor(dist.get_rank() + 1.0, device=device)
    seconds = {all_gather_loss: [], weighted_all_reduce: []}
    for i in range(WARM_UP + ROUNDS):
        for recipe, times in seconds.items():  # in turn, so that a busy machine is busy for both
            local = torch.ones((), device=device, requires_grad=True)
            dist.barrier()
            start = time.perf_counter()
            recipe(local, weight, None).backward()
            if device == "cuda":
                torch.cuda.synchronize()
            if i >= WARM_UP:
                times.append(time.perf_counter() - start)
    all_gather, all_reduce = (1000 * statistics.median(times) for times in seconds.values())
    if dist.get_rank() == 0:
        write(
            "loss" if device == "cpu" else f"loss_{device}",
            device,
            backend=backend,
            ranks=RANKS,
            rounds=ROUNDS,
            all_gather_ms=round(all_gather, 3),
            weighted_all_reduce_ms=round(all_reduce, 3),
            ratio=round(all_gather / all_reduce, 1),
        )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    if "RANK" in os.environ:
        on_each_rank(device)
        return
    from rank_main import Script
    from ranks import run_on_ranks

    with tempfile.TemporaryDirectory() as directory:
        script = Script(__file__, ("--device", device))
        print(run_on_ranks(script, world_size=RANKS, timeout=300, directory=Path(directory))[0])


if __name__ == "__main__":
    main()
