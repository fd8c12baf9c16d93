"""What docs/_theme/figures.py draws from measured data."""

import re

import pytest

for package in ("mkdocs", "matplotlib", "nbclient"):
    pytest.importorskip(package, reason=f"the site's figures were not tested: {package} is not installed")

import figures

TIMES = {"low_ms": 9.0, "high_ms": 70.0}
ATTENTION = {
    "device": "CPU, 2 cores",
    "torch": "2.13.0",
    "date": "2026-12-01",
    "backend": "gloo",
    "ranks": 4,
    "dtype": "float32",
    "deepspeed": "0.19.8",
    "yunchang": "0.6.4",
    "lengths": [
        {
            "tokens": tokens,
            "no_attention": {
                "rounds": 60,
                "ratio": 0.51,
                "this_site": {"ms": 10.2, "collective_ms": 8.0, **TIMES},
                "deepspeed": {"ms": 25.0, "collective_ms": 21.0, **TIMES},
                "yunchang": {"ms": 20.0, "collective_ms": 15.0, **TIMES},
            },
        }
        for tokens in (128, 16384)
    ],
}
ATTENTION["lengths"][0]["sdpa"] = {
    "rounds": 7,
    "ratio": 0.67,
    "this_site": {"ms": 40.0, **TIMES},
    "deepspeed": {"ms": 60.0, **TIMES},
    "yunchang": {"ms": 61.0, **TIMES},
}


def test_attention_says_what_was_measured():
    shown = figures.figure({"attention": ATTENTION}, "attention")
    assert shown.count("<figure>") == 1
    assert "\n" not in shown
    label = re.search('role="img" aria-label="([^"]+)"', shown)[1]
    assert "With a kernel that takes no time, this site takes 0.51 at 128, 0.51 at 16,384 tokens a rank." in label
    assert "With SDPA, this site takes 0.67 at 128 tokens a rank." in label
    caption = re.search("<figcaption>(.+)</figcaption>", shown)[1]
    for words in ("CPU, 2 cores", "torch 2.13.0", "DeepSpeed 0.19.8", "yunchang 0.6.4", "7 to 60 rounds", "2026-12-01"):
        assert words in caption
    assert [shown.count(f">{text}<") for text in ("10.2 ms", "61 ms", "not measured")] == [2, 1, 1]


def test_a_second_device_has_a_figure_of_its_own():
    gpu = ATTENTION | {"device": "NVIDIA H200"}
    first, second = figures.figure({"attention": ATTENTION, "attention_cuda": gpu}, "attention").split("\n\n")
    assert "CPU, 2 cores" in first
    assert "NVIDIA H200" in second
    assert not set(re.findall(r' id="([^"]+)"', first)) & set(re.findall(r' id="([^"]+)"', second))


def test_the_parts_of_a_bar_add_up():
    length = ATTENTION["lengths"][0]
    assert figures.parts_of(length, "no_attention", "yunchang") == {"collectives": 15.0, "copies": 5.0}
    assert figures.parts_of(length, "sdpa", "yunchang") == {"collectives": 15.0, "copies": 5.0, "attention": 41.0}


TRAIN = {
    "device": "CPU, 2 cores",
    "torch": "2.13.0",
    "date": "2026-12-01",
    "steps": 3,
    "samples": 8,
    "runs": [
        {"loss": [5.5, 4.0, 3.0], "loss_off": 0.0},
        {"loss": [5.5, 4.0, 3.000003], "loss_off": 1e-6},
    ],
    "faults": [{"loss": [5.5, 4.04, 3.0], "loss_off": 0.01}],
}


def test_train_says_how_far_runs_are_apart():
    shown = figures.figure({"train": TRAIN}, "train")
    label = re.search('role="img" aria-label="([^"]+)"', shown)[1]
    assert "from 5.50 to 3.00" in label
    assert "at most 1e-06 for runs without a fault" in label
    assert "1e-02 and more for those with one" in label
    caption = re.search("<figcaption>(.+)</figcaption>", shown)[1]
    for words in ("The same 3 steps of 8 samples", "CPU, 2 cores", "torch 2.13.0", "2026-12-01"):
        assert words in caption
    assert figures.distance(TRAIN["faults"][0], TRAIN["runs"][0]) == pytest.approx([2**-24, 0.01, 2**-24])


def test_constant_factor_says_how_far_parameters_are_apart():
    factors = [{"factor": factor, "loss": [5.5, 4.1], "parameters_apart": 0.01 * factor} for factor in (2, 8)]
    runs = [{"optimizer": name, "loss": [5.5, 4.0], "factors": factors} for name in ("AdamW", "SGD", "Adam", "clipped")]
    measured = {"device": "CPU", "torch": "2.13.0", "date": "2026-12-01", "steps": 2, "batch": 8, "runs": runs}
    shown = figures.figure({"constant_factor": measured}, "constant_factor")
    label = re.search('role="img" aria-label="([^"]+)"', shown)[1]
    assert "AdamW, 2.0e-02 at 2 times and 8.0e-02 at 8 times; SGD, 2.0e-02" in label
    assert "The same 2 steps of 8 samples" in re.search("<figcaption>(.+)</figcaption>", shown)[1]


@pytest.mark.parametrize("missing", ["attention", "date", "this_site", "collective_ms"])
def test_what_is_missing_fails_the_build(missing):
    def without(tree):
        if isinstance(tree, list):
            return [without(branch) for branch in tree]
        if isinstance(tree, dict):
            return {key: without(branch) for key, branch in tree.items() if key != missing}
        return tree

    with pytest.raises(figures.PluginError, match=f"'attention'.*: '{missing}' is missing"):
        figures.figure(without({"attention": ATTENTION}), "attention")


def test_an_unknown_figure_fails_the_build():
    with pytest.raises(figures.PluginError, match="'attentoin' is missing"):
        figures.figure({}, "attentoin")
