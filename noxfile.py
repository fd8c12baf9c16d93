"""The project's commands. `nox -l` lists them; what follows `--` goes to the tool that a session runs."""

import sys

import nox

sys.path.insert(0, "tests")

from records import TORCH_VERSIONS, snippets, suite_of

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["docs-test"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
SITE = ("test", "quiet", "site", "notebooks")  # the build executes the notebooks
NO_NOTICE = {"NO_MKDOCS_2_WARNING": "1"}


def install(session: nox.Session, *groups: str, needed: str = "") -> None:
    """Installs dependency groups of pyproject.toml; under --no-venv, only says what is missing.

    What the group `needed` lacks then ends the session; the tests that need the rest say that they were not run.
    """
    if session.virtualenv.is_sandboxed:
        session.install(*nox.project.dependency_groups(PYPROJECT, *groups))
        return
    for group in groups:
        missing = [line for line in nox.project.dependency_groups(PYPROJECT, group) if not is_there(session, line)]
        if missing:
            message = f"not installed: install it with\n    python -m pip install {' '.join(map(repr, missing))}\n"
            session.error(message) if group in (needed or groups) else session.warn(message)


def is_there(session: nox.Session, requirement: str) -> bool:
    name = requirement.split("=")[0]
    code = f"from importlib.metadata import *; print(bool([*distributions(name={name!r})]))"
    return "True" in session.run("python", "-c", code, silent=True, log=False, external=True)


@nox.session
def serve(session: nox.Session) -> None:
    """Builds the site and serves it with live reload."""
    install(session, *SITE)
    session.run("mkdocs", "serve", "--livereload", *session.posargs, env=NO_NOTICE, external=True)


@nox.session(name="docs-build")
def docs_build(session: nox.Session) -> None:
    """Builds the site into site/; any warning fails it."""
    install(session, *SITE)
    session.run("mkdocs", "build", "--strict", *session.posargs, env=NO_NOTICE, external=True)


@nox.session(name="docs-test")
def docs_test(session: nox.Session) -> None:
    """Proves the documentation: snippets on real ranks, their faults, the pages. Options: --device, --record."""
    install(session, *SITE, "parallel", "deepspeed", needed="test")
    # ranks wait much of the time, so two cores do more than two tests at once
    parallel = ["-n3", "--dist=loadgroup"] if session.virtualenv.is_sandboxed else []
    # sessions of their own
    apart = [
        f"--ignore=tests/{name}"
        for name in ("test_launcher.py", "test_train_long.py", "test_engine_gradients_long.py", "with_transformers")
    ]
    options = [*apart, *parallel, *session.posargs]
    bytecode = {"PYTHONDONTWRITEBYTECODE": ""}  # each fault imports its test anew: not from the source where it is set
    session.run("python", "-m", "pytest", *options, env=bytecode, external=True)


@nox.session(name="compat-test", python="3.11")  # legacy torch has no wheels for later ones
@nox.parametrize("torch", TORCH_VERSIONS)
def compat_test(session: nox.Session, torch: str) -> None:
    """Runs the snippets' tests with one of the torch versions in requirements/, 2 to 6 GB each."""
    if not session.virtualenv.is_sandboxed:
        session.error("compat-test makes an environment for each torch: run it without --no-venv")
    session.install("-r", f"requirements/torch-{torch}.txt")
    session.run("python", "-m", "pytest", *map(str, map(suite_of, snippets())), *session.posargs)


@nox.session(name="train-test")
def train_test(session: nox.Session) -> None:
    """Proves the training program as a whole: 50 steps on each grid, resumed, stopped, on two nodes."""
    install(session, "test", "quiet", "long", "deepspeed", needed="test")
    session.run("python", "-m", "pytest", "tests/test_train_long.py", *session.posargs, external=True)


@nox.session(name="engines-test")
def engines_test(session: nox.Session) -> None:
    """Proves what DeepSpeed, Transformers and Accelerate do, in full, and the snippets that need them."""
    install(session, "test", "quiet", "parallel", "deepspeed", "transformers", needed="test")
    suites = ["tests/with_deepspeed", "tests/with_transformers", "tests/test_engine_gradients_long.py"]
    session.run("python", "-m", "pytest", "-n3", "--dist=loadgroup", *suites, *session.posargs, external=True)
    if not session.posargs:
        bytecode = {"PYTHONDONTWRITEBYTECODE": ""}  # as in docs-test
        faults = ["-n3", "tests/test_faults.py", "-kwith_transformers"]
        session.run("python", "-m", "pytest", *faults, env=bytecode, external=True)


@nox.session(name="launcher-test")
def launcher_test(session: nox.Session) -> None:
    """Tests the rank launcher itself: failures, kills, hangs, Ctrl-C."""
    install(session, "test", "quiet", needed="test")
    session.run("python", "-m", "pytest", "tests/test_launcher.py", *session.posargs, external=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style and formatting."""
    install(session, "lint")
    session.run("ruff", "check", external=True)
    session.run("ruff", "format", "--check", external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Measures what the pages quote, into docs/_data/."""
    install(session, "test", "quiet", "deepspeed", "transformers", "bench")
    for name in (
        "launcher",
        "loss",
        "attention",
        "packed",
        "precision",
        "train",
        "engine_gradients",
        "engine_gradients_transformers",
        "constant_factor",
    ):
        session.run("python", f"benchmarks/{name}.py", *session.posargs, external=True)
