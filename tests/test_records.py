import json
import tomllib
from types import SimpleNamespace

import pytest

import conftest
from records import ROOT, TORCH_VERSIONS, by_number, code_hash, columns, hash_of, status

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


def test_versions_of_containers_are_sorted_too():
    assert by_number("2.6.0a0") > by_number("2.5.1")
    assert by_number("2.13.0") > by_number("2.2.2")


def test_a_snippet_that_is_imported_counts(tmp_path):
    own, other = tmp_path / "own.py", tmp_path / "other.py"
    own.write_text("from other import x\nfrom math import pi\n")
    other.write_text("x = 1\n")
    before = hash_of(own)
    assert hash_of(other) == code_hash("x = 1\n")
    other.write_text("x = 1  # one\n")
    assert hash_of(own) == before
    other.write_text("x = 2\n")
    assert hash_of(own) != before


# ---------------------------------------------------------------------------------------- the recorder


def report(when="call", outcome="passed", test="test_loss.py", **properties):
    return SimpleNamespace(
        when=when,
        outcome=outcome,
        failed=outcome == "failed",
        nodeid=f"tests/{test}::test_it",
        user_properties=list(properties.items()),
    )


@pytest.fixture
def recorded_by(tmp_path, monkeypatch):
    """What the recorder writes after these reports, as {(snippet, backend, world size): (tests, outcome, needs)}."""
    monkeypatch.setattr(conftest, "RECORDS", tmp_path)

    def run(*reports, exitstatus=pytest.ExitCode.OK):
        recorder = conftest.Recorder("CPU")
        for one in reports:
            recorder.pytest_runtest_logreport(one)
        recorder.pytest_sessionfinish(exitstatus)
        entries = [entry for file in tmp_path.glob("*.json") for entry in json.loads(file.read_text())]
        keys = ("snippet", "backend", "world_size")
        return {
            tuple(entry[key] for key in keys): (entry["tests"], entry["outcome"], entry["needs_torch"])
            for entry in entries
        }

    return run


ON_RANKS = {"backend": "gloo", "world_size": 4}
LOSS = ("loss.py", "gloo", 4)


def test_tests_on_ranks_are_counted(recorded_by):
    skipped = report(outcome="skipped", **ON_RANKS)
    assert recorded_by(report(**ON_RANKS), report(**ON_RANKS), skipped) == {LOSS: (2, "passed", [])}


@pytest.mark.parametrize(
    "failure",
    [
        report(outcome="failed", **ON_RANKS),
        report(outcome="failed"),
        report("setup", "failed"),
        report("teardown", "failed", **ON_RANKS),
    ],
)
def test_any_failure_of_a_snippets_tests_is_recorded(failure, recorded_by):
    assert recorded_by(report(**ON_RANKS), failure)[LOSS][1] == "failed"


def test_a_failure_where_nothing_ran_on_ranks(recorded_by):
    assert recorded_by(report("setup", "failed")) == {("loss.py", None, None): (0, "failed", [])}


def test_what_needs_a_newer_torch(recorded_by):
    needs = report("setup", "skipped", needs_torch="2.6")
    older = report("setup", "skipped", needs_torch="2.13")
    assert recorded_by(needs) == {("loss.py", None, None): (0, "not run", ["2.6"])}
    assert recorded_by(report(**ON_RANKS), older, needs) == {LOSS: (1, "passed", ["2.6", "2.13"])}


def test_what_is_not_a_snippets_test_or_on_another_device(recorded_by):
    assert recorded_by(report(test="test_launcher.py", **ON_RANKS), report(device="NVIDIA H200", **ON_RANKS)) == {}


def test_other_snippets_records_are_kept(recorded_by):
    recorded_by(report(**ON_RANKS), report(test="test_process_groups.py", **ON_RANKS))
    after = recorded_by(report(outcome="failed", **ON_RANKS))
    assert {key[0]: outcome for key, (_, outcome, _) in after.items()} == {
        "loss.py": "failed",
        "process_groups.py": "passed",
    }


def test_an_interrupted_run_writes_nothing(recorded_by):
    assert recorded_by(report(**ON_RANKS), exitstatus=pytest.ExitCode.INTERRUPTED) == {}


@pytest.mark.parametrize("selection", [["-k", "two"], ["test_s.py::test_two"]])
def test_a_selection_is_not_recorded(selection, pytester):
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(test_s="def test_one(): pass\ndef test_two(): pass")
    run = pytester.runpytest_inprocess("-p", "launcher", "--record", *selection)
    run.stderr.fnmatch_lines(["*--record takes whole test files*"])
