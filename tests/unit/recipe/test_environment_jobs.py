# SPDX-License-Identifier: Apache-2.0
"""Jobs whose samples an environment answers and rewards: the same bits every time, and a run that goes on whatever the
environment or the reward function does."""

import importlib
import json
import math
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dlrover.python.rl.common.errors import InvalidJob
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import check_job, run_here
from dlrover.python.rl.recipe.distill import DistillationConfig
from tests.chaos.job import tiny_job
from tests.support.policy_jobs import policy_job, write_inputs, write_teacher

SUPPORT = Path(__file__).parents[2] / "support"
HOSTILE = str(SUPPORT / "hostile_rewards.py")
GAMES = {"train": None, "eval_rows": 4}
ROLLOUT = {"samples_per_prompt": 4, "max_new_tokens": 4}
TIMES = ("time/", "speed/", "memory/")


def job(folder, steps=2, **config):
    """Prompts are 4 a step; options of ``rollout`` come beside the usual ones."""
    rollout = ROLLOUT | config.pop("rollout", {})
    config = ({"reward": {}} if "env_path" in rollout else {}) | config
    return tiny_job(folder, steps, prompts_per_step=4, rollout=rollout, **config)


def finished(folder, **config):
    made = job(folder, **config)
    status = run_here(check_job(made, local=True))
    assert status.phase is Phase.FINISHED, status.cause
    return made.job_dir


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps_of(out):
    return [row for row in lines(out / "metrics.jsonl") if row["step"]]


def children():
    files = [Path("/proc/self/task", task, "children") for task in os.listdir("/proc/self/task")]
    return {pid for file in files if file.exists() for pid in file.read_text().split()}


def ours():
    """The threads of this process but for the progress bars' one, which stays once there is one."""
    return {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


@pytest.fixture
def leaves_nothing():
    """No process and no thread is left."""
    processes, threads = children(), ours()
    yield
    until = time.monotonic() + 20
    while (children() - processes or ours() - threads) and time.monotonic() < until:
        threading.Event().wait(0.05)
    assert children() <= processes
    assert ours() <= threads


@pytest.mark.slow
@pytest.mark.feature(75)
def test_two_runs_without_data_play_the_same_games_to_the_bit(tmp_path, leaves_nothing):
    rollout = {"env_path": f"{HOSTILE}:Calm", "env_isolated": False}
    first, second = (finished(tmp_path / name, data=GAMES, rollout=rollout) for name in ("one", "two"))
    for file in ("samples.jsonl", "held_out.jsonl", "model/model.safetensors"):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    samples = lines(first / "samples.jsonl")
    assert {row["error"] for row in samples} == {None}
    assert {row["prompt"].split()[0] for row in samples} == {"game", "something"}
    games = {(row["step"], row["prompt_id"]): row["prompt"] for row in samples if row["prompt"].startswith("game")}
    assert len(set(games.values())) == len(games) == 8
    assert len(samples) > 32
    for row in steps_of(first):
        assert row["samples/failed"] == 0
        assert math.isfinite(row["loss"])


@pytest.mark.slow
def test_a_hostile_environment_fails_some_samples_and_the_run_goes_on(tmp_path, leaves_nothing):
    """It raises, hangs, returns nothing, 10 MB of text, no number, what cannot travel, and closes late."""
    out = finished(tmp_path, data=GAMES, steps=1, rollout={"env_path": HOSTILE, "env_timeout_s": 1.0})
    assert len({row["error"] for row in lines(out / "samples.jsonl")} - {None}) > 1
    steps = steps_of(out)
    assert [row["step"] for row in steps] == [1]
    assert all(row["samples/failed"] > 0 for row in steps)
    rows = lines(out / "samples.jsonl")
    assert all((row["reward"] is None) == (row["error"] is not None) for row in rows)
    assert any(row["reward"] for row in rows)


def by_sample(rows):
    """Rows of one step, those of each sample together."""
    found = {}
    for row in rows:
        found.setdefault(row["trajectory"], []).append(row)
    assert len({(row["prompt_id"], row["sample_index"]) for row in rows}) == len(found)
    return list(found.values())


def mean(name, samples):
    """Over those that did not fail, of what their rows add up to."""
    return np.mean([sum(row[name] for row in rows) for rows in samples if rows[0]["error"] is None])


@pytest.mark.feature(89)
def test_the_score_is_logged_and_every_figure_is_of_whole_samples(tmp_path):
    rollout = {"env_path": str(SUPPORT / "scenes.py"), "env_isolated": False}
    keep = {"best": "eval/score"}
    out = finished(tmp_path, data=GAMES, rollout=rollout, eval_every=1, keep=keep, seed=5)
    steps, drawn = steps_of(out), lines(out / "samples.jsonl")
    for metrics in steps:
        rows = [row for row in drawn if row["step"] == metrics["step"]]
        samples = by_sample(rows)
        assert (len(samples), len(rows)) == (16, 32)
        assert metrics["reward/mean"] == pytest.approx(mean("reward", samples))
        assert metrics["reward/score"] == pytest.approx(mean("score", samples))
        assert metrics["reward/score"] != metrics["reward/mean"]
        assert metrics["samples/failed"] == sum(row["error"] is not None for row in rows) / 2 > 0
    answers, summary = by_sample(lines(out / "held_out.jsonl")), json.loads((out / "summary.json").read_text())
    assert len(answers) == 4
    assert steps[-1]["eval/score"] == pytest.approx(mean("score", answers))
    assert summary["eval/score"] == pytest.approx(mean("score", answers))
    assert {"before/eval/score", "best/eval/score"} <= set(summary)


@pytest.mark.slow
def test_an_environment_that_takes_its_process_along_costs_those_who_play_in_it(tmp_path, leaves_nothing):
    out = finished(tmp_path, rollout={"env_path": f"{HOSTILE}:Bombs", "env_timeout_s": 1.0})
    rows = lines(out / "samples.jsonl")
    reasons = " ".join(row["error"] or "" for row in rows)
    assert "the environment's process ended" in reasons or "within 1 s" in reasons
    assert sum(row["reward"] is not None for row in rows) > len(rows) // 3


@pytest.mark.feature(98)
@pytest.mark.slow
def test_a_hostile_reward_function_fails_some_samples_and_the_run_goes_on(tmp_path, monkeypatch, leaves_nothing):
    reward = {"function": "tests.support.hostile_rewards:reward", "timeout_s": 0.5, "workers": 2}
    out = finished(tmp_path, steps=1, reward=reward)
    rows, steps = lines(out / "samples.jsonl"), steps_of(out)
    assert sum(row["samples/failed"] for row in steps) == sum(row["reward"] is None for row in rows) > 0
    assert all(row["error"] for row in rows if row["reward"] is None)


@pytest.mark.feature(115)
def test_each_turn_is_credited_with_the_rewards_that_come_after_it_and_not_with_those_before(tmp_path):
    rollout = {
        "samples_per_prompt": 2,
        "max_new_tokens": 3,
        "env_path": str(SUPPORT / "tipping.py"),
        "env_isolated": False,
    }
    played = policy_job(
        tmp_path, "ppo", steps=1, algorithm={"name": "tests.support.tipping:Kept"}, rollout=rollout, reward={}
    )
    status = run_here(check_job(played, local=True))
    assert status.phase is Phase.FINISHED, status.cause
    (rows,) = importlib.import_module("tests.support.tipping").Kept.annotated
    for returns, mask in zip(rows.ragged("returns"), rows.ragged("action_mask"), strict=True):
        turns = np.cumsum(np.diff(mask.astype(int), prepend=0) == 1)[mask]
        np.testing.assert_allclose(returns[mask], turns == 1, atol=1e-6)
        assert turns.max() == 2


def problems(folder, **config):
    try:
        check_job(job(folder, **config), local=True)
    except InvalidJob as error:
        return {problem.where: problem.what for problem in error.errors}
    return {}


def test_an_environment_that_does_not_load_is_refused_before_the_start(tmp_path):
    def found(**rollout):
        return problems(tmp_path, rollout=rollout)

    assert (
        "did you mean 'hostile_rewards.py'"
        in found(env_path=str(SUPPORT / "hostle_rewards.py"))["config.rollout.env_path"]
    )
    besides = problems(tmp_path, rollout={"env_path": str(HOSTILE)}, reward={"model": "m", "thoughts": "scored"})
    assert "rollout.env_path scores" in besides["config.reward.model"]
    assert "rollout.env_path scores" in besides["config.reward.thoughts"]
    assert "did you mean 'Bombs'" in found(env_path=f"{HOSTILE}:Bomb")["config.rollout.env_path"]
    wrong = found(env_path=f"{HOSTILE}:Bombs", env_options={"sze": 2})
    assert "takes no arguments" in wrong["config.rollout.env_path"] or "argument" in wrong["config.rollout.env_path"]
    assert "take no options" in found(env_path=HOSTILE, env_options={"a": 1})["config.rollout.env_path"]
    assert found(env_options={"a": 1}) == {"config.rollout.env_options": "there is no env_path"}
    unused = {"env_isolated": False, "env_timeout_s": 9.0, "env_missing_state": "done", "env_failure_reward": 0.0}
    assert found(**unused, max_turns=3) == {
        f"config.rollout.{name}": "there is no env_path" for name in (*unused, "max_turns")
    }
    assert found(max_turns=1) == {}
    assert "is required" in problems(tmp_path, data=GAMES)["config.data.train"]
    assert "did you mean 'env_path'" in found(env_pth="x")["config.rollout.env_pth"]
    assert found(env_path=HOSTILE) == {}
    by_score = {"eval_every": 1, "keep": {"best": "eval/score"}}
    assert problems(tmp_path, **by_score)["config.keep.best"].startswith("no metric 'eval/score'")
    assert problems(tmp_path, **by_score, rollout={"env_path": HOSTILE}) == {}


def test_settings_of_the_reward_role_are_refused_beside_an_environment_but_not_a_recipes_own(tmp_path):
    given = {"function": "gsm8k", "timeout_s": 9.0, "workers": 1, "memory_mb": 900}
    found = problems(tmp_path, rollout={"env_path": HOSTILE}, reward=given)
    assert found == {f"config.reward.{name}": "is not used: rollout.env_path scores the samples" for name in given}
    of_failures = {"on_failure": "redraw", "max_redraws": 2, "give_up_after": 2}
    assert problems(tmp_path, rollout={"env_path": HOSTILE}, reward=of_failures) == {}
    write_inputs(tmp_path)
    teachers = {"teacher": {"model": write_teacher(tmp_path)}}
    for function in ({}, {"function": DistillationConfig("m").reward.function}, {"function": "gsm8k"}):
        made = policy_job(
            tmp_path, "distill", rollout=ROLLOUT | {"env_path": HOSTILE}, reward=function, teachers=teachers
        )
        places = []
        try:
            check_job(made, local=True)
        except InvalidJob as error:
            places = [problem.where for problem in error.errors]
        assert places == (["config.reward.function"] if "gsm8k" in function.values() else [])


def test_distillation_ends_with_the_cause_where_the_environment_fails_on_every_sample(tmp_path):
    write_inputs(tmp_path)
    (tmp_path / "away.py").write_text("def step(state, action, extra_info):\n    raise ConnectionError('it is down')\n")
    rollout = ROLLOUT | {"env_path": str(tmp_path / "away.py"), "env_isolated": False}
    teachers = {"teacher": {"model": write_teacher(tmp_path)}}
    made = policy_job(tmp_path, "distill", steps=1, rollout=rollout, reward={}, teachers=teachers)
    status = run_here(check_job(made, local=True))
    assert status.phase is Phase.FAILED
    cause = "step 1: the environment failed on all 16 samples, last with: step raised ConnectionError: it is down"
    assert cause in status.cause.message
