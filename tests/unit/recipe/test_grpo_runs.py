# SPDX-License-Identifier: Apache-2.0
"""Runs of GRPO in one process: what they write, failed samples, and environments that answer and reward."""

import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import check_job, run_here
from dlrover.python.rl.page.samples import lineage, read_samples
from dlrover.python.rl.recipe.workloads import ActorWorkload
from tests.chaos.job import tiny_job
from tests.support.policy_jobs import grpo_job, policy_job, write_inputs, write_teacher
from tests.support.processes import children
from tests.support.run_files import read_json, read_lines, steps_of, untimed
from tests.support.tipping import Kept

SUPPORT = Path(__file__).parents[2] / "support"
HOSTILE = str(SUPPORT / "hostile_rewards.py")
GAMES = {"train": None, "eval_rows": 4}


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """The folder of a run of three steps, the reports it gave, and what it did between them."""
    folder = tmp_path_factory.mktemp("grpo")
    job = grpo_job(folder, f"job_dir={folder / 'out'}", "steps=3", "eval_every=2")
    reports, activities = [], []
    status = run_here(check_job(job, local=True), reports.append, activities.append)
    assert (status.phase, status.activity) == (Phase.FINISHED, ""), status.cause
    return folder / "out", reports, activities


def test_run_reports_and_writes_each_step(whole_run):
    out, reports, _ = whole_run
    assert [(report.step, report.total_steps) for report in reports] == [(1, 3), (2, 3), (3, 3)]
    initial, *rows = read_lines(out / "metrics.jsonl")
    summary = read_json(out / "summary.json")
    assert initial == {"step": 0, **{name: summary[f"before/{name}"] for name in initial if name != "step"}}
    assert {"eval/accuracy", "eval/reward", "eval/failed"} == initial.keys() - {"step"}
    assert [row["step"] for row in rows] == [1, 2, 3]
    named = {"reward/mean", "reward/std", "loss", "grad_norm", "lr", "completions/length_p95", "completions/truncated"}
    named |= {f"policy/{name}" for name in ("kl", "entropy", "mismatch_kl", "clip_low", "clip_high")}
    named |= {"speed/tokens_per_s", "speed/rollout_tokens_per_s", "time/step"}
    assert all(named <= set(row) for row in rows)
    assert ["eval/accuracy" in row for row in rows] == [False, True, False]
    assert [row["total/samples"] for row in rows] == [32, 64, 96]
    assert 0 < rows[0]["total/tokens"] < rows[1]["total/tokens"] < rows[2]["total/tokens"]
    assert all(0 <= row["policy/mismatch_kl"] < 1e-6 < row["policy/entropy"] for row in rows)
    assert rows[0]["policy/kl"] == 0.0, "the reference is the policy's own start"
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert [point.step for point in events.Scalars("reward/mean")] == [1, 2, 3]
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_run_announces_its_activities_in_order(whole_run):
    activities = whole_run[2]
    assert sorted(activities[:4]) == [f"starting {role}" for role in ("actor", "reference", "reward", "rollout")]
    evaluating = [f"evaluating {when} the training" for when in ("before", "after")]
    assert activities[4:] == ["loading the models", evaluating[0], "step 1", evaluating[1], "saving the model"]


def test_run_leaves_a_model_not_trained_on_held_out_rows(whole_run):
    out, *_ = whole_run
    AutoTokenizer.from_pretrained(out / "model")
    AutoModelForCausalLM.from_pretrained(out / "model")
    files = (read_lines(out / f"{name}.jsonl") for name in ("held_out", "samples"))
    held_out, rows = ({row["prompt_id"] for row in file} for file in files)
    assert len(held_out) == 8 and not held_out & rows
    summary = read_json(out / "summary.json")
    assert summary["held_out_prompts"] == 8
    assert (summary["train_engine"], summary["rollout_engine"]) == ("Fsdp2TrainEngine", "TorchRolloutEngine")


def run(folder, steps=3, **config):
    job = tiny_job(folder, steps, **config)
    return job.job_dir, run_here(check_job(job, local=True))


def finished(folder, steps=3, **config):
    out, status = run(folder, steps, **config)
    assert status.phase is Phase.FINISHED, status.cause
    return out


def assert_same_files(first, second, files=("samples.jsonl", "held_out.jsonl", "model/model.safetensors")):
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_two_runs_of_a_job_end_in_the_same_bits(tmp_path):
    first, second = (finished(tmp_path / name, reference=True, eval_every=2) for name in ("one", "two"))
    assert untimed(first) == untimed(second)
    assert_same_files(first, second)


def test_lineage_is_what_the_workers_trained_on(tmp_path, monkeypatch):
    trained, update = [], ActorWorkload.update

    def recording(self, rollouts, rows, plan, *aux):
        assert rollouts["digest"].tolist() == rows["digest"].tolist()
        names = [rollouts[name].tolist() for name in ("prompt_id", "sample_index")]
        means = [float(each) for each in rows["advantage"]]
        whole = zip(*names, rows["update"].tolist(), means, rollouts["completion"], strict=True)
        trained.append([(*row[:2], self.rank, *row[2:]) for row in whole if row[2] >= 0])
        return update(self, rollouts, rows, plan, *aux)

    monkeypatch.setattr(ActorWorkload, "update", recording)
    reward = {"function": "tests.support.policy_rewards:often_alike", "timeout_s": 5.0, "workers": 1}
    rollout = {"samples_per_prompt": 4, "max_new_tokens": 4, "dynamic_filtering": "drop"}
    out = finished(tmp_path, steps=2, updates_per_step=2, reward=reward, rollout=rollout)
    assert len(trained) == 2
    for step, rows in enumerate(trained, 1):
        texts = {(row["prompt_id"], row["sample_index"]): row["completion"] for row in read_samples(out, step)}
        recorded = [
            (*(row[name] for name in ("prompt_id", "sample_index", "rank", "update", "advantage")),)
            for row in lineage(out, step)
        ]
        assert sorted((*row, texts[row[:2]]) for row in recorded) == sorted(rows)
        assert {row[3] for row in rows} == {0, 1}
        assert 0 < len(rows) < len(texts), "some groups were filtered out"


# -- rewards that fail -------------------------------------------------------------------------------------------------


def flaky(folder, monkeypatch, body):
    (folder / "flaky_reward.py").write_text(f"def reward(completion, answer, extra_info):\n{body}")
    monkeypatch.syspath_prepend(str(folder))
    return {"function": "flaky_reward:reward", "timeout_s": 5.0, "workers": 1}


ONE_OF_SEVEN = """\
    if sum(completion.encode()) % 7 == 0:
        raise ValueError("this one is poisoned")
    return len(completion) / 8
"""

AWAY = """\
    with open(__file__ + ".calls", "ab") as calls:
        calls.write(b".")
        number = calls.tell()
    if 4 + 64 < number <= 4 + 2 * 64:
        raise ConnectionError("the judge is away")
    return len(completion) / 8
"""
"""Fails in the second step; the held-out prompts make four calls before the first."""


def test_two_runs_with_failed_samples_are_alike(tmp_path, monkeypatch):
    reward = flaky(tmp_path, monkeypatch, ONE_OF_SEVEN) | {"on_failure": "redraw"}
    first, second = (finished(tmp_path / name, reward=reward, steps=2) for name in ("one", "two"))
    assert untimed(first) == untimed(second)
    assert untimed(first)[1]["samples/failed"] > 0
    assert_same_files(first, second, ["model/model.safetensors"])


@pytest.mark.parametrize("filtering", ["off", "drop"])
def test_step_without_any_reward_is_skipped_and_counted(tmp_path, monkeypatch, filtering):
    rollout = {"samples_per_prompt": 8, "max_new_tokens": 12, "dynamic_filtering": filtering}
    out = finished(tmp_path, reward=flaky(tmp_path, monkeypatch, AWAY), rollout=rollout)
    first, second, third = steps_of(out)
    assert (second["samples/failed"], second["samples/steps_without_reward"], second["reward/mean"]) == (64, 1, None)
    assert "loss" not in second
    for row in (first, third):
        assert {"loss", "reward/mean"} <= set(row)
        assert row["samples/failed"] == 0
        assert "samples/steps_without_reward" not in row
    versions = {(row["step"], row["version"]) for row in read_lines(out / "samples.jsonl")}
    assert versions == {(1, 0), (2, 1), (3, 1)}, "the second step changed nothing"


def test_failed_run_has_the_curve_of_its_steps(tmp_path, monkeypatch):
    out, status = run(tmp_path, reward=flaky(tmp_path, monkeypatch, AWAY) | {"give_up_after": 1})
    assert status.phase is Phase.FAILED
    assert [row["step"] for row in steps_of(out)] == [1]
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_step_with_every_group_lost_ends_the_run(tmp_path, monkeypatch):
    reward = flaky(tmp_path, monkeypatch, "    raise ValueError('always')\n") | {"on_failure": "redraw"}
    out, status = run(tmp_path, reward=reward)
    assert status.phase is Phase.FAILED
    assert "step 1: the reward function failed on all 128 samples" in status.cause.message + status.cause.detail
    assert [row["retry"] for row in read_lines(out / "samples.jsonl")] == [0] * 64 + [1] * 64


# -- environments ------------------------------------------------------------------------------------------------------


def played(folder, steps=2, rollout=None, **config):
    """A finished run of 4 prompts a step, with these options of ``rollout`` beside the usual ones."""
    rollout = {"samples_per_prompt": 4, "max_new_tokens": 4} | (rollout or {})
    config = ({"reward": {}} if "env_path" in rollout else {}) | config
    return finished(folder, steps, prompts_per_step=4, rollout=rollout, **config)


def running_threads():
    """The threads of this process but for the progress bars' one, which stays once there is one."""
    return {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


@pytest.fixture
def leaves_nothing():
    """No process and no thread is left."""
    processes, threads = children(), running_threads()
    yield
    until = time.monotonic() + 20
    while (children() - processes or running_threads() - threads) and time.monotonic() < until:
        threading.Event().wait(0.05)
    assert children() <= processes
    assert running_threads() <= threads


@pytest.mark.slow
@pytest.mark.feature(75)
def test_two_runs_without_data_play_the_same_games(tmp_path, leaves_nothing):
    rollout = {"env_path": f"{HOSTILE}:Calm", "env_isolated": False}
    first, second = (played(tmp_path / name, data=GAMES, rollout=rollout) for name in ("one", "two"))
    assert_same_files(first, second)
    samples = read_lines(first / "samples.jsonl")
    assert {row["error"] for row in samples} == {None}
    assert {row["prompt"].split()[0] for row in samples} == {"game", "something"}
    games = {(row["step"], row["prompt_id"]): row["prompt"] for row in samples if row["prompt"].startswith("game")}
    assert len(set(games.values())) == len(games) == 8
    assert len(samples) > 32
    assert all(row["samples/failed"] == 0 and math.isfinite(row["loss"]) for row in steps_of(first))


@pytest.mark.slow
def test_run_with_a_hostile_environment_finishes(tmp_path, leaves_nothing):
    """It raises, hangs, returns nothing, 10 MB of text, no number, what cannot travel, and closes late."""
    out = played(tmp_path, data=GAMES, steps=1, rollout={"env_path": HOSTILE, "env_timeout_s": 1.0})
    rows, (step,) = read_lines(out / "samples.jsonl"), steps_of(out)
    assert len({row["error"] for row in rows} - {None}) > 1
    assert step["samples/failed"] > 0
    assert all((row["reward"] is None) == (row["error"] is not None) for row in rows)
    assert any(row["reward"] for row in rows)


@pytest.mark.feature(98)
@pytest.mark.slow
def test_run_with_a_hostile_reward_function_finishes(tmp_path, leaves_nothing):
    reward = {"function": "tests.support.hostile_rewards:reward", "timeout_s": 0.5, "workers": 2}
    out = played(tmp_path, steps=1, reward=reward)
    rows, steps = read_lines(out / "samples.jsonl"), steps_of(out)
    assert sum(row["samples/failed"] for row in steps) == sum(row["reward"] is None for row in rows) > 0
    assert all(row["error"] for row in rows if row["reward"] is None)


@pytest.mark.feature(89)
def test_score_and_all_figures_are_logged_of_whole_samples(tmp_path):
    """Each sample is of two rows, which add up."""
    rollout = {"env_path": str(SUPPORT / "scenes.py"), "env_isolated": False}
    out = played(tmp_path, data=GAMES, rollout=rollout, eval_every=1, keep={"best": "eval/score"}, seed=5)
    steps, samples = steps_of(out), read_lines(out / "samples.jsonl")
    for metrics in steps:
        rows = [row for row in samples if row["step"] == metrics["step"]]
        counted = [row for row in rows if row["error"] is None]
        assert len(rows) == 2 * 16 == 2 * len({row["trajectory"] for row in rows})
        assert metrics["samples/failed"] == (len(rows) - len(counted)) / 2 > 0
        for name, metric in {"reward": "reward/mean", "score": "reward/score"}.items():
            assert metrics[metric] == pytest.approx(2 * np.mean([row[name] for row in counted]))
    answers = [row["score"] for row in read_lines(out / "held_out.jsonl") if row["error"] is None]
    summary = read_json(out / "summary.json")
    assert steps[-1]["eval/score"] == summary["eval/score"] == pytest.approx(2 * np.mean(answers))
    assert {"before/eval/score", "best/eval/score"} <= set(summary)


@pytest.mark.feature(115)
def test_turn_is_credited_with_the_rewards_after_it(tmp_path):
    environment = {"env_path": str(SUPPORT / "tipping.py"), "env_isolated": False}
    rollout = {"samples_per_prompt": 2, "max_new_tokens": 3, **environment}
    algorithm = {"name": "tests.support.tipping:Kept"}
    job = policy_job(tmp_path, "ppo", steps=1, algorithm=algorithm, rollout=rollout, reward={})
    status = run_here(check_job(job, local=True))
    assert status.phase is Phase.FINISHED, status.cause
    (rows,) = Kept.annotated
    for returns, mask in zip(rows.ragged("returns"), rows.ragged("action_mask"), strict=True):
        turns = np.cumsum(np.diff(mask.astype(int), prepend=0) == 1)[mask]
        np.testing.assert_allclose(returns[mask], turns == 1, atol=1e-6)
        assert turns.max() == 2


def test_distillation_without_any_sample_ends_with_the_cause(tmp_path):
    write_inputs(tmp_path)
    (tmp_path / "away.py").write_text("def step(state, action, extra_info):\n    raise ConnectionError('it is down')\n")
    environment = {"env_path": str(tmp_path / "away.py"), "env_isolated": False}
    rollout = {"samples_per_prompt": 4, "max_new_tokens": 4, **environment}
    teachers = {"teacher": {"model": write_teacher(tmp_path)}}
    job = policy_job(tmp_path, "distill", steps=1, rollout=rollout, reward={}, teachers=teachers)
    status = run_here(check_job(job, local=True))
    assert status.phase is Phase.FAILED
    cause = "step 1: the environment failed on all 16 samples, last with: step raised ConnectionError: it is down"
    assert cause in status.cause.message
    rows = read_lines(tmp_path / "out/samples.jsonl")
    assert {row["mark"] for row in rows} == {"failed"}
