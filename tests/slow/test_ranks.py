# SPDX-License-Identifier: Apache-2.0
"""Runs of several FSDP2 ranks from the command line: resumed on other ranks and in another layout, and struck on one
rank, they end with the model that they would have had."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.chaos.outside import digests, prepare
from tests.support.commands import CLI

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

SHARDS, COPIES = "engine.parallel.ddp_size=1", "engine.parallel.ddp_size=2"
JOB = """
name: other-ranks
trainer: {module: dlrover.python.rl.recipe.sft, class: SFTTrainer, device_type: CPU, device_per_node: 4}
workload:
  actor: {module: dlrover.python.rl.recipe.workloads, class: ActorWorkload, num: 2}
config:
  model: model
  data: {train: examples.jsonl, max_length: 64, assistant: all}
  epochs: 2
  batch_size: 16
  optimizer: {lr: 1.0e-3, warmup_steps: 2, max_grad_norm: 1.0}
  engine: {device: cpu, threads: 1}
"""


def run(folder, epochs, *more):
    settings = [f"epochs={epochs}", f"job_dir={folder}", *more]
    done = subprocess.run(
        [*CLI, "run", "job.yaml", *settings],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def weights(folder):
    return load_file(folder / "model/model.safetensors")


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder with a run of both epochs, and one that ended after the first."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "job.yaml").write_text(JOB)
    write_tiny_model(folder / "model", hidden=32, layers=2, max_positions=64)
    rng = random.Random(0)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(64)]
    rows = [json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b)}) for a, b in pairs]
    (folder / "examples.jsonl").write_text("\n".join(rows))
    for name, epochs in (("calm", 2), ("half", 1)):
        code, output = run(folder / name, epochs, SHARDS)
        assert code == 0, output[-4000:]
    return folder


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, SHARDS), (2, SHARDS), (4, SHARDS), (4, COPIES), (2, COPIES)], ids=str
)
def test_run_of_two_ranks_resumes_on_other_ranks(desk, ranks, layout):
    folder = desk / f"on-{ranks}-{layout[-1]}"
    shutil.copytree(desk / "half", folder, symlinks=True)
    code, output = run(folder, 2, f"workload.actor.num={ranks}", layout, "checkpoint.resume=latest")
    assert code == 0, output[-4000:]
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 9))
    weights_here, expected = weights(folder), weights(desk / "calm")
    for name, tensor in expected.items():
        if not name.endswith("k_proj.bias"):  # which the softmax does not see: noise, as large as Adam makes it
            assert np.abs(weights_here[name] - tensor).max() < 2e-5, name
    if (ranks, layout) == (2, SHARDS):
        assert all(np.array_equal(weights_here[name], tensor) for name, tensor in expected.items())


# -- a rank is killed --------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]
STEPS = 40
SIZES = ["trainer.device_per_node=8", "workload.actor.num=2", "workload.reference.num=2"]
WITHIN_S = 180.0


def start_grpo(folder, *more):
    job = str(ROOT / "examples/arithmetic/grpo.yaml")
    settings = [f"steps={STEPS}", f"job_dir={folder}", *SIZES, *more]
    with open(f"{folder}.log", "w") as log:
        return subprocess.Popen([*CLI, "run", job, *settings], cwd=folder.parent, stdout=log, stderr=subprocess.STDOUT)


def members_of(folder):
    """The pid of each process, by its name, and the step of the run."""
    done = subprocess.run([*CLI, "status", "--json", "arithmetic-grpo"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return {}, 0
    view = json.loads(done.stdout)
    return {member["process"]: member["pid"] for member in view["members"]}, view["step"]


def wait_for_members(folder, process, condition):
    until_s = time.monotonic() + WITHIN_S
    while True:
        assert process.poll() is None, Path(f"{folder}.log").read_text()[-4000:]
        assert time.monotonic() < until_s
        pids, step = members_of(folder)
        if condition(pids, step):
            return pids, step
        time.sleep(0.2)


@pytest.mark.parametrize("standby", [1, 0], ids=["a standby takes its place", "there is no standby"])
def test_killed_rank_leaves_the_other_and_the_result_as_they_are(tmp_path, standby):
    prepare(tmp_path)
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    assert start_grpo(calm).wait(WITHIN_S) == 0, Path(f"{calm}.log").read_text()[-4000:]
    process = start_grpo(struck, f"workload.actor.standby={standby}")
    before, _ = wait_for_members(struck, process, lambda pids, step: step >= STEPS // 2)  # the standby is ready by then
    os.kill(before["ACTOR[1]"], signal.SIGKILL)
    after, _ = wait_for_members(
        struck, process, lambda pids, step: pids.get("ACTOR[1]", before["ACTOR[1]"]) != before["ACTOR[1]"]
    )
    assert after["ACTOR[0]"] == before["ACTOR[0]"]
    assert process.wait(WITHIN_S) == 0, Path(f"{struck}.log").read_text()[-4000:]
    assert digests(struck) == digests(calm)
