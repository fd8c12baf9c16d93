"""What DDP, FSDP2 and DeepSpeed make of each loss's gradient: all cells of tests/engine_gradients.py, on real ranks.

    python benchmarks/engine_gradients.py

Writes docs/_data/engine_gradients.json. With another DeepSpeed than the suite's it runs a part of them, and writes
docs/_data/engine_gradients_deepspeed-VERSION.json.
"""

import importlib.metadata
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "snippets"), str(ROOT / "tests")]
os.environ.setdefault("DS_ACCELERATOR", "cpu")
DEEPSPEED = importlib.metadata.version("deepspeed")


def on_each_rank(number: int, launch: str, results: str) -> None:
    from engine_gradients import SETTINGS, measure

    warnings.simplefilter("ignore")  # of what is deprecated
    dist.init_process_group("gloo")
    rows = measure(SETTINGS[number], launch)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(rows))


def main() -> None:
    if "RANK" in os.environ:
        return on_each_rank(int(sys.argv[1]), *sys.argv[2:])
    from engine_gradients import SETTINGS, launches
    from measured import write
    from rank_main import Script
    from ranks import run_on_ranks

    of_the_suite = f'"deepspeed=={DEEPSPEED}"' in (ROOT / "pyproject.toml").read_text()
    rows = []
    for number, launch in launches():
        setting = SETTINGS[number]
        if not of_the_suite and not (setting.name in ("core", "dp 1", "zero.Init") and launch == "mpu"):
            continue
        with tempfile.TemporaryDirectory() as directory:
            results = Path(directory) / "rows.json"
            script = Script(__file__, (str(number), launch, str(results)))
            world_size = setting.dp * setting.sp
            run_on_ranks(script, world_size=world_size, timeout=300, directory=Path(directory))
            rows += [{"setting": setting.name, **row} for row in json.loads(results.read_text())]
    name = "engine_gradients" if of_the_suite else f"engine_gradients_deepspeed-{DEEPSPEED}"
    write(name, "cpu", backend="gloo", deepspeed=DEEPSPEED, rows=rows)


if __name__ == "__main__":
    main()
