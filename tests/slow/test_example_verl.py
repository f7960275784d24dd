# SPDX-License-Identifier: Apache-2.0
"""verl's PPO over role groups learns, survives the death of its critic and actor, and computes what verl computes."""

import io
import json
import os
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrover.python.rl.data.state_tree import dump
from dlrover.python.rl.runtime.checkpoint.state_file import read_state
from tests.support.commands import processes_below

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-verl" / "bin" / "python"
STEPS = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not ENVIRONMENT.exists(), reason="make example NAME=verl makes its environment"),
]


def python(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (folder / "output.log").open("a") as log:
        return subprocess.Popen([str(ENVIRONMENT), *arguments], cwd=folder, env=env, stdout=log, stderr=log)


def started(folder, seed, *overrides):
    (folder / "examples").symlink_to(ROOT / "examples")
    tiny = python(folder, "-m", "dlrover.python.rl.recipe.tiny", "--out", "runs/verl-model", "--seed", str(seed))
    assert tiny.wait(timeout=100) == 0
    seeds = [f"data.seed={seed}", f"actor_rollout_ref.rollout.seed={seed}"]
    command = ["-m", "dlrover.python.rl.master.main", "run", "examples/verl/job.yaml", "job_dir=out"]
    return python(folder, *command, *seeds, *overrides)


def ended(process, folder):
    assert process.wait(timeout=600) == 0, (folder / "output.log").read_text()[-4000:]
    steps = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
    return [{name: step[name] for name in step if "perf/" not in name and "mfu" not in name} for step in steps]


def states(folder):
    """Return the contents of verl's checkpoints in the last commit; their archives hold times."""
    last, contents = max((folder / "out/checkpoints").glob("*/step-*")), {}
    for path in last.glob("*-0.*.state"):
        with tarfile.open(fileobj=io.BytesIO(read_state(path)["tar"])) as archive:
            (name,) = [name for name in archive.getnames() if name.endswith("rank-0.pt")]
            state = dump(torch.load(archive.extractfile(name), weights_only=False))
        contents[path.name.split(".")[0]] = state.skeleton, b"".join(bytes(buffer) for buffer in state.buffers)
    return contents


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    return ended(started(folder, 0), folder), states(folder)


def assert_learnt(steps):
    rewards = np.array([step["critic/score/mean"] for step in steps])
    assert len(rewards) == STEPS
    first, last = rewards[:5], rewards[-5:]
    error = np.sqrt(first.var(ddof=1) / 5 + last.var(ddof=1) / 5)
    assert last.mean() - first.mean() > 3 * error, (first, last)


def test_the_reward_rises(undisturbed):
    assert_learnt(undisturbed[0])


@pytest.mark.parametrize("seed", [1, 2])
def test_the_reward_rises_on_other_seeds(tmp_path, seed):
    assert_learnt(ended(started(tmp_path, seed), tmp_path))


@pytest.mark.parametrize("role", ["Critic", "Actor"])
def test_a_killed_process_changes_no_weight(undisturbed, tmp_path, role):
    process, log = started(tmp_path, 0), tmp_path / "output.log"
    deadline_s = time.monotonic() + 300
    while not (tmp_path / "out/metrics.jsonl").exists() or "step 1" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-3000:]
        time.sleep(0.05)
    while len((tmp_path / "out/metrics.jsonl").read_text().splitlines()) < STEPS // 2:
        assert process.poll() is None and time.monotonic() < deadline_s, log.read_text()[-3000:]
        time.sleep(0.05)
    (victim,) = [pid for pid, command in processes_below(process.pid).items() if command.startswith(f"ray::{role}")]
    os.kill(victim, signal.SIGKILL)
    assert ended(process, tmp_path) == undisturbed[0]
    assert f"{role.upper()}: replaced rank 0" in log.read_text()
    assert states(tmp_path) == undisturbed[1]


def test_columns_losses_and_gradients_are_those_of_verl_in_one_process(tmp_path):
    """The critic begins with a head that both sides load."""
    head = (
        "from transformers import AutoModelForTokenClassification as Model; import torch; torch.manual_seed(0);"
        "Model.from_pretrained('runs/verl-model', num_labels=1).save_pretrained('critic');"
        "from transformers import AutoTokenizer as T; T.from_pretrained('runs/verl-model').save_pretrained('critic')"
    )
    one_update = ["config.trainer.total_training_steps=1", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
    overrides = [
        *one_update,
        "critic.ppo_mini_batch_size=32",
        "critic.model.path=critic",
        "config.trainer.rollout_data_dir=rows",
    ]
    (tmp_path / "runs").mkdir()
    tiny = python(tmp_path, "-m", "dlrover.python.rl.recipe.tiny", "--out", "runs/verl-model", "--seed", "0")
    assert tiny.wait(timeout=100) == 0
    assert python(tmp_path, "-c", head).wait(timeout=100) == 0, (tmp_path / "output.log").read_text()[-3000:]
    (step,) = ended(started(tmp_path, 0, *overrides), tmp_path)
    reference = subprocess.run(
        [str(ENVIRONMENT), str(Path(__file__).with_name("verl_reference.py")), "out/job.yaml", "rows/1.pkl"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert reference.returncode == 0, reference.stderr[-3000:]
    reference_values = json.loads(reference.stdout.splitlines()[-1])
    metrics = {name: reference_values.pop(name) for name in list(reference_values) if "/" in name}
    assert len(reference_values) == 6 and max(reference_values.values()) < 1e-5, reference_values
    assert len(metrics) == 4 and {name: step[name] for name in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-5)
