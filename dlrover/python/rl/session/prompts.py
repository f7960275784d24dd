"""Prompts and sampling parameters as a script writes them."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.common.nearest import hint
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.base import SamplingParams
from dlrover.python.rl.engine.requests import sampling_params
from dlrover.python.rl.session.split import NeedParallel

TEXT, TOKENS = "prompt", "prompt_token_ids"

_VLLM_NAMES = {"max_tokens": "max_new_tokens", "n": "samples_per_prompt", "include_stop_str_in_output": "keep_stop"}


def as_sampling(given: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    """Sampling parameters from what a script gives; vLLM's ``max_tokens``, ``n`` and ``include_stop_str_in_output``
    stand for ``max_new_tokens``, ``samples_per_prompt`` and ``keep_stop``.

    Raises:
        EngineError: a key is unknown (gives the nearest), comes twice, or a value is wrong.
    """
    if given is None:
        return SamplingParams()
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping):
        raise EngineError(f"sampling parameters are a dict or SamplingParams, not {type(given).__name__}")
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    named: dict[str, Any] = {}
    for key, value in given.items():
        name = _VLLM_NAMES.get(key, key)
        if name not in known:
            raise EngineError(f"sampling has no parameter '{key}'{hint(key, known | set(_VLLM_NAMES))}")
        if name in named:
            raise EngineError(f"sampling parameter '{name}' is given twice, as '{key}' as well")
        named[name] = (value,) if name == "stop" and isinstance(value, str) else value
    if named.get("top_k") == -1:
        named["top_k"] = None
    return sampling_params(named)


def as_prompts(given: Any) -> list[Any]:
    """A list of prompts; a text, a dict, or a sequence of token ids is a single one.

    Raises:
        EngineError: one is no text, no tokens and no dict with either.
    """
    value = given.value if isinstance(given, NeedParallel) else given
    prompts = [value] if isinstance(value, str | Mapping) or _is_tokens(value) else list(value)
    for number, prompt in enumerate(prompts):
        inner = prompt
        if isinstance(prompt, Mapping):
            if (TEXT in prompt) == (TOKENS in prompt):
                raise EngineError(f"prompt {number} is a dict: it has either '{TEXT}' or '{TOKENS}'")
            inner = prompt[TEXT] if TEXT in prompt else prompt[TOKENS]
        if not isinstance(inner, str) and not _is_tokens(inner):
            raise EngineError(f"prompt {number} is {type(inner).__name__}: a text, a list of token ids, or a dict")
    return prompts


def _is_tokens(value: Any) -> bool:
    if hasattr(value, "dtype") and hasattr(value, "ndim"):
        return int(value.ndim) == 1
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(isinstance(token, int | np.integer) for token in value)


def as_batch(prompts: Sequence[Any], first: int, tokenizer: Any, takes: Collection[str]) -> Batch:
    """Prompts as a rollout engine wants them.

    Args:
        prompts: texts, tokens, or dicts.
        first: number of the first of them.
        tokenizer: of the model, for texts.
        takes: what the engine understands of a dict besides its text or tokens; each becomes a column of objects.

    Raises:
        EngineError: a dict has something that the engine does not take.
    """
    dicts = [prompt if isinstance(prompt, Mapping) else {_key(prompt): prompt} for prompt in prompts]
    extra: dict[str, list[Any]] = {}
    for number, prompt in enumerate(dicts):
        for name in set(prompt) - {TEXT, TOKENS}:
            if name not in takes:
                raise EngineError(
                    f"prompt {first + number} has '{name}', which the engine does not take{hint(name, takes)}"
                )
            extra.setdefault(name, [None] * len(prompts))[number] = prompt[name]
    rows = [
        np.asarray(prompt[TOKENS]) if TOKENS in prompt else np.asarray(tokenizer(prompt[TEXT])["input_ids"])
        for prompt in dicts
    ]
    texts = {TEXT: [prompt.get(TEXT) for prompt in dicts]} if TEXT in takes else {}
    return Batch(
        {
            "prompt_id": np.arange(first, first + len(rows), dtype=np.int64),
            "tokens": Ragged.from_rows(rows, dtype=np.int64),
            **texts,
            **extra,
        }
    )


def _key(prompt: Any) -> str:
    return TEXT if isinstance(prompt, str) else TOKENS
