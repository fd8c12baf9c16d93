"""Records: which snippet was run with which torch, on what, and whether its code has changed since.

Written by the suite under `--record`, read by the site. One file per device and torch version in
docs/_data/records/, a JSON list with one entry per snippet, backend and world size.
"""

import ast
import hashlib
import io
import json
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "_data" / "records"
OUTPUT = ROOT / "docs" / "_data" / "output"


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


def load_records() -> list[dict]:
    """All records, each with `stale`: whether the snippet's code is another one by now."""
    records = [record for file in sorted(RECORDS.glob("*.json")) for record in json.loads(file.read_text())]
    for record in records:
        snippet = ROOT / "snippets" / record["snippet"]
        record["stale"] = not snippet.exists() or code_hash(snippet.read_text()) != record["code"]
    return records
