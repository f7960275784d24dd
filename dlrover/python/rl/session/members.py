# SPDX-License-Identifier: Apache-2.0
"""The workloads of a script's engines, and the script's prompts and completions.

A method name that begins with ``engine.`` is a verb of the engine; every other name is a method of the user's module.
Model code is imported in ``open``, so that scripts can import these classes without it.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.names import hint
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.data.conversation import encode_prompt
from dlrover.python.rl.engine.api.base import Rendezvous, RolloutSettings, SamplingParams, TrainSettings
from dlrover.python.rl.engine.api.registry import ROLLOUT_ENGINES, engine_class
from dlrover.python.rl.engine.api.weights import WeightStamp
from dlrover.python.rl.engine.memory.device_memory import DeviceMemory
from dlrover.python.rl.engine.rollout.requests import sampling_params
from dlrover.python.rl.engine.weight_sync.base import Ticket
from dlrover.python.rl.session.split import NeedParallel
from dlrover.python.rl.session.weight_sync import Endpoints, Route
from dlrover.python.rl.trainer.workload import current_member

TEXT, TOKENS = "prompt", "prompt_token_ids"

_VLLM_NAMES = {"max_tokens": "max_new_tokens", "n": "samples_per_prompt", "include_stop_str_in_output": "keep_stop"}


@dataclass(frozen=True)
class Logprob:
    logprob: float


@dataclass(frozen=True, eq=False)
class CompletionOutput:
    index: int  #: its number among the prompt's completions
    text: str  #: without special tokens
    token_ids: list[int]  #: the end-of-sequence token included
    token_logprobs: npt.NDArray[np.float32]  #: [tokens]
    finish_reason: str  #: "stop" for an end-of-sequence token or stop string, "length" for max_new_tokens
    version: int  #: of the weights that sampled the last token; -1 for the initial weights

    @property
    def logprobs(self) -> list[dict[int, Logprob]]:
        pairs = zip(self.token_ids, self.token_logprobs.tolist(), strict=True)
        return [{token: Logprob(value)} for token, value in pairs]

    @property
    def cumulative_logprob(self) -> float:
        return float(self.token_logprobs.sum(dtype=np.float64))


@dataclass(frozen=True, eq=False)
class RequestOutput:
    request_id: str  #: the prompt's number in the call
    prompt: Any  #: the script's: a text, tokens, or a dict
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True  #: always: ``generate`` returns when all have finished


def as_outputs(prompts: Sequence[Any], first: int, completions: Batch) -> list[RequestOutput]:
    """Convert a batch of ``BaseRolloutEngine.generate`` for ``prompts``, which are numbered from ``first``."""
    tokens, masks = completions.ragged("tokens"), completions.ragged("action_mask")
    logprobs, texts = completions.ragged("logprobs"), completions.objects("completion")
    finished, versions = completions.dense("finished"), completions.dense("version")
    prompt_tokens: list[list[int]] = [[] for _ in prompts]
    outputs: list[list[CompletionOutput]] = [[] for _ in prompts]
    for row, number in enumerate(completions.dense("prompt_id").tolist()):
        mask, at = masks[row], number - first
        prompt_tokens[at] = tokens[row][: int(mask.argmax()) if mask.any() else len(mask)].tolist()
        outputs[at].append(
            CompletionOutput(
                index=int(completions.dense("sample_index")[row]),
                text=texts[row],
                token_ids=tokens[row][mask].tolist(),
                token_logprobs=logprobs[row][mask],
                finish_reason="stop" if finished[row] else "length",
                version=int(versions[row]),
            )
        )
    return [RequestOutput(str(first + at), prompt, prompt_tokens[at], outputs[at]) for at, prompt in enumerate(prompts)]


def as_sampling(values: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Parse a script's sampling parameters, some of which have vLLM's names, too. Raises EngineError for an unknown
    key (names the nearest), a repeated key, or a wrong value."""
    if values is None or isinstance(values, SamplingParams):
        return values or SamplingParams()
    if not isinstance(values, Mapping):
        raise EngineError(f"sampling parameters are a dict or SamplingParams, not {type(values).__name__}")
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    params: dict[str, Any] = {}
    for key, value in values.items():
        name = _VLLM_NAMES.get(key, key)
        if name not in fields:
            raise EngineError(f"sampling has no parameter '{key}'{hint(key, fields | set(_VLLM_NAMES))}")
        if name in params:
            raise EngineError(f"sampling parameter '{name}' is given twice, also as '{key}'")
        params[name] = (value,) if name == "stop" and isinstance(value, str) else value
    if params.get("top_k") == -1:
        params["top_k"] = None
    return sampling_params(params)


def as_prompts(value: Any) -> list[Any]:
    """Make a list of prompts; a text, a dict, or a sequence of token ids is a single one. Raises EngineError."""
    value = value.value if isinstance(value, NeedParallel) else value
    prompts = [value] if isinstance(value, str | Mapping) or _is_tokens(value) else list(value)
    for number, prompt in enumerate(prompts):
        inner = prompt
        if isinstance(prompt, Mapping):
            if (TEXT in prompt) == (TOKENS in prompt):
                raise EngineError(f"prompt {number} is a dict: it needs either '{TEXT}' or '{TOKENS}'")
            inner = prompt[TEXT] if TEXT in prompt else prompt[TOKENS]
        if not isinstance(inner, str) and not _is_tokens(inner):
            raise EngineError(f"prompt {number} is {type(inner).__name__}, not a text, a list of token ids, or a dict")
    return prompts


def _is_tokens(value: Any) -> bool:
    if hasattr(value, "dtype") and hasattr(value, "ndim"):
        return int(value.ndim) == 1
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(isinstance(token, int | np.integer) for token in value)


def as_batch(prompts: Sequence[Any], first: int, tokenizer: Any, columns: Collection[str]) -> Batch:
    """Make a rollout engine's batch of prompts, numbered from ``first``; ``columns`` are the further entries of dicts
    that it accepts. Raises EngineError for any other entry."""
    dicts = [
        prompt if isinstance(prompt, Mapping) else {TEXT if isinstance(prompt, str) else TOKENS: prompt}
        for prompt in prompts
    ]
    extra: dict[str, list[Any]] = {}
    for number, prompt in enumerate(dicts):
        for name in set(prompt) - {TEXT, TOKENS}:
            if name not in columns:
                label = f"prompt {first + number} has '{name}'"
                raise EngineError(f"{label}, which the engine does not accept{hint(name, columns)}")
            extra.setdefault(name, [None] * len(prompts))[number] = prompt[name]
    rows = [
        np.asarray(prompt[TOKENS] if TOKENS in prompt else encode_prompt(tokenizer, prompt[TEXT])) for prompt in dicts
    ]
    texts = {TEXT: [prompt.get(TEXT) for prompt in dicts]} if TEXT in columns else {}
    prompt_ids = np.arange(first, first + len(rows), dtype=np.int64)
    return Batch({"prompt_id": prompt_ids, "tokens": Ragged.from_rows(rows, dtype=np.int64), **texts, **extra})


VERB = "engine."


class EngineMember:
    """Hosts an engine; it has one public method, so that a user's module may use all other names."""

    def __init__(self, _master_handle: Any, _config: Any) -> None:
        self._member = current_member()
        self._engine: Any = None
        self._memory = DeviceMemory()
        self._endpoints = Endpoints(self._member.name, False, "cpu", self._memory)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not name.startswith(VERB):
            return self._users_method(name)
        verb = name.removeprefix(VERB)
        own = f"_{verb}"
        return getattr(self, own) if hasattr(type(self), own) else getattr(self._engine, verb)

    def _users_method(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"an inference engine has no method '{name}'")

    def _release_cache(self) -> None:
        self._memory.release_cache()

    def close(self) -> None:
        self._endpoints.close()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()


class TrainMember(EngineMember):
    """A rank's part of the user's module."""

    def _open(self, settings: TrainSettings, payload: bytes) -> None:
        from dlrover.python.rl.engine.module.engine import ModuleEngine

        member = self._member
        rendezvous = Rendezvous(member.rank, member.world_size, member.master_addr, member.master_port)
        self._memory = DeviceMemory(settings.device)
        self._engine = ModuleEngine(member.name, payload, settings, rendezvous, self._memory)
        self._endpoints = Endpoints(member.name, member.rank == 0, settings.device, self._memory)

    def _users_method(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, /, *arguments: Any, **kwargs: Any) -> Any:
        """Call a method of the module with this rank's part. The last two arguments are its shares, and the positions
        and names of the arguments that come as a list of one part."""
        *args, shares, split = arguments
        values = [value[0] if at in split else value for at, value in enumerate(args)]
        named = {key: value[0] if key in split else value for key, value in kwargs.items()}
        return self._engine.call(name, shares[0], values, named)

    def _in_training(self) -> bool:
        return bool(self._engine.training)

    def _offer(self, route: Route) -> Ticket:
        return self._endpoints.endpoint(route).offer(self._engine)

    def _send(self, ticket: Ticket, route: Route) -> WeightStamp | None:
        return self._endpoints.endpoint(route).send(ticket, self._engine)

    def _take(self, ticket: Ticket, route: Route) -> WeightStamp:
        stamp: WeightStamp = self._engine.receive(self._endpoints.endpoint(route).receive(ticket))
        return stamp


class InferenceMember(EngineMember):
    """A rollout engine, whose attribute ``prompt_columns``, if any, names entries of prompts that it accepts."""

    def _open(self, engine: Any, model: str | Path, settings: RolloutSettings) -> None:
        self._memory = DeviceMemory(settings.device)
        kind = engine_class(ROLLOUT_ENGINES, engine) if isinstance(engine, str) else engine
        self._engine = kind(model, settings, self._memory)
        self._endpoints = Endpoints(self._member.name, False, settings.device, self._memory)

    def _generate(
        self, parts: Sequence[tuple[int, Sequence[Any]]], sampling: SamplingParams, seed: tuple[int, ...]
    ) -> Batch | None:
        """Complete this rank's part of the prompts: the number of the first, and the prompts."""
        ((first, prompts),) = parts
        if not prompts:
            return None
        batch = as_batch(prompts, first, self._engine.tokenizer, getattr(self._engine, "prompt_columns", ()))
        completions: Batch = self._engine.generate(batch, sampling, seed)
        return completions

    def _take(self, ticket: Ticket, route: Route) -> WeightStamp:
        """Receive weights of any version: the script decides."""
        weights = self._endpoints.endpoint(route).receive(ticket)
        self._engine.receive(weights, rewind=True)
        if self._engine.version != weights.version:
            raise EngineError(f"the engine serves version {self._engine.version}, not {weights.version}")
        return weights.stamp
