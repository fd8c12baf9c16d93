"""The notebooks, how the build executes them, and what becomes of their pages. No process may outlive a run."""

import gzip
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import pytest

from records import ROOT
from test_pages import problems_of

for package in ("mkdocs_jupyter", "nbclient", "ipykernel", "ipyparallel", "matplotlib", "material"):
    pytest.importorskip(package, reason=f"the notebooks were not run: {package} is not installed")

import bs4
import nbformat
import psutil
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import notebooks

PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)


@pytest.fixture
def written(tmp_path):
    """Writes a notebook of the given code cells, and returns its path."""

    def write(*sources, **metadata):
        cells = [nbformat.v4.new_code_cell(source, metadata=metadata) for source in sources]
        path = tmp_path / "small.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        return path

    return write


@pytest.fixture
def nothing_left(tmp_path, monkeypatch):
    """Fails where a process of the run, or its folder, is still there after the test."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("NOTEBOOK_TEST", str(tmp_path))
    yield
    assert processes_with(NOTEBOOK_TEST=str(tmp_path)) == []
    assert list(folder.iterdir()) == []


def processes_with(**variable):
    ((name, value),) = variable.items()
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(name) == value and process.pid != os.getpid():
                found.append(process.cmdline())
        except psutil.Error:
            pass
    return found


# ---------------------------------------------------------------------------------------- as committed


@every_notebook
def test_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook.metadata == {"kernelspec": kernel}
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"alt", "tags"}
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


@every_notebook
def test_words_hold_to_the_contract_of_pages(path):
    notebook = nbformat.read(path, as_version=4)
    assert {cell.cell_type for cell in notebook.cells} == {"code", "markdown"}
    words = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    assert words[0].startswith("# ")
    assert [problem for text in words for problem in problems_of(text)] == []
    assert not any("```" in text for text in words), "code stands in cells"


@every_notebook
def test_it_is_in_the_navigation_and_its_tutorial_links_to_it(path):
    assert f"- notebooks/{path.name}\n" in (ROOT / "mkdocs.yml").read_text()
    tutorial = ROOT / "docs" / "tutorial" / f"{path.stem}.md"
    assert f"](../notebooks/{path.name})" in tutorial.read_text()
    assert f"](../docs/tutorial/{tutorial.name}" in path.read_text()


@every_notebook
def test_it_runs(path):
    cells = list(notebooks.code_cells(nbformat.read(notebooks.execute(path), as_version=4)))
    assert any(cell.source.startswith("%%px") for cell in cells)
    assert any("image/svg+xml" in output.get("data", {}) for cell in cells for output in cell.outputs)
    assert cells[-1].source == notebooks.STOP, "a reader has nobody else to end the engines"


# ------------------------------------------------------------------------------------------- execution


def test_the_second_time_comes_from_the_cache_until_something_changes(written, tmp_path, monkeypatch):
    snippets = tmp_path / "snippets"
    snippets.mkdir()
    (snippets / "one.py").write_text("")
    runs = []
    monkeypatch.setattr(notebooks, "SNIPPETS", snippets)
    monkeypatch.setattr(notebooks, "run", lambda path, timeout: runs.append(path) or nbformat.read(path, as_version=4))

    def executes(path):
        before = len(runs)
        notebooks.execute(path, cache=tmp_path / "cache")
        return len(runs) > before

    path = written("%cd -q .", "%%px\nfrom one import x")
    assert executes(path)
    assert not executes(path)
    prose = nbformat.read(path, as_version=4)
    prose.cells.append(nbformat.v4.new_markdown_cell("New words."))
    nbformat.write(prose, path)
    assert not executes(path)
    assert "New words." in (tmp_path / "cache" / path.name).read_text()
    for broken in ("", "[]", "null", "{}", '{"metadata": {"executed": null}}'):
        (tmp_path / "cache" / path.name).write_text(broken)
        assert executes(path)
    (snippets / "one.py").write_text("changed = 1\n")
    assert executes(path)
    (tmp_path / "new.mplstyle").write_text("")
    assert executes(path)
    assert executes(written("%%px\nfrom one import y"))
    assert executes(written("%%px\nfrom one import y", tags=["raises-exception"]))
    monkeypatch.setattr(notebooks, "version", lambda package: "0")
    assert executes(path)
    (tmp_path / "cache" / "small.ipynb").write_text("{")  # cut off
    assert executes(path)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["small.ipynb"]


def test_two_builds_at_once_execute_it_once(written, tmp_path, nothing_left):
    path = written(f"with open({str(tmp_path / 'runs')!r}, 'a') as runs:\n    print('run', file=runs)")
    code = (
        f"import notebooks, pathlib\nnotebooks.execute(pathlib.Path({str(path)!r}), pathlib.Path('{tmp_path}/cache'))"
    )
    builds = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "docs" / "_theme") for _ in range(2)]
    assert [build.wait(timeout=40) for build in builds] == [0, 0]
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_failing_cell_on_the_ranks(written, tmp_path, nothing_left):
    path = written(
        "import ipyparallel as ipp\n"
        "ranks = ipp.Cluster(n=2).start_and_connect_sync(activate=True)\n"
        "ranks[:].scatter('rank', range(2), flatten=True)",
        "%%px\nprint('before', rank)\nif rank == 1:\n    import time\n    time.sleep(1)\n    raise KeyError('lost')",
        "print('not reached')",
    )
    with pytest.raises(PluginError) as failure:
        notebooks.execute(path, cache=tmp_path / "cache")
    message = str(failure.value)
    assert message.startswith(f"{path}, code cell 2 (%%px print('before', rank)): it failed\n")
    assert "[rank 0] before 0\n" in message
    assert re.search(r"\[rank 1\]\nbefore 1\nKeyError .*Traceback(.|\n)*raise KeyError\('lost'\)(.|\n)*'lost'", message)
    assert "\x1b" not in message
    assert not (tmp_path / "cache").exists()


DETACHED = "import subprocess\nsubprocess.Popen(['sleep', '600'], start_new_session=True)"


def test_a_cell_that_hangs(written, tmp_path, nothing_left):
    path = written(DETACHED, "import time\nprint('so far')\ntime.sleep(600)")
    with pytest.raises(PluginError, match=r"code cell 2 \(import time\): it took longer than 2 s") as failure:
        notebooks.execute(path, cache=tmp_path / "cache", timeout=2)
    assert "so far" in str(failure.value)


def test_a_kernel_that_dies(written, tmp_path, nothing_left):
    path = written(DETACHED, "import os\nos.kill(os.getpid(), 9)")
    with pytest.raises(PluginError, match=r"code cell 2 \(import os\): the kernel died"):
        notebooks.execute(path, cache=tmp_path / "cache")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_build_that_is_stopped(name, written, tmp_path, nothing_left):
    reached = tmp_path / "reached"
    path = written(DETACHED + f"\nopen({str(reached)!r}, 'w').close()\nimport time\ntime.sleep(600)")
    code = "import notebooks, pathlib, signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += f"notebooks.execute(pathlib.Path({str(path)!r}), pathlib.Path('{tmp_path}/cache'))"
    build = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT / "docs" / "_theme", stderr=subprocess.PIPE)
    wait_until(reached.exists)
    build.send_signal(getattr(signal, name))
    _, errors = build.communicate(timeout=20)
    assert build.returncode != 0
    if name == "SIGINT":
        assert errors.rstrip().endswith(b"KeyboardInterrupt")
    wait_until(lambda: not processes_with(NOTEBOOK_TEST=str(tmp_path)))


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_cell_that_may_raise_must_raise(written, tmp_path):
    path = written("1 / 0", tags=["raises-exception"])
    executed = nbformat.read(notebooks.execute(path, cache=tmp_path / "cache"), as_version=4)
    assert executed.cells[0].outputs[0].ename == "ZeroDivisionError"
    with pytest.raises(PluginError, match=r"code cell 1 \(1 / 1\): it is tagged raises-exception, and did not raise"):
        notebooks.execute(written("1 / 1", tags=["raises-exception"]), cache=tmp_path / "cache")


def test_the_users_own_settings_do_not_matter(written, tmp_path, monkeypatch):
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "mine.py").write_text("print('mine')")
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    (kernel / "kernel.json").write_text('{"argv": ["false"], "display_name": "mine", "language": "python"}')
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    executed = notebooks.execute(written("print('ours')"), cache=tmp_path / "cache")
    assert [output.text for output in nbformat.read(executed, as_version=4).cells[0].outputs] == ["ours\n"]
    assert [path.name for path in (tmp_path / "ipython" / "profile_default").iterdir()] == ["startup"]


def test_outputs_of_ranks_are_sorted_and_equal_ones_stand_once():
    def shows(text):
        return nbformat.v4.new_output("display_data", {"text/plain": text}, metadata={"started": "now"})

    cell = nbformat.v4.new_code_cell(
        "%%px",
        outputs=[
            nbformat.v4.new_output(
                "stream", text="Starting 4 engines with <class 'X'>\n\r  0%|  | 0/4\r100%|  | 4/4\n"
            ),
            shows("[stdout:3] odd\n"),
            shows("[stdout:1] odd\n"),
            shows("\x1b[0;31mOut[2:7]: \x1b[0m5"),
            shows("[stdout:0] first\n"),
            shows(f"[stderr:0] {ROOT}/snippets/loss.py at 0x7f81b7864730\n"),
            shows(f"[stderr:0] {ROOT}/.nox/serve/lib/python3.11/site-packages/torch/graph.py:9\n"),
            nbformat.v4.new_output("stream", name="stderr", text="[2:execute]\nCell In[3], line 1\n"),
        ],
    )
    notebooks.tidy(cell)
    assert [(output.metadata.ranks, output.data["text/plain"]) for output in cell.outputs] == [
        ("rank 0", "[rank 0]\nfirst\nsnippets/loss.py at 0x…\nsite-packages/torch/graph.py:9\n"),
        ("ranks 1, 3", "[ranks 1, 3] odd\n"),
        ("rank 2", "[rank 2]\n5\nCell, line 1\n"),
    ]


def test_of_the_cell_that_stops_the_cluster_only_an_error_is_kept():
    log = nbformat.v4.new_output("stream", text="engine set stopped 1: {'exit_code': 1}\n")
    error = nbformat.v4.new_output("error", ename="NameError", evalue="ranks", traceback=["NameError: ranks"])
    cell = nbformat.v4.new_code_cell(notebooks.STOP, outputs=[log, error])
    notebooks.tidy(cell)
    assert [output.output_type for output in cell.outputs] == ["error"]


# ------------------------------------------------------------------------------------------ their pages


@pytest.fixture
def article(path, site):
    page = (site / "notebooks" / path.stem / "index.html").read_text()
    return bs4.BeautifulSoup(page, "html.parser").article


@every_notebook
def test_a_page_weighs_15_kb_at_most_beyond_its_figures(path, site):
    page = (site / "notebooks" / path.stem / "index.html").read_text()
    without, figures = re.subn(r"(?s)<figure>.*?</figure>", "", page)
    assert figures
    assert len(gzip.compress(without.encode())) <= 15 * 1024


@every_notebook
def test_a_page_has_nothing_of_jupyters(path, article):
    assert article.select("style, script, [class^='jp-'], [class*=' jp-'], clipboard-copy, .anchor-link") == []
    assert not article.find_all(string=re.compile(r"In\s*\[|Out\[|\x1b|%\||Starting \d+ engines"))
    assert article.select("math")
    assert all(text.find_parent(["pre", "code"]) for text in article.find_all(string=re.compile(r"\$|\\\(")))


@every_notebook
def test_a_page_names_its_figures_and_its_sections(path, article, site):
    for figure in article.select("figure svg"):
        assert figure["role"] == "img"
        assert len(figure["aria-label"]) > 40
    assert len({element["id"] for element in article.select("[id]")}) == len(article.select("[id]"))
    page = bs4.BeautifulSoup((site / "notebooks" / path.stem / "index.html").read_text(), "html.parser")
    contents = [link["href"] for link in page.select(".md-sidebar--secondary .md-nav__link[href]")]
    assert contents == [f"#{heading['id']}" for heading in article.select("h2")]
    assert contents
    assert all(heading.select_one("a.headerlink") for heading in article.select("h1, h2"))
    assert page.title.string.startswith(next(article.h1.strings))


@every_notebook
def test_links_lead_to_pages(path, article, site):
    page = site / "notebooks" / path.stem
    links = [link["href"].partition("#")[0] for link in article.select("a[href]")]
    assert f"../../tutorial/{path.stem}/" in links
    assert [link for link in links if link and not (page / link).exists()] == []


@every_notebook
def test_the_download_has_outputs_and_no_path_of_this_machine(path, site):
    page = site / "notebooks" / path.stem
    download = page / path.name
    assert download.read_text() == notebooks.execute(path).read_text()
    for file in (download, page / "index.html"):
        text = file.read_text()
        places = (f"{ROOT}/", f"{Path.home()}/", f"{sys.prefix}/lib", "/notebook-")
        assert [place for place in places if place in text] == []


@pytest.mark.parametrize(
    ("link", "becomes", "warning"),
    [
        ("../docs/tutorial/loss.md", "../../tutorial/loss/", None),
        ("../docs/tutorial/loss.md#proof", "../../tutorial/loss/#proof", None),
        ("../snippets/loss.py", "../../snippets/loss.py", None),
        ("#here", "#here", None),
        ("https://pytorch.org/", "https://pytorch.org/", None),
        ("../docs/tutorial/lost.md", "../docs/tutorial/lost.md", "not on the site"),
        ("../tutorial/loss.md", "../tutorial/loss.md", "not on the site"),
        ("/docs/tutorial/loss.md", "/docs/tutorial/loss.md", "not on the site"),
        ("../tests/test_loss.py", "../tests/test_loss.py", "not on the site"),
    ],
)
def test_links_are_paths_in_the_repository(link, becomes, warning, caplog):
    page_file, *others = (
        File(uri, src_dir=None, dest_dir="", use_directory_urls=True, dest_uri=dest)
        for uri, dest in [
            ("notebooks/small.ipynb", "notebooks/small/index.html"),
            ("tutorial/loss.md", "tutorial/loss/index.html"),
            ("snippets/loss.py", "snippets/loss.py"),
        ]
    )
    page = types.SimpleNamespace(file=page_file)
    soup = bs4.BeautifulSoup(f'<a href="{link}">x</a>', "html.parser")
    with caplog.at_level(logging.WARNING, "mkdocs.hooks.notebooks"):
        notebooks.mend_links(soup, page, Files([page_file, *others]))
    assert soup.a["href"] == becomes
    assert [warning in record.getMessage() for record in caplog.records] == [True] * bool(warning)
    anchors = {file.src_uri: list(anchors) for file, anchors in page.links_to_anchors.items()}
    assert anchors == {
        "#here": {"notebooks/small.ipynb": ["here"]},
        "../docs/tutorial/loss.md#proof": {"tutorial/loss.md": ["proof"]},
    }.get(link, {})


SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 200 100"><path id="a" style="fill: {}"/></svg>'


@pytest.mark.parametrize(
    ("figures", "metadata", "problem"),
    [
        ([SVG.format("#1f66b0")], {}, "without alt text"),
        ([SVG.format("#1f66b0")], {"alt": " "}, "without alt text"),
        ([SVG.format("#1f66b0")] * 2, {"alt": "x"}, "2 figures"),
        ([SVG.format("#123456")], {"alt": "x"}, "#123456"),
    ],
)
def test_figures_that_a_page_refuses(figures, metadata, problem):
    outputs = [nbformat.v4.new_output("display_data", {"image/svg+xml": figure}) for figure in figures]
    cell = nbformat.v4.new_code_cell("draw()", outputs=outputs, metadata=metadata)
    with pytest.raises(ValueError, match=problem):
        notebooks.outputs_html(cell, "figure-1")


def test_other_outputs_that_a_page_refuses():
    cell = nbformat.v4.new_code_cell("x", outputs=[nbformat.v4.new_output("display_data", {"text/html": "<b>x</b>"})])
    with pytest.raises(ValueError, match="text/html"):
        notebooks.outputs_html(cell, "figure-1")


def test_a_figure_follows_the_scheme():
    svg = notebooks.inline_svg(SVG.format("#1f66b0; stroke: #ffffff"), 'two "bars"', "figure-1")
    assert 'style="fill: var(--ube-blue); stroke: var(--ube-paper)"' in svg
    assert 'role="img" aria-label="two &quot;bars&quot;"' in svg
    assert " id=" not in svg


def test_formulas():
    soup = bs4.BeautifulSoup("<p>$a &lt; b$ <code>$x$</code></p><p>$$\nc\n$$</p>", "html.parser")
    notebooks.mend_formulas(soup)
    assert str(soup) == (
        '<p><span class="arithmatex">\\(a &lt; b\\)</span> <code>$x$</code></p>'
        '<div class="arithmatex">\\[\nc\n\\]</div>'
    )
