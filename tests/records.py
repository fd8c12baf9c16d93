"""Records: which snippet was run with which torch, on what, and whether its code has changed since.

Written by the suite under `--record`, read by the site. One file per device and torch version in
docs/_data/records/, a JSON list with one entry per snippet, backend and world size.
"""

import ast
import functools
import hashlib
import io
import json
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SNIPPETS = ROOT / "snippets"
RECORDS = ROOT / "docs" / "_data" / "records"
OUTPUT = ROOT / "docs" / "_data" / "output"


def by_number(version: str) -> list[int]:
    """The key that sorts 2.13 behind 2.2, and takes what containers call their torch, such as 2.6.0a0."""
    return [int(number) for number in re.findall(r"\d+", version)]


# What `nox -s compat-test` runs.
TORCH_VERSIONS = sorted(
    (file.stem.removeprefix("torch-") for file in (ROOT / "requirements").glob("torch-*.txt")), key=by_number
)


def snippets() -> list[Path]:
    return sorted(SNIPPETS.rglob("*.py"))


# What the snippets in a folder need beside torch; it is named where their runs are.
PACKAGES = {"with_deepspeed": ["deepspeed"], "with_transformers": ["transformers", "accelerate", "deepspeed"]}


def suite_of(snippet: Path) -> Path:
    """The snippet's test file: tests/ mirrors snippets/."""
    name = snippet.relative_to(SNIPPETS)
    return ROOT / "tests" / name.with_name(f"test_{name.name}")


def code_hash(source: str) -> str:
    """16 hex digits that change with the code, not with its comments, docstrings, blank lines or section markers.

    Comments and docstrings are cut at the position that Python reports, so the hash is the same on every version.
    """
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines[docstring.lineno - 1 : docstring.end_lineno] = [""] * (docstring.end_lineno - docstring.lineno + 1)
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()[:16]


@functools.cache
def code_hash_and_imports(source: str) -> tuple[str, frozenset[str]]:
    """Kept for each text: the tests ask for all snippets again and again."""
    imports = (node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom))
    return code_hash(source), frozenset(name for name in imports if name)


def hash_of(snippet: Path) -> str:
    """The hash of a snippet and of those that it imports, from its folder or from snippets/."""
    found, waiting = {}, [snippet]
    while waiting:
        path = waiting.pop()
        found[path], imports = code_hash_and_imports(path.read_text())
        places = {folder / f"{name}.py" for name in imports for folder in (snippet.parent, SNIPPETS)}
        waiting += {place for place in places if place.exists()} - {*found, *waiting}
    hashes = [found[path] for path in sorted(found)]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


def current_hashes() -> dict[str, str]:
    """The hash of each snippet as it stands, by the name that records have for it."""
    return {path.relative_to(SNIPPETS).as_posix(): hash_of(path) for path in snippets()}


def load_records() -> list[dict]:
    """All records, each with `stale`: whether the code is another one by now, the snippet's or what it imports."""
    current = current_hashes()
    records = [record for file in sorted(RECORDS.glob("*.json")) for record in json.loads(file.read_text())]
    for record in records:
        record["stale"] = current.get(record["snippet"]) != record["code"]
    return records


def in_order(device: str, torch: str) -> tuple:
    """The key that sorts what was run with: CPUs first, then by torch version."""
    return not device.startswith("CPU"), device, by_number(torch)


def columns(records: list[dict]) -> list[tuple[str, str]]:
    """(device, torch) of each column of the compatibility table: what compat-test runs, and what else was recorded."""
    known = {("CPU", version) for version in TORCH_VERSIONS} | {(old["device"], old["torch"]) for old in records}
    return sorted(known, key=lambda column: in_order(*column))


def status(records: list[dict]) -> str:
    """What the compatibility table says of the records of one snippet on one device and torch."""
    if not records:
        return "not run"
    if any(record["stale"] for record in records):
        return "stale"
    outcomes = {record["outcome"] for record in records}
    needs = records[0]["needs_torch"]
    if "failed" in outcomes:
        return "failed"
    if "passed" not in outcomes:
        return f"needs {needs[-1]}" if needs else "not run"
    return f"passed, but for what needs {' and '.join(needs)}" if needs else "passed"
