"""The table of docs/how-to/which-loss.md still holds: its core is measured again; all of it, in the _long file."""

import json

import pytest
import torch.distributed as dist

from engine_gradients import CORE, measure, same
from records import ROOT

RECORDED = json.loads((ROOT / "docs" / "_data" / "engine_gradients.json").read_text())["rows"]


def recorded_rows(setting) -> dict:
    return {(row["engine"], row["form"]): row for row in RECORDED if row["setting"] == setting.name}


def changes(setting, rows) -> list[str]:
    """Each cell that is not as recorded, in words."""
    recorded = recorded_rows(setting)
    told = []
    for row in rows:
        old = recorded.get((row["engine"], row["form"]))
        if old is None or not same(old, row):
            told.append(f"{setting.name}, {row['engine']}, {row['form']}: recorded {old}, now {row}")
    return told


@pytest.mark.parametrize("launch", ["plain", "mpu", "sizes"])
@pytest.mark.distributed(world_size=4)
def test_the_core_is_as_recorded(launch):
    if launch != "plain":
        pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    rows = measure(CORE, launch)
    assert [(row["engine"], row["form"]) for row in rows] == [
        (engine.name, form) for engine in CORE.of(launch) for form in CORE.forms
    ]
    if dist.get_rank() == 0:
        assert changes(CORE, rows) == []
