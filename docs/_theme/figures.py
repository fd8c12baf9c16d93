"""Adds to the build: figures drawn from docs/_data/, which hooks.py hands to the pages as `{$ figure("name") $}`."""

import html
import io

import matplotlib.style
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from mkdocs.exceptions import PluginError

from notebooks import ROOT, inline_svg

STYLE = ROOT / "notebooks" / "ranks.mplstyle"
INK, INK_SOFT = "#1d2330", "#556070"  # of site.css, as all colours here


def figure(data, name):
    """The figure's HTML. What it draws must be in `data`, or the build fails."""
    try:
        return FIGURES[name](data)
    except KeyError as error:
        raise PluginError(f"figure({name!r}): {error} is missing") from error


def as_html(drawn, figure_id, alt, caption):
    """Drawn by matplotlib, shown in the site's colours; one line, so that Markdown leaves it as it is."""
    svg = io.StringIO()
    drawn.savefig(svg, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    picture = inline_svg(svg.getvalue(), alt, figure_id)
    return f"<figure>{picture}<figcaption>{html.escape(caption)}</figcaption></figure>"


# --------------------------------------------------------------------------------------------- attention

NAMES = {"this_site": "this site", "deepspeed": "DeepSpeed", "yunchang": "yunchang"}
PARTS = {"collectives": "#1f66b0", "copies": "#a85408", "attention": INK_SOFT}
LONGEST = 2  # times the faster peer: where a busy machine's lines end
KERNELS = {"no_attention": "a kernel that takes no time", "sdpa": "SDPA"}


def attention(data):
    """One figure for each device that was measured."""
    measured = [data["attention"], *([data["attention_cuda"]] if "attention_cuda" in data else [])]
    with matplotlib.style.context(STYLE):
        return "\n\n".join(attention_on(run, f"figure-attention-{i}") for i, run in enumerate(measured))


def attention_on(run, figure_id):
    """Bars in parts, for some lengths; 1 is the faster of the other two."""
    lengths = [length for length in run["lengths"] if "sdpa" in length]
    lengths = lengths[:: max(1, len(lengths) // 3)]
    if lengths[-1] is not run["lengths"][-1]:
        lengths.append(run["lengths"][-1])
    drawn = Figure(figsize=(9, 1.05 * len(lengths) + 1))
    panels = drawn.subplots(1, 2, sharey=True, sharex=True)
    for axes, (kernel, what) in zip(panels, KERNELS.items(), strict=True):
        for row, length in enumerate(lengths):
            if kernel in length:
                draw_bars(axes, 4 * row, length, kernel)
            else:
                axes.text(0.05, 4 * row + 1, "not measured", va="center", color=INK_SOFT)
        axes.axvline(1, color=INK, linewidth=1, linestyle=":")
        axes.set(title=f"with {what}", xlabel="time, the faster peer = 1")
    places = [4 * row + bar for row in range(len(lengths)) for bar in range(3)]
    panels[0].set_yticks(places, [*NAMES.values()] * len(lengths))
    panels[0].set(xlim=(0, LONGEST + 0.4), ylim=(4 * len(lengths) - 1.3, -0.7))
    beside = {"ha": "right", "transform": panels[0].get_yaxis_transform()}  # x as a share of the panel's width
    panels[0].text(-0.45, -1, "tokens\na rank", va="bottom", **beside)
    for row, length in enumerate(lengths):
        panels[0].text(-0.45, 4 * row + 1, f"{length['tokens']:,}", va="center", fontweight="bold", **beside)
    keys = [Patch(color=colour, label=part) for part, colour in PARTS.items()]
    drawn.legend(handles=keys, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
    drawn.tight_layout()

    alt = "Bars: time of this site, DeepSpeed and yunchang divided by that of the faster peer."
    for kernel, what in KERNELS.items():
        ratios = [f"{length[kernel]['ratio']:.2f} at {length['tokens']:,}" for length in lengths if kernel in length]
        alt += f" With {what}, this site takes {', '.join(ratios)} tokens a rank."
    rounds = [length[kernel]["rounds"] for length in lengths for kernel in KERNELS if kernel in length]
    caption = (
        f"Forward and backward on {run['ranks']} ranks over {run['backend']}, {run['device']}, {run['dtype']}, torch "
        f"{run['torch']}, DeepSpeed {run['deepspeed']}, yunchang {run['yunchang']}: medians of {min(rounds)} to "
        f"{max(rounds)} rounds in turn, and lines from quartile to quartile, {run['date']}."
    )
    return as_html(drawn, figure_id, alt, caption)


def draw_bars(axes, top, length, kernel):
    times = length[kernel]
    unit = min(times[name]["ms"] for name in NAMES if name != "this_site")
    for place, name in enumerate(NAMES, top):
        left = 0
        for part, ms in parts_of(length, kernel, name).items():
            axes.barh(place, ms / unit, left=left, height=0.86, color=PARTS[part])
            left += ms / unit
        ms, low, high = (times[name][key] for key in ("ms", "low_ms", "high_ms"))
        axes.plot([low / unit, min(high / unit, LONGEST)], [place, place], color=INK, linewidth=1.5)
        end = min(max(left, high / unit), LONGEST)
        axes.text(end + 0.04, place, f"{ms:.0f} ms" if ms >= 20 else f"{ms:.1f} ms", va="center", fontsize=11)


def parts_of(length, kernel, name):
    """Milliseconds. Copies are what remains without attention; attention is what SDPA adds to that."""
    without = length["no_attention"][name]
    copies = without["ms"] - without["collective_ms"]
    parts = {"collectives": without["collective_ms"], "copies": copies}
    if kernel == "sdpa":
        parts["attention"] = max(0, length["sdpa"][name]["ms"] - without["ms"])
    return parts


# --------------------------------------------------------------------------------------------- train

RIGHT, WRONG = "#1f66b0", "#b3261e"


def train(data):
    """Loss by step, and below it how far each run is from the one on a single process."""
    run = data["train"]
    one, *others = run["runs"]
    steps = range(1, run["steps"] + 1)
    with matplotlib.style.context(STYLE):
        drawn = Figure(figsize=(9, 7))
        curves, distances = drawn.subplots(2, 1, sharex=True, height_ratios=[3, 4])
        for each in run["faults"]:
            curves.plot(steps, each["loss"], color=WRONG, linewidth=1.2)
        curves.plot(steps, one["loss"], color=INK, linewidth=5, alpha=0.35)
        for each in others:
            curves.plot(steps, each["loss"], color=RIGHT, linewidth=1.2)
        curves.set(ylabel="loss")
        for each, colour in [(each, RIGHT) for each in others] + [(each, WRONG) for each in run["faults"]]:
            distances.plot(steps, distance(each, one), color=colour, linewidth=1.2)
        distances.axhline(1e-4, color=INK_SOFT, linewidth=1, linestyle=":")
        distances.set(yscale="log", ylabel="relative difference\nfrom one process", xlabel="step")
        keys = [
            Line2D([], [], color=INK, linewidth=5, alpha=0.35, label="one process"),
            Line2D([], [], color=RIGHT, label=f"{len(others)} runs on 2 and 4 ranks"),
            Line2D([], [], color=WRONG, label=f"{len(run['faults'])} runs with a fault"),
        ]
        drawn.legend(handles=keys, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
        drawn.tight_layout()
        worst = max(each["loss_off"] for each in others)
        least = min(each["loss_off"] for each in run["faults"])
        alt = (
            f"Above, the loss falls from {one['loss'][0]:.2f} to {one['loss'][-1]:.2f} in all runs, those with a fault "
            f"among them. Below, the difference from one process: at most {worst:.0e} for runs without a fault, and "
            f"up to {least:.0e} and more for those with one."
        )
        caption = (
            f"The same {run['steps']} steps of {run['samples']} samples, fp32, {run['device']}, torch {run['torch']}, "
            f"{run['date']}. Dotted: the 1e-4 that the tests allow."
        )
        return as_html(drawn, "figure-train", alt, caption)


def distance(run, one):
    """Relative, step by step; what is equal is drawn at the resolution of fp32."""
    return [max(abs(x / y - 1), 2**-24) for x, y in zip(run["loss"], one["loss"], strict=True)]


# ------------------------------------------------------------------------------------ constant_factor

FACTORS = [INK, "#1f66b0", "#a85408"]  # no factor, then those that were run


def constant_factor(data):
    """Loss by step with the gradient times each factor, a panel for each optimizer."""
    measured = data["constant_factor"]
    with matplotlib.style.context(STYLE):
        drawn = Figure(figsize=(9, 6))
        panels = drawn.subplots(2, 2, sharex=True, sharey=True).flat
        for axes, run in zip(panels, measured["runs"], strict=True):
            factors = [{"factor": 1, "loss": run["loss"]}, *run["factors"]]
            for each, colour, width in zip(factors, FACTORS, (5, 2.2, 1.2), strict=True):
                steps = range(1, measured["steps"] + 1)
                axes.plot(steps, each["loss"], color=colour, linewidth=width, alpha=0.35 if width == 5 else 1)
            axes.set(title=run["optimizer"])
        for axes in drawn.axes[::2]:
            axes.set(ylabel="loss")
        for axes in drawn.axes[2:]:
            axes.set(xlabel="step")
        keys = [
            Line2D([], [], color=colour, linewidth=2, label=f"gradient × {each['factor']}")
            for each, colour in zip(factors, FACTORS, strict=True)
        ]
        drawn.legend(handles=keys, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))
        drawn.tight_layout()
        alt = f"Loss over {measured['steps']} steps; how far the last parameters are from those without a factor: " + (
            "; ".join(
                f"{run['optimizer']}, "
                + " and ".join(f"{each['parameters_apart']:.1e} at {each['factor']} times" for each in run["factors"])
                for run in measured["runs"]
            )
        )
        caption = (
            f"The same {measured['steps']} steps of {measured['batch']} samples, one process, fp32, "
            f"{measured['device']}, torch {measured['torch']}, {measured['date']}."
        )
        return as_html(drawn, "figure-constant-factor", alt + ".", caption)


FIGURES = {"attention": attention, "train": train, "constant_factor": constant_factor}
