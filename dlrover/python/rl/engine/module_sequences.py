"""Sequences of a user's module that ranks share (context parallel): each has a part of them, and attends to all."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dlrover.python.rl.common.errors import EngineError
from dlrover.python.rl.engine.fsdp2.grid import Grid
from dlrover.python.rl.engine.torch import attention


class SharedSequences:
    """Tells a Hugging Face model, in each forward pass, which part of its sequences it gets.

    Inside :meth:`divided` the ranks' inputs ``[rows, tokens]`` are consecutive parts of the same sequences; else each
    rank has all of them.

    Args:
        module: the model, before its parameters are divided.
        grid: the ranks.

    Raises:
        EngineError: the model's sequences cannot be shared by so many ranks.
    """

    def __init__(self, module: Any, grid: Grid) -> None:
        if not hasattr(module, "set_attn_implementation"):
            name = type(module).__name__
            raise EngineError(f"{name} is no Hugging Face model: context_parallel_size has to be 1")
        attention.check_sharing(module, grid.layout.context, grid.layout.tensor)
        module.set_attn_implementation(attention.NAME)
        module.register_forward_pre_hook(self._tell, with_kwargs=True)
        self._group = grid.context
        self._divided = False

    @contextmanager
    def divided(self, divided: bool) -> Iterator[None]:
        """Whether the ranks have parts of the sequences, inside."""
        self._divided = divided
        try:
            yield
        finally:
            self._divided = False

    def _tell(self, _module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        named = (given.get(name) for name in ("input_ids", "inputs_embeds"))
        inputs = next((value for value in (*args[:1], *named) if value is not None), None)
        if inputs is None:
            raise EngineError("ranks that share sequences have to be given input_ids or inputs_embeds")
        group = self._group if self._divided else None
        rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        rows, tokens = inputs.shape[:2]
        positions = torch.arange(rank * tokens, (rank + 1) * tokens, device=inputs.device)[None]
        told = {
            "documents": attention.Documents((ranks * tokens,) * rows, str(inputs.device), group),
            "position_ids": positions,
            "use_cache": False,
        }
        return args, told | {name: value for name, value in given.items() if value is not None}
