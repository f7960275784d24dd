# SPDX-License-Identifier: Apache-2.0
"""Programs as roles on Ray, from outside: this process knows the command line and the process table."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from durable_jobs import wait_for
from test_cli_on_ray import Command, commands_of, is_alive

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).parents[2] / "examples" / "any_script" / "train.py"
TWO = {"device_type": "CPU", "device_per_node": 2}


def job_file(folder, workload):
    file = folder / "programs.yaml"
    file.write_text(yaml.safe_dump({"trainer": TWO, "workload": workload, "restart": {"backoff_s": 0.0}}))
    return str(file)


def ranks_of(command, marker):
    """The processes of the script itself, neither the shell's nor the warden's."""
    return [pid for pid in command.children() if (line := commands_of([pid])) and line[0].startswith(marker)]


def test_the_ranks_of_a_script_start_again_together(tmp_path):
    script = (
        "echo rank $RANK start $RESTART_COUNT; case $RANK$RESTART_COUNT in 00) sleep 987654;; 10) kill -9 $$;; esac"
    )
    with Command(tmp_path, "run", job_file(tmp_path, {"train": {"command": script, "num": 2}})) as command:
        assert command.process.wait(timeout=120) == 0, command.output.read_text()
    said = command.output.read_text()
    assert "TRAIN[1]: process_died: TRAIN[1].run: ended by signal 9: rank 1 start 0" in said, said
    (folder,) = (tmp_path / "runs" / "programs").glob("2*")
    logs = [(folder / "logs" / f"TRAIN-{rank}.log").read_text().splitlines() for rank in (0, 1)]
    assert logs[0][-1] == "rank 0 start 1"
    assert logs[1] == ["rank 1 start 0", "rank 1 start 1"]


@pytest.mark.slow
def test_two_ranks_of_torchrun_start_again_together_when_one_is_killed(tmp_path):
    python = f"{sys.executable} {SCRIPT} --steps 300 --out "
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", str(SCRIPT), "--steps=300"]
    subprocess.run([*torchrun, "--out=alone"], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    with Command(tmp_path, "run", job_file(tmp_path, {"train": {"command": f"{python} out", "num": 2}})) as command:
        wait_for(lambda: command.said("step 20 "), 120)
        first = ranks_of(command, python)
        assert len(first) == 2, command.output.read_text()
        os.kill(first[1], signal.SIGKILL)
        assert command.process.wait(timeout=120) == 0, command.output.read_text()
    said = command.output.read_text()
    went_on = re.search(r"2 ranks from step (\d+), restart 1", said)
    assert went_on and int(went_on[1]) >= 20, said
    assert "exit code 137" in said or "ended by signal 9" in said
    weights, alone = (torch.load(tmp_path / out / "checkpoint.pt")["model"] for out in ("out", "alone"))
    assert all(torch.equal(weights[name], alone[name]) for name in alone)
    wait_for(lambda: not any(map(is_alive, first)), 20)


@pytest.mark.slow
def test_the_end_of_a_member_ends_its_script_and_its_children(tmp_path):
    (tmp_path / "tree.sh").write_text("setsid sleep 987654 & echo up; sleep 987654\n")
    with Command(tmp_path, "run", job_file(tmp_path, {"train": {"command": "sh tree.sh"}})) as command:
        wait_for(lambda: command.said("up"), 120)
        sleepers = ranks_of(command, "sleep 987654")
        assert len(sleepers) == 2
        member = next(pid for pid in command.children() if commands_of([pid])[0].startswith("ray::Script"))
        os.kill(member, signal.SIGKILL)
        wait_for(lambda: not any(map(is_alive, sleepers)), 20)
        wait_for(lambda: len(ranks_of(command, "sleep 987654")) == 2, 60)
        again = ranks_of(command, "sleep 987654")
        command.interrupt()
        assert command.process.wait(timeout=60) == 130
    wait_for(lambda: not any(map(is_alive, again)), 20)


@pytest.mark.slow
def test_a_script_without_output_hangs_and_one_with_output_does_not(tmp_path):
    speaks = {"command": "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 1; done", "hang_after_s": 4}
    silent = {"command": "[ $RESTART_COUNT = 1 ] || sleep 987654", "hang_after_s": 4}
    with Command(tmp_path, "run", job_file(tmp_path, {"speaks": speaks, "silent": silent})) as command:
        assert command.process.wait(timeout=120) == 0, command.output.read_text()
    said = command.output.read_text()
    assert re.search(r"SILENT\[0\]: hung", said), said
    assert "SPEAKS[0]: hung" not in said
