"""The whole program, longer than docs-test may take: 50 steps on each grid, resumed, killed, stopped, on two nodes."""

import contextlib
import json
import os
import re
import shutil
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


@pytest.fixture
def node():
    """`node(rank, port, *options)` starts a node's torchrun; what still runs at the end is killed."""
    psutil = pytest.importorskip("psutil", reason="nodes were not started: psutil is not installed")
    started = []

    def start(rank, port, *options, count=2, ranks=1, timeout=30, address="127.0.0.1", **variables):
        program = Path(sys.executable).with_name("torchrun")
        where = [f"--nnodes={count}", f"--node-rank={rank}", f"--nproc-per-node={ranks}"]
        where += [f"--master-addr={address}", f"--master-port={port}", f"--rdzv-conf=timeout={timeout}"]
        run = subprocess.Popen(
            [program, *where, SCRIPT, *options],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(psutil.Process(run.pid))
        return run

    yield start
    for process in started:
        kill_with_ranks(process)


def kill_with_ranks(agent):
    """As when a machine goes down: the agent has no time to tell anybody."""
    if agent.is_running():
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()


def ended(run, timeout=40):
    """Its exit status, and what it said."""
    output, _ = run.communicate(timeout=timeout)
    return run.returncode, output


def lines_of(metrics):
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def test_two_nodes_of_a_hostfile_have_the_same_curve(trains, tmp_path, counts_as_run):
    """DeepSpeed's launcher, the script and the hostfile as they stand but for the number of slots."""
    pytest.importorskip("deepspeed", reason="its launcher was not run: deepspeed is not installed")
    metrics, options = tmp_path / "metrics.jsonl", (*SMALL, "--steps", "4")
    hostfile = SCRIPT.with_suffix(".hostfile").read_text()
    assert hostfile == "node-0 slots=8\nnode-1 slots=8\n"
    (tmp_path / "hostfile").write_text(hostfile.replace("=8", "=2"))
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "HOSTFILE": str(tmp_path / "hostfile")}
    settings = {"PATH": programs, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    nodes = [
        subprocess.Popen(
            ["bash", SCRIPT.with_suffix(".hostfile.sh"), "--sequence-parallel-size=2", "--metrics", metrics, *options],
            cwd=ROOT,
            env=os.environ | places | settings | {"NODE_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in "01"
    ]
    try:
        for run in nodes:
            status, output = ended(run, timeout=90)
            assert status == 0, output
    finally:
        for run in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    expected, _ = trains(1, 1, *options)
    assert_same_curve(lines_of(metrics), expected)


@pytest.mark.needs_torch("2.3")
def test_a_node_that_dies_ends_the_other_and_the_run_goes_on_without_it(node, trains, tmp_path, counts_as_run):
    import psutil

    metrics, saved = tmp_path / "metrics.jsonl", ("--checkpoint-dir", str(tmp_path / "saved"), "--save-every", "2")
    options = ("--sequence-parallel-size=2", "--metrics", metrics, *SMALL, *saved, "--steps", "100000")
    port = free_port()
    first, second = [node(rank, port, *options, ranks=2) for rank in (0, 1)]
    wait_until(lambda: len(lines_of(metrics)) >= 5)
    kill_with_ranks(psutil.Process(second.pid))
    status, output = ended(first, timeout=10)
    assert status == 1, output
    assert re.search("Connection (closed|reset) by peer", output), output
    whole = max(int(path.name[5:]) for path in (tmp_path / "saved").iterdir() if path.name[5:].isdigit())
    assert whole >= 4
    expected, _ = trains(1, 1, *SMALL, "--steps", str(whole + 3))
    assert_same_curve(lines_of(metrics)[:whole], expected[:whole])
    rest, _ = trains(1, 2, *SMALL, *saved, "--steps", str(whole + 3), "--resume")
    assert_same_curve(rest, expected[whole:])


def test_a_node_that_comes_late_is_waited_for(node, counts_as_run):
    port = free_port()
    first = node(0, port, *SMALL, "--steps=1")
    time.sleep(4)  # longer than the next test's nodes wait
    second = node(1, port, *SMALL, "--steps=1")
    for run in (first, second):
        status, output = ended(run)
        assert status == 0, output


def test_a_node_that_comes_too_late(node, counts_as_run):
    """In the words that the page quotes, as in the next ones."""
    port = free_port()
    status, output = ended(node(0, port, timeout=3))
    assert status == 1
    assert "Timed out after 4 seconds waiting for clients. 1/2 clients joined." in output
    status, output = ended(node(1, port, timeout=3))
    assert status == 1
    assert f"The client socket has timed out after 3000ms while trying to connect to (127.0.0.1, {port})" in output


def test_a_name_that_does_not_resolve(node, counts_as_run):
    status, output = ended(node(1, 29500, timeout=1, address="node-0.invalid"))
    assert status == 1
    assert "addresses of (node-0.invalid, 29500) cannot be retrieved (gai error" in output


def test_an_interface_that_is_not_there(node, counts_as_run):
    status, output = ended(node(0, free_port(), count=1, GLOO_SOCKET_IFNAME="eth7"))
    assert status == 1
    assert "Unable to find address for: eth7" in output


def test_a_node_with_another_number_of_ranks(node, counts_as_run):
    port = free_port()
    options = ("--sequence-parallel-size=2", "--steps=1")
    for run in [node(0, port, *options, ranks=2), node(1, port, *options, ranks=1)]:
        status, output = ended(run)
        assert status == 1
        assert "a world of 3 ranks cannot be cut into groups of sequence_parallel_size=2" in output


def test_a_first_node_that_thinks_it_is_alone(node, tmp_path, counts_as_run):
    """It trains without the other one, which waits."""
    port, metrics = free_port(), tmp_path / "metrics.jsonl"
    first = node(0, port, *SMALL, "--steps=100000", "--metrics", metrics, count=1)
    wait_until(lambda: lines_of(metrics))
    status, output = ended(node(1, port, timeout=3))
    assert status == 1
    assert "wait timeout after 3000ms, keys: /none/torchelastic/assigned_ranks/1" in output
    assert first.poll() is None


def test_a_firewall_that_lets_only_the_master_port_through(counts_as_run):
    """Two nodes in a network of their own, in which what is sent to another port than 29500 gets lost."""
    psutil = pytest.importorskip("psutil", reason="nodes were not started: psutil is not installed")
    network = (
        "ip link set lo up",
        "ip tuntap add node mode tun && ip link set node up && ip address add 10.9.0.1/32 dev node",
        "ip tuntap add lost mode tun && ip link set lost up && ip route add default dev lost table 100",
        "ip rule add pref 10 ipproto tcp dport 29500 lookup local",
        "ip rule add pref 11 ipproto tcp sport 29500 lookup local",
        "ip rule add pref 20 to 10.9.0.1 lookup 100",
        "ip rule add pref 30 lookup local && ip rule del pref 0",
        "echo 1 > /proc/sys/net/ipv4/tcp_syn_retries",  # gives up after 3 s, not after 127 s
    )
    own_network = ["unshare", "--user", "--map-root-user", "--net", "bash", "-ec"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*own_network, "\n".join(network)], capture_output=True).returncode
    ):
        pytest.skip("the firewall was not tried: no network of one's own can be made here")
    agent = f"{Path(sys.executable).with_name('torchrun')} --nnodes=2 --nproc-per-node=1 --master-addr=10.9.0.1"
    nodes = [f"{agent} --master-port=29500 --node-rank={rank} {SCRIPT} --steps=1 &" for rank in (0, 1)]
    run = subprocess.Popen(
        [*own_network, "\n".join([*network, *nodes, "wait"])],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "node"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert any(re.search("failed to connect.*SO_ERROR: Connection timed out", line) for line in run.stdout)
    finally:
        kill_with_ranks(psutil.Process(run.pid))
        run.communicate()
