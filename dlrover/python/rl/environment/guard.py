"""What keeps one episode's fault from the others: deadlines, checked answers, and an end for every episode.

::

    rollout loop --reset, step, close--> Guard --> environment (in this process, or in one of its own: isolated.py)
                                          |
                                          '-- EnvironmentFailed: this sample has failed, and why
"""

import asyncio
import copy
import traceback
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dlrover.python.rl.common.errors import EnvironmentFailed
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.environment.base import Environment, StepResult, state_text, step_result

_LOG = get_logger(__name__)

T = TypeVar("T")


@dataclass
class Episode:
    """One sample's way through an environment. Steps come one after the other; :meth:`Guard.close` ends it.

    Attributes:
        state: what the policy acts on next; None at the end.
        extra_info: the row's data, then what the last step returned.
        reward: summed over turns.
        score: summed over turns.
        turns: how many steps were made.
        failure: why the sample has failed; None when it has not.
    """

    state: str | None
    extra_info: dict[str, Any]
    reward: float = 0.0
    score: float = 0.0
    turns: int = 0
    done: bool = False
    failure: str | None = None
    open: bool = field(default=True, repr=False)


class Guard:
    """Calls an environment for many episodes at once.

    Args:
        environment: the environment; :meth:`shutdown` ends it.
        timeout_s: of each call.
        episodes: how many are open at a time; others wait for one to be closed. By default as many as the environment
            says that it serves (``environment.episodes``), or any number.

    Attributes:
        episodes: how many are open at a time; None: any number.
        failures: how many samples have failed, by the first words of the reason.
    """

    def __init__(self, environment: Environment, timeout_s: float = 60.0, episodes: int | None = None) -> None:
        episodes = episodes if episodes is not None else getattr(environment, "episodes", None)
        if timeout_s <= 0 or (episodes is not None and episodes < 1):
            raise ValueError(f"need a positive timeout_s and episodes, not {timeout_s} and {episodes}")
        self._environment, self._timeout_s = environment, timeout_s
        self.episodes = episodes
        self._places = asyncio.Semaphore(episodes) if episodes is not None else None
        self._abandoned: set[asyncio.Task[Any]] = set()
        self.failures: Counter[str] = Counter()

    async def reset(self, prompt: str, extra_info: dict[str, Any]) -> Episode:
        """Begin an episode; it has failed if the environment has. The caller closes it in either case.

        Args:
            prompt: the row's, where the episode begins unless the environment says otherwise.
            extra_info: the row's; the environment gets a copy.
        """
        if self._places is not None:
            await self._places.acquire()  # waits: for an episode to be closed, each of whose calls has a deadline
        episode = Episode(prompt, copy.deepcopy(extra_info))
        try:
            state = await self._in_time("reset", self._environment.reset(episode.extra_info))
            if state is not None:
                episode.state = state_text("the state that reset returned", state)
        except EnvironmentFailed as error:
            self.fail(episode, error)
        except BaseException:
            await self.close(episode)
            raise
        return episode

    async def step(self, episode: Episode, action: str) -> StepResult | None:
        """Answer the action to the episode's state, and go on with it; None when the episode has failed.

        Raises:
            ValueError: the episode is over.
        """
        state = episode.state
        if state is None or not episode.open:
            raise ValueError("the episode is over")
        try:
            said = self._environment.step(state, action, episode.extra_info)
            result = step_result(await self._in_time("step", said), episode.extra_info)
        except EnvironmentFailed as error:
            self.fail(episode, error)
            return None
        episode.state, episode.extra_info, episode.done = result.next_state, result.extra_info, result.done
        episode.reward += result.reward
        episode.score += result.score
        episode.turns += 1
        return result

    async def close(self, episode: Episode) -> None:
        """End an episode, whatever became of it; a second time does nothing. What the environment raises is logged."""
        if not episode.open:
            return
        episode.open, episode.state = False, None
        try:
            await self._in_time("close", self._environment.close(episode.extra_info))
        except EnvironmentFailed as error:
            self.failures[_kind(str(error))] += 1
            _LOG.warning("an episode did not close: %s", error)
        finally:
            if self._places is not None:
                self._places.release()

    def fail(self, episode: Episode, error: EnvironmentFailed) -> None:
        """Mark an episode as failed; it is counted and logged."""
        episode.state, episode.failure = None, str(error)
        self.failures[_kind(str(error))] += 1
        _LOG.warning("a sample failed: %s", str(error).splitlines()[0])

    async def shutdown(self) -> None:
        """Release everything the environment holds; what it raises is logged."""
        try:
            await self._in_time("shutdown", self._environment.shutdown())
        except EnvironmentFailed as error:
            _LOG.warning("the environment did not shut down: %s", error)

    async def _in_time(self, call: str, asked: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(asked)
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            if not task.done():  # Not waited for any more: user code may swallow the cancellation.
                task.cancel()
                self._abandoned.add(task)
                task.add_done_callback(self._forget)
        if not task.done():
            raise EnvironmentFailed(f"{call} gave no answer within {self._timeout_s:g} s")
        try:
            return task.result()  # waits: no more, it is done
        except EnvironmentFailed:
            raise
        except asyncio.CancelledError:
            raise EnvironmentFailed(f"{call} was cancelled from inside") from None
        except Exception as error:
            what = f"{call} raised {type(error).__name__}: {error}"[:2_000]
            raise EnvironmentFailed(what, traceback.format_exc()) from error

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._abandoned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.debug("a call that was given up on raised: %s", error)


def _kind(reason: str) -> str:
    """The part of a reason that is alike for samples that failed alike."""
    return reason.split(":", 1)[0][:100]
