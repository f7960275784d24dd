# SPDX-License-Identifier: Apache-2.0
"""AdamW with moments in 8 bits (Dettmers et al., arXiv:2110.02861), rounded by bitsandbytes.

A block of numbers has one scale and is part of one row, so that ranks which divide rows divide blocks, too, and go on
from each other's states without rounding them again. Vectors have moments in float32."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from dlrover.python.rl.engine.api.registry import require_bitsandbytes

BLOCK = 256
"""Maximum numbers with one scale in float32."""

PIECE = 1 << 24
"""Numbers whose moments are in float32 at a time, but for a longer row."""

_SCALE = "_scale"
_MOMENTS = ("exp_avg", "exp_avg_sq")


def make_state(master: Any) -> dict[str, Any]:
    """Zeros. Of a matrix ``exp_avg`` and ``exp_avg_sq`` are of dtype uint8 and have the master's shape;
    ``exp_avg_scale`` and ``exp_avg_sq_scale`` are float32 ``[rows, blocks of a row]``."""
    state = {"step": torch.zeros((), device=master.device)}
    if master.ndim < 2:  # noqa: PLR2004
        return {**state, **{kind: torch.zeros_like(master, requires_grad=False) for kind in _MOMENTS}}
    scales = (master.shape[0], -(-master.shape[1:].numel() // BLOCK))
    for kind in _MOMENTS:
        state[kind] = torch.zeros_like(master, dtype=torch.uint8, requires_grad=False)
        state[kind + _SCALE] = torch.zeros(scales, device=master.device)
    return state


class AdamW8bit(torch.optim.Optimizer):
    """A step is that of AdamW from the rounded moments; the new ones are rounded after it."""

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        """The state of each parameter is :func:`make_state`'s. Raises MissingExtra without bitsandbytes."""
        require_bitsandbytes()
        from bitsandbytes import functional

        super().__init__(groups, {"lr": lr, "betas": betas})
        self._functional = functional
        device = self.param_groups[0]["params"][0].device
        signed = {"exp_avg": True, "exp_avg_sq": False}
        self._values = {kind: functional.create_dynamic_map(signed=signed[kind]).to(device) for kind in _MOMENTS}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for master in group["params"]:
                state = self.state[master]
                if _MOMENTS[0] + _SCALE in state:
                    self._step_matrix(group, master, state)
                else:
                    _take_step(group, master, master.grad, [state[kind] for kind in _MOMENTS], state["step"])

    def _step_matrix(self, group: Mapping[str, Any], master: Any, state: dict[str, Any]) -> None:
        kinds = [*_MOMENTS, *(kind + _SCALE for kind in _MOMENTS)]
        tensors = [master, master.grad, *(state[kind] for kind in kinds)]
        rows = max(PIECE // max(master.shape[1:].numel(), 1), 1)
        pieces = zip(*(tensor.split(rows) for tensor in tensors), strict=True) if master.numel() else ()
        for part, gradient, *stored in pieces:
            codes, scales = stored[: len(_MOMENTS)], stored[len(_MOMENTS) :]
            moments = [self._restore(*each) for each in zip(_MOMENTS, codes, scales, strict=True)]
            _take_step(group, part, gradient, moments, state["step"].clone())
            for each in zip(_MOMENTS, moments, codes, scales, strict=True):
                self._round(*each)
        state["step"] += 1

    def _restore(self, kind: str, codes: Any, scales: Any) -> Any:
        rounding = self._functional.QuantState(
            scales.reshape(-1), code=self._values[kind], blocksize=BLOCK, dtype=torch.float32
        )
        blocks = self._functional.dequantize_blockwise(_in_blocks(codes), rounding)
        return _out_of_blocks(blocks, codes.shape)

    def _round(self, kind: str, moment: Any, codes: Any, scales: Any) -> None:
        blocks, rounding = self._functional.quantize_blockwise(
            _in_blocks(moment), code=self._values[kind], blocksize=BLOCK
        )
        codes.copy_(_out_of_blocks(blocks, codes.shape))
        scales.copy_(rounding.absmax.view_as(scales))


def _in_blocks(tensor: Any) -> Any:
    """The rows with zeros up to whole blocks, ``[rows, numbers]``."""
    flat = tensor.flatten(1)
    return torch.nn.functional.pad(flat, (0, -flat.shape[1] % BLOCK)).contiguous()


def _out_of_blocks(blocks: Any, shape: Sequence[int]) -> Any:
    # The fused step ignores strides.
    return blocks[:, : torch.Size(shape[1:]).numel()].contiguous().view(shape)


def _take_step(group: Mapping[str, Any], master: Any, gradient: Any, moments: Sequence[Any], steps: Any) -> None:
    beta1, beta2 = group["betas"]
    settings = {"lr": group["lr"], "weight_decay": group["weight_decay"], "beta1": beta1, "beta2": beta2, "eps": 1e-8}
    average, square = moments
    adamw([master], [gradient], [average], [square], [], [steps], fused=True, amsgrad=False, maximize=False, **settings)
