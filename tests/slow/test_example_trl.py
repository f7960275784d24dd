# SPDX-License-Identifier: Apache-2.0
"""TRL's script with its import line changed learns, survives the death of its actor, and computes what TRL computes."""

import itertools
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrover.python.rl.algorithm.losses.columns import group_advantages
from tests.support.commands import processes_below

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "trl"
ENVIRONMENT = ROOT / ".venv-trl" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="make example NAME=trl makes its environment"),
]


def started(folder, seed):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(ENVIRONMENT), str(EXAMPLE / "train.py"), str(seed)]
    with (folder / "output.log").open("w") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)


def ended(process, folder, seed):
    assert process.wait(timeout=600) == 0, (folder / "output.log").read_text()[-4000:]
    run = folder / f"build/trl/run-{seed}"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return run, steps[1:]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return ended(started(folder, 0), folder, 0)


def assert_learnt(steps):
    rewards = np.array([step["reward/mean"] for step in steps])
    assert len(rewards) == 60
    first, last = rewards[:5], rewards[-5:]
    error = np.sqrt(first.var(ddof=1) / 5 + last.var(ddof=1) / 5)
    assert last.mean() - first.mean() > 3 * error, (first, last)


def test_the_reward_rises(undisturbed):
    assert_learnt(undisturbed[1])


@pytest.mark.parametrize("seed", [1, 2])
def test_the_reward_rises_on_other_seeds(tmp_path, seed):
    assert_learnt(ended(started(tmp_path, seed), tmp_path, seed)[1])


def test_a_killed_actor_changes_no_weight(undisturbed, tmp_path):
    process, log = started(tmp_path, 0), tmp_path / "output.log"
    deadline_s = time.monotonic() + 200
    while "step 18/60" not in log.read_text() and "step 1/60" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-3000:]
        time.sleep(0.05)
    (actor,) = [
        pid for pid, command in processes_below(process.pid).items() if command.startswith("ray::ActorWorkload")
    ]
    os.kill(actor, signal.SIGKILL)
    run, steps = ended(process, tmp_path, 0)
    assert "ACTOR: replaced rank 0" in log.read_text()
    (weights,) = (run / "model").glob("*.safetensors")
    assert weights.read_bytes() == (undisturbed[0] / "model" / weights.name).read_bytes()
    assert [step["reward/mean"] for step in steps] == [step["reward/mean"] for step in undisturbed[1]]


def test_advantages_are_those_of_trl(undisturbed):
    """Compute advantages as ``GRPOTrainer`` does: by the unbiased deviation of a group, plus 1e-4."""
    samples = [json.loads(line) for line in (undisturbed[0] / "samples.jsonl").read_text().splitlines()]
    compared = 0
    for _, rows in itertools.groupby(samples, key=lambda sample: (sample["step"], sample["prompt_id"])):
        rewards = torch.tensor([row["reward"] for row in rows])
        if len(rewards) == 8 and rewards.std() > 0:
            expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            advantages = group_advantages(np.zeros(8, dtype=np.int64), rewards.numpy(), "std_unbiased", None, 1e-4)
            assert advantages == pytest.approx(expected.numpy(), abs=1e-5)
            compared += 1
    assert compared


def test_fields_become_keys_and_others_are_refused():
    code = """
import json, sys
sys.path.insert(0, sys.argv[1])
from dlrover_trl import GRPOConfig, keys_of
common = dict(output_dir="x", use_cpu=True, bf16=False, per_device_train_batch_size=16)
loss = dict(loss_type="dr_grpo", scale_rewards=False, epsilon_high=0.3)
keys = keys_of(GRPOConfig(**common, **loss, steps_per_generation=2), 10)
cispo = dict(loss_type="cispo", epsilon_high=5.0, num_iterations=2, eval_strategy="steps", eval_steps=4)
keys["cispo"] = keys_of(GRPOConfig(**common, **cispo, steps_per_generation=2, num_train_epochs=1), 8)
try:
    keys_of(GRPOConfig(**common, top_entropy_quantile=0.5), 10)
except ValueError as error:
    keys["refused"] = str(error)
print(json.dumps(keys))
"""
    done = subprocess.run(
        [ENVIRONMENT, "-c", code, EXAMPLE], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    keys = json.loads(done.stdout)
    assert keys["algorithm"]["name"] == "dr_grpo"
    assert (keys["algorithm"]["averaging"], keys["algorithm"]["max_tokens"]) == ("constant", 512)
    assert keys["algorithm"]["clip_high"] == 0.3
    assert (keys["prompts_per_step"], keys["updates_per_step"], keys["steps"]) == (4, 2, 9)
    cispo = keys["cispo"]
    assert (cispo["algorithm"]["clip_low"], cispo["algorithm"]["clip_high"]) == (1.0, 4.0)
    assert cispo["algorithm"]["normalize"] == "std_unbiased"
    assert (cispo["steps"], cispo["eval_every"]) == (2, 1)
    assert "GRPOConfig's top_entropy_quantile" in keys["refused"]
