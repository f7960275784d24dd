# SPDX-License-Identifier: Apache-2.0
"""Drawing the samples of a step, and the groups under way: how many, on which member, and none too stale."""

import json
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrover.python.rl.common.errors import ConfigError, DataError, ReplayDiverged, WeightSyncError
from dlrover.python.rl.data.batch import Batch
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.engine.rollout.sampling import uniforms
from dlrover.python.rl.recipe.base.config import PromptData, RewardConfig, RolloutConfig
from dlrover.python.rl.recipe.grpo import GRPOConfig
from dlrover.python.rl.recipe.online.collector import SampleCollector, StalenessTracker
from dlrover.python.rl.trainer.port import Pending, Ref
from dlrover.python.rl.trainer.steps import dump_state, load_state

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
        self.groups = [{} for _ in speeds]
        self.sample, self.fetch = Method(self._sample), Method(self._fetch)
        self.generate, self.receive_weights = Method(None), Method(lambda ticket: [WeightStamp(self.version, "aa")])

    def __len__(self):
        return len(self.speeds)

    def _sample(self, wanted, sampling, seed, enough, patience_s):
        assert sampling.samples_per_prompt == SAMPLES
        self.rounds += 1
        assert self.rounds < 2000, "waits for ever"
        return [self._one(*each) for each in zip(range(len(self)), wanted, enough, strict=True)]

    def _one(self, member, wanted, enough):
        keys = keys_of(wanted)
        groups = self.groups[member] = {key: group for key, group in self.groups[member].items() if key in keys}
        for key in keys:
            if key not in groups and sum(not group["complete"] for group in groups.values()) < self.room:
                groups[key] = {"min_version": self.version, "complete": False}
        for group in [group for group in groups.values() if not group["complete"]][: self.speeds[member]]:
            group["complete"] = True
        rows = [groups.get(key, {"min_version": -1, "complete": False}) for key in keys]
        columns = {name: np.array([key[at] for key in keys], dtype=np.int64) for at, name in enumerate(KEY)}
        columns["started"] = np.array([key in groups for key in keys], dtype=np.bool_)
        columns["complete"] = np.array([row["complete"] for row in rows], dtype=np.bool_)
        return Batch(columns | {"min_version": np.array([row["min_version"] for row in rows], dtype=np.int64)})

    def _fetch(self, wanted):
        return Pending([Ref(None, self._rows(member, groups)) for member, groups in enumerate(wanted)])

    def _rows(self, member, groups):
        assert all(self.groups[member][key]["complete"] for key in keys_of(groups))
        return [
            (*key, index, self.groups[member][key]["min_version"], prompt)
            for key, prompt in zip(keys_of(groups), groups.objects("prompt"), strict=True)
            for index in range(SAMPLES)
        ]


KEY = ("prompt_id", "created_step", "retry")


def keys_of(groups):
    return list(zip(*(groups.dense(name).tolist() for name in KEY), strict=True))


def scored_by(reward):
    def score(shard):
        rows = [row for ref in shard.value for row in ref.token]
        numbers = {name: [row[at] for row in rows] for name, at in (("prompt_id", 0), ("sample_index", 3))}
        numbers |= {"min_version": [row[4] for row in rows], "action_tokens": [1] * len(rows)}
        columns = {name: np.array(values, dtype=np.int64) for name, values in numbers.items()}
        return [Batch(columns | {"reward": np.array([reward(*row[:4]) for row in rows], dtype=np.float64)})]

    return score


class Prompts:
    rows = 100

    def __init__(self):
        self.count = 0

    def next_rows(self, count):
        self.count += count
        return [number % self.rows for number in range(self.count - count, self.count)]

    def select(self, rows):
        count = len(rows)
        return Batch({"prompt": [f"p{row}" for row in rows], "answer": [None] * count, "extra_info": [{}] * count})


class Rewards(list):
    def __init__(self, reward):
        super().__init__([None])
        self.score = Method(scored_by(reward))


def by_index(*key):
    return float(key[3])


def make_collector(rollouts, reward=by_index, steps=50, groups=4, on_failure="drop_sample", **rollout):
    ticket = SimpleNamespace(table=SimpleNamespace(nbytes=1000))
    actor = SimpleNamespace(published_stamp=lambda: [WeightStamp(rollouts.version, "aa")])
    actor.publish_weights = lambda: [SimpleNamespace(result=lambda: ticket)]
    trainer = SimpleNamespace(RG_ROLLOUT=rollouts, RG_REWARD=Rewards(reward), RG_ACTOR=actor, state={})
    roles = {"rollout": RolloutConfig(samples_per_prompt=SAMPLES, **rollout)}
    roles["reward"] = RewardConfig(on_failure=on_failure)
    config = GRPOConfig("model", PromptData("problems.jsonl"), steps=steps, prompts_per_step=groups, **roles)
    return SampleCollector(trainer, config, Prompts())


def step_of(collector, rollouts, step):
    rollouts.version = step
    collector.sync_weights()
    return collector.collect(step)


def rows_of(batch):
    """Prompt and index of the samples of a step."""
    everything = [row for ref in batch.rollouts for row in ref.token]
    return [(everything[row][0], everything[row][3]) for row in batch.rows]


def all_samples(*prompts):
    return [(prompt, index) for prompt in prompts for index in range(SAMPLES)]


@pytest.mark.parametrize("method", ["sample", "fetch"])
def test_collect_with_a_kept_answer_for_other_groups_diverges(method):
    """A trainer that repeats a step gets the answers that workers have kept of the calls before."""
    rollouts, answers = Rollouts([4, 4]), []
    answer = getattr(rollouts, method).call

    def answer_again(*arguments):
        if not answers:
            answers.append(answer(*arguments))
        return answers[0]

    setattr(rollouts, method, Method(answer_again))
    collector = make_collector(rollouts)
    step_of(collector, rollouts, 1)
    with pytest.raises(ReplayDiverged, match="requests different groups: when rollouts run ahead"):
        step_of(collector, rollouts, 2)


@pytest.mark.parametrize(
    ("speeds", "room", "rounds"), [([4], 8, 1), ([1], 8, 4), ([2, 2], 8, 1), ([1, 3], 1, 2), ([1, 2, 1], 1, 2)]
)
def test_rows_come_in_the_order_of_the_prompts(speeds, room, rounds):
    rollouts = Rollouts(speeds, room)
    batch = step_of(make_collector(rollouts), rollouts, 1)
    scored = list(zip(batch.scored.dense("prompt_id"), batch.scored.dense("sample_index"), strict=True))
    assert rows_of(batch) == scored == all_samples(0, 1, 2, 3)
    assert (batch.groups, rollouts.rounds) == (4, rounds)


@pytest.mark.feature(95)
def test_slow_rollout_leaves_most_groups_to_the_fast_one():
    rollouts = Rollouts([1, 4], room=4)
    batch = step_of(make_collector(rollouts, groups=40, max_staleness=1), rollouts, 1)
    assert len(batch.rollouts[1].token) / len(batch.rows) > 0.6


def test_group_without_staleness_stays_on_its_member():
    """The last bits of its log-probs depend on what else is in the worker's batch."""
    rollouts = Rollouts([1, 4], room=4)
    batch = step_of(make_collector(rollouts, groups=40), rollouts, 1)
    assert [len(part.token) for part in batch.rollouts] == [40, 40]
    assert rows_of(batch) == all_samples(*range(40))


def test_failed_group_is_drawn_again():
    def reward(prompt_id, created_step, retry, index):
        return float("nan") if prompt_id == 2 and index == 1 and not retry else float(index)

    rollouts = Rollouts([9])
    batch = step_of(make_collector(rollouts, reward, on_failure="redraw"), rollouts, 1)
    assert rows_of(batch)[-SAMPLES:] == all_samples(2)
    assert batch.scored.dense("retry").tolist() == [0] * 8 + [1] * 2
    assert batch.groups == 4


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_group_failing_each_time_is_drawn_as_often_as_allowed(max_staleness):
    def reward(prompt_id, created_step, retry, index):
        return float("nan") if prompt_id % 10 == 3 else float(index)

    rollouts = Rollouts([99], room=99)
    collector = make_collector(rollouts, reward, on_failure="redraw", max_staleness=max_staleness, steps=20)
    seen = set()
    for step in range(1, 21):
        batch = step_of(collector, rollouts, step)
        assert batch.groups == 4
        seen |= set(zip(batch.scored.dense("prompt_id").tolist(), batch.scored.dense("retry").tolist(), strict=True))
    assert {key for key in seen if key[1]} == {(prompt_id, 1) for prompt_id in range(3, 80, 10)}
    assert {prompt_id for prompt_id, _ in seen} == set(range(80))
    assert not collector._tracker.open


def uniform(*without):
    return lambda prompt_id, created_step, retry, index: 1.0 if prompt_id in without else float(index)


@pytest.mark.feature(97)
def test_groups_of_uniform_rewards_are_left_out():
    rollouts = Rollouts([9])
    batch = step_of(make_collector(rollouts, uniform(0, 2), dynamic_filtering="drop"), rollouts, 1)
    assert rows_of(batch) == all_samples(1, 3)
    assert batch.metrics()["groups/filtered"] == 2
    nothing = step_of(make_collector(rollouts, uniform(*range(8)), dynamic_filtering="drop"), rollouts, 1)
    assert (nothing.rows, len(nothing.scored), nothing.groups) == ((), 0, 0)


@pytest.mark.feature(97)
def test_groups_of_uniform_rewards_are_replaced():
    rollouts = Rollouts([9])
    batch = step_of(make_collector(rollouts, uniform(0, 2, 4), dynamic_filtering="refill"), rollouts, 1)
    assert rows_of(batch) == all_samples(1, 3, 5, 6)
    assert batch.metrics() == {"groups/filtered": 3, "groups/surplus": 1}
    collector = make_collector(rollouts, uniform(*range(100)), dynamic_filtering="refill", max_refills=2)
    assert step_of(collector, rollouts, 1).metrics()["groups/filtered"] == collector.prompts.count == 12


EVERY_OTHER = uniform(*range(0, 1000, 2))


@pytest.mark.feature(97)
@pytest.mark.parametrize("groups", [4, 32])
def test_share_of_uniform_groups_spares_further_rounds(groups):
    """Half of the groups are filtered out. A request for the missing ones alone takes a round for each half."""
    rollouts, rounds = Rollouts([99], room=99), []
    collector = make_collector(rollouts, EVERY_OTHER, groups=groups, dynamic_filtering="refill")
    collector.prompts.rows = 1000
    for step in range(1, 8):
        batch = step_of(collector, rollouts, step)
        assert (batch.groups, len(batch.rows)) == (groups, groups * SAMPLES)
        rounds.append(rollouts.rounds - sum(rounds))
    assert rounds == [2, *[1] * 6]


def scattered(prompt_id, created_step, retry, index):
    """Return equal rewards for two prompts out of three, in no order."""
    return 1.0 if prompt_id * 7919 % 101 % 3 else float(index)


def refilling(rollouts, max_staleness=0, **more):
    more |= {"dynamic_filtering": "refill", "max_refills": 9, "max_staleness": max_staleness}
    collector = make_collector(rollouts, scattered, **more)
    collector.prompts.rows = 10_000
    return collector


@pytest.mark.feature(97)
@pytest.mark.parametrize("speeds", [[1], [9], [2, 2], [1, 9, 3]])
def test_refilled_step_is_independent_of_time_and_resumption(speeds):
    """Each step of the second run has a new trainer with the state of the one before."""
    whole, resumed_run = Rollouts([99], room=99), Rollouts(speeds)
    first, second = refilling(whole), refilling(resumed_run)
    for step in range(1, 13):
        batch, again = step_of(first, whole, step), step_of(second, resumed_run, step)
        assert again.scored.dense("prompt_id").tolist() == batch.scored.dense("prompt_id").tolist()
        assert (again.metrics(), again.surplus) == (batch.metrics(), batch.surplus)
        state = json.dumps(dump_state(second._trainer.state))
        prompts, second = second.prompts, refilling(resumed_run)
        second.prompts = prompts
        load_state(second._trainer.state, json.loads(state))
    assert second.prompts.count == first.prompts.count


@pytest.mark.feature(97)
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
@pytest.mark.parametrize(("speeds", "room"), [([9], 8), ([3, 5], 3), ([1, 99], 99)])
def test_refill_neither_loses_nor_repeats_a_prompt(speeds, room, max_staleness):
    rollouts, trained, filtered, unused = Rollouts(speeds, room), [], [], 0
    collector = refilling(rollouts, max_staleness, steps=40)
    for step in range(1, 41):
        batch = step_of(collector, rollouts, step)
        assert batch.groups == 4
        trained += batch.scored.dense("prompt_id")[::SAMPLES].tolist()
        removed = {prompt_id for rows in batch.filtered for prompt_id in rows.dense("prompt_id").tolist()}
        filtered += removed.difference(batch.surplus)
        unused += batch.metrics().get("groups/surplus", 0)
        done, waiting = trained + filtered, ids_in(collector._tracker)
        assert sorted(done + waiting) == list(range(collector.prompts.count))
        assert list(batch.surplus) == ([] if max_staleness else waiting), "they are the first of the next step"
    assert unused < len(trained) / 4
    assert unused or max_staleness


def test_rollouts_that_run_ahead_stop_at_enough_groups():
    """The next steps train on the groups that a step has generated but does not need."""
    rollouts = Rollouts([99], room=99)
    collector = make_collector(rollouts, EVERY_OTHER, dynamic_filtering="refill", max_staleness=2)
    collector.prompts.rows = 1000
    for step in range(1, 8):
        batch = step_of(collector, rollouts, step)
        assert batch.scored.dense("prompt_id")[::SAMPLES].tolist() == list(range(8 * step - 7, 8 * step, 2))
        assert "groups/surplus" not in batch.metrics()
        assert len(collector._tracker.open) + 8 * step == collector.prompts.count
    assert len(collector._tracker.open) >= 4 * 2 - 1


def test_rollouts_run_ahead_within_the_allowed_staleness():
    rollouts = Rollouts([1, 2], room=3)
    collector = make_collector(rollouts, max_staleness=2, steps=9)
    stale = []
    for step in range(1, 10):
        batch = step_of(collector, rollouts, step)
        stale += (step - batch.scored.dense("min_version")).tolist()
        assert batch.groups == 4
        assert batch.metrics()["samples/staleness_max"] == max(stale[-8:])
    assert max(stale) == 2
    assert collector.prompts.count == 36
    assert not collector._tracker.open


def test_samples_of_other_versions_are_refused():
    rollouts = Rollouts([9])
    collector = make_collector(rollouts, max_staleness=1)
    rollouts.version = 5
    collector.sync_weights()
    collector.check_versions(4, Batch({"min_version": np.array([5])}))
    with pytest.raises(WeightSyncError, match="4: samples are from weights of version 6; allowed is version 5, just"):
        collector.check_versions(4, Batch({"min_version": np.array([6])}), 1)
    for rollouts.version in (6, 7):
        collector.sync_weights()
    collector.check_versions(5, Batch({"min_version": np.array([6, 7])}), 1)
    with pytest.raises(WeightSyncError, match="version 5; allowed is version 7, just synced, or up to 1 before it"):
        collector.check_versions(5, Batch({"min_version": np.array([5, 7])}), 1)


def test_rollout_with_other_weights_than_published_is_named():
    collector = make_collector(rollouts := Rollouts([9, 9]))
    rollouts.receive_weights = Method(lambda ticket: [WeightStamp(0, "aa"), WeightStamp(0, "bb")])
    with pytest.raises(WeightSyncError, match=r"ROLLOUT\[1\] received weights of version 0 \(bb\), not of .* \(aa\)"):
        collector.sync_weights()


@pytest.mark.parametrize(
    ("over_long", "wrong", "is_refused"),
    [("drop", [], False), ("refuse", [], True), ("drop", [ConfigError("p.jsonl:7", "has no text")], True)],
)
def test_too_long_prompts_are_dropped_if_allowed(over_long, wrong, is_refused):
    rollouts, dropped = Rollouts([9, 9]), []
    too_long = [ConfigError(f"p.jsonl:{line}", "9 tokens, 5 at most") for line in (2, 4)]
    rollouts.check_prompts = Method(lambda *_: [([], too_long[:1]), (wrong, too_long[1:])])
    collector = make_collector(rollouts)
    data = PromptData("problems.jsonl", max_prompt_tokens=5, over_long=over_long)
    collector._cfg = replace(collector._cfg, data=data)
    collector.prompts.places, collector.prompts.drop = Batch({"place": ["p.jsonl:1"] * 9}), dropped.extend
    with pytest.raises(DataError) if is_refused else nullcontext():
        collector.check_prompts()
    assert dropped == ([] if is_refused else too_long)


# -- groups under way --------------------------------------------------------------------------------------------------


class TrackedRollouts:
    """Workers that begin what they have room for and complete what ``dice`` says; they hold the groups they get."""

    def __init__(self, tracker, dice, room):
        self.tracker, self.dice, self.room, self.version = tracker, dice, room, 0
        self.oldest = {}

    def draw(self, must_move):
        for member in range(self.tracker.members):
            groups = self.tracker.groups_of(member)
            self.oldest = {key: old for key, old in self.oldest.items() if key in self.tracker.open}
            running = [group for group in groups if group.started and not group.complete]
            for group in [group for group in groups if not group.started][: self.room - len(running)]:
                self.oldest[group.key] = self.version
                running.append(group)
            ended = [group for group in running if must_move or self.dice.draw(st.booleans())]
            for group in groups:
                complete, started = group.complete or group in ended, group.key in self.oldest
                self.tracker.update_status(group.key, started, complete and started, self.oldest.get(group.key, -1))
        self.tracker.assign_shares()

    def wait_for(self, count):
        for patience in range(100):
            self.draw(must_move=patience > 3)
            if (taken := self.tracker.take(count)) is not None:
                return taken
        raise AssertionError("waits for ever")


def complete(tracker, *groups, version=0):
    for group in groups:
        tracker.update_status(group.key, True, True, version)


def rows_in(groups):
    return [group.row for group in groups]


def ids_in(tracker):
    return [group.prompt_id for group in tracker.open.values()]


def resumed(before, *arguments):
    """A tracker with the state of ``before``."""
    tracker = StalenessTracker(*arguments)
    tracker.load_state_dict(before.state_dict())
    return tracker


def test_running_group_continues_when_fewer_are_wanted():
    tracker = StalenessTracker(2, 1, 1, 100)
    tracker.request(1, range(tracker.capacity(9, 4, 4)))
    tracker.update_status((5, 0, 1), True, False, 0)
    assert tracker.capacity(9, 1, 4) == 0
    assert rows_in(tracker.groups_of(0)) == [0, 1, 2, 5]


@given(
    st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 5),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.data(),
)
@settings(deadline=None)
def test_no_step_gets_a_too_stale_group_or_waits_for_ever(sizes, room, steps, resumes, is_dynamic, dice):
    per_step, max_staleness, _, rows = sizes
    tracker = StalenessTracker(*sizes)
    rollouts, requested, uniform = TrackedRollouts(tracker, dice, room), 0, 0
    for step in range(1, steps + 1):
        rollouts.version = step - dice.draw(st.integers(0, 1)) if step > 1 else 1  # a skipped step changes nothing
        rollouts.version = max(rollouts.version, *tracker._versions, 1)
        tracker.set_version(rollouts.version)
        missing, surplus = per_step, []
        while missing:
            wanted = missing + (dice.draw(st.integers(0, 3)) if is_dynamic else 0)
            expected = per_step + (dice.draw(st.integers(0, 9)) if is_dynamic else 0)
            count = tracker.capacity(steps - step + 1, wanted, expected)
            bound = per_step * min(max_staleness + 1, steps - step + 1)
            assert len(tracker.open) + count == bound - per_step + missing or is_dynamic
            tracker.request(step, [(requested + more) % rows for more in range(count)])
            requested += count
            ids = [(group.prompt_id, group.retry) for group in tracker.open.values()]
            assert len(set(ids)) == len(ids)
            assert all(group.prompt_id % rows == group.row for group in tracker.open.values())
            count = missing if max_staleness else wanted
            taken = rollouts.wait_for(count)
            assert len(taken) == count
            assert max(tracker.staleness(group.min_version) for group in taken) <= max_staleness
            varied = [group.row for group in taken if group is taken[0] or dice.draw(st.booleans())]
            surplus, uniform = varied[missing:], uniform + len(taken) - len(varied)
            missing = max(missing - len(varied), 0)
        assert tracker.end_step(step, surplus) == 0 or is_dynamic
        assert requested == step * per_step + uniform + len(tracker.open)
        if resumes:
            tracker = rollouts.tracker = resumed(tracker, *sizes)
    assert not tracker.open or is_dynamic


def test_step_without_staleness_takes_all_its_groups_in_order():
    tracker = StalenessTracker(4, 0, 2, 100)
    tracker.set_version(3)
    tracker.request(7, [5, 9, 5, 2])
    assert ids_in(tracker) == [5, 9, 105, 2]
    assert [rows_in(tracker.groups_of(member)) for member in (0, 1)] == [[5, 5], [9, 2]]
    complete(tracker, *list(tracker.open.values())[:3], version=3)
    assert tracker.take(4) is None
    assert tracker.summary() == "ROLLOUT[0] has 2 of 2 groups, ROLLOUT[1] has 1 of 2 groups"
    complete(tracker, tracker.open[2, 0, 7], version=3)
    assert [group.prompt_id for group in tracker.take(4)] == [5, 9, 105, 2]
    assert (tracker.capacity(1, 0, 4), tracker.capacity(2, 4, 4)) == (0, 4)


def test_slow_member_gives_groups_not_begun_to_others():
    tracker = StalenessTracker(8, 0, 2, 100)
    tracker.request(1, range(8))
    assert [len(tracker.groups_of(member)) for member in (0, 1)] == [4, 4]
    for group in tracker.groups_of(0)[:1] + tracker.groups_of(1)[:1]:
        tracker.update_status(group.key, True, group.share == 1, 0)  # the fast one has completed its first
    tracker.assign_shares()
    assert [len([group for group in tracker.groups_of(member) if not group.complete]) for member in (0, 1)] == [4, 3]
    complete(tracker, *tracker.groups_of(1))
    tracker.assign_shares()
    assert len(tracker.groups_of(1)) >= 5


def test_group_at_the_limit_of_staleness_is_waited_for():
    tracker = StalenessTracker(1, 1, 1, 100)
    tracker.set_version(1)
    tracker.request(1, [0, 1])
    tracker.update_status((0, 0, 1), True, False, 1)
    complete(tracker, tracker.open[1, 0, 1], version=1)
    assert rows_in(tracker.take(1)) == [1]
    tracker.set_version(2)
    tracker.request(2, [2])
    complete(tracker, tracker.open[2, 0, 2], version=2)
    assert tracker.take(1) is None, "the first group would be too stale in the next step"
    complete(tracker, tracker.open[0, 0, 1], version=1)
    assert rows_in(tracker.take(1)) == [0]


def test_staleness_counts_from_where_a_run_went_back():
    tracker = StalenessTracker(1, 2, 1, 100)
    for version in (1, 2, 3):
        tracker.set_version(version)
    assert [tracker.staleness(version) for version in (3, 2, 1, -1)] == [0, 1, 2, 0]
    tracker.set_version(2)
    assert [tracker.staleness(version) for version in (2, 1)] == [0, 1]
    for version in (3, 4, 5, 6):
        tracker.set_version(version)
    assert tracker.staleness(1) == 3
    assert tracker.staleness(2) > 2


def test_retry_is_another_group_of_the_same_prompt():
    tracker = StalenessTracker(2, 0, 1, 100)
    tracker.request(4, [1, 2])
    complete(tracker, *tracker.groups_of(0))
    tracker.retry(4, tracker.take(2)[:1])
    assert list(tracker.open) == [(1, 1, 4)]


def test_prompt_twice_in_a_step_has_other_samples():
    tracker = StalenessTracker(16, 0, 1, 8)
    tracker.request(1, [*range(8), *range(8)])
    assert (ids_in(tracker), rows_in(tracker.open.values())) == (list(range(16)), [*range(8), *range(8)])
    draws = {tuple(uniforms((0, 1), identity, sample, 4)) for identity in ids_in(tracker) for sample in range(4)}
    assert len(draws) == 16 * 4


def test_taken_group_keeps_its_id_until_the_next_step():
    tracker = StalenessTracker(1, 0, 1, 8)
    tracker.request(1, [3])
    complete(tracker, *tracker.open.values())
    tracker.take(1)
    tracker.request(1, [3])
    assert ids_in(tracker) == [11]
    tracker.open.clear()
    assert tracker.end_step(1, [3]) == 0
    assert ids_in(tracker) == [3]


def test_resumed_run_with_a_lower_bound_begins_groups_by_step():
    before = StalenessTracker(2, 2, 1, 100)
    before.request(1, range(6))
    before.update_status((5, 0, 1), True, False, 0)
    tracker = resumed(before, 2, 0, 1, 100)
    for step, rows in ((1, [0, 1]), (2, [2, 3]), (3, [4, 5])):
        tracker.set_version(step)
        assert tracker.capacity(9, 2, 2) == 0
        assert rows_in(tracker.groups_of(0)) == rows
        complete(tracker, *tracker.groups_of(0), version=step)
        assert rows_in(tracker.take(2)) == rows
    assert tracker.capacity(9, 2, 2) == 2


def test_next_trainer_leaves_begun_groups_on_their_members():
    before = StalenessTracker(2, 1, 2, 100)
    before.request(1, range(4))
    complete(before, before.open[0, 0, 1])
    before.update_status((2, 0, 1), True, False, 0)
    assert before.open[0, 0, 1].share == before.open[2, 0, 1].share == 0
    tracker, fewer = resumed(before, 2, 1, 2, 100), resumed(before, 2, 1, 1, 100)
    for each in (tracker, fewer):
        each.assign_shares()
    assert {group.row: group.share for group in tracker.open.values() if group.started} == {0: 0, 2: 0}
    assert {group.share for group in fewer.open.values()} == {0}


def test_fewer_members_have_all_shares_one_after_the_other():
    whole, fewer = StalenessTracker(6, 0, 3, 100), StalenessTracker(6, 0, 2, 100, shares=3)
    for tracker in (whole, fewer):
        tracker.request(1, range(6))
    shares = [rows_in(whole.groups_of(member)) for member in range(3)]
    assert [rows_in(fewer.groups_of(member)) for member in (0, 1)] == shares[:2]
    complete(fewer, *fewer.groups_of(0), version=1)
    assert rows_in(fewer.groups_of(0)) == shares[0] + shares[2]
    complete(fewer, *fewer.open.values(), version=1)
    assert rows_in(fewer.take(6)) == list(range(6))


def test_group_begun_by_a_lost_member_is_begun_elsewhere():
    before = StalenessTracker(2, 1, 2, 100)
    before.request(1, range(4))
    before.update_status((1, 0, 1), True, False, 0)
    assert before.open[1, 0, 1].share == 1
    assert not resumed(before, 2, 1, 1, 100).open[1, 0, 1].started
