"""What Transformers, Accelerate and the Trainer make of each loss's gradient, on real ranks.

    python benchmarks/engine_gradients_transformers.py

Writes docs/_data/engine_gradients_transformers.json: all cells of tests/engine_gradients_transformers.py.
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
sys.path[:0] = [str(ROOT / name) for name in ("snippets", "snippets/with_transformers", "tests")]
os.environ.setdefault("DS_ACCELERATOR", "cpu")


def on_each_rank(library: str, number: str, results: str) -> None:
    from engine_gradients_transformers import GRIDS, measure

    warnings.simplefilter("ignore")  # of what is deprecated
    dist.init_process_group("gloo")
    rows = measure(library, GRIDS[int(number)], Path(results).parent)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(rows))


def main() -> None:
    if "RANK" in os.environ:
        return on_each_rank(*sys.argv[1:])
    from engine_gradients_transformers import GRIDS, launches
    from measured import write
    from rank_main import Script
    from ranks import run_on_ranks

    rows = []
    for library, number in launches():
        with tempfile.TemporaryDirectory() as directory:
            results = Path(directory) / "rows.json"
            script = Script(__file__, (library, str(number), str(results)))
            run_on_ranks(script, world_size=GRIDS[number].world, timeout=300, directory=Path(directory))
            rows += [{"grid": GRIDS[number].name, **row} for row in json.loads(results.read_text())]
    versions = {name: importlib.metadata.version(name) for name in ("deepspeed", "transformers", "accelerate")}
    write("engine_gradients_transformers", "cpu", backend="gloo", **versions, rows=rows)


if __name__ == "__main__":
    main()
