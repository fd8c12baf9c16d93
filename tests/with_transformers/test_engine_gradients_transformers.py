"""The table of docs/how-to/transformers.md still holds: cells are measured again, ZeRO 3 for one grid."""

import json

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: nox -s engines-test")
pytest.importorskip("accelerate", reason="accelerate is not installed: nox -s engines-test")
pytest.importorskip("transformers", reason="transformers is not installed: nox -s engines-test")

import torch.distributed as dist

from engine_gradients import same
from engine_gradients_transformers import GRIDS, forms_of, measure
from records import ROOT

RECORDED = json.loads((ROOT / "docs" / "_data" / "engine_gradients_transformers.json").read_text())["rows"]


def told(grid, row) -> str:
    return f"{grid.name}, {row['library']}, ZeRO {row['stage']}, {row['form']}"


def check(library, grid, stages, directory):
    rows = measure(library, grid, directory, stages)
    assert len(rows) == len(stages) * len(forms_of(library, grid))
    recorded = {told(grid, row): row for row in RECORDED if row["grid"] == grid.name}
    if dist.get_rank() == 0:
        changed = {}
        for row in rows:
            old = recorded.get(told(grid, row), {})
            if not same(old, row) or old.get("error") != row.get("error"):
                changed[told(grid, row)] = f"recorded {old}, now {row}"
        assert changed == {}


@pytest.mark.parametrize("library", ["DeepSpeed", "Accelerate", "Trainer"])
@pytest.mark.distributed(world_size=4, timeout=60)
def test_two_replicas_are_as_recorded(library, tmp_path):
    check(library, GRIDS[0], (0, 1, 2, 3), tmp_path)


@pytest.mark.parametrize("library", ["DeepSpeed", "Accelerate", "Trainer"])
@pytest.mark.distributed(world_size=4, timeout=60)
def test_one_replica_of_four_ranks_is_as_recorded(library, tmp_path):
    check(library, GRIDS[1], (1, 2), tmp_path)


@pytest.mark.parametrize("library", ["DeepSpeed", "Accelerate", "Trainer"])
@pytest.mark.distributed(world_size=2, timeout=60)
def test_accumulation_is_as_recorded(library, tmp_path):
    check(library, GRIDS[2], (0, 3), tmp_path)


@pytest.mark.parametrize("library", ["DeepSpeed", "Accelerate", "Trainer"])
@pytest.mark.distributed(world_size=4, timeout=60)
def test_accumulation_with_two_replicas_is_as_recorded(library, tmp_path):
    check(library, GRIDS[3], (1, 2), tmp_path)
