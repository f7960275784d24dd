# SPDX-License-Identifier: Apache-2.0
"""Text environments with Gymnasium's interface (``reset(seed)``, ``step(action)``): GEM (extra ``gem``), Gymnasium
(``gym``).

A game keeps its state and plays one episode at a time, hence a pool. Run it in a separate process
(``IsolatedEnvironment``): games seed global random generators and print."""

import importlib
import itertools
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from dlrover.python.rl.common.errors import EnvironmentFailed, MissingExtra
from dlrover.python.rl.data.conversation import find_think_prefix
from dlrover.python.rl.data.model_text import split_thoughts
from dlrover.python.rl.environment.core.base import StepResult
from dlrover.python.rl.environment.core.functions import run_in_thread
from dlrover.python.rl.environment.core.rewards import boxed_answer, decimal_value, last_number

_PLACE = "world"  # the key of ``extra_info`` by which an episode finds its game


class GymEnvironment:
    """A pool of Gymnasium-style games as one environment.

    A state is ``opening`` with the first observation, then the last state, the action, and ``turn`` with the next
    observation: one sequence for the policy. Add a chat template's marks if the model expects them.

    Args:
        make: makes a game when first needed.
        size: number of games, hence of episodes at a time.
        act: parses an action without its thoughts, "" if these are unfinished; raises ValueError for an invalid text.
        opening: the template of the first observation.
        turn: the template of later ones.
        unread: the reward of an invalid action, which ends the episode."""

    def __init__(
        self,
        make: Callable[[], Any],
        size: int = 16,
        *,
        act: Callable[[str], Any] = str,
        opening: str = "{observation}",
        turn: str = "\n{observation}\n",
        unread: float = 0.0,
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one environment, not {size}")
        self._make, self._act, self._unread = make, act, unread
        self._opening, self._turn = opening, turn
        self._games: list[Any] = [None] * size  # None: not made, or in a call; a game that hangs is never used again
        self._players: list[int | None] = [None] * size  # the open episode of each game
        self._numbers = itertools.count(secrets.randbits(48))  # differ from an earlier process's
        self.episodes = size

    async def reset(self, extra_info: dict[str, Any]) -> str:
        """Start in a free game, with ``extra_info["seed"]`` if present."""
        if None not in self._players:
            raise EnvironmentFailed(f"all {len(self._players)} environments are in use: close finished episodes")
        place = self._players.index(None)
        self._players[place] = episode = next(self._numbers)
        extra_info[_PLACE] = [place, episode]
        game, self._games[place] = self._games[place], None
        try:
            if game is None:
                game = await run_in_thread(self._make)
            seed = extra_info.get("seed")
            observation, information = await run_in_thread(lambda: game.reset(seed=seed))
        except BaseException:
            self._players[place] = None  # in another process the episode does not learn its place
            raise
        self._games[place] = game
        return self._opening.replace("{observation}", _shown(observation, information))

    async def step(self, state: str, action: str, extra_info: dict[str, Any]) -> StepResult:
        place = self._place_of(extra_info)
        game = None if place is None else self._games[place]
        if place is None or game is None:
            raise EnvironmentFailed("the episode has no environment: it is over, or its last turn gave no answer")
        try:
            move = self._act(split_thoughts(action, find_think_prefix(state))[1] or "")
        except ValueError:
            return StepResult(None, self._unread, self._unread, True, extra_info)
        self._games[place] = None
        observation, reward, terminated, truncated, information = await run_in_thread(game.step, move)
        self._games[place] = game
        done = bool(terminated or truncated)
        shown = self._turn.replace("{observation}", _shown(observation, information))
        return StepResult(None if done else state + action + shown, float(reward), float(reward), done, extra_info)

    async def close(self, extra_info: dict[str, Any]) -> None:
        if (place := self._place_of(extra_info)) is not None:
            self._players[place] = None

    async def shutdown(self) -> None:
        games, self._games = self._games, [None] * len(self._games)
        for game in games:
            if hasattr(game, "close"):
                await run_in_thread(game.close)

    def _place_of(self, extra_info: dict[str, Any]) -> int | None:
        match extra_info.get(_PLACE):
            case [int(place), int(episode)] if place in range(len(self._players)) and self._players[place] == episode:
                return place
        return None


def _shown(observation: Any, information: Any) -> str:
    suffix = information.get("suffix", "") if isinstance(information, dict) else ""
    return f"{observation}\n{suffix}" if suffix else str(observation)


def gem(name: str, size: int = 16, make: dict[str, Any] | None = None, **words: Any) -> GymEnvironment:
    """Make GEM's environment ``name``; ``make`` are arguments of ``gem.make``, ``words`` of the pool."""
    make_game = _library("gem", "gem-llm", "gem").make
    return GymEnvironment(lambda: make_game(name, **(make or {})), size, **words)


def gymnasium(name: str, size: int = 16, make: dict[str, Any] | None = None, **words: Any) -> GymEnvironment:
    """Make Gymnasium's environment ``name``; ``make`` are arguments of ``gymnasium.make``, ``words`` of the pool.

    Actions are the text in a ``Text`` space, and the boxed or last number in a ``Discrete`` one; others need ``act``.
    """
    library = _library("gymnasium", "gymnasium", "gym")
    if "act" not in words:
        first = library.make(name, **(make or {}))
        space = first.action_space
        first.close()
        if not isinstance(space, library.spaces.Text | library.spaces.Discrete):
            raise ValueError(f"the actions of {name} are of {type(space).__name__}: give act, which parses a text")
        is_text = isinstance(space, library.spaces.Text)
        words["act"] = str if is_text else partial(_read_choice, int(space.start), int(space.n))
    return GymEnvironment(lambda: library.make(name, **(make or {})), size, **words)


def _read_choice(start: int, count: int, text: str) -> int:
    boxed = boxed_answer(text)
    number = boxed if boxed is not None else last_number(text)
    value = None if number is None else decimal_value(number)
    if value is None or not start <= value < start + count or value != int(value):
        raise ValueError(f"no action from {start} to {start + count - 1}")
    return int(value)


def _library(module: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(package, extra) from error
