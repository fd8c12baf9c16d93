import statistics
import subprocess

import pytest
import torch

from first_run import MEAN_LOSS, NUM_LABELS
from records import ROOT

COMMAND = "torchrun --nproc-per-node 4 snippets/first_run.py"
# sample 0: (1·7 + 2·1) / 8, sample 1: (3·30 + 4·2) / 32, the step: (9 + 98) / 40
EXPECTED = {"sample": [9 / 8, 9 / 8, 98 / 32, 98 / 32], "step": [107 / 40] * 4}


def number_after(word, line):
    return float(line.rpartition(f"{word} ")[2].partition(",")[0])


def test_the_ranks_agree(run_script, counts_as_run):
    outputs = run_script(ROOT / "snippets" / "first_run.py", world_size=4)
    for rank, output in enumerate(outputs):
        for word, numbers in EXPECTED.items():
            assert number_after(word, output) == pytest.approx(numbers[rank], abs=5e-5)


def test_through_torchrun_as_the_page_shows_it(torchrun, recorded):
    try:
        run = torchrun(COMMAND, timeout=100)
    except subprocess.TimeoutExpired:
        if torch.__version__ >= (2, 4):
            raise
        # once in a hundred runs a rank hangs in destroy_process_group there: see the page on legacy torch
        run = torchrun(COMMAND, timeout=100)
    assert run.returncode == 0, run.stderr
    recorded("first-run.txt", f"$ {COMMAND}\n{run.stdout}")


def test_three_means_of_the_same_labels(recorded):
    tokens = [[loss] * labels for loss, labels in zip(MEAN_LOSS, NUM_LABELS, strict=True)]
    samples = [tokens[0] + tokens[1], tokens[2] + tokens[3]]
    means = {
        "of the ranks' means": statistics.mean(MEAN_LOSS),
        "of the samples' token means": statistics.mean(statistics.mean(sample) for sample in samples),
        "of all tokens in the step": statistics.mean(samples[0] + samples[1]),
    }
    recorded("loss-three-means.txt", "".join(f"{name:28} {mean:.4f}\n" for name, mean in means.items()))
