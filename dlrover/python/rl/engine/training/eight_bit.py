# SPDX-License-Identifier: Apache-2.0
"""AdamW with moments in 8 bits (Dettmers et al., arXiv:2110.02861), rounded by bitsandbytes.

A block of numbers has one scale and is part of one row: ranks that divide rows divide blocks too, and resume from each
other's states without rounding them again. An engine that steps flat parts of matrices cuts these into blocks. Vectors
have moments in float32."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from dlrover.python.rl.engine.api.registry import require_bitsandbytes

BLOCK = 256
"""Maximum numbers that share a float32 scale."""

PIECE = 1 << 24
"""Numbers whose moments are in float32 at a time, except for a longer row."""

_SCALE = "_scale"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_state(master: Any, of_matrices: bool) -> dict[str, Any]:
    """Make a state of zeros. For a matrix, or a flat part of matrices, ``exp_avg`` and ``exp_avg_sq`` are uint8 of the
    master's shape; ``exp_avg_scale`` and ``exp_avg_sq_scale`` are float32 ``[rows, blocks of a row]``, or flat."""
    state = {"step": torch.zeros((), device=master.device)}
    if not of_matrices:
        return {**state, **{kind: torch.zeros_like(master, requires_grad=False) for kind in _MOMENTS}}
    *rows, width = (master.shape[0], master.shape[1:].numel()) if master.ndim > 1 else master.shape
    scales = (*rows, -(-width // BLOCK))
    for kind in _MOMENTS:
        state[kind] = torch.zeros_like(master, dtype=torch.uint8, requires_grad=False)
        state[kind + _SCALE] = torch.zeros(scales, device=master.device)
    return state


class AdamW8bit(torch.optim.Optimizer):
    """Takes AdamW's step from the rounded moments, and rounds the new ones after it."""

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        """Start without states, which :func:`make_state` makes. Raises MissingExtra without bitsandbytes."""
        require_bitsandbytes()
        from bitsandbytes import functional

        super().__init__(groups, {"lr": lr, "betas": betas})
        self._functional = functional
        signed = {"exp_avg": True, "exp_avg_sq": False}
        self._values = {kind: functional.create_dynamic_map(signed=signed[kind]) for kind in _MOMENTS}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for master in group["params"]:
                state = self.state[master]
                if is_rounded(state):
                    self._step_matrices(group, master, state)
                else:
                    _take_step(group, master, master.grad, [state[kind] for kind in _MOMENTS], state["step"])

    def read(self, state: Mapping[str, Any], kind: str) -> Any:
        """Return a moment in float32, of the master's shape."""
        codes = state[kind]
        has_codes = is_rounded(state) and codes.numel()
        return self._restore(kind, codes, state[kind + _SCALE]) if has_codes else codes.float()

    def write(self, state: Mapping[str, Any], kind: str, moment: Any) -> None:
        """Round ``moment``. Writing what :meth:`read` returned changes a block's scale if its largest number is
        negative."""
        if not is_rounded(state):
            state[kind].copy_(moment)
        elif moment.numel():
            self._round(kind, moment.to(state[kind].device), state[kind], state[kind + _SCALE])

    def _step_matrices(self, group: Mapping[str, Any], master: Any, state: dict[str, Any]) -> None:
        kinds = [*_MOMENTS, *(kind + _SCALE for kind in _MOMENTS)]
        tensors = [master, master.grad, *(state[kind] for kind in kinds)]
        rows = blocks = max(PIECE // max(master.shape[1:].numel(), 1), 1)
        if master.ndim == 1:
            blocks = PIECE // BLOCK
        sizes = [rows] * 4 + [blocks] * 2
        split = (tensor.split(size) for tensor, size in zip(tensors, sizes, strict=True))
        for part, gradient, *stored in zip(*split, strict=True) if master.numel() else ():
            codes, scales = stored[: len(_MOMENTS)], stored[len(_MOMENTS) :]
            moments = [self._restore(*each) for each in zip(_MOMENTS, codes, scales, strict=True)]
            _take_step(group, part, gradient, moments, state["step"].clone())
            for each in zip(_MOMENTS, moments, codes, scales, strict=True):
                self._round(*each)
        state["step"] += 1

    def _restore(self, kind: str, codes: Any, scales: Any) -> Any:
        values = self._values[kind] = self._values[kind].to(codes.device)  # the masters are on one
        rounding = self._functional.QuantState(scales.reshape(-1), code=values, blocksize=BLOCK, dtype=torch.float32)
        blocks = self._functional.dequantize_blockwise(_in_blocks(codes), rounding)
        return _out_of_blocks(blocks, codes.shape)

    def _round(self, kind: str, moment: Any, codes: Any, scales: Any) -> None:
        values = self._values[kind] = self._values[kind].to(moment.device)
        blocks, rounding = self._functional.quantize_blockwise(_in_blocks(moment), code=values, blocksize=BLOCK)
        codes.copy_(_out_of_blocks(blocks, codes.shape))
        scales.copy_(rounding.absmax.view_as(scales))


def is_rounded(state: Mapping[str, Any]) -> bool:
    """Return True if the moments are in 8 bits."""
    return _MOMENTS[0] + _SCALE in state


def _in_blocks(tensor: Any) -> Any:
    """Pad rows, or a flat part, with zeros to whole blocks: ``[rows, numbers]``."""
    rows = tensor.flatten(1) if tensor.ndim > 1 else tensor[None]
    return torch.nn.functional.pad(rows, (0, -rows.shape[1] % BLOCK)).contiguous()


def _out_of_blocks(blocks: Any, shape: Sequence[int]) -> Any:
    # The fused step ignores strides.
    return blocks[:, : torch.Size(shape[1:] or shape).numel()].contiguous().view(shape)


def _take_step(group: Mapping[str, Any], master: Any, gradient: Any, moments: Sequence[Any], steps: Any) -> None:
    beta1, beta2 = group["betas"]
    settings = {"lr": group["lr"], "weight_decay": group["weight_decay"], "beta1": beta1, "beta2": beta2, "eps": 1e-8}
    average, square = moments
    adamw([master], [gradient], [average], [square], [], [steps], fused=True, amsgrad=False, maximize=False, **settings)
