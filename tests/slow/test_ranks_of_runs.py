# SPDX-License-Identifier: Apache-2.0
"""Runs of several FSDP2 ranks from the command line: resumed on other ranks and in another layout, and struck on one
rank, they end with the model that they would have had."""

import json
import os
import random
import shutil
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file

from dlrover.python.rl.engine.model.tiny_model import write_tiny_model
from tests.chaos.outside import digests, prepare
from tests.support.commands import ROOT, Desk, wait_for
from tests.support.run_files import read_lines, write_rows

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
    Desk(folder.parent).run("run", "job.yaml", f"epochs={epochs}", f"job_dir={folder}", *more, within_s=300)


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
    write_rows(folder / "examples.jsonl", [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a, b in pairs])
    for name, epochs in (("calm", 2), ("half", 1)):
        run(folder / name, epochs, SHARDS)
    return folder


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, SHARDS), (2, SHARDS), (4, SHARDS), (4, COPIES), (2, COPIES)], ids=str
)
def test_run_of_two_ranks_resumes_on_other_ranks(desk, ranks, layout):
    folder = desk / f"on-{ranks}-{layout[-1]}"
    shutil.copytree(desk / "half", folder, symlinks=True)
    run(folder, 2, f"workload.actor.num={ranks}", layout, "checkpoint.resume=latest")
    assert sorted({row["step"] for row in read_lines(folder / "metrics.jsonl")}) == list(range(1, 9))
    weights_here, expected = weights(folder), weights(desk / "calm")
    for name, tensor in expected.items():
        if not name.endswith("k_proj.bias"):  # which the softmax does not see: noise, as large as Adam makes it
            assert np.abs(weights_here[name] - tensor).max() < 2e-5, name
    if (ranks, layout) == (2, SHARDS):
        assert all(np.array_equal(weights_here[name], tensor) for name, tensor in expected.items())


STEPS = 40
SIZES = ["trainer.device_per_node=8", "workload.actor.num=2", "workload.reference.num=2"]
WITHIN_S = 180.0


def start_grpo(desk, name, *more):
    job = str(ROOT / "examples/arithmetic/grpo.yaml")
    return desk.start("run", job, f"steps={STEPS}", f"job_dir={desk.folder / name}", *SIZES, *more)


def processes_of(desk):
    """The pid of each process of the run, by its name, and its step; none while there is no run."""
    status = desk.start("status", "--json", "arithmetic-grpo")
    if status.wait(60):
        return {}, 0
    view = json.loads(status.said())
    return {member["process"]: member["pid"] for member in view["members"]}, view["step"]


@pytest.mark.parametrize("standby", [1, 0], ids=["a standby takes its place", "there is no standby"])
def test_killed_rank_leaves_the_other_and_the_result_as_they_are(tmp_path, standby):
    prepare(tmp_path)
    desk = Desk(tmp_path)
    start_grpo(desk, "calm").end(0, WITHIN_S)
    command = start_grpo(desk, "struck", f"workload.actor.standby={standby}")
    wait_for(lambda: processes_of(desk)[1] >= STEPS // 2, WITHIN_S)  # the standby is ready by then
    before, _ = processes_of(desk)
    os.kill(before["ACTOR[1]"], signal.SIGKILL)
    wait_for(lambda: processes_of(desk)[0].get("ACTOR[1]", before["ACTOR[1]"]) != before["ACTOR[1]"], WITHIN_S)
    assert processes_of(desk)[0]["ACTOR[0]"] == before["ACTOR[0]"]
    command.end(0, WITHIN_S)
    assert digests(tmp_path / "struck") == digests(tmp_path / "calm")
