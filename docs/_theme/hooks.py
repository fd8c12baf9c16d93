"""Adds to the build: measured numbers and "Tested with" lines in pages, the snippets as files, formulas as MathML.

In a page, `{$ … $}` is a Jinja2 expression, `{$% … %$}` a statement, `{$# … #$}` a comment. An unknown name or a
missing number fails the build. Known are:

    {$ data.loss.speedup $}                  docs/_data/loss.json, and so on for each file there
    {$ "%.2f" | format(data.loss.speedup) $} with two decimals
    {$ tested("loss.py") $}                  what snippets/loss.py was run with, and a link to the file
"""

import functools
import html
import json
import posixpath
import re
import sys
from pathlib import Path

import jinja2
from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from pymdownx.snippets import SnippetPreprocessor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from records import ROOT, load_records

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def not_null(value):
    if value is None:
        raise jinja2.UndefinedError("a value is null")
    return value


templates = jinja2.Environment(
    variable_start_string="{$",
    variable_end_string="$}",
    block_start_string="{$%",
    block_end_string="%$}",
    comment_start_string="{$#",
    comment_end_string="#$}",
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=jinja2.StrictUndefined,
    finalize=not_null,
)


def on_config(config):
    """Reads data and records, anew for each build."""
    data = {file.stem: json.loads(file.read_text()) for file in (ROOT / "docs" / "_data").glob("*.json")}
    templates.globals.update(data=data, records=load_records())


def on_files(files, config):
    """Adds the snippets as files, without section markers. A section must be closed, else it shows all that follows."""
    for path in sorted((ROOT / "snippets").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        lines = path.read_text().splitlines()
        markers = [(m["name"], m["type"]) for m in map(SnippetPreprocessor.RE_SNIPPET_SECTION.match, lines) if m]
        for section, _ in markers:
            types = [type for other, type in markers if other == section]
            if types != ["start", "end"]:
                raise PluginError(
                    f"{name}: section {section!r} has {', '.join(types)}: it needs one start, then one end"
                )
        code = [line for line in lines if not SnippetPreprocessor.RE_SNIPPET_SECTION.match(line)]
        files.append(File.generated(config, name, content="\n".join(code).rstrip() + "\n"))


def on_page_markdown(markdown, page, config, files):
    """Fills in `{$ … $}`. MkDocs names the page of an error."""
    try:
        return templates.from_string(markdown).render(tested=functools.partial(tested, page.file.src_uri))
    except jinja2.TemplateError as error:
        raise PluginError(f"in {{$ … $}}: {error}") from error


def tested(page_uri, snippet):
    """One line of Markdown, so that it can be indented: the snippet's runs, grouped, and a link to the file."""
    runs = {}
    for record in templates.globals["records"]:
        if record["snippet"] == snippet:
            run = tuple(record[key] for key in ("torch", "python", "backend", "device", "date", "outcome", "stale"))
            runs.setdefault(run, []).append(record["world_size"])
    lines = [describe(*run, sorted(sizes)) for run, sizes in runs.items()] or ["Not run"]
    link = posixpath.relpath(f"snippets/{snippet}", posixpath.dirname(page_uri))
    lines.append(f'[Download {snippet}]({link}){{ download="{posixpath.basename(snippet)}" }}')
    return f'<small class="tested">{"<br>".join(lines)}</small>'


def describe(torch, python, backend, device, date, outcome, stale, sizes):
    result = "Tested" if outcome == "passed" else f'<strong class="failed">Tests {outcome}</strong>'
    python = ".".join(python.split(".")[:2])
    ranks = " and ".join(", ".join(map(str, sizes)).rsplit(", ", 1)) + (" rank" if sizes == [1] else " ranks")
    age = ', <strong class="stale">stale: the code has changed since</strong>' if stale else ""
    return f"{result} with torch {torch}, Python {python}, {backend} on {device}, {ranks}, {date}{age}"


def on_page_content(content, page, config, files):
    r"""Turns arithmatex's `\(…\)` and `\[…\]` into MathML."""
    return FORMULA.sub(to_mathml, content)


def to_mathml(match):
    tag, latex = match[1], html.unescape(match[2])
    try:
        mathml = convert(latex, display="inline" if tag == "span" else "block")
    except Exception as error:
        raise PluginError(f"formula {latex!r}: {type(error).__name__} {error}") from error
    if "\\" in mathml or "<mi>&</mi>" in mathml:  # what latex2mathml does not know, it lets through
        raise PluginError(f"formula {latex!r} holds a command that latex2mathml does not know: {mathml}")
    return f'<{tag} class="formula">{mathml}</{tag}>'
