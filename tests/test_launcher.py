"""The launcher's own tests: pytest runs inside pytest, on tests that fail, die, hang and leave things running."""

import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import ranks

TESTS = Path(__file__).parent
INI = """
[pytest]
addopts = -p launcher -p no:cacheprovider
rank_timeout = 3
"""
PREAMBLE = """
import gc, os, signal, subprocess, sys, threading, time
from multiprocessing.connection import Connection
from pathlib import Path
import pytest
import torch
import torch.distributed as dist

def meet():
    dist.all_reduce(torch.ones(1))
"""


@pytest.fixture(scope="session", autouse=True)
def _server():
    ranks.start_server()  # before any marker is in the environment: the server is not a process of a single run


@pytest.fixture
def inner(pytester, monkeypatch):
    """An inner pytest in this process, on test files of its own; at its end nothing that it started may be alive."""
    monkeypatch.setenv("LAUNCHER_TEST", marker := f"{os.getpid()}-{time.monotonic_ns()}")
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("CI", "BUILD_NUMBER"):  # the short summary would hold the whole report
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "GRACE", 1.0)
    monkeypatch.chdir(pytester.path)
    pytester.makefile(".ini", pytest=INI)
    yield Inner(pytester)
    deadline = time.monotonic() + 3
    while (left := alive(marker)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "left running"


def heed_ctrl_c():
    """Where the suite itself was started in the background, its children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Inner:
    def __init__(self, pytester: pytest.Pytester):
        self.pytester = pytester
        self.path = pytester.path

    def write(self, source: str, file: str = "test_inner.py") -> Path:
        path = self.path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(PREAMBLE + source)
        return path

    def run(self, *arguments: str) -> pytest.RunResult:
        return self.pytester.runpytest_inprocess(*arguments)

    def fails(self, source: str, *arguments: str) -> str:
        """Runs a file whose one test fails; returns the report, whose first line is in the short summary too."""
        self.write(source)
        start = time.monotonic()
        result = self.run(*arguments)
        assert time.monotonic() - start < 10
        result.assert_outcomes(failed=1)
        report = str(result.reprec.getfailures()[0].longrepr)
        title = report.splitlines()[0].encode(errors="backslashreplace").decode()
        assert f"FAILED test_inner.py::test_it - Failed: {title[:150]}" in result.stdout.str()
        return report

    def start(self, *arguments: str) -> subprocess.Popen:
        """pytest in a process group of its own, as a shell starts it."""
        command = [sys.executable, "-m", "pytest", *arguments]
        return self.pytester.popen(
            command,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            preexec_fn=heed_ctrl_c,
        )


def alive(marker: str) -> dict[int, str]:
    """Processes that have the marker in their environment, and ranks of this process."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            marked = marker.encode() in (process / "environ").read_bytes()
            name = (process / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended, or is another user's
            continue
        if state != "Z" and (marked or int(parent) == _forkserver._forkserver_pid):
            found[int(process.name)] = name
    return found


def wait_for_files(folder: Path, pattern: str, number: int, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while len(list(folder.glob(pattern))) < number:
        assert time.monotonic() < deadline, f"{pattern}: fewer than {number} came"
        time.sleep(0.01)


# ---------------------------------------------------------------- a fault on rank 2, while the others wait for it


class Fault(NamedTuple):
    name: str
    rank_2_does: str
    title: str  # the report's first line, as a regular expression
    shown: str = ""  # in rank 2's part of the report
    others_come_first: bool = False


FAULTY_TEST = """
@pytest.mark.distributed(world_size=4, timeout=1)
def test_it():
    if dist.get_rank() == 2:
        DOES
    meet()
"""
LINE = (PREAMBLE + FAULTY_TEST).partition("DOES")[0].count("\n") + 1
HANGS = f"time limit of 1 s: rank 2 stood at test_inner.py:{LINE}, ranks 0, 1, 3 did not finish"
ANOTHER = "class Odd(Exception):\n    {}\nraise Odd"
FAULTS = [
    Fault("assertion", "assert dist.get_rank() == 3", "rank 2: assert 2 == 3", "E   assert 2 == 3"),
    Fault("exception", "raise ValueError('wrong shard')", "rank 2: ValueError: wrong shard", "E   ValueError"),
    Fault("pytest.fail", "pytest.fail('by hand')", "rank 2: Failed: by hand"),
    Fault("KeyboardInterrupt", "raise KeyboardInterrupt", "rank 2: KeyboardInterrupt"),
    Fault("message of two lines", "raise ValueError('one\\ntwo')", "rank 2: ValueError: one", "E   two"),
    Fault("message of 1 MB", "raise ValueError('long' * 250_000)", r"rank 2: ValueError: (long)+.{,300}", "characters"),
    Fault("message that is no Unicode", "raise ValueError('\\udcff')", "rank 2: ValueError: .*", "E   ValueError"),
    Fault("str() raises", ANOTHER.format("def __str__(self): return 1 / 0"), "rank 2: .*Odd.*", "raise Odd"),
    Fault("repr() raises", ANOTHER.format("__str__ = __repr__ = lambda self: 1 / 0"), "rank 2: .*Odd.*", "raise Odd"),
    Fault("cannot be pickled", ANOTHER.format("lock = threading.Lock()"), "rank 2: .*Odd.*", "raise Odd"),
    Fault("recursion", "(f := lambda: f())()", "rank 2: RecursionError: .*", "E   RecursionError"),
    Fault(
        "chained", "try: 1 / 0\nexcept ArithmeticError as e: raise OSError('x') from e", "rank 2: OSError: x", "Zero"
    ),
    Fault("sys.exit(0)", "sys.exit(0)", r"rank 2: SystemExit: sys.exit\(0\) before the end of its body", "sys.exit(0)"),
    Fault("os._exit(0)", "os._exit(0)", "rank 2: ended with exit code 0 before the end of its body"),
    Fault("os._exit(7)", "os._exit(7)", "rank 2: ended with exit code 7 before the end of its body"),
    Fault("SIGKILL", "os.kill(os.getpid(), signal.SIGKILL)", "rank 2: killed by SIGKILL"),
    Fault("SIGTERM", "os.kill(os.getpid(), signal.SIGTERM)", "rank 2: killed by SIGTERM"),
    Fault("a signal without a name", "os.kill(os.getpid(), signal.SIGRTMIN + 3)", r"rank 2: killed by signal \d+"),
    Fault("segfault", "os.kill(os.getpid(), signal.SIGSEGV)", "rank 2: killed by SIGSEGV", "Segmentation fault"),
    Fault("where it segfaults", "os.kill(os.getpid(), signal.SIGSEGV)", "rank 2: .*", "in test_it"),
    Fault("abort", "os.abort()", "rank 2: killed by SIGABRT", "in test_it"),
    Fault(
        "dies after its body", "threading.Timer(0.2, os._exit, [1]).start(); return", "rank 2: .* exit code 1 after .*"
    ),
    Fault(
        "killed after its body", "threading.Timer(0.2, os.abort).start(); return", "rank 2: .* SIGABRT after its body"
    ),
    Fault("returns early", "return", "time limit of 1 s: rank 2 had finished, ranks 0, 1, 3 did not finish"),
    Fault(
        "skips early",
        "pytest.skip('no')",
        "time limit of 1 s: rank 2 skipped, ranks 0, 1, 3 did not finish",
        "skipped: no",
    ),
    Fault("sleeps", "time.sleep(1000)", HANGS, f"line {LINE} in test_it"),
    Fault("waits for a child", "subprocess.run(['sleep', '1000'])", HANGS, "in run"),
    Fault("waits without torch", "dist.irecv(torch.ones(1), 0).wait()", HANGS, f"line {LINE} in test_it"),
    Fault(
        "waits elsewhere",
        "dist.recv(torch.ones(1), 0)",
        "time limit of 1 s: ranks 0, 1, 2, 3 did not finish",
        "in recv",
        others_come_first=True,
    ),
    Fault(
        "holds the GIL",
        "sum(range(10**15))",
        HANGS,
        f"line {LINE} in test_it",
    ),
    Fault(
        "is stopped",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "time limit of 1 s: rank 2 did not answer, ranks 0, 1, 3 did not finish",
    ),
    Fault(
        "ignores SIGTERM",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)",
        HANGS,
    ),
    Fault(
        "closes the launcher's pipe",
        "gc.unfreeze(); [c.close() for c in gc.get_objects() if isinstance(c, Connection)]; time.sleep(1000)",
        "rank 2: closed the pipe through which it reports",
    ),
    Fault("closes stdout", "sys.stdout.close(); os.close(1); raise ValueError('x')", "rank 2: ValueError: x"),
    Fault("has no stdout", "sys.stdout = None; raise ValueError('x')", "rank 2: ValueError: x"),
    Fault("partial line", "print('half', end=''); os.kill(os.getpid(), signal.SIGKILL)", "rank 2: .* SIGKILL", "half"),
    Fault("leaves a child", "subprocess.Popen(['sleep', '1000']); assert 0", "rank 2: assert 0"),
    Fault("dies with a child", "subprocess.Popen(['sleep', '1000']); os._exit(1)", "rank 2: ended with exit code 1 .*"),
    Fault("forks", "if os.fork() == 0: time.sleep(1000)\nassert 0", "rank 2: assert 0"),
    Fault(
        "a thread never ends",
        "threading.Thread(target=time.sleep, args=[1000]).start()",
        "1 s after the end of all bodies: ranks 0, 1, 3 had finished, rank 2 did not finish",
        "in _shutdown",
        others_come_first=True,
    ),
    Fault(
        "only one skips", "meet(); pytest.skip('no')", "not skipped by all: rank 2 skipped, ranks 0, 1, 3 had finished"
    ),
    Fault("returns a value", "meet(); return 1", "rank 2: TypeError: the body must return None.*; it returned int"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_names_its_rank_first(fault, inner):
    does = fault.rank_2_does.replace("\n", "\n        ")
    report = inner.fails(FAULTY_TEST.replace("DOES", does))
    title, _, sections = report.partition("\n")
    assert re.fullmatch(fault.title, title)
    assert len(report) < 100_000
    _, *parts = re.split(r"^-+ rank (\d): ", sections, flags=re.MULTILINE)
    order, texts = parts[::2], parts[1::2]
    assert sorted(order) == ["0", "1", "2", "3"]
    assert order[0] == "2" or fault.others_come_first
    assert fault.shown in texts[order.index("2")]


def test_a_kill_is_never_taken_for_the_lost_connections_that_follow(inner):
    inner.write("""
@pytest.mark.parametrize("time", range(10))
@pytest.mark.distributed(world_size=4)
def test_it(time):
    for step in range(100):
        meet()
        if (dist.get_rank(), step) == (2, 10 * time):
            os.kill(os.getpid(), signal.SIGKILL)
""")
    failures = inner.run().reprec.getfailures()
    assert [str(failure.longrepr).splitlines()[0] for failure in failures] == ["rank 2: killed by SIGKILL"] * 10


def test_the_place_named_is_where_the_late_rank_left_the_others(inner):
    report = inner.fails("""
def shared():
    if dist.get_rank() == 0:
        time.sleep(1000)
    meet()

@pytest.mark.distributed(world_size=2, timeout=1)
def test_it():
    shared()
""")
    sleep = 1 + PREAMBLE.count("\n") + 3
    assert report.startswith(f"time limit of 1 s: rank 0 stood at test_inner.py:{sleep}, rank 1 did not finish\n")


def test_ranks_that_hang_alike_are_all_named(inner):
    report = inner.fails(
        """
@pytest.mark.distributed(world_size=3)
def test_it():
    meet()
    time.sleep(1000)
""",
        "--override-ini=rank_timeout=0.5",
    )
    assert report.startswith("time limit of 0.5 s: ranks 0, 1, 2 did not finish\n")


def test_first_of_several_failures_decides(inner):
    """Even where it takes the longest to say so."""
    report = inner.fails("""
class LongStory(Exception):
    def __str__(self):
        time.sleep(0.2)
        return "long story"

@pytest.mark.distributed(world_size=4)
def test_it():
    meet()
    if dist.get_rank() == 3:
        raise LongStory
    time.sleep(0.1)
    assert 0
""")
    assert report.startswith("rank 3: test_inner.LongStory: long story\n")


def test_a_fault_while_the_module_is_imported_names_its_rank(inner):
    report = inner.fails("""
assert os.environ.get("RANK") != "1", "import"

@pytest.mark.distributed(world_size=2, timeout=2)
def test_it():
    meet()
""")
    assert report.startswith("rank 1: AssertionError: import\n")


@pytest.mark.parametrize(
    "options", ["-x", "-q", "-s", "--tb=short", "--tb=long", "--tb=native", "--tb=line", "--tb=no"]
)
def test_rank_is_named_under_every_option(options, inner):
    inner.write("""
@pytest.mark.distributed(world_size=2)
def test_it():
    shard = dist.get_rank()
    if shard == 1:
        assert shard == 3
    meet()

@pytest.mark.distributed(world_size=2)
def test_after_it():
    assert dist.get_rank() == 3
""")
    result = inner.run(options)
    result.assert_outcomes(failed=1 if options == "-x" else 2)
    output = result.stdout.str()
    assert "FAILED test_inner.py::test_it - Failed: rank 1: assert 1 == 3" in output
    if options not in ("--tb=line", "--tb=no"):
        assert "\nrank 1: assert 1 == 3\n" in output
        assert "    assert shard == 3\n" in output


# ------------------------------------------------------------------------------------- what is not run, or not at all

OUTCOMES = [
    ("pytest.skip('not here')", {"skipped": 1}, "1 × Skipped: not here"),
    ("pytest.skip('not here')", {"skipped": 1}, "SKIPPED [1] test_inner.py:"),
    ("pytest.importorskip('no_such_module')", {"skipped": 1}, "1 × Skipped: could not import 'no_such_module'"),
    ("if dist.get_rank(): pytest.skip('no')", {"failed": 1}, "not skipped by all: ranks 1, 2, 3 skipped, rank 0 had"),
    ("if dist.get_rank() == 1: pytest.skip('no')\n    assert 0", {"failed": 1}, "E   assert 0"),
]


@pytest.mark.parametrize(("body", "outcomes", "shown"), OUTCOMES)
def test_skips(body, outcomes, shown, inner):
    inner.write(f"@pytest.mark.distributed(world_size=4)\ndef test_it():\n    {body}\n")
    result = inner.run("-rsf")
    result.assert_outcomes(**outcomes)
    assert shown in result.stdout.str()


def test_xfail(inner):
    inner.write("""
@pytest.mark.xfail
@pytest.mark.distributed(world_size=2)
def test_fails():
    assert dist.get_rank() == 0

@pytest.mark.xfail(strict=True)
@pytest.mark.distributed(world_size=2)
def test_passes():
    meet()
""")
    inner.run().assert_outcomes(xfailed=1, failed=1)


REFUSED = [
    ("@pytest.mark.distributed(ranks=4)\ndef test_it(): pass", "the distributed mark takes world_size and timeout"),
    ("@pytest.mark.distributed(world_size=0)\ndef test_it(): pass", "world_size is 0: a test needs at least 1 rank"),
    ("@pytest.mark.distributed(world_size=2)\nasync def test_it(): pass", "must return None.*it returned coroutine"),
    ("@pytest.mark.distributed(world_size=2)\ndef test_it(): yield", "'yield' keyword|must return None"),
    (
        "import unittest\n@pytest.mark.distributed\nclass TestIt(unittest.TestCase):\n    def test_it(self): pass",
        "the distributed mark does not work on unittest.TestCase",
    ),
    (
        "@pytest.fixture\ndef lock(): return threading.Lock()\n"
        "@pytest.mark.distributed(world_size=2)\ndef test_it(lock): pass",
        "argument 'lock' of type lock cannot be sent to the ranks: make it in the body",
    ),
    (
        "@pytest.mark.distributed(world_size=2)\ndef test_it(request): pass",
        "argument 'request' of type TopRequest cannot be sent",
    ),
]


@pytest.mark.parametrize(("source", "message"), REFUSED)
def test_what_cannot_run_on_ranks_is_refused(source, message, inner):
    inner.write(source)
    result = inner.run()
    assert result.ret != 0
    assert "passed" not in result.parseoutcomes()
    assert re.search(message, result.stdout.str() + result.stderr.str())


# ------------------------------------------------------------------------------------------------ what ranks are given

RECORD = '''
HERE = Path(os.environ["RECORD"])
pytestmark = pytest.mark.distributed(world_size=2)

def ran():
    """A file for each test and rank, so that no test can pass without having run."""
    assert dist.get_world_size() == 2
    test = os.environ["PYTEST_CURRENT_TEST"].split("::", 1)[1].split(" ")[0].replace("::", ".").replace("/", "_")
    (HERE / f"{test}-{dist.get_rank()}").touch(exist_ok=False)
'''


@pytest.fixture
def all_run(inner, tmp_path_factory, monkeypatch):
    """Runs an inner pytest whose tests must all pass and call `ran()` on both ranks."""

    def run(*arguments: str) -> pytest.RunResult:
        monkeypatch.setenv("RECORD", str(record := tmp_path_factory.mktemp("record")))
        result = inner.run(*arguments)
        assert result.ret == 0
        outcomes = result.parseoutcomes()
        assert set(outcomes) == {"passed"}
        records = sorted(file.name for file in record.iterdir())
        tests = sorted({name.rpartition("-")[0] for name in records})
        assert records == [f"{test}-{rank}" for test in tests for rank in (0, 1)]
        assert len(tests) == outcomes["passed"]
        return result

    return run


def test_a_body_sees_what_it_would_see_in_this_process(inner, all_run):
    inner.write("NAME = 'sibling'\ndef check():\n    assert dist.is_initialized()\n", "sibling.py")
    inner.write("NAME = 'found by the path'\n", "elsewhere/found.py")
    inner.write(
        RECORD
        + """
import sibling
from dataclasses import dataclass
from unittest import mock

class Shape:
    pass

@dataclass(frozen=True)
class Sizes:
    world: int

def double(x):
    return 2 * x

@pytest.fixture
def place(monkeypatch, tmp_path):
    folder = Path("elsewhere").resolve()
    monkeypatch.setenv("SWITCH", "on")
    monkeypatch.delenv("HOME")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)

def test_environment_folder_and_path(place, tmp_path):
    import found
    assert found.NAME == "found by the path"
    assert os.environ["SWITCH"] == "on"
    assert "HOME" not in os.environ
    assert subprocess.check_output(["sh", "-c", "echo $SWITCH $RANK"], text=True) == f"on {dist.get_rank()}\\n"
    assert Path.cwd() == tmp_path
    ran()

def test_environment_of_the_last_test_is_gone():
    assert "SWITCH" not in os.environ and "HOME" in os.environ
    ran()

def test_torchrun_environment():
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE".split()
    rank = str(dist.get_rank())
    assert [os.environ[name] for name in names] == [rank, "2", rank, "2"]
    ran()

def test_monkeypatch_of_its_own(monkeypatch):
    monkeypatch.setattr(sibling, "NAME", dist.get_rank())
    assert sibling.NAME == dist.get_rank()
    ran()

def test_folder_is_shared(tmp_path):
    (tmp_path / str(dist.get_rank())).write_text("here")
    dist.barrier()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]
    ran()

@pytest.mark.parametrize("value", [Shape, double, Sizes(2), torch.arange(3), 1.5, None, "text"], ids=str)
def test_values(value):
    known = {"Shape": Shape, "double": double}
    assert known.get(getattr(value, "__name__", None), value) is value
    assert not isinstance(value, Sizes) or value == Sizes(2)
    ran()

@pytest.fixture(scope="module")
def numbers():
    return {"numbers": torch.ones(2)}

def test_fixture(numbers, device):
    assert numbers["numbers"].sum() == 2 and device == "cpu"
    ran()

def test_without_the_group():
    ran()

def test_destroys_the_group():
    ran()
    dist.destroy_process_group()

def test_sibling():
    sibling.check()
    ran()

@mock.patch.object(sibling, "NAME", "patched")
def test_decorated():
    assert sibling.NAME == "patched"
    ran()

@pytest.mark.filterwarnings("error::FutureWarning")
def test_warnings():
    import warnings
    with pytest.raises(FutureWarning):
        warnings.warn("late", FutureWarning)
    ran()

def test_main_thread_and_no_input():
    ran()
    assert threading.current_thread() is threading.main_thread()
    assert sys.stdin.read() == ""

class TestClass:
    size = 2

    @pytest.fixture
    def own(self):
        return self.size

    def test_method(self):
        assert self.size == dist.get_world_size()
        ran()

    def test_method_with_fixture(self, own, tmp_path):
        assert own == self.size and tmp_path.exists()
        ran()

    @staticmethod
    def test_static():
        ran()

    class TestNested:
        def test_method(self):
            ran()

class TestSubclass(TestClass):
    inherits = True

    def test_method(self):
        assert self.inherits
        ran()

    def test_static(self):
        ran()
"""
    )
    all_run()


def test_warnings_as_errors_find_none_in_the_launcher(inner, all_run):
    inner.write(RECORD + "def test_it(tmp_path):\n    meet()\n    ran()\n")
    all_run("-W", "error")


def test_inherited_tests_run_as_collected(inner, all_run):
    inner.write(
        RECORD + "class Base:\n    size = 0\n    def test_it(self):\n        assert self.size == 2\n        ran()\n"
        "def test_from_there():\n    ran()\n",
        "base.py",
    )
    inner.write("import base\nfrom base import pytestmark, test_from_there\nclass TestIt(base.Base):\n    size = 2\n")
    all_run()


def test_mark_on_a_class_and_one_rank(inner):
    inner.write("""
@pytest.mark.distributed(world_size=1)
class TestAlone:
    def test_it(self, tmp_path):
        meet()
        assert dist.get_world_size() == 1

    @pytest.mark.distributed(world_size=8)
    def test_closer_mark(self, tmp_path):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 8
        assert not dist.get_rank() == 7

@pytest.mark.distributed
def test_default():
    assert dist.get_world_size() == 3
    assert dist.get_rank() < 2
""")
    result = inner.run("--world-size=3")
    result.assert_outcomes(passed=1, failed=2)
    titles = [str(failure.longrepr).splitlines()[0] for failure in result.reprec.getfailures()]
    assert titles == ["rank 7: assert not 7 == 7", "rank 2: assert 2 < 2"]


PACKAGES = {"prepend": ["one/__init__.py", "one/two/__init__.py"], "importlib": []}


@pytest.mark.parametrize("mode", PACKAGES)
def test_same_file_names_in_subfolders(mode, inner, all_run):
    for package in PACKAGES[mode]:
        inner.write("", package)
    for folder in ("one", "one/two"):
        test = f"""
class Value:
    folder = {folder!r}

@pytest.mark.parametrize("value", [Value])
def test_in_{Path(folder).name}(value):
    assert value is Value and value.folder == {folder!r}
    ran()
"""
        inner.write(RECORD + test, f"{folder}/test_same.py")
    if mode == "prepend":
        inner.write(
            "from .two.test_same import Value\n" + RECORD + "def test_relative():\n    ran()\n", "one/test_up.py"
        )
    all_run(f"--import-mode={mode}")


# --------------------------------------------------------------------------------------------- mutants

USES_MODULE = """
import shards

@pytest.mark.distributed(world_size=2)
def test_it(tmp_path):
    print("saw", shards.number())
    dist.barrier()
    assert shards.number() == 1
"""


def test_every_rank_sees_a_module_that_changed(inner, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    second = int(time.time())
    for number in (1, 2, 3, 1):
        test = inner.write(USES_MODULE.replace("saw", f"test {number} saw"))
        (inner.path / "shards.py").write_text(f"def number(): return {number}\n")
        for changed in (test, inner.path / "shards.py"):
            os.utime(changed, ns=(0, second * 10**9 + number))  # bytecode knows its source by second and size
        result = inner.run("-rP")
        result.assert_outcomes(passed=number == 1, failed=number != 1)
        assert result.stdout.str().count(f"test {number} saw {number}") == 2


def test_every_rank_sees_the_mutant_that_the_environment_chooses(inner, monkeypatch):
    inner.write(USES_MODULE)
    (inner.path / "shards.py").write_text(
        "import os\ndef number(): return 2 if os.environ['MUTANT_UNDER_TEST'] == 'shards.x_number__1' else 1\n"
    )
    for mutant, number in [("", 1), ("shards.x_number__1", 2), ("shards.x_number__2", 1)]:
        monkeypatch.setenv("MUTANT_UNDER_TEST", mutant)
        result = inner.run("-rP")
        result.assert_outcomes(passed=number == 1, failed=number != 1)
        assert result.stdout.str().count(f"saw {number}") == 2


# --------------------------------------------------------------------------------------------- output

PRINTS = """
@pytest.mark.distributed(world_size=4)
def test_it():
    rank = dist.get_rank()
    for line in range(int(os.environ["LINES"])):
        print(f"<{rank}>" * 10)
    print(f"<{rank}> on stderr", file=sys.stderr)
    subprocess.run(["echo", f"<{rank}> from a child"])
    os.write(1, b"\\xff\\xfe no UTF-8 " + f"<{rank}>".encode())
    print(f"<{rank}> no newline \\udcff", end="")
    meet()
    assert rank != 1 or os.environ["LINES"] == "20"
"""


@pytest.mark.parametrize("lines", [30, 35_000], ids=["a little", "1 MB a rank"])
def test_output_stands_under_its_rank(lines, inner, monkeypatch):
    monkeypatch.setenv("LINES", str(lines))
    report = inner.fails(PRINTS)
    _, *parts = re.split(r"^\.+ rank (\d): output \.+$", report, flags=re.MULTILINE)
    outputs = {
        rank: re.split(r"^-+ rank ", text, flags=re.MULTILINE)[0]
        for rank, text in zip(parts[::2], parts[1::2], strict=True)
    }
    assert list(outputs) == ["1", "0", "2", "3"]
    for rank, output in outputs.items():
        assert set(re.findall(r"<(.)>", output)) == {rank}
        for end in ("on stderr", "from a child", "no newline \\udcff"):
            assert f"<{rank}> {end}" in output
        assert ("bytes]" in output) == (lines > 1000)
        assert len(output) < 30_000


@pytest.mark.parametrize("option", ["-rP", "-s"])
def test_output_of_a_test_that_passes(option, inner, monkeypatch):
    monkeypatch.setenv("LINES", "20")
    inner.write(PRINTS)
    result = inner.run(option)
    result.assert_outcomes(passed=1)
    shown = re.findall(r"\[rank .\] .+$", result.stdout.str(), re.MULTILINE)
    assert len(shown) == 4 * 23
    assert all(set(re.findall(r"<(.)>", line)) == {line[len("[rank ")]} for line in shown)


# --------------------------------------------------------------------------- what is left when pytest itself is ended

HANGS_WITH_CHILDREN = """
@pytest.mark.distributed(world_size=2)
def test_it():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"])
    (Path(os.environ["READY"]) / f"rank{dist.get_rank()}").touch()
    time.sleep(1000)
"""
ENDINGS = [
    ("Ctrl-C", signal.SIGINT, os.killpg, 2),
    ("SIGTERM", signal.SIGTERM, os.kill, -signal.SIGTERM),
    ("SIGKILL", signal.SIGKILL, os.kill, -signal.SIGKILL),
]


@pytest.mark.parametrize(("number", "send", "code"), [ending[1:] for ending in ENDINGS], ids=[e[0] for e in ENDINGS])
def test_no_process_outlives_pytest(number, send, code, inner, monkeypatch):
    monkeypatch.setenv("READY", str(inner.path))
    inner.write(HANGS_WITH_CHILDREN)
    run = inner.start("--override-ini=rank_timeout=60")
    wait_for_files(inner.path, "rank?", 2)
    start = time.monotonic()
    send(run.pid, number)
    output, _ = run.communicate(timeout=10)
    assert run.returncode == code
    assert time.monotonic() - start < 5
    assert ("KeyboardInterrupt" in output.decode()) == (number == signal.SIGINT)


def test_ctrl_c_while_the_server_still_imports_torch(inner, monkeypatch):
    monkeypatch.setenv("READY", str(inner.path))
    inner.write(HANGS_WITH_CHILDREN)
    inner.write("def pytest_runtest_call(): (Path(os.environ['READY']) / 'begins').touch()\n", "conftest.py")
    run = inner.start()
    wait_for_files(inner.path, "begins", 1)
    os.killpg(run.pid, signal.SIGINT)
    run.communicate(timeout=10)
    assert run.returncode == 2


def test_children_of_ranks_end_with_a_test_that_passes(inner):
    inner.write("""
@pytest.mark.distributed(world_size=2)
def test_it():
    subprocess.Popen(["sleep", "1000"])
    if os.fork() == 0:
        time.sleep(1000)
    meet()
""")
    inner.run().assert_outcomes(passed=1)


def test_two_suites_at_the_same_time(inner):
    inner.write("""
@pytest.mark.parametrize("time", range(5))
@pytest.mark.distributed(world_size=4)
def test_it(time, tmp_path):
    meet()
    (tmp_path / str(dist.get_rank())).touch(exist_ok=False)
    meet()
    assert len(list(tmp_path.iterdir())) == 4
""")
    runs = [inner.start(), inner.start()]
    for run in runs:
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        assert b"5 passed" in output


# ----------------------------------------------------------------------------------------------- scripts and functions

SCRIPT = """
import sys
import torch
import torch.distributed as dist

def main():
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"{sys.argv[1:]}: {dist.get_world_size()} ranks, sum {total.item()}")
    if sys.argv[1] == "fail" and dist.get_rank() == 1:
        raise ValueError("wrong shard")
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def test_script_prints_what_it_prints_under_torchrun(script, run_script):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    real = subprocess.run([*torchrun, script, "a", "b"], capture_output=True, text=True, timeout=100)
    assert real.returncode == 0, real.stderr
    assert run_script(script, "a", "b", world_size=2) == [real.stdout, ""]
    assert real.stdout == "['a', 'b']: 2 ranks, sum 3\n"


def test_script_that_fails_is_reported_from_its_own_first_line(script, run_script):
    with pytest.raises(pytest.fail.Exception) as failure:
        run_script(script, "fail", world_size=2)
    title, headline, traceback, *_ = str(failure.value).splitlines()
    assert title == "rank 1: ValueError: wrong shard"
    assert " rank 1: failed " in headline
    assert re.search(r"script\.py:\d+: in <module>$", traceback)


@pytest.mark.parametrize(("code", "passes"), [("0", True), ("None", True), ("3", False), ("'no'", False)])
def test_script_may_exit(code, passes, tmp_path, run_script):
    (tmp_path / "exits.py").write_text(f"import sys\nsys.exit({code})\n")
    if passes:
        assert run_script(tmp_path / "exits.py", world_size=1) == [""]
    else:
        with pytest.raises(pytest.fail.Exception, match=rf"rank 0: SystemExit: sys.exit\({code}\)"):
            run_script(tmp_path / "exits.py", world_size=1)


def add_ranks(start, monkeypatch):
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    print(total.item())


def test_function_on_ranks(launch, monkeypatch):
    assert launch(add_ranks, world_size=3, timeout=10, start=5, monkeypatch=monkeypatch) == ["18\n"] * 3
    with pytest.raises(pytest.fail.Exception, match=r"^rank \d: TypeError: .*missing 1 required .*'start'\n"):
        launch(add_ranks, world_size=3, timeout=10, monkeypatch=monkeypatch)
