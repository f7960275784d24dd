"""A key-value cache of slots: each row has room for the longest sequence, taken once and used again and again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlrover.python.rl.engine.memory import DeviceMemory
from dlrover.python.rl.engine.torch.scheduler import GROUP

_WORTH_A_CUT = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Entries of a layer that must be spared before rows are looked at apart: as many as are read in the time that three
more operations take."""

_ALIGNED = 16
"""Entries of a mask's row at a multiple of which CUDA's attention wants it to begin, or makes a copy in each layer."""


@dataclass(frozen=True)
class Segment:
    """Rows ``start`` to ``stop``, looked at together.

    Attributes:
        longest: tokens of the longest of them.
        bias: what to add to the scores so that no row looks beyond its end, ``[rows * kv_heads, 1, longest]``; None
            where there is nothing to hide.
        values: where in a layer the values are that each query looks at, int32 ``[rows * heads * longest]``, on a CPU;
            None elsewhere.
        begins: where in ``values`` each query's begin, int32 ``[rows * heads]``.
    """

    start: int
    stop: int
    longest: int
    bias: Any
    values: Any
    begins: Any


class SlotCache:
    """Keys and values of all layers, ``[layers, 2, rows, kv_heads, length, head_dim]``; row 0 to ``len(lengths) - 1``
    are in use.

    What a row holds beyond its length is left over from others: finite, and never looked at.

    Args:
        shape: as above.
        dtype: of the entries.
        memory: of the device.
        owner: who it is accounted to.

    Attributes:
        lengths: tokens of each row in use.
    """

    def __init__(
        self, shape: tuple[int, int, int, int, int, int], dtype: Any, memory: DeviceMemory, owner: str
    ) -> None:
        self.lengths: list[int] = []
        self._data = memory.allocate(owner, "kv_cache", shape, dtype)
        _, _, rows, heads, length, _ = shape
        self._heads, self._entry = heads, 2 * heads * shape[-1]
        self._worth = _WORTH_A_CUT.get(self._data.device.type, 1 << 24)
        kinds = torch.arange(2).view(1, 2, 1)
        starts = ((kinds * rows + torch.arange(rows).view(rows, 1, 1)) * heads + torch.arange(heads)) * length
        self._flat = [layer.view(-1, shape[-1]) for layer in self._data]
        self._parts = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in self._data]
        self._starts = starts.to(memory.device)
        """Where in a layer, counted in entries, row, key or value, and head begin: ``[rows, 2, kv_heads]``."""
        hidden = torch.full((length + _ALIGNED,), -torch.inf, dtype=dtype)
        self._shown = torch.cat([torch.zeros(length, dtype=dtype), hidden]).to(memory.device)
        """What a row of ``n`` tokens adds to its scores begins ``n`` before the infinities."""

    def seat(self, past: Any) -> None:
        """Use one row more, for ``past``: ``[layers, 2, kv_heads, seq, head_dim]``."""
        self._data[:, :, len(self.lengths), :, : past.shape[3]] = past
        self.lengths.append(past.shape[3])

    def keep(self, rows: Sequence[int]) -> None:
        """Row ``i`` becomes what ``rows[i]`` was; none that is still needed may be written before it is read."""
        for row, old in enumerate(rows):
            if row != old:
                length = self.lengths[old]
                self._data[:, :, row, :, :length] = self._data[:, :, old, :, :length]
        self.lengths = [self.lengths[old] for old in rows]

    def grow(self) -> tuple[Any, Any]:
        """Make each row a token longer, which :meth:`write` then fills layer by layer.

        Returns:
            Where the new entries go, for :meth:`write`; and the new tokens' positions, ``[rows]``.
        """
        positions = torch.tensor(self.lengths, device=self._starts.device)
        self.lengths = [length + 1 for length in self.lengths]
        return (self._starts[: len(self.lengths)] + positions.view(-1, 1, 1)).flatten(), positions

    def write(self, layer: int, where: Any, entries: Any) -> None:
        """Store the new keys and values of one layer: ``[rows, 2 * kv_heads, head_dim]``."""
        self._flat[layer].index_copy_(0, where, entries.reshape(-1, entries.shape[-1]))

    def read(self, layer: int, part: Segment) -> tuple[Any, Any]:
        """Keys and values of some rows, as long as the longest of them: views ``[rows * kv_heads, seq, head_dim]``."""
        rows, (keys, values) = slice(part.start * self._heads, part.stop * self._heads), self._parts[layer]
        return keys[rows, : part.longest], values[rows, : part.longest]

    def entries(self, layer: int) -> Any:
        """Keys and values of all rows of a layer, one below the other: ``[entries, head_dim]``."""
        return self._flat[layer]

    def segments(self, heads: int) -> list[Segment]:
        """All rows in use, the first to the last; those that differ much in length apart.

        Args:
            heads: queries of each row.
        """
        found: list[tuple[int, int, int]] = []
        for start in range(0, len(self.lengths), GROUP):
            lengths, begin = self.lengths[start : start + GROUP], start
            longest = max(lengths)
            if found and abs(found[-1][2] - longest) * len(lengths) * self._entry < self._worth:
                begin, _, beside = found.pop()
                longest = max(longest, beside)
            found.append((begin, start + len(lengths), longest))
        bias = self._bias()
        return [self._segment(*part, bias, heads // self._heads) for part in found]

    def _segment(self, start: int, stop: int, longest: int, bias: Any, sharing: int) -> Segment:
        """``sharing`` queries look at one head's keys and values; ``bias`` is that of all rows."""
        hidden = None if bias is None else bias[start * self._heads : stop * self._heads, :, :longest]
        if self._data.device.type != "cpu":
            return Segment(start, stop, longest, hidden, None, None)
        first = self._starts[start:stop, 1].to(torch.int32).view(-1, 1, 1).expand(-1, sharing, 1)
        values = (first + torch.arange(longest, dtype=torch.int32)).flatten()
        return Segment(start, stop, longest, hidden, values, torch.arange(0, len(values), longest, dtype=torch.int32))

    def _bias(self) -> Any:
        """Minus infinity beyond each row's length, else 0; None when all are as long.

        ``[rows * kv_heads, 1, seq]``, and as many more as alignment asks for.
        """
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return None
        windows = self._shown.unfold(0, -(-longest // _ALIGNED) * _ALIGNED, 1)
        begins = [self._data.shape[4] - length for length in self.lengths for _ in range(self._heads)]
        return windows.index_select(0, torch.tensor(begins, device=windows.device))[:, None]
