# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF's PPO over role groups learns, survives the death of its critic and actor, and computes what OpenRLHF
computes."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.commands import processes_below

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "openrlhf"
ENVIRONMENT = ROOT / ".venv-openrlhf" / "bin" / "python"
STEPS = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="make example NAME=openrlhf makes its environment"),
]


def python(folder, *arguments):
    path = os.pathsep.join(map(str, [ROOT, EXAMPLE, Path(__file__).parent]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "output.log").open("a") as log:
        return subprocess.Popen([str(ENVIRONMENT), *arguments], cwd=folder, env=env, stdout=log, stderr=log)


def prepared(folder, seed):
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "runs").mkdir()
    tiny = python(folder, "-m", "dlrover.python.rl.recipe.tiny", "--out", "runs/openrlhf-model", "--seed", str(seed))
    assert tiny.wait(timeout=100) == 0, (folder / "output.log").read_text()[-3000:]


def started(folder, seed, *overrides):
    command = ["-m", "dlrover.python.rl.master.main", "run", "examples/openrlhf/job.yaml", "job_dir=out"]
    return python(folder, *command, f"train.seed={seed}", *overrides)


def ended(process, folder):
    assert process.wait(timeout=700) == 0, (folder / "output.log").read_text()[-4000:]
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


def weights(folder):
    return {role: (folder / f"runs/openrlhf-trained{role}/model.safetensors").read_bytes() for role in ("", "_critic")}


def run(folder, seed):
    prepared(folder, seed)
    return ended(started(folder, seed), folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(folder, 0), weights(folder)


def assert_learnt(steps):
    rewards = np.array([step["reward"] for step in steps])
    assert len(rewards) == STEPS
    first, last = rewards[:5], rewards[-5:]
    error = np.sqrt(first.var(ddof=1) / 5 + last.var(ddof=1) / 5)
    assert last.mean() - first.mean() > 3 * error, (first, last)


def test_the_reward_rises(undisturbed):
    assert_learnt(undisturbed[0])


@pytest.mark.parametrize("seed", [1, 2])
def test_the_reward_rises_on_other_seeds(tmp_path, seed):
    assert_learnt(run(tmp_path, seed))


@pytest.mark.parametrize("role", ["Critic", "Actor"])
def test_a_killed_process_changes_no_weight(undisturbed, tmp_path, role):
    prepared(tmp_path, 0)
    process, log = started(tmp_path, 0), tmp_path / "output.log"
    metrics, deadline_s = tmp_path / "out/metrics.jsonl", time.monotonic() + 400
    while not metrics.exists() or len(metrics.read_text().splitlines()) < STEPS // 2:
        assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-3000:]
        time.sleep(0.05)
    (victim,) = [pid for pid, command in processes_below(process.pid).items() if command.startswith(f"ray::{role}")]
    os.kill(victim, signal.SIGKILL)
    assert ended(process, tmp_path) == undisturbed[0]
    assert f"{role.upper()}: replaced rank 0" in log.read_text()
    assert weights(tmp_path) == undisturbed[1]


def test_columns_losses_and_gradients_are_those_of_openrlhf_in_one_process(tmp_path):
    """Record the third step, with one update over all of its rows."""
    prepared(tmp_path, 0)
    overrides = ["trainer.module=openrlhf_reference", "trainer.class=RecordingPPO", "train.num_episodes=2"]
    (*_, step, _) = ended(
        started(tmp_path, 0, *overrides, "train.batch_size=32", "train.micro_batch_size=32"), tmp_path
    )
    script = str(Path(__file__).with_name("openrlhf_reference.py"))
    assert python(tmp_path, script).wait(timeout=200) == 0, (tmp_path / "output.log").read_text()[-3000:]
    differences = json.loads((tmp_path / "differences.json").read_text())
    metrics = differences.pop("metrics")
    assert len(differences) == 5 and max(differences.values()) < 1e-5, differences
    assert step["step"] == 3 and metrics["kl"] > 0.01
    assert len(metrics) == 6 and {name: step[name] for name in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.adam.lrr=1", "unrecognized arguments: --actor.adam.lrr"),
        ("algo.advantage.estimator=gea", "invalid choice: 'gea'"),
        ("train.async_enable=true", "train.async_enable has no counterpart here"),
        ("algo.advantage.estimator=reinforce", "workload.critic: goes with algo.advantage.estimator=gae"),
        ("ds.zero_stage=3", "is for transformers 5.15"),
        ("reward.remote_url=http://127.0.0.1:1", "a file with a reward_func here"),
    ],
)
def test_options_that_openrlhf_or_the_example_lacks_are_refused(tmp_path, override, message):
    prepared(tmp_path, 0)
    assert started(tmp_path, 0, override).wait(timeout=100) != 0
    assert message in (tmp_path / "output.log").read_text()
