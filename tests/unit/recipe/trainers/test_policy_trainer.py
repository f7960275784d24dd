# SPDX-License-Identifier: Apache-2.0
"""A step of a policy trainer: its samples over workers, filtering, warnings, and decisions about updates and models."""

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.losses.columns import find_masked
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.common.errors import DataError, EngineError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.base.config import PolicyConfig, RolloutConfig
from dlrover.python.rl.recipe.online.batch import SampleLog, StepBatch
from dlrover.python.rl.recipe.ppo import CriticConfig, PPOConfig, PPOTrainer
from dlrover.python.rl.recipe.reporting.rewards import StepWarnings, find_cut, uniform_share
from dlrover.python.rl.recipe.trainers import policy_trainer
from dlrover.python.rl.recipe.trainers.policy_trainer import PolicyTrainer
from dlrover.python.rl.trainer.plan import plan_of
from dlrover.python.rl.trainer.port import Pending

NAN = float("nan")


# -- decisions about updates and models --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "weights", "calls"),
    [
        ((NAN, NAN), (1, 1), ["samples"]),
        ((NAN, 1.0), (0, 0), ["aux", "samples"]),
        ((NAN, 1.0), (0, 1), ["aux", "begin", "update", "end"]),
    ],
)
def test_step_without_a_weighted_sample_updates_nothing(rewards, weights, calls):
    done, weighted = [], Batch({"weight": np.float32(weights)})

    @contextmanager
    def writing(*_):
        done.append("begin")
        yield
        done.append("end")

    trainer = SimpleNamespace(
        run_log=SimpleNamespace(write_refused=None),
        offending_samples=lambda batch: [],
        compute_aux_outputs=lambda batch: done.append("aux"),
        add_token_columns=lambda batch, aux: batch.train_rows,
        algorithm=SimpleNamespace(annotate=lambda rows: weighted),
        update=lambda *_: done.append("update") or {"loss": 1.0},
        plan_updates=lambda rows: (rows, None),
        sample_log=SimpleNamespace(
            write_step=lambda *_: done.append("samples"),
            writing_step=writing,
            write_failed_step=lambda *_: nullcontext(),
        ),
        policy_ranks=lambda step: range(1),
    )
    trainer.update_and_write = partial(PolicyTrainer.update_and_write, trainer)
    metrics = PolicyTrainer.train(trainer, 3, step_of(samples_of(rewards)))
    assert done == calls and metrics == ({"loss": 1.0} if "update" in calls else {})


@pytest.mark.parametrize("fails_too", [False, True], ids=["written", "not written"])
def test_samples_are_written_before_an_error_of_the_step(fails_too, caplog):
    done = []

    def refuse(batch):
        raise DataError("no log-probs")

    def write(step, batch):
        done.append("samples")
        if fails_too:
            raise OSError("no space")

    log = object.__new__(SampleLog)
    log.write_step = write
    trainer = SimpleNamespace(
        run_log=SimpleNamespace(write_refused=None),
        offending_samples=lambda batch: [],
        compute_aux_outputs=refuse,
        sample_log=log,
    )
    with pytest.raises(DataError, match="no log-probs"):
        PolicyTrainer.train(trainer, 3, step_of(samples_of([0.0, 1.0])))
    assert done == ["samples"]
    assert ("the samples of step 3 could not be written: no space" in caplog.text) == fails_too


@pytest.mark.parametrize(("step", "ranks"), [(2, []), (3, [0, 2])])
def test_policy_is_trained_by_its_replicas_after_the_warm_up(step, ranks):
    class Actors(SimpleNamespace):
        def __len__(self):
            return 4

    trainer = object.__new__(PPOTrainer)
    vars(trainer).update(cfg=PPOConfig(model="m", critic=CriticConfig(warmup_steps=2)), algorithm=PPO())
    vars(trainer).update(RG_ACTOR=Actors(data_parallel_size=2))
    assert list(trainer.policy_ranks(step)) == ranks


@pytest.mark.parametrize(
    ("evaluation", "is_offered"),
    [
        ({"eval/reward": 0.5}, True),
        ({"eval/a/reward": 0.5, "eval/b/reward": NAN}, False),
        ({"eval/reward": NAN}, False),
    ],
)
@pytest.mark.parametrize("step", [4, 5])
def test_best_model_has_an_evaluation_of_all_sets(monkeypatch, evaluation, is_offered, step):
    calls = []
    monkeypatch.setattr(policy_trainer.rewards, "step_metrics", lambda scores: evaluation)
    collector = SimpleNamespace(synced_bytes=7, sync_weights=lambda: calls.append("sync"))
    collector.evaluate, collector.collect_scores = lambda step: calls.append("evaluate"), lambda answers: answers
    saver = SimpleNamespace(update=lambda *_: calls.append("offer"), save_step=lambda step: calls.append("save"))
    trainer = SimpleNamespace(
        cfg=PolicyConfig(model="m", eval_every=2),
        reward_failures=SimpleNamespace(metrics=dict),
        collector=collector,
        evaluate=lambda step: calls.append("evaluate"),
        sandbox={},
        warnings=StepWarnings(True, 64),
        model_saver=saver,
        report=lambda step, metrics, *counts: calls.append(counts),
    )
    PolicyTrainer.record(trainer, step, step_of(samples_of([0.0, 1.0]), 2), {})
    evaluated = ["sync", "evaluate", *(["offer"] if is_offered else [])] if step == 4 else []
    assert calls == [*evaluated, "save", (2, 2, 2)]


@pytest.mark.parametrize(
    ("marks", "is_refused"), [({"actor": "a", "critic": "a"}, False), ({"actor": "a", "critic": "b"}, True)]
)
def test_role_with_another_vocabulary_is_refused(marks, is_refused):
    trainer = SimpleNamespace(group=lambda role: SimpleNamespace(vocabulary=lambda: [marks[role]]))
    with pytest.raises(EngineError, match="'critic' has a different vocabulary") if is_refused else nullcontext():
        PolicyTrainer.check_vocabularies(trainer, ["critic"])


@pytest.mark.parametrize(
    ("name", "engine", "precision", "max_staleness", "corrects"),
    [
        ("gspo", "torch", "fp32", 0, False),
        ("gspo", "torch", "fp32", 1, True),
        ("grpo", "torch", "fp32", 1, False),
        ("grpo", "vllm", "fp32", 0, True),
        ("grpo", "torch", "bf16", 0, True),
    ],
)
def test_correction_is_on_where_rollouts_differ(name, engine, precision, max_staleness, corrects):
    config = {"engine": {"rollout": engine, "precision": precision}, "rollout": {"max_staleness": max_staleness}}
    assert bool(plan_of(PolicyTrainer).algorithm_defaults(config, name)) == corrects


@pytest.mark.parametrize(
    ("name", "logged"), [("loss", "loss"), ("entropy", "policy/entropy"), ("critic/loss", "critic/loss"), ("lr", "lr")]
)
def test_metric_of_an_update_has_one_name(name, logged):
    assert policy_trainer._log_name(name) == logged


def test_later_samples_are_cut_where_the_last_step_ended(tmp_path):
    calls, log = [], SimpleNamespace()
    rollouts = SimpleNamespace(cut_samples=lambda *place: calls.append(place) or [40])
    trainer = SimpleNamespace(RG_ROLLOUT=rollouts, job_dir=tmp_path, run_log=log, results_dir=Path(tmp_path))
    samples = SampleLog(trainer, None)
    samples.load_state_dict({"end": 60})
    samples.remove_steps(5)
    assert calls == [(tmp_path / "samples.jsonl", 5, 60)]
    assert samples.state_dict() == {"end": 40}


def samples_of(*rewards_by_prompt, **columns):
    rewards = [reward for group in rewards_by_prompt for reward in group]
    ids, count = [number for number, group in enumerate(rewards_by_prompt) for _ in group], len(rewards)
    numbers = {"prompt_id": ids, "sample_index": range(count), "trajectory": range(count), "retry": [0] * count}
    numbers |= dict.fromkeys(("turns", "action_tokens", "token_count"), [1] * count) | columns
    rows = Batch({name: np.array(values, dtype=np.int64) for name, values in numbers.items()})
    return rows.with_columns(reward=np.array(rewards, dtype=np.float64), finished=np.ones(count, dtype=np.bool_))


def step_of(rows, groups=1):
    batch = StepBatch.from_rollouts(Pending([]), rows, np.arange(len(rows)), groups)
    return replace(batch, train_rows=rows)


def parts_of(tokens, update, ranks):
    rows = Batch({"token_count": np.array(tokens, dtype=np.int64)})
    return step_of(rows, len(tokens)).balance(ranks, np.array(update))


# -- samples over workers, and filtering -------------------------------------------------------------------------------


@pytest.mark.feature(63)
def test_tokens_are_balanced_within_each_update():
    # Balanced over the step as a whole, 40 + 40 and 70 + 10, one rank would have all of the first update.
    tokens, update = [40, 40, 70, 10], [0, 0, 1, 1]
    parts = parts_of(tokens, update, 2)
    loads = [[sum(tokens[row] for row in part if update[row] == number) for part in parts] for number in (0, 1)]
    assert [max(load) for load in loads] == [40, 70]


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(-1, 3)), min_size=1, max_size=20), st.integers(1, 5))
def test_every_row_goes_to_one_rank(rows, ranks):
    parts = parts_of(*zip(*rows, strict=True), ranks)
    assert len(parts) == ranks
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))


@pytest.mark.feature(97)
def test_trajectory_of_several_rows_is_scored_as_a_whole():
    """Prompt 0 has samples worth 1 and 2, prompt 1 two that are worth 1."""
    rows = samples_of([1.0, 1.0, 1.0], [0.0, 1.0, 0.0, 1.0], trajectory=[0, 1, 1, 2, 2, 3, 3])
    filtered = step_of(rows, 2).drop_uniform_groups(rows.dense("reward"))
    assert (filtered.rows, filtered.groups) == ((0, 1, 2), 1)
    assert filtered.scored.dense("prompt_id").tolist() == [0, 0, 0]
    assert filtered.metrics()["groups/filtered"] == 1.0


@pytest.mark.feature(97)
def test_order_of_rewarded_turns_makes_no_difference():
    turns = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1]
    assert sum(turns[:3]) != sum(turns[3:])
    rows = samples_of(turns, trajectory=[0, 0, 0, 1, 1, 1])
    assert step_of(rows).drop_uniform_groups(np.array(turns)).groups == 0


def test_parts_of_a_step_keep_their_rows_and_filtered_rows():
    parts = []
    for ids, rewards in (([1, 1, 2, 2], [1.0, 1.0, 0.0, 1.0]), ([3, 3, 4, 4, 5, 5], [1.0, 0.0, 0.0, 0.0, 1.0, 0.0])):
        batch = step_of(samples_of(rewards, prompt_id=ids), len(ids) // 2)
        parts.append(batch.drop_uniform_groups(np.array(rewards)))
    whole = StepBatch.concat(parts)
    assert (whole.rows, whole.filtered_rows, whole.groups, whole.total) == ((2, 3, 4, 5, 8, 9), (0, 1, 6, 7), 3, 10)
    assert whole.all_numbers == (2, 3, 4, 5, 8, 9, 0, 1, 6, 7)
    assert whole.all_rows.dense("prompt_id").tolist() == [2, 2, 3, 3, 5, 5, 1, 1, 4, 4]
    fewer = whole.drop_uniform_groups(np.array([1.0, 0.0, 1.0, 0.0, 0.5, 0.5]))
    assert (fewer.rows, fewer.filtered_rows) == ((2, 3, 4, 5), (0, 1, 6, 7, 8, 9))
    assert fewer.all_rows.dense("prompt_id").tolist() == [2, 2, 3, 3, 1, 1, 4, 4, 5, 5]
    assert fewer.metrics()["groups/filtered"] == 3.0


@pytest.mark.feature(97)
def test_groups_beyond_the_wanted_ones_are_surplus():
    rows = samples_of([1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0, 0.0], trajectory=[*range(9), 9, 9])
    varied = step_of(rows, 5).drop_uniform_groups(rows.dense("reward"))
    assert varied.keep_groups(4) is varied
    batch = varied.keep_groups(2)
    assert (batch.rows, batch.groups, batch.surplus) == ((0, 1, 4, 5), 2, (3, 4))
    assert batch.all_numbers == (0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 10)
    assert batch.all_rows.dense("prompt_id").tolist() == [0, 0, 2, 2, 1, 1, 3, 3, 4, 4, 4]
    assert replace(batch, late=3).metrics() == {"groups/filtered": 1.0, "groups/surplus": 5.0}
    assert StepBatch.concat([varied, batch]).surplus == (3, 4)


def test_staleness_of_a_sample_is_its_stalest_rows():
    rows = samples_of([0.0] * 3, trajectory=[0, 0, 1], staleness=[1, 2, 0])
    metrics = step_of(rows).metrics()
    assert (metrics["samples/staleness_mean"], metrics["samples/staleness_max"]) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("groups", "share"),
    [
        (([1.0, 1.0], [0.0, 0.0]), 1.0),
        (([1.0, 0.0], [0.0, 0.0]), 0.5),
        (([1.0, np.nan, 1.0], [0.0, 1.0]), 0.5),
        (([1.0], [0.0]), 0.0),
    ],
)
def test_groups_of_equal_rewards_have_no_signal(groups, share):
    assert uniform_share(samples_of(*groups)) == share


def test_truncated_completions_are_warned_of_once_in_a_row(caplog):
    warnings = StepWarnings(compares_samples=True, max_new_tokens=64)
    for step, share in enumerate([0.5, 0.75, 1.0, 0.25, 0.51], start=1):
        warnings.note_completions(step, {"completions/truncated": share})
    assert [record.args[:2] for record in caplog.records] == [(2, 75.0), (5, 51.0)]


def test_steps_without_signal_are_warned_of_ever_less(caplog):
    uniform, varied = samples_of([1.0, 1.0]), samples_of([1.0, 0.0])
    for algorithm, warned in ((GRPO(), [2, 3, 6]), (PPO(), [])):
        warnings = StepWarnings(algorithm.compares_samples, 64)
        caplog.clear()
        for step, rows in enumerate([varied, uniform, uniform, varied, uniform, uniform], start=1):
            warnings.note_rewards(step, rows)
        assert [record.args[0] for record in caplog.records] == warned


def test_trained_tokens_count_weighted_samples_in_each_epoch():
    trainer = SimpleNamespace(cfg=PolicyConfig(model="m", updates_per_step=2, epochs=3), needed_outputs=[])
    rows = Batch({"weight": np.float32([1, 0, 1]), "token_count": np.array([5, 70, 7])})
    PolicyTrainer.plan_updates(trainer, rows)
    assert trainer.trained_tokens == 3 * (5 + 7)


def test_sample_with_a_finished_last_turn_is_not_cut():
    rows = samples_of([0.0] * 4, trajectory=[7, 7, 8, 8])
    rows = rows.with_columns(finished=np.array([False, True, True, False]))
    assert find_cut(rows).tolist() == [False, False, True, True]


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_truncated_samples_are_masked_if_asked(mask_truncated):
    rows = samples_of([1.0, 0.0]).with_columns(finished=np.array([True, False]))
    cfg = PolicyConfig(model="m", rollout=RolloutConfig(mask_truncated=mask_truncated))
    trainer = SimpleNamespace(cfg=cfg, count_failures=lambda *_: None, warnings=StepWarnings(True, 64))
    assert find_masked(PolicyTrainer.score(trainer, 1, step_of(rows)).train_rows).tolist() == [False, mask_truncated]
