# SPDX-License-Identifier: Apache-2.0
"""Text environments with Gymnasium's interface (``reset(seed)``, ``step(action)``): GEM (extra ``gem``), Gymnasium
(``gym``).

They keep their state and play one episode at a time, hence a pool. Run them in a separate process
(``IsolatedEnvironment``): they seed global random generators and print.
"""

import importlib
import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dlrover.python.rl.common.errors import EnvironmentFailed, MissingExtra
from dlrover.python.rl.data.conversation import find_think_prefix
from dlrover.python.rl.data.model_text import split_thoughts
from dlrover.python.rl.environment.core.base import StepResult
from dlrover.python.rl.environment.core.functions import run_in_thread
from dlrover.python.rl.environment.core.rewards import boxed_answer, decimal_value, last_number

_PLACE = "world"  # the key of ``extra_info`` by which an episode finds its world


@dataclass
class _Slot:
    world: Any = None
    """A game, with Gymnasium's ``reset(seed=...)``, ``step(action)`` and perhaps ``close()``."""

    episode: int = 0
    busy: bool = False


class GymEnvironment:
    """A pool of Gymnasium-style games as one environment.

    A state is ``opening`` with the first observation, then the last state, the action, and ``turn`` with the next
    observation: one sequence for the policy. Add a chat template's marks if the model expects them.

    Args:
        make: makes a game, when first needed.
        size: number of games, hence of episodes at a time.
        act: parses an action without its thoughts, "" for unfinished ones; raises ValueError for an invalid text.
        opening: the template of the first observation.
        turn: the template of later ones.
        unread: the reward of an invalid action, which ends the episode.
    """

    def __init__(  # noqa: PLR0913 - the words around observations, and what a world does not say itself
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
            raise ValueError(f"a pool needs at least one world, not {size}")
        self._make, self._act, self._unread = make, act, unread
        self._opening, self._turn = opening, turn
        self._slots = [_Slot() for _ in range(size)]
        self._episodes = itertools.count(secrets.randbits(48))  # No number of a process before this one.
        self.episodes = size

    async def reset(self, extra_info: dict[str, Any]) -> str:
        """Start in a free game, with ``extra_info["seed"]`` if present."""
        number = next((at for at, slot in enumerate(self._slots) if not slot.busy), None)
        if number is None:
            raise EnvironmentFailed(f"all {len(self._slots)} worlds are taken: close episodes that are over")
        slot = self._slots[number]
        slot.busy, slot.episode = True, next(self._episodes)
        extra_info[_PLACE] = [number, slot.episode]
        world, slot.world = slot.world, None  # Put back when it has answered: one that hangs is never used again.
        try:
            if world is None:
                world = await run_in_thread(self._make)
            seed = extra_info.get("seed")
            observation, information = await run_in_thread(lambda: world.reset(seed=seed))
        except BaseException:
            slot.busy = False  # in another process than the episode's, which does not learn the place
            raise
        slot.world = world
        return self._opening.replace("{observation}", _shown(observation, information))

    async def step(self, state: str, action: str, extra_info: dict[str, Any]) -> StepResult:
        slot = self._slot_of(extra_info)
        world = slot.world if slot is not None else None
        if slot is None or world is None:
            raise EnvironmentFailed("the episode has no world: it is over, or its last turn gave no answer")
        try:
            move = self._act(split_thoughts(action, find_think_prefix(state))[1] or "")
        except ValueError:
            return StepResult(None, self._unread, self._unread, True, extra_info)
        slot.world = None
        observation, reward, terminated, truncated, information = await run_in_thread(world.step, move)
        slot.world = world
        done = bool(terminated or truncated)
        shown = self._turn.replace("{observation}", _shown(observation, information))
        return StepResult(None if done else state + action + shown, float(reward), float(reward), done, extra_info)

    async def close(self, extra_info: dict[str, Any]) -> None:
        if slot := self._slot_of(extra_info):
            slot.busy = False

    async def shutdown(self) -> None:
        for slot in self._slots:
            world, slot.world = slot.world, None
            close = getattr(world, "close", None)
            if close is not None:
                await run_in_thread(close)

    def _slot_of(self, extra_info: dict[str, Any]) -> _Slot | None:
        place = extra_info.get(_PLACE)
        if not isinstance(place, list | tuple) or len(place) != 2 or place[0] not in range(len(self._slots)):
            return None
        slot = self._slots[place[0]]
        return slot if slot.busy and slot.episode == place[1] else None


def _shown(observation: Any, information: Any) -> str:
    suffix = information.get("suffix", "") if isinstance(information, dict) else ""
    return f"{observation}\n{suffix}" if suffix else str(observation)


def gem(name: str, size: int = 16, make: dict[str, Any] | None = None, **words: Any) -> GymEnvironment:
    """GEM's environment ``name`` (``game:GuessTheNumber-v0-easy``); ``make`` are arguments of ``gem.make``, ``words``
    of the pool."""
    make_game = _library("gem", "gem-llm", "gem").make
    return GymEnvironment(lambda: make_game(name, **(make or {})), size, **words)


def gymnasium(name: str, size: int = 16, make: dict[str, Any] | None = None, **words: Any) -> GymEnvironment:
    """Gymnasium's environment ``name``; ``make`` are arguments of ``gymnasium.make``, ``words`` of the pool.

    Actions are the text in a ``Text`` space, and the boxed or last number in a ``Discrete`` one; others need
    ``act``."""
    library = _library("gymnasium", "gymnasium", "gym")
    if "act" not in words:
        first = library.make(name, **(make or {}))
        space = first.action_space
        first.close()
        if not isinstance(space, library.spaces.Text | library.spaces.Discrete):
            message = f"the actions of {name} are of {type(space).__name__}"
            raise ValueError(f"{message}: give act, which makes one of a text")
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
