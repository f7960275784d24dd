"""A model's weights in one stretch of memory per dtype, so that offload moves whole stretches and names are views."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.offload import Place
from dlrover.python.rl.engine.weights import WeightSnapshot, verify

_ALIGNMENT = 64
"""Bytes at a multiple of which each group of tensors begins: a cache line, which vector instructions like."""


class WeightStore:
    """The weights of one engine, by their names in a Hugging Face checkpoint.

    Tensors of one group lie one after the other without a gap: :meth:`fused` gives them as one.

    Args:
        groups: names and tensors; those of a group have equal trailing dimensions. They are copied.
        dtype: what floating-point ones become; others keep theirs.
        memory: of the device.
        owner: who the memory is accounted to.

    Attributes:
        place: where they are.
        views: name to tensor; empty at ``meta``.
        shapes: name to shape.
    """

    def __init__(
        self, groups: Iterable[Sequence[tuple[str, Any]]], dtype: Any, memory: DeviceMemory, owner: str
    ) -> None:
        self.place: Place = "meta"
        self.views: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._memory, self._owner = memory, owner
        self._at: dict[str, tuple[Any, int]] = {}
        self._sizes: dict[Any, int] = {}
        self._flats: dict[Any, Any] = {}
        named: dict[str, Any] = {}
        for group in groups:
            self._place(group, dtype)
            named.update(group)
        self.cuda()
        for name, tensor in named.items():
            self.views[name].copy_(tensor.detach())

    def _place(self, group: Sequence[tuple[str, Any]], dtype: Any) -> None:
        kinds = {dtype if tensor.is_floating_point() else tensor.dtype for _, tensor in group}
        for kind in kinds:
            step = max(1, _ALIGNMENT // kind.itemsize)
            self._sizes[kind] = -(-self._sizes.get(kind, 0) // step) * step
        for name, tensor in group:
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            self.shapes[name] = tuple(tensor.shape)
            self._at[name] = kind, self._sizes[kind]
            self._sizes[kind] += tensor.numel()

    def fused(self, *names: str) -> Any:
        """Tensors of one group, one after the other along their first dimension, as a view of all."""
        kind, start = self._at[names[0]]
        rows = sum(self.shapes[name][0] for name in names)
        shape = (rows, *self.shapes[names[0]][1:])
        return self._flats[kind][start : start + torch.Size(shape).numel()].view(shape)

    # -- where they are -----------------------------------------------------------------------------------------------

    def cpu(self) -> None:
        """Move to host memory; stays at ``meta`` if it is there."""
        if self.place == "cuda":
            self._settle({kind: flat.to("cpu", copy=True) for kind, flat in self._flats.items()}, "cpu")

    def cuda(self) -> None:
        """Move to the device; from ``meta``: room for weights, which are zeros until they are written.

        Raises:
            OutOfDeviceMemory: they do not fit; they stay where they were.
        """
        if self.place == "cpu":
            moved = {kind: self._memory.bring(self._owner, "weights", flat) for kind, flat in self._flats.items()}
            self._settle(moved, "cuda")
        elif self.place == "meta":
            sizes = self._sizes.items()
            made = {kind: self._memory.allocate(self._owner, "weights", (size,), kind) for kind, size in sizes}
            self._settle(made, "cuda")

    def host(self) -> None:
        """From ``meta``: room for weights in host memory."""
        self._settle({kind: torch.zeros(size, dtype=kind) for kind, size in self._sizes.items()}, "cpu")

    def meta(self) -> None:
        """Release all of them."""
        self._flats, self.views, self.place = {}, {}, "meta"

    def _settle(self, flats: dict[Any, Any], place: Place) -> None:
        self._flats, self.place = flats, place
        for name, shape in self.shapes.items():
            kind, start = self._at[name]
            self.views[name] = flats[kind][start : start + torch.Size(shape).numel()].view(shape)

    # -- what they are ------------------------------------------------------------------------------------------------

    def check(self, weights: WeightSnapshot, serving: int) -> None:
        """Verify everything that :meth:`write` relies on.

        Raises:
            WeightSyncError: the snapshot does not fit, is corrupt or older than ``serving``.
        """
        verify(weights, self.shapes, serving)

    @torch.no_grad()
    def write(self, weights: WeightSnapshot) -> None:
        """Copy a checked snapshot into the weights, in place, as this engine's dtype."""
        for name, view in self.views.items():
            view.copy_(weights.tensor(name))
