"""Adds to the build: notebooks/*.ipynb, executed, and their pages as lean and as well linked as those of Markdown.

`execute` runs a notebook where a reader would, in its own folder, and keeps the result in .cache/notebooks/ until its
code, a snippet, or a package changes. mkdocs-jupyter then shows that result, and
`on_page_content` mends what it makes. In a notebook,

    links are relative paths in the repository, `../docs/tutorial/loss.md`, so they work in Jupyter too;
    a cell that draws has the metadata "alt", the text for those who do not see the figure;
    figures use the colours of docs/assets/site.css, light scheme, and follow the scheme on the page;
    a cell tagged `raises-exception` shows a fault, and must raise.
"""

import concurrent.futures
import contextlib
import datetime
import hashlib
import html
import json
import logging
import os
import platform
import posixpath
import re
import subprocess
import sys
import tempfile
import urllib.parse
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

import filelock
import nbclient
import nbformat
import pygments
from bs4 import BeautifulSoup
from IPython.lib.lexers import IPython3Lexer
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from markdown.extensions.toc import nest_toc_tokens, slugify, unique
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File
from mkdocs.structure.toc import get_toc
from pygments.formatters import HtmlFormatter

log = logging.getLogger("mkdocs.hooks.notebooks")
ROOT = Path(__file__).resolve().parents[2]
SNIPPETS = ROOT / "snippets"
CACHE = ROOT / ".cache" / "notebooks"
PACKAGES = ("torch", "ipyparallel", "ipykernel", "ipython", "matplotlib", "nbclient")

# ------------------------------------------------------------------------------------------- execution

PROFILE = """
c = get_config()
c.IPKernelApp.log_level = "ERROR"
c.InlineBackend.figure_formats = {"svg"}
c.InlineBackend.print_figure_kwargs = {"bbox_inches": "tight", "metadata": {"Date": None, "Creator": None}}
"""

# Controller and engines are in sessions of their own, so no signal to the kernel or to the build reaches them. They
# inherit its environment, though. This process waits until the build closes the pipe or ends, in whatever way, and
# then ends each process that has the run's folder in its environment.
REAPER = """
import shutil, sys, time
import psutil
folder = sys.argv[1]
sys.stdin.read()
def is_ours(process):
    try:
        return process.environ().get("NOTEBOOK_RUN") == folder
    except psutil.Error:
        return False
while found := [process for process in psutil.process_iter() if is_ours(process)]:
    for process in found:
        try:
            process.kill()
        except psutil.Error:
            pass
    time.sleep(0.02)
shutil.rmtree(folder, ignore_errors=True)
"""


STOP = "ranks.cluster.stop_cluster_sync()"


def execute(notebook: Path, cache: Path = CACHE, timeout: int = 60) -> Path:
    """The executed notebook, from the cache or from a run in which no cell takes longer than `timeout` seconds.

    One process executes at a time: the others wait, and then find the result in the cache.
    """
    cache.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{cache}.lock"):
        return execute_alone(notebook, cache, timeout)


def execute_alone(notebook: Path, cache: Path, timeout: int) -> Path:
    result, source = cache / notebook.name, nbformat.read(notebook, as_version=4)
    key = cache_key(notebook, source)
    try:
        executed = nbformat.read(result, as_version=4)
        cached = executed.metadata.executed.key == key
    except Exception:  # not there, or not what was written there
        cached = False
    if not cached:
        log.info(f"Executing {relative(notebook)}")
        executed = run(notebook, timeout)
        executed.metadata.executed = {
            "torch": version("torch").split("+")[0],
            "python": platform.python_version(),
            "device": "CPU",
            "date": datetime.date.today().isoformat(),
            "key": key,
        }
    for cell, with_outputs in zip(code_cells(source), code_cells(executed), strict=True):
        cell.outputs, cell.execution_count = with_outputs.outputs, with_outputs.execution_count
    source.metadata = executed.metadata
    text = nbformat.writes(source)
    if not cached or text != result.read_text():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=cache, delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o644)
        os.replace(file.name, result)
    return result


def cache_key(notebook: Path, source) -> str:
    """Changes with all that outputs may depend on: any snippet too. Markdown cells and alt texts are not part of it."""
    code = [[cell.source, cell.metadata.get("tags")] for cell in code_cells(source)]
    files = [Path(__file__), *sorted(notebook.parent.glob("*.mplstyle")), *sorted(SNIPPETS.rglob("*.py"))]
    versions = {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
    parts = [json.dumps([code, versions]).encode(), *(file.read_bytes() for file in files)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def run(notebook: Path, timeout: int) -> nbformat.NotebookNode:
    executed = nbformat.read(notebook, as_version=4)
    with folder_of_run() as folder:
        client = nbclient.NotebookClient(
            executed,
            km=AsyncKernelManager(
                kernel_name="python3",
                kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # this Python, whatever the user has set up
                connection_file=f"{folder}/kernel.json",
            ),
            timeout=timeout,
            shutdown_kernel="immediate",
            resources={"metadata": {"path": str(notebook.parent)}},
        )
        started = []
        client.on_cell_start = lambda cell, cell_index: started.append(cell)
        # In a thread, where nbclient cannot take Ctrl-C for itself and report a dead kernel instead.
        thread = concurrent.futures.ThreadPoolExecutor(1)
        try:
            thread.submit(client.execute, env=environment(folder), cleanup_kc=True).result()
        except (nbclient.exceptions.CellControlSignal, nbclient.exceptions.DeadKernelError) as error:
            raise PluginError(failure(notebook, executed, started[-1], timeout, error)) from error
        finally:
            thread.shutdown(wait=False)
    for number, cell in enumerate(code_cells(executed), 1):
        tidy(cell)
        if "raises-exception" in cell.metadata.get("tags", []) and not failed(cell):
            raise PluginError(f"{where(notebook, number, cell)}: it is tagged raises-exception, and did not raise")
    return executed


@contextlib.contextmanager
def folder_of_run():
    """A folder whose name marks the processes of a run. At the end, whatever it is, they and it are removed."""
    folder = tempfile.mkdtemp(prefix="notebook-")
    reaper = subprocess.Popen([sys.executable, "-c", REAPER, folder], stdin=subprocess.PIPE, start_new_session=True)
    try:
        profile = Path(folder, "ipython", "profile_default")
        profile.mkdir(parents=True)
        (profile / "ipython_kernel_config.py").write_text(PROFILE)
        Path(folder, "matplotlibrc").touch()
        yield folder
    finally:
        reaper.stdin.close()
        reaper.wait()


def environment(folder: str) -> dict[str, str]:
    """Nothing of the user's own settings matters, and nothing is left in the user's folders."""
    folders = {"IPYTHONDIR": "ipython", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data"}
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER_", "MPL", "IPP_"))},
        **{name: f"{folder}/{subfolder}" for name, subfolder in folders.items()},
        "JUPYTER_RUNTIME_DIR": folder,
        "MATPLOTLIBRC": f"{folder}/matplotlibrc",
        "NOTEBOOK_RUN": folder,
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": folder,
    }


def failure(notebook: Path, executed, cell, timeout: int, error: Exception) -> str:
    number = list(code_cells(executed)).index(cell) + 1
    tidy(cell)
    shown = [text_of(output) for output in cell.outputs]
    if isinstance(error, nbclient.exceptions.CellTimeoutError):
        what = f"it took longer than {timeout} s, and was stopped"
    elif isinstance(error, nbclient.exceptions.DeadKernelError):
        what = "the kernel died"
    else:
        what = "it failed"
    return "\n".join([f"{where(notebook, number, cell)}: {what}", *shown])


def where(notebook: Path, number: int, cell) -> str:
    first = " ".join(cell.source.split("\n", 2)[: 2 if cell.source.startswith("%%") else 1])
    return f"{relative(notebook)}, code cell {number} ({first})"


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


def code_cells(notebook):
    return (cell for cell in notebook.cells if cell.cell_type == "code")


def failed(cell) -> bool:
    return any(output.output_type == "error" for output in cell.outputs)


# --------------------------------------------------------------------------------------------- outputs

ANSI = re.compile(r"\x1b\[[0-9;]*m")
PROGRESS = re.compile(r"\r[^\r\n]*\n?|^Starting \d+ engines with .*\n", re.M)
# What ipyparallel writes before the output of an engine.
FROM_ENGINE = re.compile(r"(?:\[(?:stdout|stderr|output):(\d+)\] ?|Out\[(\d+):\d+\]: ?|^\[(\d+):execute\]\n)", re.M)
PLACES = [(str(ROOT) + "/", ""), (str(ROOT).replace(str(Path.home()), "~", 1) + "/", "")]
INSTALLED = re.compile(r"[~/][^\s\"':]*/(?=site-packages/|python3\.\d+/)")


def tidy(cell) -> None:
    """Gives a cell's outputs a form that is the same on each run: by rank, ranks of equal output together."""
    ranks, others = {}, []
    for output in cell.outputs:
        if output.output_type in ("display_data", "execute_result"):
            output.metadata = {}
            if "image/svg+xml" in output.data:
                output.data = {"image/svg+xml": output.data["image/svg+xml"]}
                others.append(output)
                continue
        text = clean(text_of(output))
        # Text, then rank and text in turn.
        first, *parts = FROM_ENGINE.split(text)
        for *rank, part in zip(*[iter(parts)] * 4, strict=True):
            rank = int(next(filter(None, rank)))
            ranks[rank] = ranks.get(rank, "") + part.rstrip("\n") + "\n"
        if output.output_type == "error":
            output.traceback = first.splitlines()
            others.append(output)
        elif first.strip():
            set_text(output, first)
            others.append(output)
    by_text = {}
    for rank, text in sorted(ranks.items()):
        by_text.setdefault(text, []).append(rank)
    cell.outputs = [
        nbformat.v4.new_output(
            "display_data",
            {"text/plain": f"[{label(group)}]{chr(10) if text.count(chr(10)) > 1 else ' '}{text}"},
            metadata={"ranks": label(group)},
        )
        for text, group in by_text.items()
    ] + others
    if cell.source == STOP:  # how much of it the cluster reports depends on the moment
        cell.outputs = [output for output in cell.outputs if output.output_type == "error"]
    if "execution" in cell.metadata:
        del cell.metadata["execution"]  # times


def label(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def text_of(output) -> str:
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return "\n".join(output.traceback)
    return output.data.get("text/plain", "")


def set_text(output, text: str) -> None:
    if output.output_type == "stream":
        output.text = text
    else:
        output.data["text/plain"] = text


def clean(text: str) -> str:
    """Without colours, progress bars, and what only this machine or this run has."""
    text = PROGRESS.sub("", ANSI.sub("", text))
    text = INSTALLED.sub("", text)  # first: an environment may lie within the repository
    for place, name in PLACES:
        text = text.replace(place, name)
    text = re.sub(r"\b0x[0-9a-f]{8,}", "0x…", text)
    text = re.sub(r"Cell In\[\d+\]", "Cell", text)  # pages show no such numbers
    text = re.sub(r"^-{70,}\n", "", text, flags=re.M)
    text = re.sub(r" {2,}(?=Traceback \(most recent)", "  ", text)
    # Of a library's frames in a traceback only the line that was run.
    library = r"(?m)^(File (?:site-packages|python3).*\n)((?:[- ].*\n)+)"
    return re.sub(library, lambda frame: frame[1] + "".join(re.findall(r"^-.*\n", frame[2], re.M)), text)


# ---------------------------------------------------------------------------------------------- pages


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files, config):
    """Adds the executed notebooks."""
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        result = execute(notebook)
        files.append(
            File(f"{result.parent.name}/{result.name}", result.parents[1], config.site_dir, config.use_directory_urls)
        )


def on_pre_page(page, config, files):
    """The source of a notebook is not in docs/."""
    if is_notebook(page) and page.edit_url:
        page.edit_url = page.edit_url.replace("docs/notebooks/", "notebooks/")


def is_notebook(page) -> bool:
    return page.file.src_uri.endswith(".ipynb")


def on_page_content(content, page, config, files):
    """Takes the Markdown cells as mkdocs-jupyter has rendered them; code and outputs as the site shows them."""
    if not is_notebook(page):
        return content
    notebook = nbformat.read(page.file.abs_src_path, as_version=4)
    rendered = iter(BeautifulSoup(content, "html.parser").select(".jp-MarkdownCell .jp-RenderedMarkdown"))
    parts, code = [], {}
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "markdown":
            parts.append(next(rendered).decode_contents())
        else:
            parts.append(f"<!--cell {number}-->")
            try:
                code[parts[-1]] = code_html(cell.source) + outputs_html(cell, f"figure-{number}")
            except ValueError as error:
                raise PluginError(f"notebooks/{page.file.name}.ipynb, cell {number}: {error}") from error
    soup = BeautifulSoup("".join(parts), "html.parser")
    mend_headings(soup, page)
    mend_links(soup, page, files)
    mend_formulas(soup)
    soup.p.insert_after(BeautifulSoup(run_html(notebook.metadata.executed, page), "html.parser"))
    return re.sub(r"<!--cell \d+-->", lambda match: code[match[0]], str(soup))


def run_html(executed, page) -> str:
    python = ".".join(executed.python.split(".")[:2])
    name = posixpath.basename(page.file.src_uri)
    return (
        f'<p class="tested">Executed with torch {executed.torch}, Python {python}, on {executed.device},'
        f' {executed.date}<br><a href="{name}" download="{name}">Download this notebook, with outputs</a></p>'
    )


def code_html(source: str) -> str:
    """As Pygments does elsewhere on the site. Its IPython lexer takes what follows `%%px` for plain text."""
    magic, code = re.fullmatch(r"(%%[^\n]*\n)?(.*)", source, re.S).groups()
    first = f'<span class="cp">{html.escape(magic)}</span>' if magic else ""
    rest = pygments.highlight(code, IPython3Lexer(), HtmlFormatter(nowrap=True))
    return f'<div class="highlight"><pre><code>{first}{rest}</code></pre></div>'


def outputs_html(cell, figure_id: str) -> str:
    figures = [output.data["image/svg+xml"] for output in cell.outputs if "image/svg+xml" in output.get("data", {})]
    if len(figures) > 1:
        raise ValueError(f"{len(figures)} figures: draw one in a cell, so that it has an alt text of its own")
    if figures and not cell.metadata.get("alt", "").strip():
        raise ValueError('a figure without alt text: it stands in the cell\'s metadata, as "alt"')
    of_ranks, others, longest = "", "", 0
    for output in cell.outputs:
        ranks, text = output.get("metadata", {}).get("ranks"), text_of(output)
        if ranks:
            text = text[len(f"[{ranks}] ") :]
        elif "ename" in output and output.ename == "AlreadyDisplayedError":
            continue  # only counts what the ranks have shown
        kinds = set(output.get("data", {})) - {"text/plain", "image/svg+xml"}
        if kinds:
            raise ValueError(f"an output of type {', '.join(kinds)}, which pages do not show: print text or draw SVG")
        if text.strip():
            longest = max(longest, *map(len, text.splitlines()))
            box = f"<pre>{html.escape(text.rstrip(), quote=False)}</pre>"
            if ranks:
                of_ranks += f"<dt>{ranks}</dt><dd>{box}</dd>"
            else:
                others += box
    kind = "output long" if longest > 40 else "output"
    boxes = (f'<dl class="{kind}">{of_ranks}</dl>' if of_ranks else "") + (
        f'<div class="output">{others}</div>' if others else ""
    )
    return boxes + "".join(f"<figure>{inline_svg(svg, cell.metadata.alt, figure_id)}</figure>" for svg in figures)


def site_colours() -> dict[str, str]:
    """#1f66b0 → var(--ube-blue), from the light scheme of site.css, which comes first."""
    css = (ROOT / "docs" / "assets" / "site.css").read_text()
    colours = {}
    for name, colour in re.findall(r"(--ube-[\w-]+): (#[0-9a-f]{6});", css.partition('scheme="slate"')[0]):
        colours.setdefault(colour, f"var({name})")
    return colours


SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"


def inline_svg(svg: str, alt: str, figure_id: str) -> str:
    """matplotlib's SVG as part of a page: in the site's colours and type, its ids its own."""
    colours = site_colours()
    unknown = set(re.findall(r"(?:fill|stroke|color): (#\w+)", svg)) - set(colours)
    if unknown:
        raise ValueError(f"the colours {', '.join(sorted(unknown))} are not in the light scheme of site.css")
    svg = re.sub(r"(fill|stroke|color): (#\w+)", lambda match: f"{match[1]}: {colours[match[2]]}", svg)
    svg = re.sub(r"font: (\S+px) [^;\"]*", r"font-size: \1", svg)

    ElementTree.register_namespace("", SVG[1:-1])
    root = ElementTree.fromstring(svg)
    for parent in list(root.iter()):
        for child in [child for child in parent if child.tag in (f"{SVG}metadata", f"{SVG}style")]:
            parent.remove(child)
    referred = set(re.findall(r"url\(#([^)]+)\)|xlink:href=\"#([^\"]+)\"", svg))
    new_ids = {id: f"{figure_id}-{n}" for n, id in enumerate(sorted("".join(pair) for pair in referred))}
    for element in root.iter():
        id = element.attrib.pop("id", None)
        if id in new_ids:
            element.set("id", new_ids[id])
        if XLINK in element.attrib:
            element.set("href", "#" + new_ids[element.attrib.pop(XLINK)[1:]])
        for name, value in element.attrib.items():
            element.set(name, re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{new_ids[match[1]]})", value))
    width = float(root.get("viewBox").split()[2]) / 20  # rem; on a narrow screen it scrolls, see site.css
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": " ".join(alt.split())}
    root.set("style", f"min-width: {min(width, 24):.1f}rem; max-width: {width:.1f}rem")
    text = ElementTree.tostring(root, encoding="unicode")
    return re.sub(r"\s+", " ", re.sub(r">\s+<", "><", text))


def mend_headings(soup, page) -> None:
    ids, tokens = set(), []
    for heading in soup.find_all(["h1", "h2", "h3", "h4"]):
        for link in heading.select("a.anchor-link"):
            link.decompose()
        name = heading.get_text().strip()
        heading["id"] = unique(slugify(name, "-"), ids)
        tokens.append({"level": int(heading.name[1]), "id": heading["id"], "name": name})
        link = soup.new_tag("a", href=f"#{heading['id']}", title="Link to this section")
        link["class"] = "headerlink"
        link.string = "#"
        heading.append(link)
    page.toc = get_toc(nest_toc_tokens(tokens))
    page.present_anchor_ids = ids


def mend_links(soup, page, files) -> None:
    """From paths in the repository to addresses on the site. MkDocs checks the anchors, of all pages at the end."""
    page.links_to_anchors = {}
    for link in soup.find_all("a", href=True):
        for attribute in ("rel", "target"):
            link.attrs.pop(attribute, None)
        address = urllib.parse.urlsplit(link["href"])
        if address.scheme or "headerlink" in link.get("class", []):
            continue
        target = page.file
        if address.path:
            path = posixpath.normpath(posixpath.join("notebooks", urllib.parse.unquote(address.path)))
            target = files.get_file_from_path(path.removeprefix("docs/"))
            if target is None or not (ROOT / path).is_file():
                log.warning(f"Notebook '{page.file.src_uri}' links to '{link['href']}', which is not on the site")
                continue
            link["href"] = target.url_relative_to(page.file)
        if address.fragment:
            page.links_to_anchors.setdefault(target, {})[address.fragment] = address.geturl()
            link["href"] = (link["href"] if address.path else "").partition("#")[0] + f"#{address.fragment}"


def mend_formulas(soup) -> None:
    """From `$…$` and `$$…$$` to what arithmatex makes of them, which hooks.py turns into MathML."""
    for text in soup.find_all(string=re.compile(r"\$")):
        if text.find_parent(["code", "pre"]):
            continue
        new = html.escape(text, quote=False)
        new = re.sub(r"\$\$(.+?)\$\$", r'<div class="arithmatex">\\[\1\\]</div>', new, flags=re.S)
        new = re.sub(r"\$(.+?)\$", r'<span class="arithmatex">\\(\1\\)</span>', new, flags=re.S)
        text.replace_with(BeautifulSoup(new, "html.parser"))
    for formula in soup.select("p > div.arithmatex:only-child"):
        formula.parent.unwrap()
