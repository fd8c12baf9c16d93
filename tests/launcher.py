"""pytest plugin: `@pytest.mark.distributed(world_size=4)` runs a test's body on every rank.

The process group is there before the body. The first rank that fails decides the test, and the report
shows where every rank stands (ranks.py, rank_main.py).
"""

import ast
import marshal
import pickle
import sys
import unittest
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from _pytest.assertion.rewrite import rewrite_asserts

import rank_main
from ranks import run_on_ranks, start_server


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks")
    group.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where the ranks' tensors live")
    group.addoption(
        "--world-size", type=int, default=4, metavar="N", help="ranks of the tests that do not fix their own number"
    )
    parser.addini("rank_timeout", "seconds a distributed test may take", default="60")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "distributed(world_size, timeout): run the body on every rank of a process group"
    )
    if config.option.device == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no CUDA device here")


def backend_for(device: str, world_size: int) -> str:
    """NCCL refuses two ranks on one GPU; gloo takes CUDA tensors and lets them share."""
    return "nccl" if device == "cuda" and world_size <= torch.cuda.device_count() else "gloo"


def describe(device: str, backend: str) -> str:
    if device == "cpu":
        return f"{backend} on CPU"
    shared = ", ranks share a GPU" if backend == "gloo" else ", one GPU a rank"
    return f"{backend} on {torch.cuda.get_device_name()}{shared}"


def pytest_report_header(config: pytest.Config) -> str:
    device, world_size = config.option.device, config.option.world_size
    how = describe(device, backend_for(device, world_size))
    return f"ranks: {world_size} by default, {how}; torch {torch.__version__}"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    distributed = [item for item in items if item.get_closest_marker("distributed")]
    for item in distributed:
        if issubclass(getattr(item, "cls", None) or object, unittest.TestCase):
            raise pytest.UsageError(f"{item.nodeid}: the distributed mark does not work on unittest.TestCase")
    if distributed and not distributed[0].config.option.collectonly:
        start_server()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("distributed")
    if marker is None:
        return None
    __tracebackhide__ = True
    mark = _read_mark(pyfuncitem, *marker.args, **marker.kwargs)
    # As collected: what a subclass or another module took over is not what the function itself says.
    names = [pyfuncitem.cls.__qualname__] if pyfuncitem.cls else []
    outputs = _run_function(
        pyfuncitem,
        pyfuncitem.module,
        ".".join([*names, pyfuncitem.originalname]),
        {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames},
        world_size=pyfuncitem.config.option.world_size if mark.world_size is None else mark.world_size,
        timeout=float(pyfuncitem.config.getini("rank_timeout")) if mark.timeout is None else mark.timeout,
    )
    for number, output in enumerate(outputs):
        if output:
            print(f"[rank {number}] " + output.rstrip("\n").replace("\n", f"\n[rank {number}] "))
    return True


def _run_function(
    item: pytest.Function, module: ModuleType, qualname: str, arguments: dict, *, world_size: int, timeout: float
) -> list[str]:
    __tracebackhide__ = True
    config = item.config
    backend = backend_for(config.option.device, world_size)
    path = Path(module.__file__)
    directory = item._request.getfixturevalue("tmp_path_factory").mktemp("ranks")
    work = rank_main.Body(
        module=module.__name__,
        path=str(path),
        code=_rewritten_code(path, path.stat().st_mtime_ns),
        qualname=qualname,
        arguments=_pickled(arguments),
        backend=backend,
        device=config.option.device,
        rendezvous=str(directory / "rendezvous"),
    )
    item.user_properties += [("world_size", world_size), ("backend", backend)]
    style = config.option.tbstyle
    return run_on_ranks(
        work,
        world_size=world_size,
        timeout=timeout,
        directory=directory,
        tbstyle="short" if style == "auto" else style,
    )


@dataclass(frozen=True)
class _Mark:
    world_size: int | None = None
    timeout: float | None = None


def _read_mark(item: pytest.Function, *args, **kwargs) -> _Mark:
    try:
        return _Mark(*args, **kwargs)
    except TypeError as error:
        raise pytest.UsageError(f"{item.nodeid}: the distributed mark takes world_size and timeout: {error}") from None


@lru_cache
def _rewritten_code(path: Path, modified: int) -> bytes:
    """The test module's code as pytest rewrites it, compiled once for all ranks and tests."""
    source = path.read_bytes()
    tree = ast.parse(source, str(path))
    rewrite_asserts(tree, source, str(path))
    return marshal.dumps(compile(tree, str(path), "exec", dont_inherit=True))


def _pickled(arguments: dict) -> bytes:
    for name, value in arguments.items():
        if isinstance(value, pytest.MonkeyPatch):
            arguments[name] = rank_main.MonkeyPatchOfRank
            continue
        try:
            pickle.dumps(value)
        except Exception as error:  # pickle raises what it likes
            pytest.fail(
                f"argument {name!r} of type {type(value).__name__} cannot be sent to the ranks: make it in the "
                f"body, or pass a name and look it up there ({error})",
                pytrace=False,
            )
    return pickle.dumps((arguments, warnings.filters))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """`"cpu"` or `"cuda"`; each rank's current CUDA device is its own, or the one that it shares."""
    return request.config.option.device


@pytest.fixture
def launch(request: pytest.FixtureRequest):
    """`launch(function, world_size=4, timeout=5, **arguments)` runs a module's function on ranks, for tests of
    what goes wrong: catch `pytest.fail.Exception`, whose text is the report. Returns each rank's output."""

    def run(function, *, world_size: int, timeout: float, **arguments) -> list[str]:
        __tracebackhide__ = True
        module = sys.modules[function.__module__]
        return _run_function(
            request.node, module, function.__qualname__, arguments, world_size=world_size, timeout=timeout
        )

    return run


@pytest.fixture
def run_script(tmp_path_factory: pytest.TempPathFactory):
    """`run_script(path, *arguments, world_size=4)` runs a script as torchrun would; returns each rank's output."""

    def run(path: str | Path, *arguments: str, world_size: int, timeout: float = 60.0) -> list[str]:
        __tracebackhide__ = True
        script = rank_main.Script(str(path), arguments)
        directory = tmp_path_factory.mktemp("ranks")
        return run_on_ranks(script, world_size=world_size, timeout=timeout, directory=directory)

    return run


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    runs = [dict(report.user_properties) for report in reports if getattr(report, "when", "") == "call"]
    on_device = [
        run["backend"] for run in runs if "backend" in run and "device" not in run
    ]  # the option's, not its own
    for backend, count in Counter(on_device).items():
        terminalreporter.line(
            f"{count} tests ran on real ranks: {describe(config.option.device, backend)}, torch {torch.__version__}"
        )
    if skipped := terminalreporter.stats.get("skipped", []):
        terminalreporter.section(f"{len(skipped)} tests were NOT RUN", yellow=True, bold=True)
        for reason, count in Counter(_reason(report) for report in skipped).items():
            terminalreporter.line(f"{count} × {reason}")


def _reason(report: pytest.TestReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
