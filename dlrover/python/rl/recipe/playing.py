"""What one sample goes through: its turns between the policy and an environment, or the one turn without."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.errors import EngineError, EnvironmentFailed
from dlrover.python.rl.data.batch import Ragged
from dlrover.python.rl.data.conversation import encode_prompt, prompt_text
from dlrover.python.rl.engine.base import Completion, Request, SamplingParams
from dlrover.python.rl.environment.base import StepResult
from dlrover.python.rl.environment.guard import Episode, Guard
from dlrover.python.rl.environment.turns import TokenSequence, Trajectory
from dlrover.python.rl.recipe.stream import Asked, EngineStream


@dataclass(frozen=True, eq=False)
class Row:
    """A sequence of a sample, as it will be trained on.

    Attributes:
        tokens: int64 ``[seq]``.
        action_mask: bool ``[seq]``: which of them the policy chose.
        logprobs: float32 ``[seq]``, 0 on the others.
        versions: int64 ``[seq]``: of the weights that drew them, -1 on the others.
        rewards: float32 ``[seq]``: at the last token of each action.
        prompt: what it begins with, as the row of the data says it where that is the same.
        completion: what came after.
        finished: the last action ended by itself, not by the limit of tokens.
        score: of its actions.
    """

    tokens: npt.NDArray[np.int64]
    action_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int64]
    rewards: npt.NDArray[np.float32]
    prompt: Any
    completion: str
    finished: bool
    score: float = 0.0


@dataclass(frozen=True)
class Task:
    """What the samples of a group have in common.

    Attributes:
        prompt_id: of the group.
        prompt: text or messages.
        extra_info: the user's data of the row.
        sampling: how every turn is drawn.
        seed: what samples depend on besides prompt and index.
        first: whether they go first where some do.
    """

    prompt_id: int
    prompt: Any
    extra_info: dict[str, Any]
    sampling: SamplingParams
    seed: tuple[int, ...]
    first: bool = False

    def seed_of(self, turn: int) -> tuple[int, ...]:
        """Of a turn, from 0: that of the first is the sample's own, as if it were the only one."""
        return (*self.seed, *([0] * (3 - len(self.seed))), turn) if turn else self.seed


@dataclass(eq=False)
class Sample:
    """One sample on its way, and what has come of it.

    Attributes:
        rows: its sequences, once it is over.
        turns: how many actions the policy has made.
        error: why it has failed; None when it has not.
        asked: the completion it waits for.
        drawn: oldest and newest version of the weights that drew the turns before.
    """

    index: int
    rows: list[Row] = field(default_factory=list)
    turns: int = 0
    error: str | None = None
    asked: Asked | None = None
    drawn: tuple[int, int] = (-1, -1)
    over: bool = False

    def saw(self, versions: tuple[int, int]) -> tuple[int, int]:
        """Oldest and newest of what has been drawn and of ``versions``; -1 where nothing was."""
        there = [pair for pair in (self.drawn, versions) if pair[0] >= 0]
        return (min(pair[0] for pair in there), max(pair[1] for pair in there)) if there else (-1, -1)


class Player:
    """Plays samples.

    Args:
        stream: of the engine.
        guard: of the environment; None: a sample is one completion.
        max_turns: actions of a sample at most.

    Attributes:
        busy: samples that are drawn, or about to be; the others wait for the environment.
    """

    def __init__(self, stream: EngineStream, guard: Guard | None, max_turns: int) -> None:
        self._stream, self._guard, self._max_turns = stream, guard, max_turns
        self._tokenizer = stream.engine.tokenizer
        self.busy = 0

    async def play(self, sample: Sample, task: Task, tokens: Sequence[int]) -> None:
        """Play a sample to its end; that of an environment is marked if the environment fails.

        Args:
            sample: gets what comes of it.
            task: its group's.
            tokens: of the prompt.

        Raises:
            EngineError: the engine refuses the prompt.
            DataError: the prompt cannot be encoded.
        """
        if self._guard is None:
            done = await self._draw(sample, task, tokens)
            sample.rows = [_only_row(done, task.prompt)]
            return
        episode = await self._guard.reset(prompt_text(self._tokenizer, task.prompt), task.extra_info)
        try:
            await self._episode(self._guard, sample, task, episode)
        finally:
            await self._guard.close(episode)

    async def _episode(self, guard: Guard, sample: Sample, task: Task, episode: Episode) -> None:
        trajectory = self._trajectory(task, episode)

        def fits(tokens: list[int]) -> bool:
            return self._fits(tokens, task.sampling)

        if episode.state is not None and not fits(trajectory.context):
            guard.fail(episode, _no_beginning(len(trajectory.context)))
        while episode.state is not None:
            await self._act(sample, task, trajectory)
            result = await self._step(guard, episode, trajectory.action)
            if result is not None:
                trajectory.reward(result.reward, result.score)
            if episode.state is None or sample.turns == self._max_turns or not trajectory.observe(episode.state, fits):
                break
        sample.error = episode.failure
        sample.rows = [_row(sequence, task, self._tokenizer) for sequence in trajectory.sequences]

    def _trajectory(self, task: Task, episode: Episode) -> Trajectory:
        text = prompt_text(self._tokenizer, task.prompt)
        state = text if episode.state is None else episode.state
        given = encode_prompt(self._tokenizer, task.prompt) if state == text else None
        whole = self._encode if not isinstance(task.prompt, str) else self._encode_whole
        return Trajectory(self._encode, state, given, whole)

    async def _act(self, sample: Sample, task: Task, trajectory: Trajectory) -> None:
        done = await self._draw(sample, task, trajectory.context)
        drawn = done.request
        trajectory.act(done.text, drawn.done.tolist(), drawn.logprobs.tolist(), drawn.versions.tolist())
        trajectory.last.finished = _ended_itself(done)

    async def _draw(self, sample: Sample, task: Task, context: Sequence[int]) -> Completion:
        request = Request.fresh(task.prompt_id, sample.index, context)
        sample.asked = self._stream.ask(request, task.sampling, task.seed_of(sample.turns), task.first)
        done = await self._stream.answer(sample.asked)
        versions = done.request.versions
        sample.drawn = sample.saw((int(versions.min()), int(versions.max())))
        sample.asked = None
        sample.turns += 1
        return done

    async def _step(self, guard: Guard, episode: Episode, action: str) -> StepResult | None:
        self.busy -= 1
        try:
            return await guard.step(episode, action)
        finally:
            self.busy += 1

    def _fits(self, tokens: list[int], sampling: SamplingParams) -> bool:
        try:
            self._stream.engine.check(Ragged.from_rows([tokens], dtype=np.int64), sampling)
        except EngineError:
            return False
        return True

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode_whole(self, text: str) -> list[int]:
        return encode_prompt(self._tokenizer, text)


def _no_beginning(tokens: int) -> EnvironmentFailed:
    if not tokens:
        return EnvironmentFailed("nothing to begin with: the row has no prompt, and reset returned no state")
    return EnvironmentFailed(f"the first state leaves no room for an action: it has {tokens} tokens")


def _ended_itself(done: Completion) -> bool:
    return done.finish in ("eos", "stop")


def _only_row(done: Completion, prompt: Any) -> Row:
    """Of a sample that is one completion."""
    drawn = done.request
    given, count = len(drawn.prompt), len(drawn.prompt) + len(drawn.done)
    return Row(
        np.concatenate([drawn.prompt, drawn.done]),
        np.arange(count) >= given,
        np.concatenate([np.zeros(given, dtype=np.float32), drawn.logprobs]),
        np.concatenate([np.full(given, -1), drawn.versions]),
        np.zeros(count, dtype=np.float32),
        prompt,
        done.text,
        _ended_itself(done),
    )


def _row(sequence: TokenSequence, task: Task, tokenizer: Any) -> Row:
    """Of a sample that an environment answered. One that failed before it was given anything has one token."""
    nothing = TokenSequence("", "", [tokenizer.eos_token_id or 0], [False], [0.0], [-1], [0.0])
    told = sequence if sequence.tokens else nothing
    known = not isinstance(task.prompt, str) and sequence.opening == prompt_text(tokenizer, task.prompt)
    return Row(
        np.array(told.tokens, dtype=np.int64),
        np.array(told.action_mask, dtype=np.bool_),
        np.array(told.logprobs, dtype=np.float32),
        np.array(told.versions, dtype=np.int64),
        np.array(told.rewards, dtype=np.float32),
        task.prompt if known else sequence.opening,
        sequence.text,
        sequence.finished,
        sequence.score,
    )
