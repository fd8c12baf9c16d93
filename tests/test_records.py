import tomllib

import pytest

from records import ROOT, TORCH_VERSIONS, by_number, code_hash, columns, status

CODE = "def f(x):\n    return x + 1\n"


@pytest.mark.parametrize(
    "same",
    [
        "def f(x):  # why\n\n    return x + 1   \n",
        'def f(x):\n    """What.\n\n    More.\n    """\n    return x + 1\n',
        '"""Module."""\n\n\n# --8<-- [start:f]\ndef f(x):\n    return x + 1\n# --8<-- [end:f]\n',
    ],
)
def test_words_do_not_make_a_record_stale(same):
    assert code_hash(same) == code_hash(CODE)


@pytest.mark.parametrize(
    "other",
    [
        CODE.replace("1", "2"),
        CODE.replace("    return", "  return"),
        'def f(x):\n    "#"\n    y = "# not a comment"\n    return x + 1\n',
        CODE + "f(0)\n",
    ],
)
def test_code_does(other):
    assert code_hash(other) != code_hash(CODE)


def record(outcome="passed", stale=False, needs=()):
    return {"outcome": outcome, "stale": stale, "needs_torch": list(needs)}


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([], "not run"),
        ([record()], "passed"),
        ([record(), record("failed")], "failed"),
        ([record(), record(stale=True)], "stale"),
        ([record("not run", stale=True, needs=["2.2"])], "stale"),
        ([record("not run", needs=["2.2", "2.6"])], "needs 2.6"),
        ([record("not run")], "not run"),
        (
            [record(needs=["2.2", "2.6"]), record("not run", needs=["2.2", "2.6"])],
            "passed, but for what needs 2.2 and 2.6",
        ),
    ],
)
def test_the_compatibility_table_tells_apart(records, says):
    assert status(records) == says


def test_every_version_of_compat_test_has_a_column():
    seen = [{"device": "NVIDIA H200", "torch": "2.11.0"}, {"device": "CPU", "torch": "2.14.0"}]
    torchs = [torch for device, torch in columns(seen) if device == "CPU"]
    assert set(torchs) == {*TORCH_VERSIONS, "2.14.0"}
    assert torchs == sorted(torchs, key=by_number)
    assert columns(seen)[-1] == ("NVIDIA H200", "2.11.0")


def test_the_default_torch_is_one_of_them():
    default = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["test"]
    assert default[0].removeprefix("torch==") in TORCH_VERSIONS
    for version in TORCH_VERSIONS:
        pins = (ROOT / "requirements" / f"torch-{version}.txt").read_text().splitlines()
        assert f"torch=={version}" in pins
        assert default[1] in pins, "the same pytest"
