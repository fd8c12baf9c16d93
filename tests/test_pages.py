"""The contract between pages and code: what a reader sees is what the tests run.

Every Python or bash block is a snippet or a named section of one; every output block is a file that a test writes and
compares; every command is one that a test or .ci/run runs; the site builds without a warning and asks nobody else.
"""

import html.parser
import json
import re
import textwrap
import tomllib

import pytest

from faults import FAULTS
from records import OUTPUT, ROOT, load_records, snippets, suite_of

PAGES = sorted((ROOT / "docs").rglob("*.md"))
SNIPPETS = snippets()
FENCE = re.compile(
    r"^(?P<indent>[ \t>]*)(?P<ticks>`{3,}|~{3,})(?P<info>[^\n]*)\n(?P<body>.*?)^(?P=indent)(?P=ticks)", re.S | re.M
)
MARKER = re.compile(r"^[ \t]*# --8<-- \[(?P<kind>start|end):(?P<name>[\w-]+)\]\n", re.M)
INCLUDE = re.compile(r'--8<-- "(?P<file>[^":]+)(:(?P<section>[\w-]+))?"')
# What .ci/run takes from README.md and runs, see test_ci_runs_what_the_readme_says.
README_COMMAND = "python3 -m venv .venv && .venv/bin/pip install nox && .venv/bin/nox -s {session}"
RUN_BY_CI = {README_COMMAND.format(session=session) for session in ("serve", "docs-test")}


def sections(snippet: str) -> dict[str, str]:
    """The named sections of a snippet's text, without markers inside them. Raises where one does not end."""
    found = {}
    for start in MARKER.finditer(snippet):
        if start["kind"] == "start":
            end = re.search(rf"^[ \t]*# --8<-- \[end:{start['name']}\]", snippet[start.end() :], re.M)
            assert end, f"section {start['name']} does not end"
            assert start["name"] not in found, f"section {start['name']} stands twice"
            found[start["name"]] = MARKER.sub("", snippet[start.end() : start.end() + end.start()])
    return found


def problems_of(page: str) -> list[str]:
    """What in a page's Markdown breaks the contract."""
    problems = []
    for fence in FENCE.finditer(page):
        language = fence["info"].strip(" {}.").split(" ")[0]
        lines = [line.strip(" \t>") for line in fence["body"].splitlines() if line.strip(" \t>")]
        includes = [INCLUDE.fullmatch(line) for line in lines]
        if language not in ("python", "bash", "text", "console"):
            problems.append(f"a block of language {language!r}: use python, bash, text or console")
        elif language == "console" and not any(includes):
            commands = [line.removeprefix("$ ") for line in lines]
            problems += [f"a command that nothing runs: {line}" for line in commands if line not in RUN_BY_CI]
        elif len(lines) != 1 or not includes[0]:
            problems.append(f"a {language} block typed by hand: {lines[:1]}")
        else:
            problems += problems_of_include(language, includes[0]["file"], includes[0]["section"])
    if re.search(r"(?i)<(pre|code|samp|kbd|textarea|xmp|tt|iframe|small)\b|\bstyle *=|white-space", page):
        problems.append("code as HTML: use a fenced block")
    if re.search(r"(?i)class *= *[^>]*\b(tested|highlight)\b|\{[^}]*\.tested|tested with torch \d", page):
        problems.append("what it was tested with, typed by hand: use tested()")
    if re.search(r"^(<{7}|={7}|>{7})( |$)", page, re.M):
        problems.append("a conflict of a merge")
    if re.search(r"by_rank\(\s*[\[\"']", page):
        problems.append("an outcome typed by hand: pass data")
    if re.search(r"```|~~~|`#!", FENCE.sub("", page)):
        problems.append("a block that is not fenced in lines of its own")
    return problems


def problems_of_include(language: str, file: str, section: str | None) -> list[str]:
    home = "snippets/" if language in ("python", "bash") else "docs/_data/output/"
    path = ROOT / file
    if not file.startswith(home):
        return [f"a {language} block from {file}, not from {home}"]
    if not path.is_file():
        return [f"{file} is missing"]
    if section and section not in sections(path.read_text()):
        return [f"{file} has no section {section!r}"]
    return []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_shows_only_what_is_run(page):
    assert problems_of(page.read_text()) == []


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("```python\nprint(1)\n```\n", "typed by hand"),
        ("``` { .python .annotate }\nprint(1)\n```\n", "typed by hand"),
        ("~~~python\nprint(1)\n~~~\n", "typed by hand"),
        ("!!! note\n\n    ```python\n    print(1)\n    ```\n", "typed by hand"),
        ("> ```python\n> print(1)\n> ```\n", "typed by hand"),
        ("```py\nprint(1)\n```\n", "language 'py'"),
        ("```\nprint(1)\n```\n", "language ''"),
        ("<pre>print(1)</pre>", "code as HTML"),
        ("<CODE style='display: block'>print(1)</CODE>", "code as HTML"),
        ("<tt>print(1)</tt>", "code as HTML"),
        ("<<<<<<< HEAD\none\n=======\ntwo\n>>>>>>> 7a40acf\n", "a conflict"),
        ("<div style='font-family: monospace'>rank 0: 3</div>", "code as HTML"),
        ("<small>3 ranks</small>", "code as HTML"),
        ("<p class = 'x tested'>3 ranks</p>", "typed by hand: use tested()"),
        ("Three ranks\n{ .tested }", "typed by hand: use tested()"),
        ("Tested with torch 9.9, 64 ranks", "typed by hand: use tested()"),
        ('{$ by_rank(["right"] * 4) $}', "an outcome typed by hand"),
        ("- ```python\n  print(1)\n  ```\n", "not fenced in lines of its own"),
        ("```python\nprint(1)\n", "not fenced in lines of its own"),
        ("`#!python print(1)`", "not fenced in lines of its own"),
        ('```python\n--8<-- "snippets/loss.py:weighted"\nx = 1\n```\n', "typed by hand"),
        ('```python\n--8<-- "snippets/loss.py:no-such"\n```\n', "no section"),
        ('```python\n--8<-- "snippets/no_such.py"\n```\n', "is missing"),
        ('```python\n--8<-- "tests/faults.py"\n```\n', "not from snippets/"),
        ("```text\nrank 0: 3\n```\n", "typed by hand"),
        ('```text\n--8<-- "docs/_data/output/no-such.txt"\n```\n', "is missing"),
        ("```console\n$ rm -rf /\n```\n", "a command that nothing runs"),
    ],
)
def test_the_contract_can_be_broken(page, problem):
    assert [problem in found for found in problems_of(page)] == [True]


def test_the_contract_can_be_kept():
    page = (
        '```python\n--8<-- "snippets/loss.py:weighted"\n```\n\n    ```console\n    $ ' + min(RUN_BY_CI) + "\n    ```\n"
    )
    assert len(FENCE.findall(page)) == 2
    assert problems_of(page) == []


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda path: path.name)
def test_snippet_is_shown_and_tested(snippet):
    name = snippet.relative_to(ROOT / "snippets").as_posix()
    sections(snippet.read_text())
    assert re.search(rf"^ *(from|import) {snippet.stem}\b", suite_of(snippet).read_text(), re.M)
    assert "def test_" in suite_of(snippet).read_text()
    assert any(f'"snippets/{name}' in page.read_text() for page in PAGES), "no page shows it"
    assert any(f'tested("{name}")' in page.read_text() for page in PAGES), "no page says what it was tested with"


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda path: path.name)
def test_snippet_to_copy_has_faults(snippet):
    text = snippet.read_text()
    meant_for_copying = "FAULTY" not in text.partition("\n")[0] and "__main__" not in text
    if meant_for_copying or snippet.name == "train.py":
        assert any(fault.snippet == snippet.relative_to(ROOT / "snippets").as_posix() for fault in FAULTS)


@pytest.mark.parametrize("output", sorted(OUTPUT.glob("*")), ids=lambda path: path.name)
def test_output_is_shown_and_compared(output):
    assert any(f'"docs/_data/output/{output.name}"' in page.read_text() for page in PAGES), "no page shows it"
    call = re.compile(rf'^ +recorded\("{re.escape(output.name)}"', re.M)
    assert any(call.search(test.read_text()) for test in (ROOT / "tests").rglob("test_*.py"))


def test_ci_runs_what_the_readme_says():
    readme, script = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for command in RUN_BY_CI:
        assert f"$ {command}\n" in readme
    assert r"sed -n 's/^ *\$ \(python3 -m venv .* -s '" in script, "it takes the commands from README.md"


@pytest.mark.parametrize("snippet", SNIPPETS, ids=lambda path: path.name)
def test_record_on_the_default_torch_is_fresh(snippet, request):
    if request.config.option.record:
        return  # being written in this very run
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    torch = next(line.removeprefix("torch==") for line in groups["test"] if line.startswith("torch=="))
    records = [
        record
        for record in load_records()
        if (ROOT / "snippets" / record["snippet"], record["torch"], record["device"]) == (snippet, torch, "CPU")
    ]
    assert records, f"never recorded on torch {torch}: nox -s docs-test -- --record"
    assert not any(record["stale"] for record in records), (
        "the code has changed since it was recorded: once all its other tests pass, nox -s docs-test -- --record"
    )
    # on a number of ranks all may be skipped, as what needs a GPU is
    assert {"passed"} <= {record["outcome"] for record in records} <= {"passed", "not run"}


# ------------------------------------------------------------------------------------- the built site


class Built(html.parser.HTMLParser):
    """The code blocks of a page, and the addresses that a browser fetches for it."""

    def __init__(self, text: str):
        super().__init__()
        self.blocks, self.fetched, self.in_block = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "pre":
            self.blocks.append("")
            self.in_block = True
        if tag != "a":
            self.fetched += [attributes[name] for name in ("src", "href", "srcset", "data") if attributes.get(name)]

    def handle_endtag(self, tag):
        self.in_block = self.in_block and tag != "pre"

    def handle_data(self, data):
        if self.in_block:
            self.blocks[-1] += data


def test_every_block_that_a_reader_sees_is_run(site):
    """Also what the Markdown hides from the check above: indented blocks, other fences, macros."""
    shown = {normal(file.read_text()) for file in OUTPUT.glob("*")} | {normal(f"$ {line}") for line in RUN_BY_CI}
    scripts = [path for kind in ("sbatch", "sh", "hostfile") for path in (ROOT / "snippets").glob(f"*.{kind}")]
    shown |= {normal(script.read_text()) for script in scripts}
    for snippet in SNIPPETS:
        text = snippet.read_text()
        shown |= {normal(section) for section in sections(text).values()} | {normal(MARKER.sub("", text))}
    for notebook in site.glob("notebooks/*/*.ipynb"):
        shown |= {normal(block) for block in blocks_of(json.loads(notebook.read_text()))}
    pages = {page: Built(page.read_text()) for page in site.rglob("*.html")}
    typed = [
        (page.name, block) for page, built in pages.items() for block in built.blocks if normal(block) not in shown
    ]
    assert typed == []
    assert sum(len(built.blocks) for built in pages.values()) >= len(SNIPPETS)


def blocks_of(notebook: dict) -> list[str]:
    """The sources and the outputs of an executed notebook, those of ranks without the ranks."""
    blocks = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            blocks.append("".join(cell["source"]))
            for output in cell["outputs"]:
                text = output.get("text") or output.get("data", {}).get("text/plain") or output.get("traceback", [])
                text = ("\n" if "traceback" in output else "").join(text)
                blocks.append(re.sub(r"^\[ranks? [\d, ]+\]\s", "", text))
    return blocks


def normal(block: str) -> str:
    return textwrap.dedent(block).strip()


def test_a_page_asks_no_third_party(site):
    addresses = [address for page in site.rglob("*.html") for address in Built(page.read_text()).fetched]
    styles = [url for sheet in site.rglob("*.css") for url in re.findall(r"url\(([^)]*)\)", sheet.read_text())]
    assert [address for address in addresses + styles if re.match(r"[\"']?(https?:)?//", address)] == []
    assert addresses
    # with a repo_url, the theme's script asks the host for stars
    assert not any('data-md-component="source"' in page.read_text() for page in site.rglob("*.html"))


def test_snippets_can_be_downloaded(site):
    for snippet in SNIPPETS:
        published = (site / snippet.relative_to(ROOT)).read_text()
        assert published == MARKER.sub("", snippet.read_text()).rstrip() + "\n"
