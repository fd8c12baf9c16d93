import re
import textwrap

import torch

from legacy_torch_trainer import __doc__ as usage
from records import ROOT

SCRIPT = ROOT / "snippets" / "legacy_torch_trainer.py"


def test_through_torchrun_it_warns_before_it_fails(torchrun, recorded):
    command = next(line for line in usage.splitlines() if line.startswith("torchrun"))
    run = torchrun(command)
    assert run.returncode != 0
    warnings = re.findall(r"^.*legacy_torch_trainer.py:\d+: (UserWarning: .*)$", run.stderr, re.M)
    assert len(warnings) == 1, "on rank 0 alone"
    assert run.stderr.index("UserWarning: torch") < run.stderr.index("Error: ")
    if torch.__version__[:5] == "2.13.":  # the page's
        warning = warnings[0].replace(torch.__version__, torch.__version__.split("+")[0])
        recorded("legacy-torch-trainer.txt", textwrap.fill(warning, 80) + "\n")


def test_with_the_loss_replaced_it_trains(run_script, tmp_path, counts_as_run):
    code = SCRIPT.read_text().replace(
        "from loss_all_gather import all_gather_loss", "from loss import weighted_all_reduce"
    )
    code = code.replace(" all_gather_loss(", " weighted_all_reduce(")
    assert code.count("weighted_all_reduce") == 2
    script = tmp_path / "trainer.py"
    script.write_text(code)
    run_script(script, world_size=4, timeout=20)
