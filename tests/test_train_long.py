"""The whole program, longer than docs-test may take: 50 steps on each grid, resumed, killed, stopped, on two nodes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from records import ROOT
from test_train import ENGINES, SCRIPT, SMALL, assert_same_curve

GRIDS = [(1, 2), (1, 4), (2, 2), (4, 1)]  # dp, sp


@pytest.fixture
def trains(run_script, tmp_path, request):
    """`trains(dp, sp, *options)`: the lines of metrics, and what rank 0 prints."""
    numbers = iter(range(100))

    def run(dp, sp, *options):
        metrics = tmp_path / f"{next(numbers)}.jsonl"
        options = (*options, "--device", request.config.option.device, "--metrics", str(metrics))
        outputs = run_script(SCRIPT, "--sequence-parallel-size", str(sp), *options, world_size=dp * sp, timeout=200)
        return [json.loads(line) for line in metrics.read_text().splitlines()], outputs[0]

    return run


def test_through_torchrun_as_the_page_shows_it(torchrun, recorded, counts_as_run):
    command = next(line for line in train.__doc__.splitlines() if line.startswith("torchrun"))
    run = torchrun(command)
    assert run.returncode == 0, run.stderr
    with_sp, without = held_out_losses(run.stdout)
    assert with_sp == pytest.approx(without, abs=1e-4)
    assert with_sp < 4 < 5 < float(re.search(r"step 1/50  loss ([\d.]+)", run.stderr)[1])
    recorded("train.txt", f"$ {command}\n")


def test_the_same_curve_for_50_steps(trains):
    expected, output = trains(1, 1, "--tokens", "128")
    assert len(expected) == 50
    assert len({line["tokens"] for line in expected}) > 10
    assert expected[-1]["loss"] < 0.7 * expected[0]["loss"]
    held_out = held_out_losses(output)
    assert held_out[0] == pytest.approx(held_out[1], abs=1e-4)
    for dp, sp in GRIDS:
        curve, output = trains(dp, sp, "--tokens", "128")
        assert_same_curve(curve, expected)
        assert held_out_losses(output) == pytest.approx(held_out, rel=1e-3)
        assert output.splitlines()[1:] != []


def held_out_losses(output):
    return [float(x) for x in re.search(r"held out: ([\d.]+) with SP, ([\d.]+) without", output).groups()]


def test_micro_batches_do_not_matter(trains):
    curves = [trains(2, 1, *SMALL, "--steps", "6", "--micro-batch", size)[0] for size in ("4", "2", "1")]
    for curve in curves[1:]:
        assert_same_curve(curve, curves[0])


@pytest.mark.needs_torch("2.6")
@pytest.mark.parametrize(("dp", "sp"), [(1, 2), (2, 2)])
def test_fsdp2_has_the_same_curve(dp, sp, trains):
    options = (*SMALL, "--steps", "8")
    curve, output = trains(dp, sp, *options, "--engine", "fsdp2")
    expected, expected_output = trains(1, 1, *options)
    assert_same_curve(curve, expected)
    assert held_out_losses(output) == pytest.approx(held_out_losses(expected_output), rel=1e-3)


@pytest.mark.needs_torch("2.6")
def test_compiled_layers_have_the_same_curve(trains):
    """The batches of three steps have three lengths; each layer is compiled once."""
    expected, _ = trains(1, 1, *SMALL, "--steps", "3")
    curve, _ = trains(1, 2, *SMALL, "--steps", "3", "--compile")
    assert_same_curve(curve, expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_resumed_on_other_numbers_of_ranks(engine, trains, tmp_path):
    expected, _ = trains(1, 1, *SMALL, "--steps", "8")
    saved = ("--checkpoint-dir", str(tmp_path / "saved"))
    first, _ = trains(2, 2, *SMALL, *saved, "--steps", "4", "--save-every", "4")
    assert_same_curve(first, expected[:4])
    for dp, sp in {"ddp": [(1, 1), (1, 4), (4, 1)], "fsdp2": [(1, 2)]}[engine]:
        rest, _ = trains(dp, sp, *SMALL, *saved, "--steps", "8", "--resume", "--engine", engine)
        assert_same_curve(rest, expected[4:])


@pytest.mark.needs_torch("2.3")
def test_a_half_written_checkpoint_is_not_taken(run_script, trains, tmp_path):
    """Rank 1 is killed while it writes the second one."""
    saved = ("--checkpoint-dir", str(tmp_path / "saved"), "--save-every", "2")
    dying = tmp_path / "dying.py"
    dying.write_text(
        "import os, sys, runpy\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import torch.distributed as dist\n"
        "from torch.distributed.checkpoint import filesystem\n"
        "write, saves = filesystem.FileSystemWriter.write_data, []\n"
        "def write_data(self, *arguments):\n"
        "    saves.append(1)\n"
        "    if len(saves) == 2 and dist.get_rank() == 1:\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return write(self, *arguments)\n"
        "filesystem.FileSystemWriter.write_data = write_data\n"
        f"sys.argv[0] = {str(SCRIPT)!r}\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    with pytest.raises(pytest.fail.Exception, match="killed by SIGKILL"):
        run_script(dying, "--sequence-parallel-size", "2", *SMALL, *saved, "--steps", "8", world_size=2)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-2", "step-4.partial"]
    expected, _ = trains(1, 1, *SMALL, "--steps", "6")
    rest, _ = trains(1, 2, *SMALL, *saved, "--steps", "6", "--resume")
    assert_same_curve(rest, expected[2:])
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step-2", "step-4", "step-6"]


def test_resume_without_a_checkpoint_begins(trains, tmp_path):
    curve, _ = trains(1, 2, *SMALL, "--steps", "2", "--resume", "--checkpoint-dir", str(tmp_path / "none"))
    assert [line["step"] for line in curve] == [1, 2]


def torchrun_of(*options, ranks=2):
    program = Path(sys.executable).with_name("torchrun")
    return [program, f"--nproc-per-node={ranks}", "--standalone", SCRIPT, "--sequence-parallel-size=2", *options]


@pytest.mark.needs_torch("2.3")
@pytest.mark.parametrize("to", ["torchrun", "one rank"])
def test_sigterm_saves_and_ends(to, trains, tmp_path, counts_as_run):
    metrics, saved = tmp_path / "metrics.jsonl", tmp_path / "saved"
    options = (*SMALL, "--checkpoint-dir", str(saved))
    run = subprocess.Popen(
        torchrun_of(*options, "--metrics", str(metrics), "--steps", "100000"),
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 3)
        if to == "torchrun":
            run.send_signal(signal.SIGTERM)
        else:
            psutil = pytest.importorskip("psutil")

            ranks = [child for child in psutil.Process(run.pid).children() if "train.py" in " ".join(child.cmdline())]
            assert len(ranks) == 2
            ranks[-1].terminate()
        _, errors = run.communicate(timeout=40)
    finally:
        run.kill()
    if to == "one rank":
        assert run.returncode == 0, errors
    done = len(metrics.read_text().splitlines())
    assert [path.name for path in saved.iterdir()] == [f"step-{done}"]
    rest, _ = trains(1, 1, *options, "--resume", "--steps", str(done + 2))
    assert [line["step"] for line in rest] == [done + 1, done + 2]


def wait_until(condition):
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def slurm(tmp_path):
    """`srun` and `scontrol` as a job on two nodes has them; both nodes are this machine."""
    commands = {
        "scontrol": 'echo 127.0.0.1; echo "not this one"',
        "srun": 'for node in 0 1; do SLURM_NNODES=2 SLURM_NODEID=$node "$@" & pids+=($!); done\n'
        'for pid in "${pids[@]}"; do wait "$pid" || exit 1; done',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "SLURM_JOB_NODELIST": "two", "RANKS_PER_NODE": "2", "OMP_NUM_THREADS": "1"}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_two_nodes_have_the_same_curve(slurm, trains, tmp_path, counts_as_run):
    """The SLURM script as it stands, two torchrun agents."""
    metrics, options = tmp_path / "metrics.jsonl", (*SMALL, "--steps", "4")
    arguments = ("--sequence-parallel-size", "2", "--metrics", str(metrics), *options)
    script = SCRIPT.with_suffix(".sbatch")
    run = subprocess.run(
        ["bash", script, *arguments],
        cwd=ROOT,
        env=slurm | {"MASTER_PORT": free_port()},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    curve = [json.loads(line) for line in metrics.read_text().splitlines()]
    expected, _ = trains(1, 1, *options)
    assert_same_curve(curve, expected)


@pytest.mark.parametrize(
    ("arguments", "variable", "error"),
    [
        (["--nnodes=2", "--node-rank=0"], {}, r"Timed out after \d+ seconds waiting for clients. 1/2 clients joined"),
        (["--nnodes=2", "--node-rank=1"], {}, r"client socket has timed out after 3000ms while trying to connect to"),
        ([], {"GLOO_SOCKET_IFNAME": "eth7"}, "Unable to find address for: eth7"),
    ],
    ids=["the other node does not come", "the first node does not come", "no such interface"],
)
def test_what_goes_wrong_between_nodes(arguments, variable, error, counts_as_run):
    """In the words that the page quotes."""
    program = Path(sys.executable).with_name("torchrun")
    address = ["--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    run = subprocess.run(
        [program, *address, "--rdzv-conf=timeout=3", *arguments, SCRIPT, "--steps=1"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variable,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode != 0
    assert re.search(error, run.stderr), run.stderr
