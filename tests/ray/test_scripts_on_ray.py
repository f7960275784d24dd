# SPDX-License-Identifier: Apache-2.0
"""Programs as roles on Ray, from outside: this process knows the command line and the process table."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.support.commands import Desk, is_alive, processes_below, run_python, wait_for

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).parents[2] / "examples" / "any_script" / "train.py"
TWO = {"device_type": "CPU", "device_per_node": 2}


def job_file(folder, workload, **keys):
    file = folder / "programs.yaml"
    file.write_text(yaml.safe_dump({"trainer": TWO, "workload": workload, "restart": {"backoff_s": 0.0}, **keys}))
    return str(file)


def ranks_of(command, marker):
    """The processes of the script itself, neither the shell's nor the warden's."""
    return [pid for pid, line in processes_below(command.pid).items() if line.startswith(marker)]


def started(folder, **workload):
    return Desk(folder).start("run", job_file(folder, workload))


@pytest.mark.slow
def test_ranks_of_a_script_start_again_together(tmp_path):
    script = (
        "echo rank $RANK start $RESTART_COUNT; case $RANK$RESTART_COUNT in 00) sleep 987654;; 10) kill -9 $$;; esac"
    )
    with started(tmp_path, train={"command": script, "num": 2}) as command:
        output = command.end()
    assert "TRAIN[1]: process_died: TRAIN[1].run: ended by signal 9: rank 1 start 0" in output, output
    (folder,) = (tmp_path / "runs" / "programs").glob("2*")
    logs = [(folder / "logs" / f"TRAIN-{rank}.log").read_text().splitlines() for rank in (0, 1)]
    assert logs[0][-1] == "rank 0 start 1"
    assert logs[1] == ["rank 1 start 0", "rank 1 start 1"]


@pytest.mark.slow
def test_ranks_of_torchrun_start_again_together(tmp_path):
    python = f"{sys.executable} {SCRIPT} --steps 300 --out "
    run_python(tmp_path, "-m", "torch.distributed.run", "--nproc_per_node=2", SCRIPT, "--steps=300", "--out=alone")
    with started(tmp_path, train={"command": f"{python} out", "num": 2}) as command:
        wait_for(lambda: command.has_said("step 20 "), 120)
        first = ranks_of(command, python)
        assert len(first) == 2, command.said()
        os.kill(first[1], signal.SIGKILL)
        output = command.end()
    went_on = re.search(r"2 ranks from step (\d+), restart 1", output)
    assert went_on and int(went_on[1]) >= 20, output
    assert "exit code 137" in output or "ended by signal 9" in output
    weights, alone = (torch.load(tmp_path / out / "checkpoint.pt")["model"] for out in ("out", "alone"))
    assert all(torch.equal(weights[name], alone[name]) for name in alone)
    wait_for(lambda: not any(map(is_alive, first)), 20)


@pytest.mark.slow
def test_killed_worker_takes_its_script_and_children_along(tmp_path):
    (tmp_path / "tree.sh").write_text("setsid sleep 987654 & echo both sleep; sleep 987654\n")
    with started(tmp_path, train={"command": "sh tree.sh"}) as command:
        wait_for(lambda: command.has_said("both sleep"), 120)
        wait_for(lambda: len(ranks_of(command, "sleep 987654")) == 2, 20)
        sleepers = ranks_of(command, "sleep 987654")
        member = next(iter(ranks_of(command, "ray::Script")))
        os.kill(member, signal.SIGKILL)
        wait_for(lambda: not any(map(is_alive, sleepers)), 20)
        wait_for(lambda: len(ranks_of(command, "sleep 987654")) == 2, 60)
        again = ranks_of(command, "sleep 987654")
        command.interrupt()
        command.end(130, 60)
    wait_for(lambda: not any(map(is_alive, again)), 20)


@pytest.mark.slow
def test_script_without_output_is_hung_and_one_with_output_not(tmp_path):
    speaks = {"command": "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 1; done", "hang_after_s": 4}
    silent = {"command": "[ $RESTART_COUNT = 1 ] || sleep 987654", "hang_after_s": 4}
    with started(tmp_path, speaks=speaks, silent=silent) as command:
        output = command.end()
    assert re.search(r"SILENT\[0\]: hung", output), output
    assert "SPEAKS[0]: hung" not in output


DRAIN = """
import subprocess, sys
from pathlib import Path
from tests.ray.two_nodes import two_nodes
from tests.support.commands import Desk, processes_below, wait_for

def holder(nodes):
    lines = {index: processes_below(nodes.raylet_pid(index)).values() for index in (1, 2)}
    return next((index for index in lines if any("train.py" in line for line in lines[index])), 0)

with two_nodes(workers=2, cpus=2, head_cpus=0, connect=False) as nodes:
    with Desk(Path.cwd(), nodes.address).start("run", "programs.yaml", "trainer.node_number=2") as command:
        wait_for(lambda: command.has_said("step 20 "), 120)
        left = holder(nodes)
        why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
        node = ["--node-id", nodes.node_id(left), "--deadline-remaining-seconds", "60", "--address", nodes.address]
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", "drain-node", *node, *why], check=True)
        wait_for(lambda: holder(nodes) not in (0, left), 60)
        nodes.kill_node(left)
        command.end()
"""


@pytest.mark.slow
def test_drained_node_is_left_without_charge(tmp_path):
    train = {"command": f"{sys.executable} {SCRIPT} --steps 600 --out out", "num": 2}
    limits = {"workload_max_restart": {"train": 0}, "backoff_s": 0.0}
    job_file(tmp_path, {"train": train}, restart=limits, checkpoint={"commit_to": "job_dir"})
    run_python(tmp_path, "-c", DRAIN, within_s=280)
    output = (tmp_path / "output-0.txt").read_text()
    assert "it will be removed: it is drained" in output
    assert re.search(r"2 ranks from step \d+, restart 1", output), output
