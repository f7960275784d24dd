# SPDX-License-Identifier: Apache-2.0
"""A step's samples: their division over workers, filtering, and warnings of their rewards."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrover.python.rl.algorithm.grpo import GRPO
from dlrover.python.rl.algorithm.losses.columns import find_masked
from dlrover.python.rl.algorithm.ppo import PPO
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.recipe.base.config import PolicyConfig, RolloutConfig
from dlrover.python.rl.recipe.online.batch import StepBatch
from dlrover.python.rl.recipe.reporting.rewards import StepWarnings, find_cut, uniform_share
from dlrover.python.rl.recipe.trainers.policy_trainer import PolicyTrainer
from dlrover.python.rl.trainer.port import Pending


def batch_of(*tokens):
    scored = Batch({"token_count": np.array(tokens, dtype=np.int64)})
    return StepBatch.from_rollouts(Pending([]), scored, np.arange(len(tokens)), len(tokens))


@pytest.mark.feature(63)
def test_tokens_are_balanced_within_each_update():
    # Balanced over the step as a whole, 40 + 40 and 70 + 10, one rank would have all of the first update.
    tokens, update = [40, 40, 70, 10], np.array([0, 0, 1, 1])
    parts = batch_of(*tokens).balance(2, update)
    loads = [[sum(tokens[row] for row in part if update[row] == number) for part in parts] for number in (0, 1)]
    assert [max(load) for load in loads] == [40, 70]


@given(st.lists(st.tuples(st.integers(1, 99), st.integers(-1, 3)), min_size=1, max_size=20), st.integers(1, 5))
def test_every_row_goes_to_one_rank(rows, ranks):
    tokens, update = zip(*rows, strict=True)
    parts = batch_of(*tokens).balance(ranks, np.array(update))
    assert len(parts) == ranks
    assert sorted(row for part in parts for row in part) == list(range(len(rows)))


@pytest.mark.feature(97)
def test_trajectory_of_several_rows_is_scored_as_a_whole():
    """Prompt 0 has samples worth 1 and 2, prompt 1 two that are worth 1."""
    scored = Batch(
        {
            "prompt_id": np.array([0, 0, 0, 1, 1, 1, 1]),
            "trajectory": np.array([0, 1, 1, 2, 2, 3, 3]),
            "action_tokens": np.ones(7, dtype=np.int64),
            "reward": np.array([1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]),
        }
    )
    filtered = StepBatch.from_rollouts(Pending([]), scored, np.arange(7), 2).drop_uniform_groups(scored.dense("reward"))
    assert filtered.rows == (0, 1, 2)
    assert filtered.groups == 1
    assert filtered.scored.dense("prompt_id").tolist() == [0, 0, 0]
    assert filtered.metrics() == {"groups/filtered": 1.0}


@pytest.mark.feature(97)
def test_order_of_rewarded_turns_makes_no_difference():
    turns = np.array([0.1, 0.2, 0.3, 0.3, 0.2, 0.1])
    scored = Batch(
        {
            "prompt_id": np.zeros(6, dtype=np.int64),
            "trajectory": np.repeat([0, 1], 3),
            "action_tokens": np.ones(6, dtype=np.int64),
            "reward": turns,
        }
    )
    assert sum(turns[:3]) != sum(turns[3:])
    assert StepBatch.from_rollouts(Pending([]), scored, np.arange(6), 1).drop_uniform_groups(turns).groups == 0


def test_parts_of_a_step_keep_their_rows_and_filtered_rows():
    parts = []
    for ids, rewards in (([1, 1, 2, 2], [1.0, 1.0, 0.0, 1.0]), ([3, 3, 4, 4, 5, 5], [1.0, 0.0, 0.0, 0.0, 1.0, 0.0])):
        rows = samples_of(rewards).with_columns(prompt_id=np.array(ids))
        batch = StepBatch.from_rollouts(Pending([]), rows, np.arange(len(ids)), len(ids) // 2)
        parts.append(batch.drop_uniform_groups(np.array(rewards)))
    whole = StepBatch.concat(parts)
    assert (whole.rows, whole.filtered_rows, whole.groups, whole.total) == ((2, 3, 4, 5, 8, 9), (0, 1, 6, 7), 3, 10)
    assert whole.all_numbers == (2, 3, 4, 5, 8, 9, 0, 1, 6, 7)
    assert whole.all_rows.dense("prompt_id").tolist() == [2, 2, 3, 3, 5, 5, 1, 1, 4, 4]
    fewer = whole.drop_uniform_groups(np.array([1.0, 0.0, 1.0, 0.0, 0.5, 0.5]))
    assert (fewer.rows, fewer.filtered_rows) == ((2, 3, 4, 5), (0, 1, 6, 7, 8, 9))
    assert fewer.all_rows.dense("prompt_id").tolist() == [2, 2, 3, 3, 1, 1, 4, 4, 5, 5]
    assert fewer.metrics() == {"groups/filtered": 3.0}


def test_staleness_of_a_sample_is_its_stalest_rows():
    scored = Batch(
        {
            "trajectory": np.array([0, 0, 1]),
            "action_tokens": np.ones(3, dtype=np.int64),
            "staleness": np.array([1, 2, 0]),
        }
    )
    metrics = StepBatch.from_rollouts(Pending([]), scored, np.arange(3), 1).metrics()
    assert metrics == {"samples/staleness_mean": 1.0, "samples/staleness_max": 2.0}


def samples_of(*rewards_by_prompt):
    rewards = [reward for group in rewards_by_prompt for reward in group]
    ids = [number for number, group in enumerate(rewards_by_prompt) for _ in group]
    return Batch(
        {
            "prompt_id": np.array(ids),
            "sample_index": np.arange(len(ids)),
            "retry": np.zeros(len(ids), dtype=np.int64),
            "turns": np.ones(len(ids), dtype=np.int64),
            "trajectory": np.arange(len(ids)),
            "reward": np.array(rewards, dtype=np.float64),
            "action_tokens": np.ones(len(ids), dtype=np.int64),
            "token_count": np.ones(len(ids), dtype=np.int64),
            "finished": np.ones(len(ids), dtype=np.bool_),
        }
    )


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
    rows = Batch(
        {
            "prompt_id": np.array([0, 0, 0, 0]),
            "trajectory": np.array([7, 7, 8, 8]),
            "finished": np.array([False, True, True, False]),
            "action_tokens": np.ones(4, dtype=np.int64),
        }
    )
    assert find_cut(rows).tolist() == [False, False, True, True]


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_truncated_samples_are_masked_if_asked(mask_truncated):
    rows = samples_of([1.0, 0.0]).with_columns(finished=np.array([True, False]))
    cfg = PolicyConfig(model="m", rollout=RolloutConfig(mask_truncated=mask_truncated))
    failures = SimpleNamespace(update=lambda step, rows: None)
    trainer = SimpleNamespace(cfg=cfg, reward_failures=failures, warnings=StepWarnings(True, 64))
    batch = StepBatch.from_rollouts(Pending([]), rows, np.arange(2), 1)
    train_rows = PolicyTrainer.score(trainer, 1, batch).train_rows
    assert find_masked(train_rows).tolist() == [False, mask_truncated]
