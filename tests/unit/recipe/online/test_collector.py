# SPDX-License-Identifier: Apache-2.0
"""Drawing the samples of a step, with rollouts that complete what the test says."""

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


class TrackedRollouts:
    """Workers that begin what they have room for and complete what ``dice`` says; they hold what they are told to."""

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
                complete = group.complete or group in ended
                begun = group.key in self.oldest
                self.tracker.update_status(group.key, begun, complete and begun, self.oldest.get(group.key, -1))
        self.tracker.assign_shares()

    def wait_for(self, count):
        for patience in range(100):
            self.draw(must_move=patience > 3)
            if (taken := self.tracker.take(count)) is not None:
                return taken
        raise AssertionError("waits for ever")


@given(
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(1, 3),
    st.booleans(),
    st.data(),
)
@settings(deadline=None)
def test_no_step_gets_a_group_that_is_too_stale_and_none_waits_for_ever(
    per_step, max_staleness, members, room, steps, rows, resumes, dice
):
    tracker = StalenessTracker(per_step, max_staleness, members, rows)
    rollouts = TrackedRollouts(tracker, dice, room)
    asked = 0
    for step in range(1, steps + 1):
        rollouts.version = step - dice.draw(st.integers(0, 1)) if step > 1 else 1  # a skipped step changes nothing
        rollouts.version = max(rollouts.version, *tracker._versions, 1)
        tracker.set_version(rollouts.version)
        kept = 0
        while kept < per_step:
            wanted = tracker.capacity(steps - step + 1, kept)
            assert wanted >= 0
            tracker.request(step, [(asked + more) % rows for more in range(wanted)])
            asked += wanted
            ids = [(group.prompt_id, group.retry) for group in tracker.open.values()]
            assert len(set(ids)) == len(ids)
            assert all(group.prompt_id % rows == group.row for group in tracker.open.values())
            taken = rollouts.wait_for(per_step - kept)
            assert len(taken) == per_step - kept
            assert max(tracker.staleness(group.min_version) for group in taken) <= max_staleness
            kept += sum(dice.draw(st.booleans()) for _ in taken[1:]) + 1  # the others are filtered out
        if resumes:
            saved = tracker.state_dict()
            tracker = StalenessTracker(per_step, max_staleness, members, rows)
            tracker.load_state_dict(saved)
            rollouts.tracker = tracker
    assert not tracker.open


def test_without_staleness_a_step_takes_all_that_it_has_asked_for_in_order():
    tracker = StalenessTracker(4, 0, 2, 100)
    tracker.set_version(3)
    tracker.request(7, [5, 9, 5, 2])
    assert [group.prompt_id for group in tracker.open.values()] == [5, 9, 105, 2]
    assert [[group.row for group in tracker.groups_of(member)] for member in (0, 1)] == [[5, 5], [9, 2]]
    for group in list(tracker.open.values())[:3]:
        tracker.update_status(group.key, True, True, 3)
    assert tracker.take(4) is None
    assert tracker.summary() == "ROLLOUT[0] has 2 of 2 groups, ROLLOUT[1] has 1 of 2 groups"
    tracker.update_status((2, 0, 7), True, True, 3)
    assert [group.prompt_id for group in tracker.take(4)] == [5, 9, 105, 2]
    assert tracker.capacity(1, collected=4) == 0


def test_a_slow_member_gives_what_it_has_not_begun_to_the_others():
    tracker = StalenessTracker(8, 0, 2, 100)
    tracker.request(1, range(8))
    assert [len(tracker.groups_of(member)) for member in (0, 1)] == [4, 4]
    for group in tracker.groups_of(0)[:1] + tracker.groups_of(1)[:1]:
        tracker.update_status(group.key, True, group.share == 1, 0)  # the fast one has completed its first
    tracker.assign_shares()
    assert [len([group for group in tracker.groups_of(member) if not group.complete]) for member in (0, 1)] == [4, 3]
    for group in tracker.groups_of(1):
        tracker.update_status(group.key, True, True, 0)
    tracker.assign_shares()
    assert len(tracker.groups_of(1)) >= 5


def test_what_has_to_go_now_is_waited_for():
    tracker = StalenessTracker(1, 1, 1, 100)
    tracker.set_version(1)
    tracker.request(1, [0, 1])
    tracker.update_status((0, 0, 1), True, False, 1)
    tracker.update_status((1, 0, 1), True, True, 1)
    assert [group.row for group in tracker.take(1)] == [1]
    tracker.set_version(2)
    tracker.request(2, [2])
    tracker.update_status((2, 0, 2), True, True, 2)
    assert tracker.take(1) is None, "the first group would be too stale in the next step"
    tracker.update_status((0, 0, 1), True, True, 1)
    assert [group.row for group in tracker.take(1)] == [0]


def test_a_run_that_went_back_counts_from_there():
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


def test_another_attempt_is_a_group_of_its_own_for_the_same_prompt():
    tracker = StalenessTracker(2, 0, 1, 100)
    tracker.request(4, [1, 2])
    for group in tracker.groups_of(0):
        tracker.update_status(group.key, True, True, 0)
    taken = tracker.take(2)
    tracker.retry(4, taken[:1])
    assert [group.key for group in tracker.open.values()] == [(1, 1, 4)]


def test_a_prompt_twice_in_a_step_is_sampled_anew_in_a_group_of_its_own():
    tracker = StalenessTracker(16, 0, 1, 8)
    tracker.request(1, [*range(8), *range(8)])
    ids = [group.prompt_id for group in tracker.open.values()]
    assert (ids, [group.row for group in tracker.open.values()]) == (list(range(16)), [*range(8), *range(8)])
    draws = {tuple(uniforms((0, 1), identity, sample, 4)) for identity in ids for sample in range(4)}
    assert len(draws) == 16 * 4


def test_what_a_step_has_taken_keeps_its_number_until_the_next_one():
    tracker = StalenessTracker(1, 0, 1, 8)
    tracker.request(1, [3])
    tracker.update_status((3, 0, 1), True, True, 0)
    tracker.take(1)
    tracker.request(1, [3])
    assert [group.prompt_id for group in tracker.open.values()] == [11]
    tracker.open.clear()
    tracker.begin_step()
    tracker.request(2, [3])
    assert [group.prompt_id for group in tracker.open.values()] == [3]


def test_a_run_that_goes_on_with_a_lower_bound_begins_what_is_open_step_by_step():
    before = StalenessTracker(2, 2, 1, 100)
    before.request(1, range(6))
    tracker = StalenessTracker(2, 0, 1, 100)
    tracker.load_state_dict(before.state_dict())
    for step, rows in ((1, [0, 1]), (2, [2, 3]), (3, [4, 5])):
        tracker.begin_step()
        tracker.set_version(step)
        assert tracker.capacity(9) <= 0
        assert [group.row for group in tracker.groups_of(0)] == rows
        for group in tracker.groups_of(0):
            tracker.update_status(group.key, True, True, step)
        assert [group.row for group in tracker.take(2)] == rows
    assert tracker.capacity(9) == 2


def test_a_trainer_that_goes_on_leaves_what_was_begun_where_it_is():
    before = StalenessTracker(2, 1, 2, 100)
    before.request(1, range(4))
    before.update_status((0, 0, 1), True, True, 0)
    before.update_status((2, 0, 1), True, False, 0)
    where = {group.row: group.share for group in before.open.values()}
    assert where[0] == where[2] == 0

    tracker = StalenessTracker(2, 1, 2, 100)
    tracker.load_state_dict(before.state_dict())
    tracker.assign_shares()
    assert {group.row: group.share for group in tracker.open.values() if group.started} == {0: 0, 2: 0}

    fewer = StalenessTracker(2, 1, 1, 100)
    fewer.load_state_dict(before.state_dict())
    fewer.assign_shares()
    assert {group.share for group in fewer.open.values()} == {0}


def test_with_fewer_members_each_has_its_shares_one_after_the_other_as_the_missing_ones_would():
    whole, fewer = StalenessTracker(6, 0, 3, 100), StalenessTracker(6, 0, 2, 100, shares=3)
    for tracker in (whole, fewer):
        tracker.request(1, range(6))
    shares = [whole.groups_of(member) for member in range(3)]
    rows = [[group.row for group in share] for share in shares]
    assert [[group.row for group in fewer.groups_of(member)] for member in (0, 1)] == rows[:2]
    for group in fewer.groups_of(0):
        fewer.update_status(group.key, True, True, 1)
    assert [group.row for group in fewer.groups_of(0)] == rows[0] + rows[2]
    for group in fewer.open.values():
        fewer.update_status(group.key, True, True, 1)
    assert [group.row for group in fewer.take(6)] == list(range(6))


def test_what_a_lost_member_had_begun_is_begun_elsewhere():
    before = StalenessTracker(2, 1, 2, 100)
    before.request(1, range(4))
    before.update_status((1, 0, 1), True, False, 0)
    assert before.open[1, 0, 1].share == 1

    tracker = StalenessTracker(2, 1, 1, 100)
    tracker.load_state_dict(before.state_dict())
    assert not tracker.open[1, 0, 1].started
