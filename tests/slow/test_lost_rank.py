# SPDX-License-Identifier: Apache-2.0
"""A rank of an FSDP2 actor is killed from outside, by the command line alone: the other ranks keep their processes,
and the run ends in the bits of an undisturbed one."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.chaos.outside import digests, prepare
from tests.support.commands import CLI

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
STEPS = 40
SIZES = ["trainer.device_per_node=8", "workload.actor.num=2", "workload.reference.num=2"]
WITHIN_S = 180.0


def start(folder, *more):
    job = str(ROOT / "examples/arithmetic/grpo.yaml")
    settings = [f"steps={STEPS}", f"job_dir={folder}", *SIZES, *more]
    with open(f"{folder}.log", "w") as log:
        return subprocess.Popen([*CLI, "run", job, *settings], cwd=folder.parent, stdout=log, stderr=subprocess.STDOUT)


def members(folder):
    """The pid of each process, by its name, and the step of the run."""
    done = subprocess.run([*CLI, "status", "--json", "arithmetic-grpo"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {}, 0
    view = json.loads(done.stdout)
    return {member["process"]: member["pid"] for member in view["members"]}, view["step"]


def wait_for(folder, process, condition):
    until_s = time.monotonic() + WITHIN_S
    while True:
        assert process.poll() is None, Path(f"{folder}.log").read_text()[-4000:]
        assert time.monotonic() < until_s
        pids, step = members(folder)
        if condition(pids, step):
            return pids, step
        time.sleep(0.2)


@pytest.mark.parametrize("standby", [1, 0], ids=["a standby takes its place", "there is no standby"])
def test_the_other_rank_keeps_its_process_and_the_result_is_the_same(tmp_path, standby):
    prepare(tmp_path)
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    assert start(calm).wait(WITHIN_S) == 0, Path(f"{calm}.log").read_text()[-4000:]
    process = start(struck, f"workload.actor.standby={standby}")
    before, _ = wait_for(struck, process, lambda pids, step: step >= STEPS // 2)  # the standby is ready by then
    os.kill(before["ACTOR[1]"], signal.SIGKILL)
    after, _ = wait_for(
        struck, process, lambda pids, step: pids.get("ACTOR[1]", before["ACTOR[1]"]) != before["ACTOR[1]"]
    )
    assert after["ACTOR[0]"] == before["ACTOR[0]"]
    assert process.wait(WITHIN_S) == 0, Path(f"{struck}.log").read_text()[-4000:]
    assert digests(struck) == digests(calm)
