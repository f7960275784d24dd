"""What all rollout engines do alike with prompts, requests and completions; no backend is known here."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.config.typed import parse
from dlrover.python.rl.data.batch import Batch, Ragged
from dlrover.python.rl.engine.base import Completion, Request, SamplingParams


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from a plain mapping, as scripts and job files give them.

    Raises:
        EngineError: a key is unknown (gives the nearest) or a value wrong; names all of them.
    """
    params, problems = parse(SamplingParams, dict(values), "sampling")
    if params is None:
        raise EngineError("; ".join(map(str, problems)))
    return params


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse values that no engine can draw with.

    Raises:
        EngineError: names each.
    """
    stop: Any = sampling.stop  # a text is a sequence of texts, too
    fine = {
        "max_new_tokens": sampling.max_new_tokens >= 1,
        "temperature": 0.0 <= sampling.temperature < float("inf"),
        "samples_per_prompt": sampling.samples_per_prompt >= 1,
        "top_k": sampling.top_k is None or sampling.top_k >= 1,
        "top_p": 0.0 < sampling.top_p <= 1.0,
        "stop": not isinstance(stop, str) and all(stop),
        "logprobs": sampling.logprobs in ("policy", "sampled"),
    }
    wrong = [f"{name} {getattr(sampling, name)!r}" for name, right in fine.items() if not right]
    if wrong:
        raise EngineError(f"cannot sample with {', '.join(wrong)}")


def check_requests(requests: Sequence[Request], sampling: SamplingParams, running: Iterable[tuple[int, int]]) -> None:
    """Refuse requests that do not fit each other, those that run, or the sampling.

    Args:
        requests: to be taken in.
        sampling: how they shall be drawn.
        running: keys of those that have been taken in before.

    Raises:
        EngineError: a key comes twice, a column is of another length, or nothing is left to draw.
    """
    seen = set(running)
    for request in requests:
        if request.key in seen:
            raise EngineError(f"request {request.key} runs already, or comes twice")
        seen.add(request.key)
        lengths = {len(request.done), len(request.logprobs), len(request.versions)}
        if len(lengths) > 1:
            raise EngineError(f"request {request.key}: done, logprobs and versions have {sorted(lengths)} entries")
        if len(request.done) >= sampling.max_new_tokens:
            raise EngineError(
                f"request {request.key} has {len(request.done)} tokens of at most {sampling.max_new_tokens}:"
                " nothing is left to draw"
            )


def fresh_requests(prompts: Batch, sampling: SamplingParams) -> list[Request]:
    """The samples that :meth:`~dlrover.python.rl.engine.base.RolloutEngine.generate` is asked for, in its order.

    Args:
        prompts: columns ``prompt_id`` (int64 ``[rows]``) and ``tokens`` (ragged).
        sampling: gives the samples of each prompt.
    """
    pairs = zip(prompts.dense("prompt_id").tolist(), prompts.ragged("tokens"), strict=True)
    return [
        Request.fresh(identity, index, tokens)
        for identity, tokens in pairs
        for index in range(sampling.samples_per_prompt)
    ]


def as_batch(completions: Sequence[Completion]) -> Batch:
    """The columns that :meth:`~dlrover.python.rl.engine.base.RolloutEngine.generate` returns, a row per completion."""
    asked = [completion.request for completion in completions]
    tokens = [np.concatenate([request.prompt, request.done]) for request in asked]
    chosen = [np.arange(len(row)) >= len(request.prompt) for row, request in zip(tokens, asked, strict=True)]
    logprobs = [np.concatenate([np.zeros(len(request.prompt)), request.logprobs]) for request in asked]
    return Batch(
        {
            "tokens": Ragged.from_rows(tokens, dtype=np.int64),
            "action_mask": Ragged.from_rows(chosen, dtype=np.bool_),
            "logprobs": Ragged.from_rows(logprobs, dtype=np.float32),
            "finished": np.array([item.finish in ("eos", "stop") for item in completions], dtype=np.bool_),
            "prompt_id": np.array([request.prompt_id for request in asked], dtype=np.int64),
            "sample_index": np.array([request.sample_index for request in asked], dtype=np.int64),
            "version": np.array([request.versions[-1] for request in asked], dtype=np.int64),
            "completion": [completion.text for completion in completions],
        }
    )
