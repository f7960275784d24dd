# SPDX-License-Identifier: Apache-2.0
"""Token sampling inside vLLM's workers.

These logits processors sample each token with the random number of its position, write the log-prob in place of the
logit, and mask all other tokens. vLLM samples greedily from processed logits: it picks the token and reports the
log-prob. There is one for each of vLLM's interfaces, which differ in how they follow the batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams as VllmSamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.sample.logits_processor import LogitsProcessor as RunnerV1Processor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as RunnerV2Processor

from dlrover.python.rl.engine.api.base import SamplingParams
from dlrover.python.rl.engine.rollout.requests import RunningRequest
from dlrover.python.rl.engine.rollout.sampling import choose, sampling_key, uniforms

EXTRA = "dlrover_rl"
"""Key of a request's plan in its ``extra_args``."""

_SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "logprobs")


def plan_of(running: RunningRequest) -> dict[str, Any]:
    """Return what a worker needs to sample the tokens of a request, as plain values."""
    return {
        "seed": list(running.seed),
        "key": list(running.request.key),
        "prompt_tokens": len(running.request.prompt),
        "known_ids": running.known_ids,
        **{name: getattr(running.sampling, name) for name in _SAMPLING},
    }


@dataclass(frozen=True, eq=False)
class Plan:
    sampling: SamplingParams
    prompt_tokens: int  # without generated tokens, which vLLM may receive as part of the prompt
    known_ids: int | None  # this id and higher ones are not sampled
    uniform: "np.ndarray[Any, np.dtype[np.float64]]"  # the random number of each new token

    @classmethod
    def read(cls, params: VllmSamplingParams) -> "Plan | None":
        """Return a request's plan; None for requests of vLLM itself."""
        values = (params.extra_args or {}).get(EXTRA)
        if values is None:
            return None
        sampling = SamplingParams(**{name: values[name] for name in _SAMPLING})
        prompt_id, sample_index = values["key"]
        numbers = uniforms(tuple(values["seed"]), prompt_id, sample_index, sampling.max_new_tokens)
        return cls(sampling, values["prompt_tokens"], values["known_ids"], numbers)


def sample_rows(logits: torch.Tensor, plans: Mapping[int, Plan], uniform: torch.Tensor) -> torch.Tensor:
    """Sample a token for each row of ``logits`` ``[rows, vocab]`` that has a plan, and leave only its log-prob there.
    ``uniform`` ``[rows]`` has their random numbers."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, plan in plans.items():
        groups.setdefault((*sampling_key(plan.sampling), plan.known_ids), []).append(row)
    for rows in groups.values():
        plan, index = plans[rows[0]], torch.tensor(rows).to(logits.device, non_blocking=True)
        tokens, logprobs = choose(logits[index, : plan.known_ids], plan.sampling, uniform[index])
        logits[index] = -torch.inf
        logits[index, tokens] = logprobs.to(logits.dtype)
    return logits


class PositionSamplerV1(RunnerV1Processor):
    """For vLLM's first model runner; vLLM makes one in each worker."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[Plan, int, Sequence[int]]] = {}  # plan, length of vLLM's prompt, its growing output

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            self._rows.pop(row, None)
            if (plan := Plan.read(params)) is not None:
                self._rows[row] = plan, len(prompt or ()), output
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        numbers = np.zeros(len(logits))
        for row, (plan, prompt_tokens, output) in self._rows.items():
            index = prompt_tokens + len(output) - plan.prompt_tokens
            # vLLM discards tokens past the last one, which get its number.
            numbers[row] = plan.uniform[min(max(index, 0), len(plan.uniform) - 1)]
        plans = {row: plan for row, (plan, _, _) in self._rows.items()}
        return sample_rows(logits, plans, torch.from_numpy(numbers).to(logits.device, non_blocking=True))


class PositionSamplerV2(RunnerV2Processor):
    """For vLLM's second model runner, whose batch may be ahead of the host: positions are read on the device."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._plans: dict[int, Plan] = {}  # by request slot
        slots, device = req_states.max_num_reqs, req_states.device
        self._uniform = torch.zeros(slots, vllm_config.model_config.max_model_len, dtype=torch.float64, device=device)
        self._last = torch.zeros(slots, dtype=torch.int64, device=device)
        self._prompt_tokens = torch.zeros(slots, dtype=torch.int64, device=device)

    def add_request(self, req_idx: int, sampling_params: VllmSamplingParams) -> bool:
        plan = Plan.read(sampling_params)
        if plan is None:
            self._plans.pop(req_idx, None)
            return False
        self._plans[req_idx] = plan
        self._uniform[req_idx, : len(plan.uniform)].copy_(torch.from_numpy(plan.uniform), non_blocking=True)
        self._last[req_idx], self._prompt_tokens[req_idx] = len(plan.uniform) - 1, plan.prompt_tokens
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        slots = ctx.expanded_idx_mapping.long()
        index = torch.minimum(ctx.pos + 1 - self._prompt_tokens[slots], self._last[slots]).clamp(min=0)
        uniform = self._uniform[slots, index]
        plans = {row: plan for row, slot in enumerate(ctx.idx_mapping_np.tolist()) if (plan := self._plans.get(slot))}
        return sample_rows(logits, plans, uniform)


class KnownIds(RunnerV2Processor):
    """Masks ids without a text where vLLM samples itself."""

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:
        self._known_ids: int | None = None  # the same in all requests of an engine

    def add_request(self, req_idx: int, sampling_params: VllmSamplingParams) -> bool:
        self._known_ids = (sampling_params.extra_args or {}).get(EXTRA, {}).get("known_ids")
        return self._known_ids is not None

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        if self._known_ids is not None:
            logits[:, self._known_ids :] = -torch.inf
        return logits
