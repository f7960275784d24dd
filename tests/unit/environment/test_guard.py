# SPDX-License-Identifier: Apache-2.0
"""Faults of environments stay with the sample they struck."""

import asyncio
import time

import pytest

from dlrover.python.rl.environment.core.functions import load_environment
from dlrover.python.rl.environment.core.turns import Guard
from dlrover.python.rl.environment.sandbox.environment_process import IsolatedEnvironment
from tests.support import user_environments

SCRIPT = user_environments.__file__
WORDS = {
    "raise": "step raised RuntimeError: out of order",
    "none": "step returned None",
    "fallthrough": "step returned no 'next_state', and is not done",
    "nan": "step returned nan as 'reward'",
    "misspelt": "step returned an unknown field 'next_sate'",
    "huge": "next_state has 10000000 characters, 4000000 at most",
    "sleep": "step gave no answer within 1 s",
}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def play(guard, actions, max_turns=4, **info):
    """One episode of these actions."""
    episode = await guard.reset("prompt ", info)
    try:
        for action in actions[:max_turns]:
            if episode.state is None:
                break
            await guard.step(episode, action)
    finally:
        await guard.close(episode)
    return episode


async def group(guard, plays):
    episodes = await asyncio.gather(*(play(guard, actions) for actions in plays))
    await guard.shutdown()
    return episodes


@pytest.fixture(params=["here", "isolated"])
def environment(request):
    user_environments.log.clear()
    return (
        load_environment("tests.support.user_environments") if request.param == "here" else IsolatedEnvironment(SCRIPT)
    )


@pytest.mark.feature(91)
def test_every_fault_marks_its_sample_and_the_group_finishes(environment):
    guard = Guard(environment, timeout_s=1.0)
    faults = dict(WORDS)
    if isinstance(environment, IsolatedEnvironment):  # Only a process can be rid of a call that hears no cancellation.
        faults["deaf"] = "step gave no answer within 1 s"
    began = time.monotonic()
    episodes = run(group(guard, [[fault] for fault in faults] + [["go ", "done"]] * 4))
    assert time.monotonic() - began < 20
    for episode, expected in zip(episodes, faults.values(), strict=False):
        assert expected in episode.failure
        assert (episode.done, episode.turns, episode.state) == (False, 0, None)
    for episode in episodes[len(faults) :]:
        assert (episode.failure, episode.done, episode.turns) == (None, True, 2)
        assert (episode.reward, episode.score) == (2.0, 1.0)
        assert episode.extra_info["turns"] == 2
    assert sum(guard.failures.values()) == len(faults)
    assert guard.failures["step raised RuntimeError"] == 1


def test_failures_of_a_kind_are_logged_once_with_the_users_line(environment, caplog):
    run(group(Guard(environment, timeout_s=5.0), [["raise"]] * 3))
    (text,) = [record.getMessage() for record in caplog.records if "out of order" in record.getMessage()]
    assert "user_environments.py" in text
    assert "in step" in text


@pytest.mark.feature(91)
def test_reset_and_close_may_fail_too(environment):
    async def all_of_them():
        guard = Guard(environment, timeout_s=0.5)
        raising = await play(guard, ["go "], reset="raise")
        hanging = await play(guard, ["go "], reset="hang")
        late = await play(guard, ["done"], close="raise")
        fine = await play(guard, ["done"])
        await guard.shutdown()
        return guard, raising, hanging, late, fine

    guard, raising, hanging, late, fine = run(all_of_them())
    assert "reset raised KeyError: 'no such game'" in raising.failure
    assert hanging.failure == "reset gave no answer within 0.5 s"
    assert (late.failure, late.done, fine.done) == (None, True, True)
    assert sum(guard.failures.values()) == 3


@pytest.mark.feature(90)
def test_an_episode_stops_when_done_and_is_closed_at_the_limit_of_turns():
    user_environments.log.clear()
    guard = Guard(load_environment("tests.support.user_environments"))
    done = run(play(guard, ["go ", "done", "never"]))
    cut = run(play(guard, ["go "] * 9, max_turns=3))
    assert (done.turns, done.done) == (2, True)
    assert (cut.turns, cut.done, cut.failure, cut.state) == (3, False, None, None)
    assert [closed["turns"] for closed in user_environments.log] == [2, 3]

    async def late():
        with pytest.raises(ValueError, match="the episode is over"):
            await guard.step(cut, "go ")
        await guard.close(cut)

    run(late())
    assert len(user_environments.log) == 2


@pytest.mark.feature(86)
def test_the_rows_data_reach_the_steps_unchanged_and_stay_the_rows(environment):
    given = {"answer": "x", "nested": {"list": [1, (2, 3)], 5: None}, "first": "begin "}
    kept = {**given, "nested": {"list": [1, (2, 3)], 5: None}}

    async def one():
        guard = Guard(environment)
        episode = await guard.reset("prompt", given)
        first = episode.state
        result = await guard.step(episode, "go ")
        await guard.close(episode)
        await guard.shutdown()
        return first, result

    first, result = run(one())
    assert (first, result.next_state) == ("begin ", "begin go seen ")
    assert given == kept
    assert {key: result.extra_info[key] for key in kept} == kept
    assert result.extra_info["began"]


@pytest.mark.slow
@pytest.mark.feature(93)
def test_eight_samples_that_wait_take_as_long_as_one(environment):
    async def timed():
        guard = Guard(environment)
        took_s = []
        for _ in range(3):  # The machine may be busy in one of them.
            began = time.monotonic()
            episodes = await asyncio.gather(*(play(guard, ["nap", "done"]) for _ in range(8)))
            took_s.append(time.monotonic() - began)
            assert all(episode.done for episode in episodes)
        await guard.shutdown()
        return min(took_s)

    assert run(timed()) < 0.6


@pytest.mark.feature(92)
def test_no_more_episodes_at_a_time_than_the_environment_serves():
    class Watched:
        episodes = 2

        def __init__(self):
            self.open = self.most = 0

        async def reset(self, extra_info):
            self.open += 1
            self.most = max(self.most, self.open)

        async def step(self, state, action, extra_info):
            await asyncio.sleep(0.01)
            return {"next_state": state + action, "reward": 0, "done": False}

        async def close(self, extra_info):
            self.open -= 1

        async def shutdown(self):
            """Nothing is held."""

    watched = Watched()
    episodes = run(group(Guard(watched), [["a", "b"]] * 8))
    assert [episode.turns for episode in episodes] == [2] * 8
    assert (watched.open, watched.most) == (0, 2)


def test_a_cancelled_rollout_closes_its_episodes():
    user_environments.log.clear()

    async def cancelled():
        guard = Guard(load_environment("tests.support.user_environments"))
        task = asyncio.create_task(play(guard, ["sleep"]))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        return task.cancelled()

    assert run(cancelled())
    assert len(user_environments.log) == 1


@pytest.mark.parametrize("limits", [{"timeout_s": 0}, {"episodes": 0}])
def test_impossible_limits_are_refused(limits):
    with pytest.raises(ValueError, match="need a positive timeout_s and episodes"):
        Guard(load_environment("tests.support.user_environments"), **limits)


@pytest.mark.parametrize(
    ("step", "rules", "expected"),
    [
        ("{'reward': 0.0, 'done': False}", {}, ("step returned no 'next_state'", 0.0, False)),
        ("{'reward': 0.0, 'done': False}", {"missing_state": "done"}, (None, 0.0, True)),
        ("{'reward': 0.0, 'done': False}", {"failure_reward": -1.0}, (None, -1.0, True)),
        ("{'next_state': None, 'reward': 0.0, 'done': False}", {}, (None, 0.0, True)),
    ],
)
@pytest.mark.parametrize("isolated", [False, True])
def test_step_without_a_next_state_follows_the_rules(tmp_path, step, rules, expected, isolated):
    path = tmp_path / "rl2.py"
    path.write_text(f"def step(state, action, extra_info):\n    return {step}\n")

    async def one_step():
        guard = Guard(IsolatedEnvironment(str(path)) if isolated else load_environment(str(path)), **rules)
        episode = await guard.reset("a ", {})
        await guard.step(episode, "b")
        await guard.close(episode)
        await guard.shutdown()
        return episode

    episode = asyncio.run(one_step())
    failure, reward, done = expected
    assert (episode.reward, episode.done) == (reward, done)
    assert (episode.failure or "").startswith(failure or "") and (episode.failure is None) == (failure is None)
