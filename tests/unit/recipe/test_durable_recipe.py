# SPDX-License-Identifier: Apache-2.0
"""The recipes as durable loops: the same bits every time, and what a step does about samples that fail."""

import json

import pytest

from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.job import check_job, run_here
from tests.chaos.job import tiny_job

TIMES = ("time/", "speed/", "memory/")


def run(folder, steps=3, **config):
    job = tiny_job(folder, steps, **config)
    status = run_here(check_job(job, local=True))
    return job.job_dir, status


def finished(folder, steps=3, **config):
    out, status = run(folder, steps, **config)
    assert status.phase is Phase.FINISHED, status.cause
    return out


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps_of(out):
    return [row for row in lines(out / "metrics.jsonl") if row["step"]]


def untimed(out):
    return [{name: row[name] for name in row if not name.startswith(TIMES)} for row in steps_of(out)]


@pytest.mark.parametrize("reference", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_runs_of_a_job_end_in_the_same_bits(tmp_path, reference):
    first, second = (finished(tmp_path / name, reference=reference, eval_every=2) for name in ("one", "two"))
    assert untimed(first) == untimed(second)
    for file in ("samples.jsonl", "held_out.jsonl", "model/model.safetensors"):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file


def test_each_step_samples_from_the_weights_of_the_step_before(tmp_path):
    rows = lines(finished(tmp_path) / "samples.jsonl")
    assert {(row["step"], row["version"], row["retry"]) for row in rows} == {(1, 0, 0), (2, 1, 0), (3, 2, 0)}


def flaky(folder, monkeypatch, body):
    (folder / "flaky_reward.py").write_text(f"def reward(completion, answer, extra_info):\n{body}")
    monkeypatch.syspath_prepend(str(folder))
    return {"function": "flaky_reward:reward", "timeout_s": 5.0, "workers": 1}


ONE_OF_SEVEN = """\
    if sum(completion.encode()) % 7 == 0:
        raise ValueError("this one is poisoned")
    return len(completion) / 8
"""


def groups(rows):
    """Step and prompt to the attempts drawn, and the rewards of each."""
    found = {}
    for row in rows:
        drawn = found.setdefault((row["step"], row["prompt_id"]), {})
        drawn.setdefault(row["retry"], []).append((row["completion"], row["reward"]))
    return found


@pytest.mark.slow
def test_groups_with_a_failed_sample_are_drawn_again_with_other_seeds(tmp_path, monkeypatch):
    reward = flaky(tmp_path, monkeypatch, ONE_OF_SEVEN) | {"on_failure": "redraw", "max_redraws": 2}
    out = finished(tmp_path, reward=reward, reference=True)
    rows, metrics = lines(out / "samples.jsonl"), steps_of(out)
    drawn = groups(rows)
    assert max(len(attempts) for attempts in drawn.values()) == 3
    for attempts in drawn.values():
        for retry, samples in attempts.items():
            failed = any(reward is None for _, reward in samples)
            assert failed == (retry + 1 in attempts) or retry == 2
        assert len({tuple(text for text, _ in samples) for samples in attempts.values()}) == len(attempts)
    for row in metrics:
        step = {place: attempts for place, attempts in drawn.items() if place[0] == row["step"]}
        again = sum(len(samples) for attempts in step.values() for at, samples in attempts.items() if at)
        lost = sum(all(any(r is None for _, r in one) for one in attempts.values()) for attempts in step.values())
        assert (row["samples/redrawn"], row["groups/dropped"]) == (again, lost)
        assert row["samples/failed"] == sum(
            r is None for attempts in step.values() for one in attempts.values() for _, r in one
        )


@pytest.mark.parametrize(
    "on_failure", [*(pytest.param(rule, marks=pytest.mark.slow) for rule in ("drop_sample", "drop_group")), "redraw"]
)
def test_failed_samples_change_nothing_about_two_runs_being_alike(tmp_path, monkeypatch, on_failure):
    reward = flaky(tmp_path, monkeypatch, ONE_OF_SEVEN) | {"on_failure": on_failure}
    first, second = (finished(tmp_path / name, reward=reward, steps=2) for name in ("one", "two"))
    assert untimed(first) == untimed(second)
    assert untimed(first)[0]["samples/failed"] > 0
    assert (first / "model/model.safetensors").read_bytes() == (second / "model/model.safetensors").read_bytes()


AWAY = """\
    with open(__file__ + ".calls", "ab") as calls:
        calls.write(b".")
        number = calls.tell()
    if 4 + 64 < number <= 4 + 2 * 64:
        raise ConnectionError("the judge is away")
    return len(completion) / 8
"""
"""In the second step; four calls come before the first, for what is held out."""


@pytest.mark.parametrize("filtering", ["off", "drop"])
def test_a_step_whose_judge_was_away_is_skipped_logged_and_counted(tmp_path, monkeypatch, filtering):
    rollout = {"samples_per_prompt": 8, "max_new_tokens": 12, "dynamic_filtering": filtering}
    out = finished(tmp_path, reward=flaky(tmp_path, monkeypatch, AWAY), rollout=rollout)
    first, second, third = steps_of(out)
    assert (second["samples/failed"], second["samples/steps_without_reward"], second["reward/mean"]) == (64, 1, None)
    assert "loss" not in second
    for row in (first, third):
        assert {"loss", "reward/mean"} <= set(row)
        assert row["samples/failed"] == 0
        assert "samples/steps_without_reward" not in row
    versions = {(row["step"], row["version"]) for row in lines(out / "samples.jsonl")}
    assert versions == {(1, 0), (2, 1), (3, 1)}, "the second step changed nothing"


def test_a_run_that_fails_has_the_curve_of_its_steps(tmp_path, monkeypatch):
    out, status = run(tmp_path, reward=flaky(tmp_path, monkeypatch, AWAY) | {"give_up_after": 1})
    assert status.phase is Phase.FAILED
    assert [row["step"] for row in steps_of(out)] == [1]
    assert (out / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_evaluation_whose_judge_was_away_says_nothing_of_the_model(tmp_path, monkeypatch):
    body = AWAY.replace("4 + 64 < number <= 4 + 2 * 64", "4 + 64 + 4 + 64 < number <= 4 + 64 + 4 + 64 + 4")
    body = body.replace("len(completion) / 8", "1.0 if len(completion) > 3 else 0.0")
    keep = {"best": "eval/accuracy", "patience": 1}
    out = finished(tmp_path, reward=flaky(tmp_path, monkeypatch, body), steps=2, eval_every=1, keep=keep)
    first, second = steps_of(out)
    assert "eval/accuracy" in first
    assert "eval/accuracy" not in second
    assert (second["eval/failed"], second["eval/reward"], second["samples/failed"]) == (4, None, 0)
    assert json.loads((out / "summary.json").read_text())["best/step"] == 1


@pytest.mark.slow
def test_a_judge_that_stays_away_ends_the_run(tmp_path, monkeypatch):
    reward = flaky(tmp_path, monkeypatch, AWAY.replace("<= 4 + 2 * 64", "< 999")) | {"give_up_after": 2}
    out, status = run(tmp_path, reward=reward)
    assert status.phase is Phase.FAILED
    cause = status.cause.message + status.cause.detail
    assert "step 3: the reward function failed on all 64 samples, last with: flaky_reward:reward raised" in cause
    assert "the judge is away; it was the last of 2 such steps in a row (reward.give_up_after)" in cause
    assert [row["step"] for row in steps_of(out)] == [1, 2]


def test_a_step_of_which_every_group_is_lost_ends_the_run(tmp_path, monkeypatch):
    reward = flaky(tmp_path, monkeypatch, "    raise ValueError('always')\n") | {"on_failure": "redraw"}
    out, status = run(tmp_path, reward=reward)
    assert status.phase is Phase.FAILED
    assert "step 1: the reward function failed on all 128 samples" in status.cause.message + status.cause.detail
    assert [row["retry"] for row in lines(out / "samples.jsonl")] == [0] * 64 + [1] * 64
