"""Text worlds of Gymnasium's kind (``reset(seed)``, ``step(action)``) as an environment.

Worlds keep their state to themselves and play one episode at a time, so there is a pool of them. GEM's (extra ``gem``)
and Gymnasium's (extra ``gym``) are made by name. Run them in a process of their own: they seed random generators of the
whole process, and print what they like. See :class:`~dlrover.python.rl.environment.isolated.IsolatedEnvironment`::

    dlrover.python.rl.environment.worlds:gem         options: name, size, ...
    dlrover.python.rl.environment.worlds:gymnasium   the same
"""

import importlib
import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from dlrover.python.rl.common.errors import EnvironmentFailed, MissingExtra
from dlrover.python.rl.environment.answers import boxed_answer, decimal_value, last_number
from dlrover.python.rl.environment.base import StepResult
from dlrover.python.rl.environment.functions import in_thread

_PLACE = "world"
"""The key of ``extra_info`` by which an episode finds its world."""


class World(Protocol):
    """One game at a time."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin anew: observation and information."""
        ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Observation, reward, terminated, truncated, information."""
        ...


@dataclass
class _Seat:
    """A world, and who plays in it."""

    world: World | None = None
    episode: int = 0
    busy: bool = field(default=False)


class Worlds:
    """A pool of worlds as one environment.

    The states are ``opening`` with the first observation, then what was there, the action, and ``turn`` with the next
    observation: one sequence for the policy. Give the two a chat template's marks if the model expects them.

    Args:
        make: makes a world.
        size: how many there are, and so how many episodes at a time. Each is made when it is first needed.
        act: the action that a text stands for; raises ValueError where it stands for none.
        opening: what ``{observation}`` stands in at first.
        turn: the same later.
        unread: the reward of a text that stands for no action; the episode ends with it.

    Attributes:
        episodes: ``size``.
    """

    def __init__(  # noqa: PLR0913 - the words around observations, and what a world does not say itself
        self,
        make: Callable[[], World],
        size: int = 16,
        *,
        act: Callable[[str], Any] = str,
        opening: str = "{observation}",
        turn: str = "\n{observation}\n",
        unread: float = 0.0,
    ) -> None:
        if size < 1:
            raise ValueError(f"a pool needs a world at least, not {size}")
        self._make, self._act, self._unread = make, act, unread
        self._opening, self._turn = opening, turn
        self._seats = [_Seat() for _ in range(size)]
        self._episodes = itertools.count(secrets.randbits(48))  # No number of a process before this one.
        self.episodes = size

    async def reset(self, extra_info: dict[str, Any]) -> str:
        """Begin in a free world, by ``extra_info["seed"]`` if there is one.

        Raises:
            EnvironmentFailed: no world is free.
        """
        number = next((at for at, seat in enumerate(self._seats) if not seat.busy), None)
        if number is None:
            raise EnvironmentFailed(f"all {len(self._seats)} worlds are taken: close episodes that are over")
        seat = self._seats[number]
        seat.busy, seat.episode = True, next(self._episodes)
        extra_info[_PLACE] = [number, seat.episode]
        world, seat.world = seat.world, None  # Put back when it has answered: one that hangs is never used again.
        if world is None:
            world = await in_thread(self._make)
        seed = extra_info.get("seed")
        observation, information = await in_thread(lambda: world.reset(seed=seed))
        seat.world = world
        return self._opening.replace("{observation}", _shown(observation, information))

    async def step(self, state: str, action: str, extra_info: dict[str, Any]) -> StepResult:
        """Play a turn; the score is the reward.

        Raises:
            EnvironmentFailed: the episode has no world (any more).
        """
        seat = self._seat(extra_info)
        world = seat.world if seat is not None else None
        if seat is None or world is None:
            raise EnvironmentFailed("the episode has no world: it is over, or its last turn gave no answer")
        try:
            move = self._act(action)
        except ValueError:
            return StepResult(None, self._unread, self._unread, True, extra_info)
        seat.world = None
        observation, reward, terminated, truncated, information = await in_thread(world.step, move)
        seat.world = world
        done = bool(terminated or truncated)
        shown = self._turn.replace("{observation}", _shown(observation, information))
        return StepResult(None if done else state + action + shown, float(reward), float(reward), done, extra_info)

    async def close(self, extra_info: dict[str, Any]) -> None:
        """Free the episode's world for another one."""
        seat = self._seat(extra_info)
        if seat is not None:
            seat.busy = False

    async def shutdown(self) -> None:
        """Close every world that can be."""
        for seat in self._seats:
            world, seat.world = seat.world, None
            close = getattr(world, "close", None)
            if close is not None:
                await in_thread(close)

    def _seat(self, extra_info: dict[str, Any]) -> _Seat | None:
        place = extra_info.get(_PLACE)
        if not isinstance(place, list | tuple) or len(place) != 2 or place[0] not in range(len(self._seats)):
            return None
        seat = self._seats[place[0]]
        return seat if seat.busy and seat.episode == place[1] else None


def _shown(observation: Any, information: Any) -> str:
    """The observation as text, with what GEM says has to stand behind it."""
    suffix = information.get("suffix", "") if isinstance(information, dict) else ""
    return f"{observation}\n{suffix}" if suffix else str(observation)


def gem(name: str, size: int = 16, make: dict[str, Any] | None = None, **words: Any) -> Worlds:
    """GEM's environment ``name`` (``game:GuessTheNumber-v0-easy``).

    Args:
        name: as GEM registers it.
        size: of the pool.
        make: what ``gem.make`` is given besides.
        words: further arguments of :class:`Worlds`.

    Raises:
        MissingExtra: GEM is not installed.
    """
    made = _library("gem", "gem-llm", "gem").make
    return Worlds(lambda: made(name, **(make or {})), size, **words)


def gymnasium(name: str, size: int = 16, make: dict[str, Any] | None = None, **words: Any) -> Worlds:
    """Gymnasium's environment ``name``, whose observations are shown as text.

    Actions are the text itself in a ``Text`` space, and the last number (or what is boxed) in a ``Discrete`` one.

    Args:
        name: as Gymnasium registers it, with the module that does so before a colon if it is not Gymnasium's own.
        size: of the pool.
        make: what ``gymnasium.make`` is given besides.
        words: further arguments of :class:`Worlds`; ``act`` for another space.

    Raises:
        MissingExtra: Gymnasium is not installed.
        ValueError: actions are of another space, and there is no ``act``.
    """
    library = _library("gymnasium", "gymnasium", "gym")
    if "act" not in words:
        first = library.make(name, **(make or {}))
        words["act"] = _reader(library, first.action_space, name)
        first.close()
    return Worlds(lambda: library.make(name, **(make or {})), size, **words)


def _reader(library: Any, space: Any, name: str) -> Callable[[str], Any]:
    if isinstance(space, library.spaces.Text):
        return str
    if isinstance(space, library.spaces.Discrete):
        return lambda text: _choice(text, int(space.start), int(space.n))
    raise ValueError(f"the actions of {name} are of {type(space).__name__}: give act, which makes one of a text")


def _choice(text: str, start: int, count: int) -> int:
    boxed = boxed_answer(text)
    said = boxed if boxed is not None else last_number(text)
    value = None if said is None else decimal_value(said)
    if value is None or not start <= value < start + count or value != int(value):
        raise ValueError(f"no action from {start} to {start + count - 1}")
    return int(value)


def _library(module: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(package, extra) from error
