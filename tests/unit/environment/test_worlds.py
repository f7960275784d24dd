# SPDX-License-Identifier: Apache-2.0
"""Text worlds as environments."""

import asyncio
import time

import pytest

from dlrover.python.rl.common.errors import EnvironmentFailed, MissingExtra
from dlrover.python.rl.environment.core.functions import load_environment
from dlrover.python.rl.environment.core.gym_adapter import GymEnvironment, gem, gymnasium
from dlrover.python.rl.environment.core.turns import Guard
from dlrover.python.rl.environment.sandbox.environment_process import IsolatedEnvironment

WORLDS = "dlrover.python.rl.environment.core.gym_adapter"


class Countdown:
    """Ends after ``turns``; counts itself."""

    made = 0

    def __init__(self):
        Countdown.made += 1
        self.left, self.seed = 0, None

    def reset(self, *, seed=None):
        self.left, self.seed = 3, seed
        return f"{self.left} left", {"suffix": "go on" if seed else ""}

    def step(self, action):
        if action == "hang":
            time.sleep(30)
        self.left -= 1
        return f"{self.left} left", 1, self.left == 0, action == "cut", {}


@pytest.fixture(autouse=True)
def _none_made():
    Countdown.made = 0


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 90))


async def play(guard, action, max_turns=9, **info):
    episode = await guard.reset("", info)
    while episode.state is not None and episode.turns < max_turns:
        await guard.step(episode, action(episode.state) if callable(action) else action)
    cut = episode.state
    await guard.close(episode)
    return episode, cut


@pytest.mark.feature(92)
def test_a_pool_of_two_serves_eight_samples_half_of_which_are_cut_at_the_limit():
    async def all_of_them():
        guard = Guard(GymEnvironment(Countdown, size=2))
        played = await asyncio.gather(*(play(guard, "x", max_turns=2 if at % 2 else 9) for at in range(8)))
        await guard.shutdown()
        return played

    for at, (episode, _) in enumerate(run(all_of_them())):
        assert episode.failure is None
        assert (episode.turns, episode.done) == ((2, False) if at % 2 else (3, True))
    assert Countdown.made == 2


def test_states_go_on_from_each_other():
    async def one():
        return await play(
            Guard(GymEnvironment(Countdown, opening="<{observation}>", turn="[{observation}]")), "a", 2, seed=5
        )

    episode, cut = run(one())
    assert cut == "<3 left\ngo on>a[2 left]a[1 left]"
    assert (episode.reward, episode.score) == (2.0, 2.0)


@pytest.mark.feature(92)
def test_a_world_that_hangs_is_not_used_again():
    async def hung():
        guard = Guard(GymEnvironment(Countdown, size=1), timeout_s=0.5)
        stuck, _ = await play(guard, "hang")
        after = [await play(guard, "x") for _ in range(2)]
        return stuck, [episode for episode, _ in after]

    stuck, after = run(hung())
    assert stuck.failure == "step gave no answer within 0.5 s"
    assert all(episode.done for episode in after)
    assert Countdown.made == 2


@pytest.mark.parametrize("isolated", [False, True])
def test_a_world_that_cannot_start_leaves_its_place(isolated):
    async def fail_often():
        options = {"make": Broken, "size": 2}
        worlds = IsolatedEnvironment(f"{__file__}:Pool", {"size": 2}) if isolated else GymEnvironment(**options)
        guard = Guard(worlds, episodes=2)
        try:
            return [(await play(guard, "x"))[0].failure for _ in range(5)]
        finally:
            await guard.shutdown()

    assert all("it is broken" in failure for failure in run(fail_often()))


class Broken:
    def reset(self, *, seed=None):
        raise OSError("it is broken")


class Pool(GymEnvironment):
    def __init__(self, size):
        super().__init__(Broken, size)


def test_an_episode_that_is_over_has_no_world_and_frees_no_others():
    async def over():
        worlds, info = GymEnvironment(Countdown, size=1), {}
        await worlds.reset(info)
        with pytest.raises(EnvironmentFailed, match="all 1 worlds are in use"):
            await worlds.reset({})
        await worlds.close(info)
        other = {}
        await worlds.reset(other)
        await worlds.close(info)
        with pytest.raises(EnvironmentFailed, match="has no world"):
            await worlds.step("s", "a", info)
        return (await worlds.step("s", "a", other)).reward

    assert run(over()) == 1.0


def halving(state):
    """A player of GEM's guessing game."""
    low, high = 1, 10
    for line in state.splitlines():
        for word, above in (("higher than ", True), ("lower than ", False)):
            if word in line:
                value = int(line.rpartition(word)[2].strip(" ."))
                low, high = (max(low, value + 1), high) if above else (low, min(high, value - 1))
    return rf"\boxed{{{(low + high) // 2}}}"


@pytest.mark.feature(92)
@pytest.mark.slow
def test_a_game_of_gem_is_played_to_its_end():
    pytest.importorskip("gem")

    async def games():
        guard = Guard(IsolatedEnvironment(f"{WORLDS}:gem", {"name": "game:GuessTheNumber-v0-easy", "size": 2}))
        assert guard._open_slots is not None
        won = await asyncio.gather(*(play(guard, halving, seed=seed) for seed in range(4)))
        cut = await play(guard, halving, max_turns=1, seed=11)
        one, two = [(await play(guard, halving, seed=7))[0] for _ in range(2)]
        await guard.shutdown()
        return [episode for episode, _ in won], cut[0], one, two

    won, cut, one, two = run(games())
    assert [episode.failure for episode in won] == [None] * 4
    assert [(episode.done, episode.reward) for episode in won] == [(True, 1.0)] * 4
    assert cut.failure is None
    assert one.turns == two.turns


@pytest.mark.feature(92)
def test_a_game_of_gymnasium_is_played_to_its_end():
    pytest.importorskip("gymnasium")

    async def game():
        environment = load_environment(
            f"{WORLDS}:gymnasium", {"name": "FrozenLake-v1", "size": 1, "make": {"is_slippery": False}, "unread": -1.0}
        )
        guard = Guard(environment)
        moves = iter([1, 1, 2, 1, 2, 2])  # Down, down, right, down, right, right.
        won, _ = await play(guard, lambda state: f"I go \\boxed{{{next(moves)}}}", seed=1)
        mute, _ = await play(guard, "I go nowhere")
        wrong, _ = await play(guard, "I go 7")
        await guard.shutdown()
        return won, mute, wrong

    won, mute, wrong = run(game())
    assert (won.done, won.reward, won.turns) == (True, 1.0, 6)
    for episode in (mute, wrong):
        assert (episode.done, episode.reward, episode.failure) == (True, -1.0, None)


def test_actions_of_other_spaces_need_a_reader():
    pytest.importorskip("gymnasium")
    with pytest.raises(ValueError, match="are of Box: give act"):
        gymnasium("Pendulum-v1")
    assert gymnasium("Pendulum-v1", act=float).episodes == 16


@pytest.mark.parametrize(("make", "module", "extra"), [(gem, "gem", "gem"), (gymnasium, "gymnasium", "gym")])
def test_absent_libraries_name_their_extra(monkeypatch, make, module, extra):
    import sys

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=rf"dlrover-rl\[{extra}\]"):
        make("any")


def test_a_pool_needs_a_world():
    with pytest.raises(ValueError, match="at least one world, not 0"):
        GymEnvironment(Countdown, size=0)
