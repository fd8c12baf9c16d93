"""Adds to the build: measured numbers and "Tested with" lines in pages, the snippets as files, formulas as MathML.

In a page, `{$ … $}` is a Jinja2 expression, `{$% … %$}` a statement, `{$# … #$}` a comment. An unknown name or a
missing number fails the build. Known are:

    {$ data.loss.speedup $}                  docs/_data/loss.json, and so on for each file there
    {$ data.exit_hang[0].hung $}             a folder's files, by torch version
    {$ "%.2f" | format(data.loss.speedup) $} with two decimals
    {$ tested("loss.py") $}                  what snippets/loss.py was run with, and a link to the file
    {$ compatibility() $}                    the table of all snippets on all versions and devices
    {$ by_rank(["right", "ValueError"]) $}   one outcome for each rank, in words
    {$ gradients("core") $}              what engines make of each loss's gradient, from engine_gradients.json
    {$ figure("attention") $}                drawn from docs/_data/ by figures.py
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

from figures import figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from records import ROOT, by_number, columns, in_order, load_records, snippets, status

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
    folder = ROOT / "docs" / "_data"
    data = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    for subfolder in ("differentiable_sums", "exit_hang"):
        tables = [json.loads(file.read_text()) for file in (folder / subfolder).glob("*.json")]
        data[subfolder] = sorted(tables, key=lambda table: in_order(table["device"], table["torch"]))
    templates.globals.update(data=data, records=load_records(), by_rank=by_rank)
    templates.globals.update(figure=functools.partial(figure, data), gradients=functools.partial(gradients, data))


def on_files(files, config):
    """Adds the snippets as files, without section markers. A section must be closed, else it shows all that follows."""
    for path in snippets():
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
    uri = page.file.src_uri
    try:
        return templates.from_string(markdown).render(
            tested=functools.partial(tested, uri), compatibility=functools.partial(compatibility, uri, files)
        )
    except jinja2.TemplateError as error:
        raise PluginError(f"in {{$ … $}}: {error}") from error


def tested(page_uri, snippet):
    """One line of Markdown, so that it can be indented: the snippet's runs, grouped, and a link to the file."""
    ranks = {}
    for record in templates.globals["records"]:
        if record["snippet"] == snippet:
            run = ("python", "backend", "device", "date", "outcome", "stale", "torch")
            needs, packages = tuple(record["needs_torch"]), tuple(record["packages"])
            ranks.setdefault((needs, packages, *(record[key] for key in run)), []).append(record["world_size"])
    versions = {}
    for (*run, torch), sizes in ranks.items():
        versions.setdefault((*run, tuple(sorted(sizes, key=str))), []).append(torch)
    runs = sorted(versions.items(), key=lambda item: by_number(item[1][-1]))
    lines = [describe(sorted(torch, key=by_number), *run) for run, torch in runs] or ["Not run"]
    link = posixpath.relpath(f"snippets/{snippet}", posixpath.dirname(page_uri))
    lines.append(f'[Download {snippet}]({link}){{ download="{posixpath.basename(snippet)}" }}')
    return f'<small class="tested">{"<br>".join(lines)}</small>'


def describe(versions, needs, packages, python, backend, device, date, outcome, stale, sizes):
    if outcome == "not run" and (needs or backend is None):
        return f"Not run with torch {words(versions)}" + (f": needs torch {needs[-1]}" if needs else "")
    if backend is None:
        return f'<strong class="failed">Tests failed</strong> with torch {words(versions)} on {device}, {date}'
    results = {"passed": "Tested", "not run": "Not run"}
    result = results.get(outcome, f'<strong class="failed">Tests {outcome}</strong>')
    python = ".".join(python.split(".")[:2])
    ranks = words(sizes) + (" rank" if sizes == (1,) else " ranks")
    partly = f", but for what needs torch {words(needs)}" if needs else ""
    age = ', <strong class="stale">stale: the code has changed since</strong>' if stale else ""
    with_packages = "".join(f", {package}" for package in packages)
    what = f"torch {words(versions)}{with_packages}, Python {python}, {backend} on {device}, {ranks}"
    return f"{result} with {what}, {date}{partly}{age}"


def words(values):
    return " and ".join(", ".join(map(str, values)).rsplit(", ", 1))


def compatibility(page_uri, files):
    """A Markdown table: for each snippet and (device, torch), its tests' outcome, or why there is none."""
    records = templates.globals["records"]
    known = columns(records)
    pages = {}
    for file in files.documentation_pages():
        if file.src_uri.endswith(".md"):
            for snippet in re.findall(r'tested\("(.*?)"\)', file.content_string):
                pages[snippet] = posixpath.relpath(file.src_uri, posixpath.dirname(page_uri))
    lines = ["| Snippet |" + "".join(f" torch {torch}, {device} |" for device, torch in known)]
    lines.append("| --- |" + " --- |" * len(known))
    for path in snippets():
        name = path.relative_to(ROOT / "snippets").as_posix()
        faulty = " (faulty)" if path.read_text().startswith('"""FAULTY') else ""
        cells = []
        for device, torch in known:
            says = status([r for r in records if (r["snippet"], r["device"], r["torch"]) == (name, device, torch)])
            cells.append(f'<span class="{re.match("[a-z]+", says)[0]}">{says}</span>')
        link = f"[{name}]({pages[name]})" if name in pages else name
        lines.append(f"| {link}{faulty} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gradients(data, setting, source="engine_gradients"):
    """A Markdown table of one setting: engines down, forms of the loss across."""
    rows = [row for row in data[source]["rows"] if row["setting"] == setting]
    if not rows:
        raise jinja2.UndefinedError(f"{source} has no setting {setting!r}")
    forms = {
        "token_mean": "`token_mean` with the engine's $D$",
        "weighted, mean": '`weighted_all_reduce`, `"mean"`',
        "weighted, sum": '`weighted_all_reduce`, `"sum"`',
        "all_gather": "functional `all_gather`",
        "in place": "in-place `all_reduce`",
        "local mean": "each rank's own mean",
    }
    lines = [f"| Engine | {' | '.join(forms.values())} |", "| --- |" + " --- |" * len(forms)]
    for engine in dict.fromkeys(row["engine"] for row in rows):
        cells = {row["form"]: verdict(row) for row in rows if row["engine"] == engine}
        lines.append(f"| {engine} | {' | '.join(cells[form] for form in forms)} |")
    return "\n".join(lines)


def verdict(row):
    """Right, orange where it is right for another mean, or wrong."""
    said = row["verdict"]
    if said == "raises":
        said = row["error"].partition(":")[0]
    elif said == "scaled":
        said = f"{row['factor']:.2g} ×" + ("" if row["of"] == "tokens" else f" {row['of']}")
    kinds = {"right": "right", "1 × replicas": "stale"}
    return f'<span class="{kinds.get(said, "failed")}">{said}</span>'


def by_rank(outcomes):
    """`right`, where all ranks agree, else `right on 0 and 1; ValueError on 2 and 3`."""
    groups = {}
    for rank, outcome in enumerate(outcomes):
        groups.setdefault(outcome, []).append(rank)
    if len(groups) == 1:
        return outcomes[0]
    return "; ".join(f"{outcome} on {words(ranks)}" for outcome, ranks in groups.items())


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
