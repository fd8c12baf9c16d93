"""One rank: what runs in each process that the launcher starts.

A rank tells its parent over a pipe how the body went, and then waits. Nobody leaves the process group
before the parent has heard from everybody, so a fault on one rank never shows as a lost connection on
another.
"""

import faulthandler
import gc
import importlib.util
import io
import marshal
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from pathlib import Path
from types import ModuleType

import pytest


@dataclass(frozen=True)
class Body:
    """A module's function with its arguments, such as a test as the parent collected it."""

    module: str
    path: str
    code: bytes  # the module's code with pytest's assertion rewriting, marshalled
    qualname: str
    arguments: bytes  # pickled dict, and the warning filters; unpickled once the module is there to look up its names
    backend: str
    device: str
    rendezvous: str  # path of a file that is not there yet

    def run(self) -> None:
        # Imported here, so that a script's rank is not slowed by it and the parent's copy is not touched.
        import torch.distributed as dist

        if self.device == "cuda":
            import torch

            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        owner = self._load()
        *classes, name = self.qualname.split(".")
        for class_name in classes:
            owner = getattr(owner, class_name)
        function = getattr(owner() if classes else owner, name)
        arguments, filters = pickle.loads(self.arguments)
        for name, value in arguments.items():
            if value is MonkeyPatchOfRank:
                arguments[name] = pytest.MonkeyPatch()
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # A file, not torchrun's TCPStore: a TCPStore client looks up the name of its peer's address, which takes
        # seconds where the name server is slow.
        store = dist.FileStore(self.rendezvous, world_size)
        dist.init_process_group(self.backend, store=store, rank=rank, world_size=world_size)
        warnings.resetwarnings()
        warnings.filters.extend(filters)
        if (result := function(**arguments)) is not None:
            raise TypeError(f"the body must return None, as every test; it returned {type(result).__name__}")

    def _load(self):
        parents = self.module.split(".")[:-1]
        for name in [".".join(parents[: end + 1]) for end in range(len(parents))]:
            try:
                importlib.import_module(name)
            except ImportError:  # under --import-mode=importlib it need not be a package
                sys.modules[name] = ModuleType(name)
        spec = importlib.util.spec_from_file_location(self.module, self.path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        exec(marshal.loads(self.code), module.__dict__)
        return module


class MonkeyPatchOfRank:
    """Stands for the `monkeypatch` argument: each rank gets one of its own."""


@dataclass(frozen=True)
class Script:
    """A Python file with its arguments, run as torchrun would: it makes its own process group."""

    path: str
    arguments: tuple[str, ...]

    def run(self) -> None:
        sys.argv = [self.path, *self.arguments]
        sys.path.insert(0, str(Path(self.path).resolve().parent))
        try:
            runpy.run_path(self.path, run_name="__main__")
        except SystemExit as exit:
            if exit.code not in (None, 0):
                raise


def main(work, environment: dict[str, str], connection: Connection, log: str, stacks: str, tbstyle: str) -> None:
    gc.freeze()  # what the server has loaded: collecting would touch all of it, and so copy it for each rank
    os.setpgid(0, 0)  # Ctrl-C reaches the parent alone, and what a rank starts is ended with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _write_output_to(log)
    os.environ.clear()  # the server's environment is that of its start, not that of this test
    os.environ.update(environment)
    SourceFileLoader.path_stats = _path_stats
    faulthandler.enable(sys.stderr)
    stack_file = open(f"{stacks}.new", "w")
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    os.rename(stack_file.name, stacks)  # now, and not before, the parent may send the signal

    connection.send(_outcome(work, tbstyle))
    connection.recv()  # "everybody is done"; where a rank failed, this process is ended here instead
    faulthandler.unregister(signal.SIGUSR1)  # otherwise it thinks that its handler is there still
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)

    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _outcome(work, tbstyle: str) -> tuple[str, str, str, float]:
    """`("passed" | "skipped" | "failed", one line, traceback, time)`"""
    error = _error_of(work)
    when = time.monotonic()
    # From here on this rank has an outcome to tell, and no longer a place where it stands.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if error is None:
        return "passed", "", "", when
    if isinstance(error, pytest.skip.Exception):
        return "skipped", str(error), "", when
    if isinstance(error, SystemExit):
        summary = f"SystemExit: sys.exit({error.code!r}) before the end of its body"
    else:
        summary = pytest.ExceptionInfo.from_exception(error).exconly(tryshort=True)
    return "failed", summary, _traceback(error, tbstyle), when


def _error_of(work) -> BaseException | None:
    try:
        if "OMP_NUM_THREADS" not in os.environ:
            import torch

            torch.set_num_threads(1)  # torchrun's default as well
        _never_destroy_on_legacy_torch()
        work.run()
    except BaseException as error:  # KeyboardInterrupt, SystemExit and pytest's outcomes as well
        return error
    return None


def _never_destroy_on_legacy_torch() -> None:
    """On torch 2.1 to 2.3 destroy_process_group waits, now and then for ever, for a thread of gloo's that waits for the
    GIL, which it holds. The page on legacy torch says more; here the rank just ends."""
    if "torch.distributed" in sys.modules and sys.modules["torch"].__version__ < (2, 4):
        sys.modules["torch.distributed"].destroy_process_group = lambda group=None: None


def _traceback(error: BaseException, tbstyle: str) -> str:
    frames = error.__traceback__
    while frames.tb_next and frames.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        frames = frames.tb_next
    return str(pytest.ExceptionInfo.from_exception(error.with_traceback(frames)).getrepr(style=tbstyle))


def _write_output_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (
        # unbuffered as under `python -u`: what a rank printed before it was killed is there
        io.TextIOWrapper(
            open(stream, "wb", buffering=0, closefd=False),
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        for stream in (1, 2)
    )


def _path_stats(loader: SourceFileLoader, path: str, stats=SourceFileLoader.path_stats) -> dict:
    """Bytecode knows its source by second and size: what was changed just now is read from the source instead."""
    found = stats(loader, path)
    if time.time() - found["mtime"] < 10:
        raise OSError("fresh")
    return found


def _end_with_parent() -> None:
    wait([parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)
