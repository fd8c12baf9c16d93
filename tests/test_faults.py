"""Each fault of faults.py is put into a copy of its snippet, and the test that it names must fail."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from faults import FAULTS
from records import PACKAGES, ROOT, suite_of


@pytest.fixture(autouse=True)
def transformers_is_imported(fault):
    """Before pytester remembers which modules there are, to take back the others: torch's take no second import."""
    if fault.snippet.startswith("with_transformers/") and importlib.util.find_spec("transformers"):
        importlib.import_module("preload_transformers")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.snippet}: {fault.name}")
def test_fault_is_caught(fault, pytester, monkeypatch, request):
    snippet = ROOT / "snippets" / fault.snippet
    for package in PACKAGES.get(Path(fault.snippet).parent.name, []):
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed: nox -s engines-test puts these faults in")
    text = snippet.read_text()
    assert text.count(fault.right) == 1, (
        f"{fault.snippet} has changed: in tests/faults.py, fit {fault.name!r} to its new text"
    )
    (pytester.path / snippet.name).write_text(text.replace(fault.right, fault.wrong))

    for name, module in list(sys.modules.items()):  # a fresh import of the snippets and of their tests
        file = getattr(module, "__file__", None) or ""
        if file.startswith(str(ROOT / "snippets")) or name.startswith("test_"):
            monkeypatch.delitem(sys.modules, name)
    run = pytester.inline_run(
        f"{suite_of(snippet)}::{fault.caught_by}",
        f"--config-file={ROOT}/pyproject.toml",
        f"--device={request.config.option.device}",
        f"--override-ini=pythonpath={pytester.path} {snippet.parent} {ROOT}/snippets {ROOT}/tests",
        "--override-ini=rank_timeout=2",
        "--exitfirst",
        "--tb=native",  # half of a failing rank's time goes into pytest's own tracebacks
        "-pno:cacheprovider",
        "-pno:hypothesispytest",  # its plugin takes seconds for each failure
    )
    passed, skipped, failed = run.listoutcomes()
    assert not skipped
    assert [report.when for report in failed] == ["call"], f"not caught: {len(passed)} tests passed"
