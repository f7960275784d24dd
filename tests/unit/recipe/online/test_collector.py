# SPDX-License-Identifier: Apache-2.0
"""Drawing the samples of a step, with rollouts that complete what the test says."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dlrover.python.rl.common.errors import ConfigError, DataError, ReplayDiverged, WeightSyncError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.recipe.base.config import PromptData, RewardConfig, RolloutConfig
from dlrover.python.rl.recipe.grpo import GRPOConfig
from dlrover.python.rl.recipe.online.collector import SampleCollector
from dlrover.python.rl.trainer.port import Pending, Ref

SAMPLES = 2


class Method:
    """A method of a role group."""

    def __init__(self, call):
        self.call = call

    def options(self, **_):
        return self

    def __call__(self, *arguments):
        return self.call(*arguments)


class Rollouts:
    """``speeds[worker]`` groups are completed by that worker in each call; ``room[worker]`` are begun at a time."""

    full_size = 0

    def __init__(self, speeds, room=8):
        self.speeds, self.room, self.version, self.rounds = speeds, room, 0, 0
        self.held = [{} for _ in speeds]
        self.sample, self.fetch = Method(self._sample), Method(self._fetch)
        self.generate, self.receive_weights = Method(None), Method(lambda ticket: [WeightStamp(self.version, "aa")])

    def __len__(self):
        return len(self.speeds)

    def _sample(self, wanted, sampling, seed, enough, patience_s):
        assert sampling.samples_per_prompt == SAMPLES
        self.rounds += 1
        return [self._one(*each) for each in zip(range(len(self)), wanted, enough, strict=True)]

    def _one(self, member, wanted, enough):
        keys = [tuple(key) for key in zip(*(wanted.dense(name).tolist() for name in KEY), strict=True)]
        held = self.held[member] = {key: have for key, have in self.held[member].items() if key in keys}
        for key in keys:
            if key not in held and sum(not have["complete"] for have in held.values()) < self.room:
                held[key] = {"min_version": self.version, "complete": False, "by": member}
        for have in [have for have in held.values() if not have["complete"]][: self.speeds[member]]:
            have["complete"] = True
        rows = [held.get(key, {"min_version": -1, "complete": False}) for key in keys]
        return Batch(
            {
                **{name: np.array([key[at] for key in keys], dtype=np.int64) for at, name in enumerate(KEY)},
                "started": np.array([key in held for key in keys], dtype=np.bool_),
                "complete": np.array([row["complete"] for row in rows], dtype=np.bool_),
                "min_version": np.array([row["min_version"] for row in rows], dtype=np.int64),
            }
        )

    def _fetch(self, wanted):
        return Pending([Ref(None, self._rows(member, groups)) for member, groups in enumerate(wanted)])

    def _rows(self, member, groups):
        rows = []
        keys = zip(*(groups.dense(name).tolist() for name in KEY), strict=True)
        for key, prompt in zip(keys, groups.objects("prompt"), strict=True):
            assert self.held[member][key]["complete"]
            rows += [(*key, index, self.held[member][key]["min_version"], prompt) for index in range(SAMPLES)]
        return rows


KEY = ("prompt_id", "created_step", "retry")


def scored_by(reward):
    def score(shard):
        rows = [row for ref in shard.value for row in ref.token]
        return [
            Batch(
                {
                    "prompt_id": np.array([row[0] for row in rows], dtype=np.int64),
                    "sample_index": np.array([row[3] for row in rows], dtype=np.int64),
                    "min_version": np.array([row[4] for row in rows], dtype=np.int64),
                    "action_tokens": np.ones(len(rows), dtype=np.int64),
                    "reward": np.array([reward(*row[:4]) for row in rows], dtype=np.float64),
                }
            )
        ]

    return score


class Prompts:
    rows = 100

    def __init__(self):
        self.drawn = 0

    def next_rows(self, count):
        self.drawn += count
        return [number % self.rows for number in range(self.drawn - count, self.drawn)]

    def select(self, rows):
        return Batch(
            {"prompt": [f"p{row}" for row in rows], "answer": [None] * len(rows), "extra_info": [{}] * len(rows)}
        )


class Rewards:
    def __init__(self, reward):
        self.score = Method(scored_by(reward))

    def __len__(self):
        return 1


def make_collector(
    rollouts, reward=lambda *key: float(key[3]), steps=50, groups=4, on_failure="drop_sample", **rollout
):
    def publish():
        ticket = SimpleNamespace(table=SimpleNamespace(nbytes=1000))
        return [SimpleNamespace(result=lambda: ticket)]

    trainer = SimpleNamespace(
        RG_ROLLOUT=rollouts,
        RG_REWARD=Rewards(reward),
        RG_ACTOR=SimpleNamespace(
            publish_weights=publish, published_stamp=lambda: [WeightStamp(rollouts.version, "aa")]
        ),
        state={},
    )
    config = GRPOConfig(
        "model",
        PromptData("problems.jsonl"),
        steps=steps,
        prompts_per_step=groups,
        rollout=RolloutConfig(samples_per_prompt=SAMPLES, **rollout),
        reward=RewardConfig(on_failure=on_failure),
    )
    return SampleCollector(trainer, config, Prompts())


def step_of(collector, rollouts, step):
    rollouts.version = step
    collector.sync_weights()
    return collector.collect(step)


def rows_of(drawn):
    everything = [row for ref in drawn.rollouts for row in ref.token]
    return [(everything[row][0], everything[row][3]) for row in drawn.rows]


@pytest.mark.parametrize("method", ["sample", "fetch"])
def test_collect_with_a_kept_answer_for_other_groups_diverges(method):
    """A trainer that repeats a step gets the answers that workers have kept of the calls before."""
    rollouts = Rollouts([4, 4])
    answers = []
    kept = Method(lambda *arguments: answers[0] if answers else answers.append(answer(*arguments)) or answers[0])
    answer = getattr(rollouts, method).call
    setattr(rollouts, method, kept)
    collector = make_collector(rollouts)
    step_of(collector, rollouts, 1)
    with pytest.raises(ReplayDiverged, match="requests other groups than before"):
        step_of(collector, rollouts, 2)


def test_rows_come_in_the_order_of_the_prompts_whoever_has_drawn_them_and_however_fast():
    expected = [(prompt, index) for prompt in range(4) for index in range(SAMPLES)]
    for speeds, room in (([4], 8), ([1], 8), ([2, 2], 8), ([1, 3], 1), ([1, 2, 1], 1)):
        rollouts = Rollouts(speeds, room)
        drawn = step_of(make_collector(rollouts), rollouts, 1)
        assert rows_of(drawn) == expected
        assert list(zip(drawn.scored.dense("prompt_id"), drawn.scored.dense("sample_index"), strict=True)) == expected
        assert drawn.groups == 4


@pytest.mark.feature(95)
def test_a_slow_rollout_leaves_most_of_the_groups_to_the_fast_one():
    rollouts = Rollouts([1, 4], room=4)
    drawn = step_of(make_collector(rollouts, groups=40, max_staleness=1), rollouts, 1)
    by_fast = len(drawn.rollouts[1].token)
    assert by_fast / len(drawn.rows) > 0.6


def test_without_staleness_a_group_stays_on_its_member_however_long_that_takes_to_start():
    """The last bits of its log-probs depend on what else is in the worker's batch."""
    rollouts = Rollouts([1, 4], room=4)
    drawn = step_of(make_collector(rollouts, groups=40), rollouts, 1)
    assert [len(part.token) for part in drawn.rollouts] == [40, 40]
    assert rows_of(drawn) == [(prompt, index) for prompt in range(40) for index in range(SAMPLES)]


def test_all_is_had_in_one_round_where_the_rollouts_are_done_in_time():
    rollouts = Rollouts([99, 99], room=99)
    step_of(make_collector(rollouts), rollouts, 1)
    assert rollouts.rounds == 1


def test_a_failed_group_is_drawn_again():
    def reward(prompt_id, created_step, retry, index):
        return float("nan") if prompt_id == 2 and index == 1 and not retry else float(index)

    rollouts = Rollouts([9])
    drawn = step_of(make_collector(rollouts, reward, on_failure="redraw"), rollouts, 1)
    assert rows_of(drawn)[-SAMPLES:] == [(2, 0), (2, 1)]
    assert drawn.scored.dense("retry").tolist() == [0] * 8 + [1] * 2
    assert drawn.groups == 4


def test_a_group_that_fails_beside_one_that_was_drawn_again_is_drawn_again_too():
    def reward(prompt_id, created_step, retry, index):
        return float("nan") if prompt_id in (2, 5) and index == 1 and not retry else float(index)

    rollouts = Rollouts([9])
    collector = make_collector(rollouts, reward, on_failure="redraw", max_staleness=1)
    seen = set()
    for step in range(1, 5):
        scored = step_of(collector, rollouts, step).scored
        seen |= set(zip(scored.dense("prompt_id").tolist(), scored.dense("retry").tolist(), strict=True))
    assert {(2, 1), (5, 1)} <= seen


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_a_group_that_always_fails_is_drawn_again_as_often_as_allowed_and_no_more(max_staleness):
    def reward(prompt_id, created_step, retry, index):
        return float("nan") if prompt_id % 10 == 3 else float(index)

    rollouts = Rollouts([99], room=99)
    collector = make_collector(rollouts, reward, on_failure="redraw", max_staleness=max_staleness, steps=20)
    seen = set()
    for step in range(1, 21):
        drawn = step_of(collector, rollouts, step)
        assert drawn.groups == 4
        seen |= set(zip(drawn.scored.dense("prompt_id").tolist(), drawn.scored.dense("retry").tolist(), strict=True))
    assert {key for key in seen if key[1]} == {(prompt_id, 1) for prompt_id in range(3, 80, 10)}
    assert {prompt_id for prompt_id, _ in seen} == set(range(80))
    assert not collector._tracker.open


def uniform(*without):
    return lambda prompt_id, created_step, retry, index: 1.0 if prompt_id in without else float(index)


@pytest.mark.feature(97)
def test_groups_whose_rewards_are_alike_are_left_out():
    rollouts = Rollouts([9])
    drawn = step_of(make_collector(rollouts, uniform(0, 2), dynamic_filtering="drop"), rollouts, 1)
    assert rows_of(drawn) == [(1, 0), (1, 1), (3, 0), (3, 1)]
    assert drawn.metrics()["groups/filtered"] == 2
    nothing = step_of(make_collector(rollouts, uniform(*range(8)), dynamic_filtering="drop"), rollouts, 1)
    assert (nothing.rows, len(nothing.scored), nothing.groups) == ((), 0, 0)


@pytest.mark.feature(97)
def test_others_are_drawn_in_their_place():
    rollouts = Rollouts([9])
    drawn = step_of(make_collector(rollouts, uniform(0, 2, 4), dynamic_filtering="refill"), rollouts, 1)
    assert rows_of(drawn) == [(1, 0), (1, 1), (3, 0), (3, 1), (5, 0), (5, 1), (6, 0), (6, 1)]
    assert drawn.metrics()["groups/filtered"] == 3
    collector = make_collector(rollouts, uniform(*range(100)), dynamic_filtering="refill", max_refills=2)
    assert step_of(collector, rollouts, 1).metrics()["groups/filtered"] == 12
    assert collector.prompts.drawn == 12


def test_rollouts_run_ahead_and_no_sample_is_staler_than_allowed():
    rollouts = Rollouts([1, 2], room=3)
    collector = make_collector(rollouts, max_staleness=2, steps=9)
    stale = []
    for step in range(1, 10):
        drawn = step_of(collector, rollouts, step)
        stale += (step - drawn.scored.dense("min_version")).tolist()
        assert drawn.groups == 4
        assert drawn.metrics()["samples/staleness_max"] == max(stale[-8:])
    assert max(stale) == 2
    assert collector.prompts.drawn == 36
    assert not collector._tracker.open


def test_samples_that_are_too_stale_are_refused():
    rollouts = Rollouts([9])
    collector = make_collector(rollouts, max_staleness=1)
    rollouts.version = 5
    collector.sync_weights()
    collector.check_versions(4, Batch({"min_version": np.array([5])}))
    with pytest.raises(WeightSyncError, match="step 4: samples were generated by weights of version 6, not 5"):
        collector.check_versions(4, Batch({"min_version": np.array([6])}), 1)
    for rollouts.version in (6, 7):
        collector.sync_weights()
    collector.check_versions(5, Batch({"min_version": np.array([6, 7])}), 1)
    with pytest.raises(WeightSyncError, match="version 5, not 7, which was just synced or the 1 served before"):
        collector.check_versions(5, Batch({"min_version": np.array([5, 7])}), 1)


def test_a_rollout_that_holds_other_weights_than_those_published_is_named():
    rollouts = Rollouts([9, 9])
    collector = make_collector(rollouts)
    rollouts.receive_weights = Method(lambda ticket: [WeightStamp(0, "aa"), WeightStamp(0, "bb")])
    with pytest.raises(WeightSyncError, match=r"ROLLOUT\[1\] received weights of version 0 \(bb\), not of .* \(aa\)"):
        collector.sync_weights()


@pytest.mark.parametrize(
    ("over_long", "wrong", "is_refused"),
    [("drop", [], False), ("refuse", [], True), ("drop", [ConfigError("p.jsonl:7", "has no text")], True)],
)
def test_prompts_that_are_too_long_are_dropped_if_allowed(over_long, wrong, is_refused):
    rollouts, dropped = Rollouts([9, 9]), []
    too_long = [ConfigError(f"p.jsonl:{line}", "9 tokens, 5 at most") for line in (2, 4)]
    parts = [([], too_long[:1]), (wrong, too_long[1:])]
    rollouts.check_prompts = Method(lambda *_: parts)
    collector = make_collector(rollouts)
    data = PromptData("problems.jsonl", max_prompt_tokens=5, over_long=over_long)
    collector._cfg = replace(collector._cfg, data=data)
    collector.prompts.places, collector.prompts.drop = Batch({"place": ["p.jsonl:1"] * 9}), dropped.extend
    with pytest.raises(DataError) if is_refused else nullcontext():
        collector.check_prompts()
    assert dropped == ([] if is_refused else too_long)
