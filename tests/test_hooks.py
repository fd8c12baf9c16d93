"""What docs/_theme/hooks.py makes of records: lines under snippets, the compatibility table."""

from types import SimpleNamespace

import pytest

for package in ("mkdocs", "matplotlib", "nbclient"):
    pytest.importorskip(package, reason=f"the site's hooks were not tested: {package} is not installed")

import hooks


def record(torch, world_size=4, **other):
    return {
        "snippet": "loss.py",
        "torch": torch,
        "packages": [],
        "python": "3.11.7",
        "backend": "gloo",
        "device": "CPU",
        "world_size": world_size,
        "date": "2026-12-01",
        "outcome": "passed",
        "stale": False,
        "needs_torch": [],
        **other,
    }


@pytest.fixture
def lines(monkeypatch):
    def lines(*records):
        monkeypatch.setitem(hooks.templates.globals, "records", list(records))
        *shown, link = hooks.tested("tutorial/loss.md", "loss.py").split(">", 1)[1].split("<br>")
        assert link.startswith("[Download loss.py](../snippets/loss.py)")
        return shown

    return lines


def test_runs_of_a_kind_stand_in_one_line(lines):
    runs = [record(torch, size) for torch in ("2.13.0", "2.2.2") for size in (4, 1)]
    assert lines(*runs) == ["Tested with torch 2.2.2 and 2.13.0, Python 3.11, gloo on CPU, 1 and 4 ranks, 2026-12-01"]


def test_others_have_a_line_of_their_own(lines):
    needs = record("2.1.2", needs_torch=["2.2", "2.6"])
    gpu = record("2.11.0", 1, device="NVIDIA H200", backend="nccl", packages=["deepspeed 0.19.8"])
    first, second, third = lines(record("2.13.0"), gpu, needs)
    assert first.endswith("4 ranks, 2026-12-01, but for what needs torch 2.2 and 2.6")
    assert second == "Tested with torch 2.11.0, deepspeed 0.19.8, Python 3.11, nccl on NVIDIA H200, 1 rank, 2026-12-01"
    assert "torch 2.13.0" in third


def test_what_is_not_right_is_said(lines):
    (stale,) = lines(record("2.13.0", stale=True))
    (failed,) = lines(record("2.13.0", outcome="failed"))
    nowhere = {"backend": None, "world_size": None}
    assert "stale: the code has changed since" in stale
    assert failed.startswith('<strong class="failed">Tests failed</strong> with torch 2.13.0')
    assert lines(record("2.1.2", outcome="not run", needs_torch=["2.2"], **nowhere)) == [
        "Not run with torch 2.1.2: needs torch 2.2"
    ]
    assert lines(record("2.1.2", outcome="not run", **nowhere)) == ["Not run with torch 2.1.2"]
    tested, not_run = lines(record("2.13.0", 2), record("2.13.0", 4, outcome="not run"))
    assert tested == "Tested with torch 2.13.0, Python 3.11, gloo on CPU, 2 ranks, 2026-12-01"
    assert not_run == "Not run with torch 2.13.0, Python 3.11, gloo on CPU, 4 ranks, 2026-12-01"
    assert lines(record("2.1.2", outcome="failed", **nowhere))[0].startswith('<strong class="failed">Tests failed')
    assert lines() == ["Not run"]
    assert lines(record("2.13.0", snippet="process_groups.py")) == ["Not run"]


def test_the_compatibility_table(monkeypatch):
    records = [
        record("2.13.0"),
        record("2.2.2", stale=True),
        record("2.2.2", snippet="first_run.py"),
        record("2.6.0a0", device="NVIDIA H200", outcome="failed"),
    ]
    monkeypatch.setitem(hooks.templates.globals, "records", records)
    page = SimpleNamespace(src_uri="tutorial/loss.md", content_string='{$ tested("loss.py") $}')
    files = SimpleNamespace(documentation_pages=lambda: [page])
    head, _, *rows = hooks.compatibility("reference/compatibility.md", files).splitlines()
    columns = [column.strip() for column in head.strip("|").split("|")]
    (row,) = [row for row in rows if "[loss.py](../tutorial/loss.md)" in row]
    cells = dict(zip(columns, (cell.strip() for cell in row.strip("|").split("|")), strict=True))
    assert cells["torch 2.13.0, CPU"] == '<span class="passed">passed</span>'
    assert cells["torch 2.2.2, CPU"] == '<span class="stale">stale</span>'
    assert cells["torch 2.3.1, CPU"] == '<span class="not">not run</span>'
    assert cells["torch 2.6.0a0, NVIDIA H200"] == '<span class="failed">failed</span>'
    assert any("loss_all_gather.py (faulty)" in row for row in rows)


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        (["right"] * 4, "right"),
        (["right", "right", "ValueError", "ValueError"], "right on 0 and 1; ValueError on 2 and 3"),
        (["right", "right", "ValueError", "RuntimeError"], "right on 0 and 1; ValueError on 2; RuntimeError on 3"),
    ],
)
def test_outcomes_by_rank(outcomes, words):
    assert hooks.by_rank(outcomes) == words


def test_a_section_that_is_not_closed_fails_the_build(tmp_path, monkeypatch):
    (tmp_path / "snippets").mkdir()
    (tmp_path / "snippets" / "open.py").write_text("# --8<-- [start:one]\nx = 1\n")
    monkeypatch.setattr(hooks, "ROOT", tmp_path)
    monkeypatch.setattr(hooks, "snippets", lambda: [tmp_path / "snippets" / "open.py"])
    with pytest.raises(hooks.PluginError, match=r"section 'one' has start"):
        hooks.on_files([], None)


def test_gradients_are_green_only_where_they_are_right():
    forms = ("token_mean", "weighted, mean", "weighted, sum", "all_gather", "in place", "local mean")
    verdicts = (
        {"verdict": "right", "factor": 1.0, "of": "tokens"},
        {"verdict": "scaled", "factor": 0.9996, "of": "replicas"},
        {"verdict": "scaled", "factor": 0.4998, "of": "replicas"},
        {"verdict": "raises", "error": "ValueError: Global rank 0 is not part of group …"},
        {"verdict": "scaled", "factor": 4.0, "of": "tokens"},
        {"verdict": "ranks differ", "factor": 1.2},
    )
    rows = [
        {"setting": "core", "engine": "E", "form": form} | verdict
        for form, verdict in zip(forms, verdicts, strict=True)
    ]
    table = hooks.gradients({"engine_gradients": {"rows": rows}}, "core")
    assert table.splitlines()[2] == (
        '| E | <span class="right">right</span> | <span class="stale">1 × replicas</span> |'
        ' <span class="failed">0.5 × replicas</span> | <span class="failed">ValueError</span> |'
        ' <span class="failed">4 ×</span> | <span class="failed">ranks differ</span> |'
    )
    with pytest.raises(hooks.jinja2.UndefinedError, match="no setting 'cores'"):
        hooks.gradients({"engine_gradients": {"rows": rows}}, "cores")
