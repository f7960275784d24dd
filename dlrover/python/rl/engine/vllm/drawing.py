"""Drawing tokens inside vLLM by the rule of all engines here, so that a sample depends on nothing but itself.

vLLM's own seeds belong to a request's history: one that was interrupted and goes on would get other tokens than it
would have got. So this logits processor draws each token with the random number of its position, and leaves nothing of
the row but that token, with its log-prob in the place of its logit. vLLM, which is told to be greedy and to report
processed logits, then takes the token and reports the log-prob.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm import SamplingParams as VllmSamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from dlrover.python.rl.engine.base import SamplingParams
from dlrover.python.rl.engine.torch.sampling import choose

EXTRA = "dlrover_drawing"
"""The key of a request's ``extra_args`` under which this finds what to do."""


@dataclass(frozen=True, eq=False)
class Drawing:
    """How to draw the rest of one request.

    Attributes:
        sampling: as the port has it.
        uniform: the random numbers of the tokens that are left to draw.
    """

    sampling: SamplingParams
    uniform: list[float]


@dataclass(frozen=True, eq=False)
class _Row:
    """A request's place in vLLM's batch; ``output`` is vLLM's own list of the tokens drawn, which grows."""

    drawing: Drawing
    output: list[int]


class PositionDrawing(LogitsProcessor):
    """vLLM makes one in each worker."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._groups: list[tuple[SamplingParams, list[int]]] = []

    def is_argmax_invariant(self) -> bool:
        """It decides what the largest logit is."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow vLLM's batch, which request is in which row: a ``BatchUpdate``, or None where nothing changed."""
        if process_dict_updates(self._rows, batch_update, _row):
            self._groups = _grouped(self._rows.items())

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw a token for each row of ``logits`` ``[rows, vocab]``, and leave only its log-prob there."""
        for sampling, rows in self._groups:
            index = torch.tensor(rows, device=self._device)
            numbers = [self._number(row) for row in rows]
            uniform = torch.tensor(numbers, dtype=torch.float64, device=self._device)
            tokens, logprobs = choose(logits[index], sampling, uniform)
            logits[index] = -torch.inf
            logits[index, tokens] = logprobs.to(logits.dtype)
        return logits

    def _number(self, row: int) -> float:
        """The random number of the row's next token. Past the last, vLLM draws only what it throws away."""
        uniform, drawn = self._rows[row].drawing.uniform, len(self._rows[row].output)
        return uniform[min(drawn, len(uniform) - 1)]


def _row(params: VllmSamplingParams, prompt: list[int] | None, output: list[int]) -> _Row | None:
    drawing = (params.extra_args or {}).get(EXTRA)
    return None if drawing is None else _Row(drawing, output)


def _grouped(rows: Iterable[tuple[int, _Row]]) -> list[tuple[SamplingParams, list[int]]]:
    """Rows that draw alike, together."""
    groups: dict[tuple[Any, ...], tuple[SamplingParams, list[int]]] = {}
    for number, row in rows:
        sampling = row.drawing.sampling
        alike = sampling.temperature, sampling.top_k, sampling.top_p, sampling.logprobs
        groups.setdefault(alike, (sampling, []))[1].append(number)
    return list(groups.values())
