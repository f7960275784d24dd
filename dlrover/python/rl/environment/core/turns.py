# SPDX-License-Identifier: Apache-2.0
"""Isolates the faults of an episode from others: deadlines, checked answers, and a reliable end.

::

    rollout loop --reset, step, close--> Guard --> environment (in this process, or in a separate one)
                                          |
                                          '-- EnvironmentFailed: this sample failed, with the reason

A trajectory has the policy's tokens in one sequence as long as each state continues the last."""

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar

from dlrover.python.rl.common.errors import DataError, EnvironmentFailed, EnvironmentLost, user_traceback
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import GENERATED, SEQUENCE, ColumnSpec, SequenceColumns
from dlrover.python.rl.environment.core.base import (
    Environment,
    EnvironmentTraits,
    StepResult,
    validate_state,
    validate_step,
)
from dlrover.python.rl.environment.core.messages import Message, State, make_assistant_message

_LOG = get_logger(__name__)

T = TypeVar("T")


@dataclass
class Episode:
    """One sample's interaction with an environment: sums over turns, and the state, all of a conversation."""

    state: State | None
    extra_info: dict[str, Any]
    reward: float = 0.0
    score: float = 0.0
    turns: int = 0
    done: bool = False
    failure: str | None = None
    lost: bool = False  #: the environment's process has ended in its last call
    open: bool = field(default=True, repr=False)


class Guard:
    """Calls an environment for many episodes at once.

    ``timeout_s`` limits each call; ``episodes`` limits the open episodes, by default to ``environment.episodes``.
    ``missing_state`` tells how to treat a step that is not done and has no ``next_state``. If ``step`` fails, the
    episode ends with ``failure_reward``, or the sample fails if it is None. ``failures`` counts failed samples by the
    start of the reason."""

    def __init__(
        self,
        environment: Environment,
        timeout_s: float = 60.0,
        episodes: int | None = None,
        missing_state: Literal["error", "done"] = "error",
        failure_reward: float | None = None,
    ) -> None:
        self.traits = EnvironmentTraits.of(environment)
        episodes = episodes if episodes is not None else self.traits.episodes
        if timeout_s <= 0 or (episodes is not None and episodes < 1):
            raise ValueError(f"need a positive timeout_s and episodes, not {timeout_s} and {episodes}")
        self._environment, self._timeout_s = environment, timeout_s
        self._needs_state, self._failure_reward = missing_state == "error", failure_reward
        self.episodes = episodes
        self._open_slots = asyncio.Semaphore(episodes) if episodes is not None else None
        self._abandoned: set[asyncio.Task[Any]] = set()
        self.failures: Counter[str] = Counter()
        self._logged: Counter[tuple[str, ...]] = Counter()

    async def reset(self, prompt: State, extra_info: dict[str, Any]) -> Episode:
        """Start an episode at the row's ``prompt`` or the environment's own state; the caller must always close it."""
        if self._open_slots is not None:
            await self._open_slots.acquire()  # waits: for an episode to be closed, each of whose calls has a deadline
        episode = Episode(copy.deepcopy(prompt), copy.deepcopy(extra_info))
        try:
            state = await self._in_time("reset", self._environment.reset(episode.extra_info))
            if state is not None:
                episode.state = validate_state("the state that reset returned", state)
        except EnvironmentFailed as error:
            episode.lost = isinstance(error, EnvironmentLost)
            self.fail(episode, error)
        except BaseException:
            await self.close(episode)
            raise
        return episode

    async def step(self, episode: Episode, action: str, timeout_s: float | None = None) -> StepResult | None:
        """Answer the action, by default within the guard's ``timeout_s``; return None if the episode failed. Raises
        ValueError if it has ended."""
        state = episode.state
        if state is None or not episode.open:
            raise ValueError("the episode is over")
        try:
            sent: str | Message = action
            if isinstance(state, list):
                sent = make_assistant_message(action, episode.turns)
            step = self._environment.step(copy.deepcopy(state), copy.deepcopy(sent), episode.extra_info)
            answer = await self._in_time("step", step, timeout_s)
            result = validate_step(answer, episode.extra_info, self._needs_state)
            next_state = result.next_state
            if isinstance(next_state, list) and isinstance(state, list) and isinstance(sent, dict):
                next_state = [*state, sent, *next_state]
            elif next_state is not None and not (isinstance(next_state, str) and isinstance(state, str)):
                own, other = ("messages", "text") if isinstance(state, list) else ("text", "messages")
                raise EnvironmentFailed(f"the episode's state is {own}, but next_state is {other}")
        except EnvironmentFailed as error:
            episode.lost = isinstance(error, EnvironmentLost)
            if self._failure_reward is None:
                self.fail(episode, error)
                return None
            self._count(error)
            result, next_state = StepResult(None, self._failure_reward, 0.0, True, episode.extra_info), None
        if result.next_state is None and not result.done:
            result = replace(result, done=True)
        episode.state, episode.extra_info, episode.done = next_state, result.extra_info, result.done
        episode.reward += result.reward
        episode.score += result.score
        episode.turns += 1
        return result

    async def close(self, episode: Episode) -> None:
        """End an episode; a second call does nothing. Errors of the environment are logged."""
        if not episode.open:
            return
        episode.open, episode.state = False, None
        try:
            await self._in_time("close", self._environment.close(episode.extra_info))
        except EnvironmentFailed as error:
            self._count(error)
        finally:
            if self._open_slots is not None:
                self._open_slots.release()

    def fail(self, episode: Episode, error: EnvironmentFailed) -> None:
        episode.state, episode.failure = None, str(error)
        self._count(error)

    def _count(self, error: EnvironmentFailed) -> None:
        """Count a failure. The first of a kind and line is logged with its traceback, then the 10th, 100th, ..."""
        self.failures[kind := str(error).split(":", 1)[0][:100]] += 1  # similar failures have the same beginning
        lines = [line for line in error.remote_traceback.splitlines() if line.startswith("  File ")]
        self._logged[kind, *lines[-1:]] += 1
        text = str(error).partition("\n")[0]
        if (count := self._logged[kind, *lines[-1:]]) == 1:
            _LOG.warning("the environment failed on a sample: %s", f"{text}\n{error.remote_traceback}".rstrip())
        elif str(count).rstrip("0") == "1":
            _LOG.warning("the environment has failed on %d samples: %s", count, text)

    async def shutdown(self) -> None:
        try:
            await self._in_time("shutdown", self._environment.shutdown())
        except EnvironmentFailed as error:
            _LOG.warning("the environment did not shut down: %s", error)

    async def _in_time(self, call: str, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        task = asyncio.ensure_future(coroutine)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            if not task.done():  # abandoned: user code may suppress the cancellation
                task.cancel()
                self._abandoned.add(task)
                task.add_done_callback(self._forget)
        if not task.done():
            raise EnvironmentFailed(f"{call} gave no answer within {round(timeout_s, 3):g} s")
        try:
            return task.result()  # waits: no more, it is done
        except EnvironmentFailed:
            raise
        except asyncio.CancelledError:
            raise EnvironmentFailed(f"{call} was cancelled from inside") from None
        except Exception as error:
            message = f"{call} raised {type(error).__name__}: {error}"[:2_000]
            raise EnvironmentFailed(message, user_traceback(error)) from error

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._abandoned.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.debug("an abandoned call raised: %s", error)


Encode: TypeAlias = Callable[[str], list[int]]  # token ids of a text, without special tokens around it

ROW: Mapping[str, ColumnSpec] = {
    **SEQUENCE,
    "token_rewards": ColumnSpec("float32"),
    "finished": ColumnSpec("bool", fill=False, per="sample"),
    "score": ColumnSpec("float64", per="sample"),
}
"""The columns of every sequence, before the engine's. ``action_mask`` is True on the policy's tokens, a reward is on
the last token of its action, and ``finished`` is True if the last action ended before a token limit."""


class Trajectory:
    """Builds the sequences of a sample: ``prompt``, then :meth:`act` and :meth:`observe` in turns.

    Sampled tokens are never encoded again. If the next state continues the last state and action, only the new text is
    encoded; otherwise a new sequence starts with the whole state. All sequences are one sample with one advantage.

    Args:
        encode: encodes texts of states.
        state: the first state.
        tokens: the tokens of ``state`` (from a chat template); by default ``encode_whole(state)``.
        encode_whole: encodes states that start a sequence, with the model's prefix; by default ``encode``.
        columns: the engine's columns."""

    def __init__(
        self,
        encode: Encode,
        state: str,
        tokens: Sequence[int] | None = None,
        encode_whole: Encode | None = None,
        columns: Mapping[str, ColumnSpec] = GENERATED,
    ) -> None:
        self._specs = {**ROW, **columns}
        self._encode, self._encode_whole = encode, encode_whole or encode
        self._state, self.action, self._ending = state, "", ""
        self.sequences: list[SequenceColumns] = []
        self._begin(state, self._encode_whole(state) if tokens is None else tokens)

    @property
    def context(self) -> list[int]:
        """The tokens that the policy continues."""
        return self.last.tokens

    def act(self, text: str, tokens: Sequence[int], columns: Mapping[str, Any], ending: str = "") -> None:
        """Add the policy's action: its decoded ``text``, sampled ``tokens``, and their ``columns`` from the engine.

        ``ending`` is the end marker that the last token stands for and ``text`` lacks. If the next state continues the
        action with it, as a chat template does, it is not encoded again."""
        count = len(tokens)
        own = {"tokens": tokens, "action_mask": [True] * count, "token_rewards": [0.0] * count}
        self.last.extend(count, {**columns, **own})
        self.last.text += text
        self.action, self._ending = self.action + text, ending

    def reward(self, value: float, score: float = 0.0) -> None:
        """Add a reward to the last action; raises DataError without one."""
        values = self.last.values
        if not any(mask := values["action_mask"]):
            raise DataError("there is no action to reward")
        values["token_rewards"][-1 - mask[::-1].index(True)] += value
        values["score"] += score

    def observe(self, state: str, fits: Callable[[list[int]], bool] | None = None) -> bool:
        """Add the next state; return False, without a change, if ``fits`` refuses the policy's next input."""
        context = self._state + self.action
        continues = state.startswith(context)
        added = state[len(context) :]
        new = added.removeprefix(self._ending)
        tokens = (self._encode(new) if new else []) if continues else self._encode_whole(state)
        if fits is not None and not fits([*self.context, *tokens] if continues else tokens):
            return False
        if continues:
            self.last.give(len(tokens), tokens=tokens)
            self.last.text += added
        else:
            self._begin(state, tokens)
        self._state, self.action, self._ending = state, "", ""
        return True

    def _begin(self, state: str, tokens: Sequence[int]) -> None:
        self.sequences.append(SequenceColumns(self._specs, opening=state))
        self.last.give(len(tokens), tokens=tokens)

    @property
    def last(self) -> SequenceColumns:
        return self.sequences[-1]
