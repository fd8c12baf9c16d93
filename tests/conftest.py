"""The suite's `--record`: writes the outputs that pages show, and the records of what was run."""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from records import OUTPUT, RECORDS, ROOT, code_hash

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the outputs and records that the pages show")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.record:
        option = config.option
        selected = option.keyword or option.markexpr or option.deselect or option.maxfail
        if selected or any("::" in argument for argument in config.args):
            raise pytest.UsageError("--record takes whole test files: a record counts all tests of a snippet")
        config.pluginmanager.register(Recorder(config.option.device))


@pytest.fixture
def recorded(request: pytest.FixtureRequest):
    """`recorded("name.txt", text)`: a page shows this file, so the text must still be what the file says."""

    def compare(name: str, text: str) -> None:
        file = OUTPUT / name
        if request.config.option.record:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        assert file.exists(), f"{file.relative_to(ROOT)} is missing: write it with --record"
        assert text == file.read_text(), f"not what {file.relative_to(ROOT)} shows: read its page, then use --record"

    return compare


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built site: any warning fails the build."""
    for package in ("material", "mkdocs_jupyter", "ipyparallel", "matplotlib"):
        pytest.importorskip(package, reason=f"the site was not built: {package} is not installed")
    target = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", target],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stderr
    return target


class Recorder:
    """Collects how each snippet's tests went on each backend and number of ranks; writes it at the end."""

    def __init__(self, device: str):
        self.device = "CPU" if device == "cpu" else torch.cuda.get_device_name()
        self.outcomes = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        run = dict(report.user_properties)
        if report.when != "call" or "backend" not in run:
            return
        test = Path(report.nodeid.split("::")[0])
        snippet = Path(*test.parts[1:-1], test.name.removeprefix("test_"))  # tests/ mirrors snippets/
        if (ROOT / "snippets" / snippet).exists():
            self.outcomes[snippet.as_posix(), run["backend"], run["world_size"]].append(report.outcome)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return  # interrupted: not all tests have run
        version = torch.__version__.split("+")[0]
        file = RECORDS / f"{self.device.lower().replace(' ', '-')}-torch-{version}.json"
        ran = {snippet for snippet, _, _ in self.outcomes}
        kept = [old for old in json.loads(file.read_text()) if old["snippet"] not in ran] if file.exists() else []
        new = [
            {
                "snippet": snippet,
                "code": code_hash((ROOT / "snippets" / snippet).read_text()),
                "torch": version,
                "python": platform.python_version(),
                "backend": backend,
                "device": self.device,
                "world_size": world_size,
                "tests": len(outcomes) - outcomes.count("skipped"),
                "outcome": "failed" if "failed" in outcomes else "passed" if "passed" in outcomes else "skipped",
                "date": datetime.date.today().isoformat(),
            }
            for (snippet, backend, world_size), outcomes in self.outcomes.items()
        ]
        RECORDS.mkdir(parents=True, exist_ok=True)
        records = sorted(kept + new, key=lambda record: (record["snippet"], record["backend"], record["world_size"]))
        file.write_text(json.dumps(records, indent=1) + "\n")
