"""The suite's `--record`: writes the outputs that pages show, and the records of what was run."""

import datetime
import importlib.metadata
import json
import operator
import os
import platform
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from records import OUTPUT, PACKAGES, RECORDS, ROOT, TORCH_VERSIONS, by_number, current_hashes

pytest_plugins = ["pytester"]
TORCH = torch.__version__.split("+")[0]
WHOLE_FILES = "--record takes whole test files: a record counts all tests of a snippet"


def device_name(config: pytest.Config) -> str:
    return "CPU" if config.option.device == "cpu" else torch.cuda.get_device_name()


def file_stem(device: str) -> str:
    return f"{device.lower().replace(' ', '-')}-torch-{TORCH}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="write the outputs and records that the pages show")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "xdist_group(name): on one worker of pytest-xdist")
    config.addinivalue_line("markers", "needs_torch(version): not run on an older torch, as its record then says")
    os.environ.setdefault("DS_ACCELERATOR", config.option.device)
    if config.option.record and not hasattr(config, "workerinput"):  # pytest-xdist: the workers' reports come together
        option = config.option
        if option.maxfail or any("::" in argument for argument in config.args):
            raise pytest.UsageError(WHOLE_FILES)
        config.pluginmanager.register(Recorder(device_name(config)))


def pytest_deselected(items: list[pytest.Item]) -> None:
    if items[0].config.option.record:
        raise pytest.UsageError(WHOLE_FILES)


def pytest_itemcollected(item: pytest.Item) -> None:
    if "site" in item.fixturenames or item.path.name == "test_notebooks.py":
        item.add_marker(pytest.mark.xdist_group("site"))  # so that it is built once
    elif "torchrun" in item.fixturenames:
        item.add_marker(pytest.mark.xdist_group("torchrun"))  # which takes one port unless it is told another


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs_torch"):
        (needed,) = mark.args
        if torch.__version__ < needed:  # compares numbers, not text
            item.user_properties.append(("needs_torch", needed))
            pytest.skip(f"needs torch {needed}")


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


@pytest.fixture
def tabulated(request: pytest.FixtureRequest):
    """`tabulated("folder", rows)`: a page draws a table from docs/_data/folder/, one file for each device and torch."""

    def compare(folder: str, rows: dict) -> None:
        device = device_name(request.config)
        file = ROOT / "docs" / "_data" / folder / f"{file_stem(device)}.json"
        if request.config.option.record:
            file.parent.mkdir(parents=True, exist_ok=True)
            table = {"torch": TORCH, "device": device, "date": datetime.date.today().isoformat(), "rows": rows}
            file.write_text(json.dumps(table, indent=1) + "\n")
        if not file.exists() and not (device == "CPU" and TORCH in TORCH_VERSIONS):
            pytest.skip(f"the page has no column for torch {TORCH} on {device}")
        assert rows == json.loads(file.read_text())["rows"]

    return compare


@pytest.fixture
def torchrun():
    """`torchrun(command, timeout)`: a line such as a page shows, run by the real torchrun in the repository."""

    def run(command: str, timeout: float = 100.0) -> subprocess.CompletedProcess:
        program = Path(sys.executable).with_name("torchrun")
        arguments = command.removeprefix("torchrun ").split()
        return subprocess.run([program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)

    return run


@pytest.fixture
def counts_as_run(record_property):
    """For tests of a script on four ranks that takes gloo and the CPU whatever --device says: the record has them."""
    for name, value in {"backend": "gloo", "world_size": 4, "device": "CPU"}.items():
        record_property(name, value)


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
    """Collects how each snippet's tests went on each backend and number of ranks; writes it at the end.

    A test takes part by its properties `backend` and `world_size`, which the launcher sets, and for scripts
    `counts_as_run`, with `device` where the script does not follow --device.
    """

    def __init__(self, device: str):
        self.device = device
        self.outcomes = defaultdict(list)
        self.needs_torch = defaultdict(set)
        self.failed = set()
        # What runs is what stands there now, whatever is edited meanwhile.
        self.hashes = current_hashes()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        run = dict(report.user_properties)
        test = Path(report.nodeid.split("::")[0])
        snippet = Path(*test.parts[1:-1], test.name.removeprefix("test_")).as_posix()  # tests/ mirrors snippets/
        if snippet not in self.hashes or run.get("device", self.device) != self.device:
            return
        if report.failed:  # in setup or teardown as well, and whether on ranks or not
            self.failed.add(snippet)
        if report.when == "setup" and "needs_torch" in run:
            self.needs_torch[snippet].add(run["needs_torch"])
        elif report.when == "call" and "backend" in run:
            self.outcomes[snippet, run["backend"], run["world_size"]].append(report.outcome)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return  # interrupted: not all tests have run
        file = RECORDS / f"{file_stem(self.device)}.json"
        seen = {snippet for snippet, _, _ in self.outcomes}
        nothing_ran = {(snippet, None, None): [] for snippet in {*self.needs_torch, *self.failed} - seen}
        runs = {**self.outcomes, **nothing_ran}
        old = json.loads(file.read_text()) if file.exists() else []
        kept = [record for record in old if record["snippet"] not in {snippet for snippet, _, _ in runs}]
        new = [
            {
                "snippet": snippet,
                "code": self.hashes[snippet],
                "torch": TORCH,
                "packages": [
                    f"{name} {importlib.metadata.version(name)}" for name in PACKAGES.get(Path(snippet).parent.name, [])
                ],
                "python": platform.python_version(),
                "backend": backend,
                "device": self.device,
                "world_size": world_size,
                "tests": len(outcomes) - outcomes.count("skipped"),
                "needs_torch": sorted(self.needs_torch[snippet], key=by_number),
                "outcome": "failed" if snippet in self.failed else "passed" if "passed" in outcomes else "not run",
                "date": datetime.date.today().isoformat(),
            }
            for (snippet, backend, world_size), outcomes in runs.items()
        ]
        RECORDS.mkdir(parents=True, exist_ok=True)
        key = operator.itemgetter("snippet", "backend", "world_size")  # a snippet without a backend has one record
        records = sorted(kept + new, key=key)
        file.write_text(json.dumps(records, indent=1) + "\n")
