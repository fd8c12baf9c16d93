import re
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

from legacy_torch_trainer import __doc__ as usage
from records import ROOT

SCRIPT = ROOT / "snippets" / "legacy_torch_trainer.py"


def test_through_torchrun_it_warns_before_it_fails(recorded):
    command = next(line for line in usage.splitlines() if line.startswith("torchrun"))
    torchrun = Path(sys.executable).with_name("torchrun")
    run = subprocess.run([torchrun, *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode != 0
    warnings = re.findall(r"^.*legacy_torch_trainer.py:\d+: (UserWarning: .*)$", run.stderr, re.M)
    assert len(warnings) == 1, "on rank 0 alone"
    assert run.stderr.index("UserWarning: torch") < run.stderr.index("Error: ")
    if torch.__version__[:5] == "2.13.":  # the page's
        warning = warnings[0].replace(torch.__version__, torch.__version__.split("+")[0])
        recorded("legacy-torch-trainer.txt", textwrap.fill(warning, 80) + "\n")


def test_with_the_loss_replaced_it_trains(run_script, tmp_path, record_property):
    record_property("backend", "gloo")
    record_property("world_size", 4)
    record_property("device", "CPU")
    code = SCRIPT.read_text().replace(
        "from loss_all_gather import all_gather_loss", "from loss import weighted_all_reduce"
    )
    code = code.replace(" all_gather_loss(", " weighted_all_reduce(")
    assert code.count("weighted_all_reduce") == 2
    script = tmp_path / "trainer.py"
    script.write_text(code)
    run_script(script, world_size=4, timeout=20)
