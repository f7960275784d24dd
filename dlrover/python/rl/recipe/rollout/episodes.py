# SPDX-License-Identifier: Apache-2.0
"""Groups of samples, their rows, and the episode of one sample: its turns with an environment."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.errors import DataError, EngineError, EnvironmentFailed
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.data.batch import GENERATED, Batch, ColumnSpec, Ragged, SequenceColumns
from dlrover.python.rl.data.conversation import continue_chat, encode_prompt, find_think_prefix, prompt_text
from dlrover.python.rl.engine.api.base import Completion, Request, SamplingParams
from dlrover.python.rl.engine.api.rollout_server import PendingRequest, RolloutServer
from dlrover.python.rl.environment.core.messages import Message
from dlrover.python.rl.environment.core.turns import ROW, Episode, Guard, Trajectory

_LOG = get_logger(__name__)

_SUMMARY = (
    "prompt_id", "sample_index", "retry", "trajectory", "turns", "finished", "version", "min_version", "digest",
    "reward", "score", "error", "unknown_ids",
)  # fmt: skip

_TRAJECTORY_BITS = {"created_step": 14, "retry": 6, "prompt_id": 28, "sample_index": 14}
"""62 bits. Higher bits are cut: two samples of one step do not differ in them."""


class GroupKey(NamedTuple):
    """Identifies a group among the open ones."""

    prompt_id: int
    retry: int
    created_step: int


@dataclass(eq=False)
class Sample:
    """One completion, or one episode with an environment."""

    index: int
    sequences: Sequence[SequenceColumns] = ()  # set at the end; several if a state does not continue the last one
    turns: int = 0  # actions of the policy so far
    error: str | None = None  # why the environment failed
    pending: set[PendingRequest] = field(default_factory=set)  # the requests being generated
    open_requests: int = 0  # of its agent
    versions: tuple[int, int] = (-1, -1)  # lowest and highest of the finished turns, -1 for none
    task: "asyncio.Task[None] | None" = None  # runs the sample
    ended: bool = False

    def merge_versions(self, *versions: tuple[int, int]) -> tuple[int, int]:
        pairs = [pair for pair in (self.versions, *versions) if pair[0] >= 0]
        return (min(pair[0] for pair in pairs), max(pair[1] for pair in pairs)) if pairs else (-1, -1)


@dataclass(eq=False)
class Group:
    """The samples of one prompt. The trainer tracks it by ``row`` and ``share``; a rollout worker generates it."""

    prompt_id: int  # unique among open groups, except for retries
    created_step: int  # the random numbers depend on it
    retry: int = 0  # number of earlier groups of the prompt in that step, whose rewards failed
    row: int = 0  # the prompt's row in the file
    share: int = 0  # share of the rollouts' work: the rank of a worker, if none is missing
    started: bool = False  # the group stays in its share
    complete: bool = False  # all samples have ended
    min_version: int = -1  # lowest weight version of its tokens, -1 for none yet
    prompt: Any = None
    text: str = ""  # the prompt as the policy reads it
    answer: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = SamplingParams()
    seed: tuple[int, ...] = ()  # seeds the random numbers, with the prompt id and the sample index
    priority: bool = False  # runs before other groups, see ``RolloutServer.exclusive``
    samples: list[Sample] = field(default_factory=list)
    failure: BaseException | None = None  # an exception that ended one of its samples

    @property
    def key(self) -> GroupKey:
        return GroupKey(self.prompt_id, self.retry, self.created_step)


def make_batch(groups: Sequence[Group], scored: bool, generated: Mapping[str, ColumnSpec] = GENERATED) -> Batch:
    """Return the rows of complete groups: groups in this order, samples by index, sequences of a sample adjacent.

    Ragged ``[rows, seq]``: ``tokens``, ``action_mask``, and the columns that the engine ``generated``: ``logprobs``,
    ``versions`` (int64, -1 outside the mask), and further columns that it declares (dense if they are per sample).
    Dense: ``prompt_id``, ``sample_index``, ``retry``, ``turns`` (of the sample), ``finished``, ``version`` and
    ``min_version`` (highest and lowest of the row, -1 without an action token), ``trajectory`` (equal in the rows of a
    sample), ``digest`` (of the tokens). Objects: ``completion``, ``prompt``, ``answer``, ``extra_info``,
    ``think_prefix``. If an environment has ``scored`` them, also ``token_rewards``, ``reward`` and ``score`` (float64;
    of the row's own actions, NaN if the sample failed) and ``error`` (None, or the reason)."""
    rows = [(group, sample, row) for group in groups for sample in group.samples for row in sample.sequences]
    sequences = [row for _, _, row in rows]
    stacked = SequenceColumns.stack(sequences, {**ROW, **generated})
    score, token_rewards = stacked.pop("score"), stacked.pop("token_rewards")
    tokens, versions = cast(Ragged, stacked["tokens"]), cast(Ragged, stacked["versions"])
    columns: dict[str, Any] = {
        "prompt_id": _integers(group.prompt_id for group, _, _ in rows),
        "sample_index": _integers(sample.index for _, sample, _ in rows),
        "retry": _integers(group.retry for group, _, _ in rows),
        "turns": _integers(sample.turns for _, sample, _ in rows),
        "version": _integers(row.max() for row in versions),
        "min_version": _integers(row[row >= 0].min(initial=row.max()) for row in versions),
        "digest": _integers(
            int.from_bytes(blake2b(row.tobytes(), digest_size=8).digest(), "little", signed=True) for row in tokens
        ),
        "completion": [row.text for row in sequences],
        "prompt": [group.prompt if row.opening == group.text else row.opening for group, _, row in rows],
        "answer": [group.answer for group, _, _ in rows],
        "extra_info": [group.extra_info for group, _, _ in rows],
        "think_prefix": [find_think_prefix(row.opening) for row in sequences],
    }
    trajectory, created = np.zeros(len(rows), np.int64), _integers(group.created_step for group, _, _ in rows)
    for name, bits in _TRAJECTORY_BITS.items():
        trajectory = trajectory << bits | {"created_step": created, **columns}[name] % (1 << bits)
    columns["trajectory"] = trajectory
    if scored:
        failed = np.array([sample.error is not None for _, sample, _ in rows], dtype=np.bool_)
        sums = np.array([math.fsum(row.values["token_rewards"]) for row in sequences], dtype=np.float64)
        columns |= {
            "token_rewards": token_rewards,
            "reward": np.where(failed, np.nan, sums),
            "score": np.where(failed, np.nan, cast(Any, score)),
            "error": [sample.error for _, sample, _ in rows],
        }
    if clash := sorted(columns.keys() & stacked.keys()):
        raise DataError(f"the engine declares a column '{clash[0]}', which the samples of every engine have")
    return Batch(stacked | columns)


def summarize_rows(rollouts: Batch) -> Batch:
    """Return the numbers of each row that the trainer needs, with ``action_tokens`` and ``token_count``."""
    actions = rollouts.ragged("action_mask")
    return rollouts.select(*(name for name in _SUMMARY if name in rollouts)).with_columns(
        action_tokens=_count_true(actions), token_count=actions.lengths
    )


def count_unknown_ids(rollouts: Batch, known_ids: int) -> Batch:
    """Add ``unknown_ids`` (int64 ``[rows]``), the number of generated ids from ``known_ids`` on."""
    tokens, actions = rollouts.ragged("tokens"), rollouts.ragged("action_mask")
    return rollouts.with_columns(unknown_ids=_count_true(actions.like(actions.values & (tokens.values >= known_ids))))


def _count_true(flags: Ragged) -> npt.NDArray[np.int64]:
    totals: npt.NDArray[np.int64] = np.concatenate([[0], np.cumsum(flags.values)])
    return totals[flags.offsets[1:]] - totals[flags.offsets[:-1]]


def _integers(values: Any) -> npt.NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)


@dataclass(eq=False)
class ChatText:
    """The text of a conversation by the chat template, with the policy's turns as they were generated."""

    tokenizer: Any
    template_kwargs: Mapping[str, Any]
    messages: list[Message] = field(default_factory=list)
    text: str = ""

    def render(self, state: list[Message], action: str) -> str:
        """Render all messages, of which the policy's last one is ``action``; the first state has no action yet."""
        if not self.messages:
            self.text = prompt_text(self.tokenizer, state, self.template_kwargs)
            self.messages = list(state)
            return self.text
        answers = state[len(self.messages) + 1 :]
        self.text = continue_chat(self.tokenizer, self.text, self.messages, action, answers, self.template_kwargs)
        self.messages += [{"role": "assistant", "content": action}, *answers]
        return self.text


class EpisodeRunner:
    """Runs samples of at most ``max_turns`` actions; without ``guard`` a sample is one completion. ``generating`` is
    the number of samples that need the engine; the others wait for the environment."""

    def __init__(
        self, server: RolloutServer, guard: Guard | None, max_turns: int, arguments_of_template: Callable[..., Any]
    ) -> None:
        self._server, self._guard, self._max_turns = server, guard, max_turns
        self._tokenizer, self._arguments_of_template = server.tokenizer, arguments_of_template
        self.columns: Mapping[str, ColumnSpec] = {**GENERATED, **server.columns}
        self.generating = 0

    async def run(self, group: Group, sample: Sample, tokens: Sequence[int]) -> None:
        """Run a sample to its end; ``tokens`` is the prompt without an environment. A sample whose environment
        fails has an ``error``. Raises EngineError if the engine refuses the prompt, DataError if encoding fails."""
        if self._guard is None:
            trajectory = Trajectory(self._encode, group.text, tokens, columns=self.columns)
            completion = await self._generate(group, sample, tokens)
            trajectory.act(completion.text, completion.request.done.tolist(), columns_of(completion))
            sample.sequences = trajectory.sequences
            return
        answer = {} if group.answer is None else {"answer": group.answer}
        prompt = group.prompt if self._guard.traits.uses_messages else group.text
        episode = await self._guard.reset(prompt, {**answer, **group.extra_info})
        try:
            await self._run_episode(self._guard, group, sample, episode)
        finally:
            await self._guard.close(episode)

    async def _run_episode(self, guard: Guard, group: Group, sample: Sample, episode: Episode) -> None:
        chat = ChatText(self._tokenizer, self._arguments_of_template(group.extra_info))
        state = _render_state(guard, episode, chat)
        trajectory = self._start_trajectory(group, state, chat)
        fits = partial(self._fits, group.sampling)
        if state is not None and not fits(trajectory.context):
            fault = "there is no first state: the row has no prompt, and reset returned no state"
            if count := len(trajectory.context):
                fault = f"the first state leaves no room for an action: it has {count} tokens"
            guard.fail(episode, EnvironmentFailed(fault))
        while episode.state is not None:
            completion = await self._generate(group, sample, trajectory.context)
            tokens = completion.request.done.tolist()
            ending = str(self._tokenizer.decode(tokens[-1:])) if completion.finish == "eos" else ""
            trajectory.act(completion.text, tokens, columns_of(completion), ending)
            # The environment sees no prompt, so the action repeats an open tag of thoughts.
            self.generating -= 1
            try:
                result = await guard.step(episode, find_think_prefix(chat.text) + trajectory.action)
            finally:
                self.generating += 1
            if result is not None:
                trajectory.reward(result.reward, result.score)
            state = _render_state(guard, episode, chat, trajectory.action)
            if state is None or sample.turns == self._max_turns:
                break
            if not trajectory.observe(state, fits):
                trajectory.last.values["finished"] = False  # the model has no position left for another turn
                break
        sample.error = episode.failure
        sample.sequences = trajectory.sequences
        if not trajectory.sequences[0].tokens:  # it failed before the first state, and a row needs a token
            trajectory.sequences[0].give(1, tokens=[self._tokenizer.eos_token_id or 0])

    def _start_trajectory(self, group: Group, state: str | None, chat: ChatText) -> Trajectory:
        state = group.text if state is None else state
        if chat.messages:
            return Trajectory(self._encode, state, columns=self.columns)
        tokens = encode_prompt(self._tokenizer, group.prompt, chat.template_kwargs) if state == group.text else None
        whole = partial(encode_prompt, self._tokenizer) if isinstance(group.prompt, str) else self._encode
        return Trajectory(self._encode, state, tokens, whole, self.columns)

    async def _generate(self, group: Group, sample: Sample, context: Sequence[int]) -> Completion:
        seed = group.seed  # turn 0 has the seed of a sample without further turns
        if sample.turns:
            seed = (*seed, *([0] * (3 - len(seed))), sample.turns)
        request = Request.fresh(group.prompt_id, sample.index, context)
        return await self.complete(group, sample, request, group.sampling, seed)

    async def complete(
        self, group: Group, sample: Sample, request: Request, sampling: SamplingParams, seed: tuple[int, ...]
    ) -> Completion:
        pending = self._server.submit(request, sampling, seed, group.priority)
        sample.pending.add(pending)
        try:
            completion = await self._server.wait(pending)
        finally:
            sample.pending.discard(pending)
        return self.take_action(sample, completion)

    def take_action(self, sample: Sample, completion: Completion) -> Completion:
        """Count an action, which is returned."""
        versions = completion.request.versions
        sample.versions = sample.merge_versions((int(versions.min()), int(versions.max())))
        sample.turns += 1
        return completion

    def _fits(self, sampling: SamplingParams, tokens: list[int]) -> bool:
        try:
            self._server.check(Ragged.from_rows([tokens], dtype=np.int64), sampling)
        except EngineError:
            return False
        return True

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def _render_state(guard: Guard, episode: Episode, chat: ChatText, action: str = "") -> str | None:
    """Return the text that the policy continues; None if the episode is over, or the template refuses the messages."""
    if not isinstance(episode.state, list):
        return episode.state
    try:
        return chat.render(episode.state, action)
    except DataError as error:
        guard.fail(episode, EnvironmentFailed(str(error)))
        return None


def columns_of(completion: Completion) -> dict[str, Any]:
    return {**completion.columns, "finished": completion.finish in ("eos", "stop")}
