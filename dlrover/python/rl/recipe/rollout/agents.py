# SPDX-License-Identifier: Apache-2.0
"""Agents that act by requests in OpenAI's shape: their sessions, which become trajectories, and their runs.

::

    agent's process --run(client, row)--> client --HTTP--> endpoint --Ask--> AgentSession --context--> RolloutServer
         |                                                                        |
         '------------------------------ reward ------------------> rows of tokens, one sample

A session has rows of tokens. A request that extends the conversation of a row continues its tokens: only the new text
is encoded. Any other request, such as one with a trimmed history or with other tools, starts a new row. A repeated
request gets the recorded actions, also while they are being generated; that is how an agent continues that has lost
its process. Random numbers depend on a request's content, not on the order of requests."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Any, Literal, Protocol

from dlrover.python.rl.common.errors import DataError, EnvironmentFailed
from dlrover.python.rl.data.conversation import encode_prompt, find_think_prefix
from dlrover.python.rl.engine.api.base import Completion, Request, SamplingParams
from dlrover.python.rl.engine.api.rollout_server import RolloutServer
from dlrover.python.rl.environment.core.base import Environment
from dlrover.python.rl.environment.core.messages import Message, State, make_assistant_message
from dlrover.python.rl.environment.core.turns import Episode, Guard, Trajectory
from dlrover.python.rl.recipe.base.config import AgentConfig
from dlrover.python.rl.recipe.rollout.chat_api import Answer, ApiError, Ask, Choice, Kind, normalize_chat_message
from dlrover.python.rl.recipe.rollout.episodes import ChatText, EpisodeRunner, Group, Sample, columns_of
from dlrover.python.rl.recipe.rollout.kept_samples import KeptSamples, completed

_TRIES = 3  # of an agent that loses its process
_INDEX_BITS = 16
"""The low bits of a request's ``sample_index`` are the sample's; the others are of a digest of the request."""


class Endpoint(Protocol):
    """The server that passes requests on to sessions."""

    def open(self, session: "AgentSession") -> tuple[str, str]:
        """Return the address of a session: its base URL and its key."""

    def end(self, address: tuple[str, str]) -> None:
        """Refuse further requests of a session."""


class AgentGuard(Guard):
    """Guards an environment of one step, which runs an agent to its end."""

    def __init__(
        self, environment: Environment, endpoint: Endpoint, settings: AgentConfig, failure_reward: float | None = None
    ) -> None:
        super().__init__(environment, settings.timeout_s, failure_reward=failure_reward)
        self.endpoint, self.settings = endpoint, settings


@dataclass(eq=False)
class _Row:
    """A sequence of tokens, and its conversation as the agent knows it."""

    kind: Kind
    template_kwargs: Mapping[str, Any]
    chat: ChatText
    trajectory: Trajectory
    conversation: State
    cut: str = ""  # the stop string that the last action keeps and the agent does not get
    is_open: bool = False  # its last action has ended

    def is_continued_by(self, ask: Ask) -> bool:
        is_alike = self.is_open and self.kind == ask.kind and self.template_kwargs == ask.template_kwargs
        return is_alike and ask.state[: len(self.conversation)] == self.conversation

    def extend_chat(self, ask: Ask) -> ChatText:
        """Return the chat of a request that continues this row, which does not change."""
        chat = replace(self.chat, messages=[*self.chat.messages])
        if isinstance(ask.state, list):
            answers = ask.state[len(self.conversation) :]
            chat.render([*chat.messages, {}, *answers], self.trajectory.action)
        else:
            chat.text += self.trajectory.action + ask.state[len(self.conversation) :].removeprefix(self.cut)
        return chat


class AgentSession:
    """The requests of one episode, until it is closed; every method is called in the rollouts' event loop.

    Limits: ``settings.max_tokens``, the time ``ends_s`` of the loop, and ``max_turns`` actions. A later ``attempt``
    gets other actions for the same requests."""

    def __init__(self, runner: "AgentRunner", group: Group, sample: Sample, attempt: int, ends_s: float) -> None:
        seed = (*group.seed, *([0] * (3 - len(group.seed))), attempt) if attempt else group.seed
        self._runner, self._group, self._sample = runner, replace(group, seed=seed), sample
        self.loop = asyncio.get_running_loop()
        self._ends_s = ends_s
        self._record: dict[bytes, asyncio.Task[tuple[Sequence[int], list[Choice]]]] = {}
        self._rows: list[_Row] = []
        self._latest: _Row | None = None
        self._actions = self._tokens = 0  # begun or reserved
        self._kept = {} if runner.copies is None else runner.copies.load_actions(self._group, sample.index)
        self.address = runner.endpoint.open(self)

    @property
    def most_open(self) -> int:
        return self._runner.settings.max_open

    @property
    def left_s(self) -> float:
        return max(self._ends_s - self.loop.time(), 0.0)

    def close(self) -> None:
        self._ends_s = self.loop.time()
        self._runner.endpoint.end(self.address)
        for task in self._record.values():
            task.cancel()

    async def discard(self) -> None:
        """Close the session, and forget its actions."""
        requests = [*self._record.values()]
        self.close()
        await asyncio.gather(*requests, return_exceptions=True)  # waits: for requests that are cancelled
        self._sample.turns, self._sample.versions = 0, (-1, -1)

    async def answer(self, ask: Ask) -> Answer:
        """Return the policy's actions. Raises ApiError beyond a limit, or if the model cannot continue the state."""
        ended = ApiError(401, "the episode of this key has ended", "invalid_api_key")
        if not self.left_s:
            raise ended
        task = self._record.get(ask.digest)
        if task is None:
            task = self._record[ask.digest] = self.loop.create_task(self._act(ask, self._reserve(ask)))
            self._runner.count_busy(self._sample, 1)
            task.add_done_callback(partial(self._end_request, ask.digest))
        await asyncio.wait({task})  # waits: for the engine, until the episode's deadline cancels the request
        if task.cancelled():
            raise ended
        context, choices = task.result()  # waits: no more, it is done
        decode = self._runner.tokenizer.decode
        if ask.logprobs:
            choices = [replace(each, token_texts=[decode([token]) for token in each.tokens]) for each in choices]
        return Answer(ask, choices, context, self._runner.version, int(time.time()), self.limits())

    def limits(self) -> dict[str, int]:
        """Return the episode's limits, and what remains of them."""
        most = self._runner.settings.max_tokens
        limits = {
            "limit-requests": self._runner.max_turns,
            "remaining-requests": self._runner.max_turns - self._actions,
        }
        if most is not None:
            limits |= {"limit-tokens": most, "remaining-tokens": most - self._tokens}
        return {**limits, "reset-seconds": int(self.left_s)}

    def _reserve(self, ask: Ask) -> int:
        """Count a new request, and return the tokens that each of its actions may have."""
        if self._actions + ask.n > self._runner.max_turns:
            raise ApiError(429, f"the episode has had {self._actions} of {self._runner.max_turns} actions", "max_turns")
        most = min(self._group.sampling.max_new_tokens, ask.max_tokens or self._group.sampling.max_new_tokens)
        if self._runner.settings.max_tokens is not None:
            most = min(most, (self._runner.settings.max_tokens - self._tokens) // ask.n)
            if most < 1 and self._sample.open_requests:
                message = "open requests have reserved the episode's last tokens: wait for their answers"
                raise ApiError(429, message, "rate_limit_exceeded", retry=True)
            if most < 1:
                raise ApiError(429, f"the episode has had its {self._runner.settings.max_tokens} tokens", "max_tokens")
        self._actions += ask.n
        self._tokens += most * ask.n
        return most

    def _end_request(self, digest: bytes, task: "asyncio.Task[Any]") -> None:
        self._runner.count_busy(self._sample, -1)
        if (task.cancelled() or task.exception() is not None) and self._record.get(digest) is task:
            del self._record[digest]  # it may be asked again

    async def _act(self, ask: Ask, most: int) -> tuple[Sequence[int], list[Choice]]:
        sampling = self._group.sampling
        stops = tuple(dict.fromkeys((*sampling.stop, *ask.stop)))
        sampling = replace(sampling, max_new_tokens=most, stop=stops, keep_stop=True)
        completing: list[asyncio.Task[Completion]] = []
        try:
            row = self._continue_row(ask, self._runner.fitting(sampling))
            context = list(row.trajectory.context)
            rows = [row, *(self._copy_row(row, context) for _ in range(ask.n - 1))]
            for number in range(ask.n):
                completing.append(self.loop.create_task(self._complete(ask, number, context, sampling)))
            completions = await asyncio.gather(*completing)
        except BaseException:
            for each in completing:
                each.cancel()
            self._actions -= ask.n
            self._tokens -= most * ask.n
            raise
        self._tokens -= most * ask.n - sum(len(each.request.done) for each in completions)
        self._rows += rows[1:]
        choices = [
            self._add_action(row, ask, stops, completion) for row, completion in zip(rows, completions, strict=True)
        ]
        return context, choices

    async def _complete(self, ask: Ask, number: int, context: Sequence[int], sampling: SamplingParams) -> Completion:
        runner, sample = self._runner, self._sample
        mark = blake2b(ask.digest + bytes([number]), digest_size=5).digest()
        index = sample.index | int.from_bytes(mark) << _INDEX_BITS
        request = Request.fresh(self._group.prompt_id, index, context)
        replayed = completed(request, self._kept.pop(mark.hex(), None))
        if replayed is not None:
            return runner.take_action(sample, replayed)
        completion = await runner.complete(self._group, sample, request, sampling, self._group.seed)
        if runner.copies is not None:
            runner.copies.save_action(self._group, sample.index, mark.hex(), completion)
        return completion

    def _continue_row(self, ask: Ask, fits: Callable[[list[int]], bool]) -> _Row:
        """Return the row with the request's state as its context: the longest one that it continues, or a new one."""
        continued = [row for row in self._rows if row.is_continued_by(ask)]
        row = max(continued, key=lambda row: len(row.conversation), default=None)
        try:
            if row is not None:
                chat = row.extend_chat(ask)
                if not row.trajectory.observe(chat.text, fits):
                    row.trajectory.last.values["finished"] = False
                    raise self._too_long(ask)
                row.chat = chat
                row.is_open = False  # until its action has ended
                return row
            chat = ChatText(self._runner.tokenizer, self._runner.template_arguments(self._group, ask))
            if isinstance(ask.state, list):
                chat.render(ask.state, "")
            else:
                chat.text = ask.state
        except DataError as error:
            raise ApiError(400, str(error)[:1000], "invalid_value", "messages") from None
        whole = partial(encode_prompt, self._runner.tokenizer) if ask.kind == "text" else self._runner.encode
        trajectory = Trajectory(self._runner.encode, chat.text, None, whole, self._runner.columns)
        if not fits(trajectory.context):
            raise self._too_long(ask)
        row = _Row(ask.kind, ask.template_kwargs, chat, trajectory, ask.state)
        self._rows.append(row)
        return row

    def _too_long(self, ask: Ask) -> ApiError:
        param = "messages" if ask.kind == "chat" else "prompt"
        message = "the conversation leaves no room for an action: it has more tokens than the model has positions"
        return ApiError(400, message, "context_length_exceeded", param)

    def _copy_row(self, row: _Row, context: Sequence[int]) -> _Row:
        chat = replace(row.chat, messages=[*row.chat.messages])
        trajectory = Trajectory(self._runner.encode, chat.text, context, columns=self._runner.columns)
        return replace(row, chat=chat, trajectory=trajectory)

    def _add_action(self, row: _Row, ask: Ask, stops: Sequence[str], completion: Completion) -> Choice:
        text, tokens = completion.text, completion.request.done.tolist()
        decode = self._runner.tokenizer.decode
        ending = str(decode(tokens[-1:])) if completion.finish == "eos" else ""
        row.trajectory.act(text, tokens, columns_of(completion), ending)
        places = [at for at in map(text.find, stops) if at >= 0] if completion.finish == "stop" else []
        row.cut = text[min(places) :] if places else ""
        shown = text.removesuffix(row.cut)
        if isinstance(ask.state, list):
            message = self._message(row, ask, shown)
            row.conversation = [*ask.state, normalize_chat_message(message)]
        else:
            message, row.conversation = {"role": "assistant", "content": shown}, ask.state + shown
        row.is_open, self._latest = True, row
        finish: Literal["stop", "length"] = "stop" if completion.finish in ("eos", "stop") else "length"
        return Choice(shown, tokens, (), completion.request.logprobs.tolist(), finish, message)

    def _message(self, row: _Row, ask: Ask, shown: str) -> Message:
        content = find_think_prefix(row.chat.text) + shown
        if "tools" not in ask.template_kwargs:
            return {"role": "assistant", "content": content}
        return make_assistant_message(content, sum(message.get("role") == "assistant" for message in ask.state))  # type: ignore[union-attr]

    def finish(self, episode: Episode) -> None:
        """Credit the agent's reward to the last action, and give the sample its rows."""
        sample, runner = self._sample, self._runner
        if self._latest is not None:
            self._latest.trajectory.reward(episode.reward, episode.score)
        elif episode.failure is None:
            runner.guard.fail(episode, EnvironmentFailed("the agent has made no request"))
        sequences = [sequence for row in self._rows for sequence in row.trajectory.sequences]
        sample.sequences = [each for each in sequences if any(each.values["action_mask"])]
        if not sample.sequences:  # a row needs a token
            trajectory = Trajectory(runner.encode, "", [runner.tokenizer.eos_token_id or 0], columns=runner.columns)
            sample.sequences = trajectory.sequences
        sample.error = episode.failure


class AgentRunner(EpisodeRunner):
    """Runs an agent for each sample, of at most ``max_turns`` actions. A sample needs the engine while one of its
    requests is open."""

    def __init__(
        self,
        server: RolloutServer,
        guard: AgentGuard,
        max_turns: int,
        arguments_of_template: Callable[..., Any],
        copies: KeptSamples | None,
    ) -> None:
        super().__init__(server, guard, max_turns, arguments_of_template)
        self.copies = copies
        self.guard, self.settings, self.endpoint = guard, guard.settings, guard.endpoint
        self.max_turns = max_turns

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def version(self) -> int:
        return self._server.version

    def template_arguments(self, group: Group, ask: Ask) -> dict[str, Any]:
        return {**self._arguments_of_template(group.extra_info), **ask.template_kwargs}

    def fitting(self, sampling: SamplingParams) -> Callable[[list[int]], bool]:
        return partial(self._fits, sampling)

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def count_busy(self, sample: Sample, change: int) -> None:
        """Count the open requests of a sample, which needs the engine while there is one."""
        before, sample.open_requests = sample.open_requests, sample.open_requests + change
        if not sample.ended:
            self.generating += bool(sample.open_requests) - bool(before)

    async def run(self, group: Group, sample: Sample, tokens: Sequence[int]) -> None:
        ends_s = asyncio.get_running_loop().time() + self.settings.timeout_s
        session = AgentSession(self, group, sample, 0, ends_s)
        self.generating -= 1
        try:
            for attempt in range(_TRIES):
                if attempt and self.settings.on_loss == "redraw":
                    await session.discard()
                    session = AgentSession(self, group, sample, attempt, ends_s)
                episode = await self._run_agent(session, group)
                if not episode.lost:
                    break
            session.finish(episode)
        finally:
            session.close()
            self.generating += not sample.open_requests

    async def _run_agent(self, session: AgentSession, group: Group) -> Episode:
        answer = {} if group.answer is None else {"answer": group.answer}
        guard, (url, key) = self.guard, session.address
        episode = await guard.reset(url, {"prompt": group.prompt, **answer, **group.extra_info})
        try:
            if episode.failure is None:
                await guard.step(episode, key, session.left_s)
        finally:
            await guard.close(episode)
        return episode
