"""The training program on several grids of ranks: its curves, and how far they are from the one of a single process.

    python benchmarks/train.py [--device cuda]

Beside them the same run on the grid 2 × 2 with one thing wrong: what a fault looks like in the log. Writes
docs/_data/train.json, or train_cuda.json.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "snippets"), str(ROOT / "tests")]

STEPS, TOKENS, BATCH = 50, 128, 8
RUNS = [  # dp, sp, options; the first is what the others are compared with
    (1, 1, []),
    (1, 2, []),
    (1, 4, []),
    (2, 2, []),
    (4, 1, []),
    (2, 2, ["--micro-batch", "4"]),
    (2, 2, ["--engine", "fsdp2"]),
    (2, 2, ["--compile"]),
]
FAULTY_GRID = 2, 2
FAULTS = {  # name: what stands in train.py, and what in its place
    "each rank attends to its own slice": ("functools.partial(ulysses_attention, group=groups.sp)", "sdpa"),
    "positions count from 0 in each slice": (
        'shard["position_ids"], attention',
        'shard["position_ids"] - shard["position_ids"][:, :1], attention',
    ),
    "the mean of each rank's own mean": (
        "                None,\n                gradient_divisor=dist.get_world_size(),",
        "                dist.new_group([dist.get_rank()], use_local_synchronization=True),\n"
        "                gradient_divisor=1,",
    ),
    "the gradient divided by the SP size once more": (
        "gradient_divisor=dist.get_world_size()",
        "gradient_divisor=dist.get_world_size() // 2",
    ),
}


def train(snippets: Path, device: str, dp: int, sp: int, options: list[str]) -> dict:
    """Lists of all steps, and the loss of what was held out, computed with SP and without."""
    from rank_main import Script
    from ranks import run_on_ranks

    with tempfile.TemporaryDirectory() as directory:
        metrics = Path(directory) / "metrics.jsonl"
        settings = {"steps": STEPS, "tokens": TOKENS, "global-batch": BATCH, "device": device, "metrics": metrics}
        arguments = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        script = Script(str(snippets / "train.py"), ("--sequence-parallel-size", str(sp), *arguments, *options))
        output = run_on_ranks(script, world_size=dp * sp, timeout=500, directory=Path(directory))[0]
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    held_out = re.search(r"held out: ([\d.]+) with SP, ([\d.]+) without", output)
    steps = {name: [line[name] for line in lines] for name in ("loss", "grad_norm", "tokens")}
    return steps | {"held_out": [float(number) for number in held_out.groups()]}


def compared(run: dict, one: dict) -> dict:
    """What is written of a run: beside its losses the largest relative differences from the run on one process."""
    assert run["tokens"] == one["tokens"]
    largest = {
        f"{name}_off": float(f"{max(abs(x / y - 1) for x, y in zip(run[name], one[name], strict=True)):.1e}")
        for name in ("loss", "grad_norm")
    }
    return {"loss": [float(f"{loss:.7g}") for loss in run["loss"]], "held_out": run["held_out"], **largest}


def main() -> None:
    from measured import write

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    device = parser.parse_args().device
    raw = [train(ROOT / "snippets", device, *run) for run in RUNS]
    one = raw[0]
    runs = [
        {"dp": dp, "sp": sp, "options": " ".join(options)} | compared(run, one)
        for (dp, sp, options), run in zip(RUNS, raw, strict=True)
    ]
    faults = []
    for name, (right, wrong) in FAULTS.items():
        with tempfile.TemporaryDirectory() as directory:
            copy = Path(shutil.copytree(ROOT / "snippets", Path(directory) / "snippets"))
            text = (copy / "train.py").read_text()
            assert text.count(right) == 1, f"train.py has changed: {name!r} does not fit its text"
            (copy / "train.py").write_text(text.replace(right, wrong))
            faults.append({"name": name} | compared(train(copy, device, *FAULTY_GRID, []), one))
    write(
        "train" if device == "cpu" else f"train_{device}",
        device,
        steps=STEPS,
        longest=TOKENS,
        samples=BATCH,
        fewest_tokens=min(one["tokens"]),
        most_tokens=max(one["tokens"]),
        runs=runs,
        faults=faults,
    )


if __name__ == "__main__":
    main()
