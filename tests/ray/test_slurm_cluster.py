# SPDX-License-Identifier: Apache-2.0
"""The sbatch script of ``init --cluster slurm`` in Debian's Slurm: a controller, two nodes on this machine, munge.

One test trains on Ray. In the others Ray is a stand-in that notes where it is started: they are about the steps that
Slurm makes of the script.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from tempfile import TemporaryDirectory

import pytest

from dlrover.python.rl.cli.begin import write_skeleton
from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.chaos.outside import digests
from tests.support.commands import CLI, ROOT, wait_for
from tests.support.run_files import steps_of, untimed

STEPS = 24
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "munged")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)), reason="needs root, slurm and munge"),
]

CONFIG = """
ClusterName=desk
SlurmctldHost=localhost
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
GresTypes=gpu
KillWait=10
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 Gres=gpu:1 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


RAY = """
case $1 in
  start)
    [[ $SLURMD_NODENAME == n2 && -e {folder}/broken ]] && exit 1
    echo "$SLURMD_NODENAME" >> {folder}/joined
    exec sleep 120 ;;
  status) [[ -e {folder}/joined ]] ;;
esac
"""
# Two nodes have one address here, on loopback, where the fixed port of Ray's agent is taken by the first.
REAL_RAY = """
if [[ $1 == start ]]; then
  echo "$SLURMD_NODENAME" >> {folder}/joined
  set -- "$@" --num-cpus=4 --dashboard-agent-listen-port=0
fi
exec {python} -c '
from ray._private import ray_constants, services
ray_constants.ENABLE_RAY_CLUSTER = True
services.get_node_ip_address = lambda *_: "127.0.0.1"
from ray.scripts.scripts import main
main()' "$@"
"""
MODULE = """
def init(**_): pass
def nodes():
    return [{{"Alive": True, "Labels": {{"slurm-node": name}}}} for name in open("{folder}/joined").read().split()]
"""


def free_ports(count):
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("", 0))).getsockname()[1] for _ in range(count)]


def write_program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with the job, on a Slurm of two nodes; its programs are first on PATH."""
    names = ("controller", "first", "second")
    ports = dict(zip(names, free_ports(3), strict=True))
    slurm = tmp_path / "slurm"
    (slurm / "state").mkdir(parents=True)
    slurm.chmod(0o755)
    (slurm / "slurm.conf").write_text(CONFIG.format(folder=slurm, host=socket.gethostname(), **ports))
    (slurm / "gres.conf").write_text("NodeName=n1,n2 Name=gpu File=/dev/zero\n")
    (slurm / "munge.key").write_bytes(os.urandom(128))
    (slurm / "munge.key").chmod(0o400)
    monkeypatch.setenv("SLURM_CONF", str(slurm / "slurm.conf"))
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in {
        "dlrover-rl": "echo the job runs",
        "python": f'exec {sys.executable} "$@"',
        "ray": RAY.format(folder=tmp_path),
        "hostname": "echo 127.0.0.1",
    }.items():
        write_program(tools / name, text)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    (tmp_path / "ray.py").write_text(MODULE.format(folder=tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    munge = ["munged", "--foreground", "--force", f"--socket={slurm / 'munge.socket'}", f"--key-file={slurm}/munge.key"]
    munge += [f"--pid-file={slurm}/munge.pid", f"--log-file={slurm}/munge.log", f"--seed-file={slurm}/munge.seed"]
    commands = [munge, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in ("n1", "n2"))]
    processes = []
    try:
        for command in commands:
            with (slurm / "output.log").open("ab") as output:
                processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
            if command is munge:
                wait_for((slurm / "munge.socket").exists, 20)
        wait_for(lambda: run("sinfo", "-h", "-o", "%D %t").split() == ["2", "idle"], 60)
        monkeypatch.chdir(tmp_path)
        folder = write_skeleton("slurm-test", "slurm").absolute()
        yield folder
        for job in run("squeue", "-h", "-o", "%i").split():
            run("scancel", "--signal=KILL", "--full", job)
        wait_for(lambda: not run("squeue", "-h").strip(), 60)
    finally:
        for process in reversed(processes):
            process.terminate()
            process.wait(20)


def run(*command, cwd=None):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def submit(desk):
    return re.search(r"Submitted batch job (\d+)", run("sbatch", "--nodes=2", "job.sbatch", cwd=desk))[1]


def state(job):
    return run("squeue", "-h", "-j", job, "-o", "%T").strip()


def log(desk, job):
    file = desk / f"slurm-test-{job}.log"
    return file.read_text(errors="replace") if file.is_file() else ""


def ended(job):
    return "RUNNING" not in (now := state(job)) and "PENDING" not in now and "COMPLETING" not in now


def joined(desk):
    file = desk.parent / "joined"
    return sorted(file.read_text().split()) if file.exists() else []


def test_each_node_of_an_allocation_joins_once(desk):
    job = submit(desk)
    wait_for(lambda: ended(job), 60)
    assert joined(desk) == ["n1", "n2"], log(desk, job)
    assert "can't honor" not in log(desk, job) and "the job runs" in log(desk, job)


def test_options_of_a_site_are_lines_to_switch_on(desk):
    values = {"account=ACCOUNT": "account=mine", "partition=PARTITION": "partition=all", "mem=0": "mem=0"}
    values |= {"gpus-per-node=8": "gpus-per-node=1", "cpus-per-task=64": "cpus-per-task=2"}
    script = (desk / "job.sbatch").read_text()
    for line, value in values.items():
        assert f"##SBATCH --{line}\n" in script
        script = script.replace(f"##SBATCH --{line}\n", f"#SBATCH --{value}\n")
    (desk / "job.sbatch").write_text(script)
    job = submit(desk)
    shown = run("scontrol", "show", "job", job)
    wait_for(lambda: ended(job), 60)
    assert joined(desk) == ["n1", "n2"] and "the job runs" in log(desk, job), log(desk, job)
    words = ("Account=mine", "Partition=all", "CPUs/Task=2", "TresPerNode=gres:gpu:1")
    assert [word for word in words if word not in shown] == []


def test_node_that_does_not_join_is_named(desk, monkeypatch):
    """After half a minute, and the job ends later."""
    (desk.parent / "broken").touch()
    monkeypatch.setenv("JOIN_S", "36")
    job = submit(desk)
    wait_for(lambda: ended(job), 100)
    late = [line for line in log(desk, job).splitlines() if "have not joined" in line]
    assert re.fullmatch(r"these nodes have not joined Ray within 3[01] s: n2;.*", late[0])
    assert re.fullmatch(r"these nodes have not joined Ray within 3[67] s: n2;.*", late[1]) and len(late) == 2
    assert "the job runs" not in log(desk, job)


@pytest.fixture
def ray_folder():
    """Below it are sockets, whose paths have at most 107 characters."""
    with TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield folder


def test_requeued_job_ends_in_the_undisturbed_weights(ray_folder, desk, monkeypatch):
    """Ray and GRPO run on both nodes."""
    tools = desk.parent / "bin"
    write_program(tools / "ray", REAL_RAY.format(folder=desk.parent, python=sys.executable))
    write_program(tools / "dlrover-rl", f'exec {" ".join(CLI)} "$@"')
    (desk.parent / "ray.py").unlink()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{desk}")
    monkeypatch.setenv("RAY_TMPDIR", ray_folder)
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # on loopback, also the job
    write_tiny_model(desk / "tiny-model")
    job = (desk / "job.yaml").read_text()
    layout = ("node_number: 1, device_per_node: 4", "node_number: 2, device_per_node: 2")
    (desk / "job.yaml").write_text(job.replace(*layout).replace("steps: 20", f"steps: {STEPS}"))
    rewards = (desk / "rewards.py").read_text().replace("    if", "    time.sleep(0.05)\n    if", 1)
    (desk / "rewards.py").write_text(f"import time\n{rewards}")  # on a fast machine it would end before the requeue

    quiet, disturbed = (desk / "runs/slurm-test" / f"slurm-{number}" for number in (1, 2))
    assert submit(desk) == "1"
    wait_for(lambda: ended("1"), 150)
    assert joined(desk) == ["n1", "n2"] and len(steps_of(quiet)) == STEPS, log(desk, "1")

    assert submit(desk) == "2"
    metrics = disturbed / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and len(metrics.read_text().splitlines()) > STEPS // 4, 120)
    run("scontrol", "requeue", "2")
    wait_for(lambda: state("2") == "PENDING", 60)
    assert len(steps_of(disturbed)) < STEPS
    wait_for(lambda: ended("2"), 150)
    assert joined(desk) == sorted(["n1", "n2"] * 3), log(desk, "2")
    assert "resum" in log(desk, "2").lower() and digests(disturbed) == digests(quiet)
    assert untimed(disturbed) == untimed(quiet)
