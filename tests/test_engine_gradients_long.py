"""All cells of "Which loss for which engine", measured again: `nox -s engines-test`."""

import pytest
import torch.distributed as dist

from engine_gradients import SETTINGS, launches, measure
from test_engine_gradients import RECORDED, changes

LAUNCHES = [pytest.param(*launch, id=f"{SETTINGS[launch[0]].name}-{launch[1]}") for launch in launches()]


def check(number: int, of: str) -> None:
    setting = SETTINGS[number]
    rows = measure(setting, of)
    if dist.get_rank() == 0:
        assert changes(setting, rows) == []


@pytest.mark.parametrize(("number", "of"), LAUNCHES)
def test_each_setting_is_as_recorded(number, of, launch):
    pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    setting = SETTINGS[number]
    launch(check, world_size=setting.dp * setting.sp, timeout=60, number=number, of=of)


def test_nothing_else_is_recorded():
    measured = [
        (SETTINGS[number].name, engine.name, form)
        for number, launch in launches()
        for engine in SETTINGS[number].of(launch)
        for form in SETTINGS[number].forms
    ]
    assert [(row["setting"], row["engine"], row["form"]) for row in RECORDED] == measured
