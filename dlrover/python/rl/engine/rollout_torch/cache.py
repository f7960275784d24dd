# SPDX-License-Identifier: Apache-2.0
"""The scheduler, which assigns requests to rows, and the key-value cache with one slot per row."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dlrover.python.rl.engine.memory.device_memory import DeviceMemory

ROW_GROUP = 16
"""Rows that stay adjacent: those of a group are about equally old."""

ADMIT_SHARE = 16
"""Requests are admitted once ``1 / ADMIT_SHARE`` of all rows is free."""


class Scheduler:
    """Requests, by number, in two states: waiting in order, or active in rows 0, 1, 2, ... without a gap.

    Older requests precede newer ones, group by group: a freed row is taken by the oldest request of the next group,
    whose row is filled likewise, and waiting requests take the last rows. So rows of similar length stay adjacent, at
    the cost of a few moves.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows  # most requests that are active at a time
        self.active: list[int] = []  # the request in each row
        self.waiting: deque[int] = deque()  # the next first

    @property
    def has_requests(self) -> bool:
        return bool(self.active or self.waiting)

    def add(self, numbers: Iterable[int]) -> None:
        self.waiting.extend(numbers)

    def admit(self) -> list[int]:
        """Activate and return as many waiting requests as fit, in the rows after those in use.

        Reading one prompt takes nearly as long as reading several, so with many rows it waits for a few free ones.
        """
        admitted = [self.waiting.popleft() for _ in range(self.admissible())]
        self.active += admitted
        return admitted

    def admissible(self) -> int:
        """How many :meth:`admit` would activate."""
        free_rows = max(0, min(self.rows - len(self.active), len(self.waiting)))
        return 0 if free_rows < min(self.rows // ADMIT_SHARE, len(self.waiting)) else free_rows

    def upcoming(self) -> list[int]:
        """The request that is admitted next; empty when none waits."""
        return [self.waiting[0]] if self.waiting else []

    def remove(self, numbers: Collection[int]) -> list[int]:
        """Remove requests; returns for each row still in use the row its request had before: the same or a later."""
        removed = set(numbers)
        self.waiting = deque(number for number in self.waiting if number not in removed)
        free = {row for row, number in enumerate(self.active) if number in removed}
        order = list(range(len(self.active) - len(free)))
        for row in order:
            if row in free:
                order[row] = self._follower(row, free)
                free.add(order[row])
        self.active = [self.active[row] for row in order]
        return order

    def _follower(self, row: int, free: Collection[int]) -> int:
        """The row to move into the free ``row``: a later one, so that rows can be moved in ascending order."""
        candidates = [later for later in range(row + 1, len(self.active)) if later not in free]
        following = [later for later in candidates if later // ROW_GROUP > row // ROW_GROUP]
        if not following:
            return candidates[-1]
        group = following[0] // ROW_GROUP
        return min((later for later in following if later // ROW_GROUP == group), key=self.active.__getitem__)

    def requeue(self) -> None:
        """Return all active requests to the queue, in the order of their numbers."""
        self.waiting = deque(sorted([*self.active, *self.waiting]))
        self.active = []


_MIN_SAVING = {"cpu": 1 << 16, "cuda": 1 << 24}
"""Cache entries that a further segment must save: as many as are read in the time of three more operations."""

_ALIGNED = 16
"""CUDA's attention copies a mask in each layer unless its rows begin at a multiple of this many entries."""


@dataclass(frozen=True)
class Segment:
    """Rows ``start`` to ``stop``, which attend in one operation."""

    start: int
    stop: int
    longest: int  # tokens of the longest row
    bias: Any
    """``[rows * kv_heads, 1, longest]``, added to the scores to mask what is beyond each row's end; None if all are
    equally long."""
    values: Any  # on a CPU: indices of the values that each query reads, int32 `[rows * heads * longest]`
    begins: Any  # where each query's indices begin in `values`, int32 `[rows * heads]`


class SlotCache:
    """Keys and values of all layers: ``[layers, 2, rows, kv_heads, length, head_dim]``, allocated once.

    Rows 0 to ``len(lengths) - 1`` are in use. Beyond its length a row has finite remains of others, always masked.
    """

    def __init__(
        self, shape: tuple[int, int, int, int, int, int], dtype: Any, memory: DeviceMemory, owner: str
    ) -> None:
        self.lengths: list[int] = []
        self._data = memory.allocate(owner, "kv_cache", shape, dtype)
        _, _, rows, heads, length, _ = shape
        self._heads, self._entry = heads, 2 * heads * shape[-1]
        self._min_saving = _MIN_SAVING.get(self._data.device.type, 1 << 24)
        kinds = torch.arange(2).view(1, 2, 1)
        starts = ((kinds * rows + torch.arange(rows).view(rows, 1, 1)) * heads + torch.arange(heads)) * length
        self._flat = [layer.view(-1, shape[-1]) for layer in self._data]
        self._parts = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in self._data]
        self._starts = starts.to(memory.device)
        """First entry of each row, key or value, and head in a layer: ``[rows, 2, kv_heads]``."""
        hidden = torch.full((length + _ALIGNED,), -torch.inf, dtype=dtype)
        self._mask = torch.cat([torch.zeros(length, dtype=dtype), hidden]).to(memory.device)
        """The mask of a row of ``n`` tokens begins ``n`` before the infinities."""

    def add_row(self, past: Any) -> None:
        """Fill the next row with ``past``: ``[layers, 2, kv_heads, seq, head_dim]``."""
        self._data[:, :, len(self.lengths), :, : past.shape[3]] = past
        self.lengths.append(past.shape[3])

    def select_rows(self, rows: Sequence[int]) -> None:
        """Row ``i`` becomes what ``rows[i]`` was, in ascending order: no row may be overwritten before it is read."""
        for row, old in enumerate(rows):
            if row != old:
                length = self.lengths[old]
                self._data[:, :, row, :, :length] = self._data[:, :, old, :, :length]
        self.lengths = [self.lengths[old] for old in rows]

    @property
    def rows(self) -> int:
        return int(self._data.shape[2])

    def grow(self) -> list[int]:
        """Make each row a token longer; returns the positions of the new tokens."""
        positions = self.lengths
        self.lengths = [length + 1 for length in positions]
        return positions

    def indices(self, positions: Any) -> Any:
        """Where :meth:`write` stores what is at these positions ``[rows]`` of the first rows, ``[rows, entries]``."""
        return (self._starts[: len(positions)] + positions.view(-1, 1, 1)).flatten(1)

    def write(self, layer: int, indices: Any, entries: Any) -> None:
        """Store the new keys and values of one layer: ``[rows, 2 * kv_heads, head_dim]``."""
        self._flat[layer].index_put_((indices,), entries)

    def read(self, layer: int, part: Segment) -> tuple[Any, Any]:
        """Keys and values of a segment: views ``[rows * kv_heads, longest, head_dim]``."""
        rows, (keys, values) = slice(part.start * self._heads, part.stop * self._heads), self._parts[layer]
        return keys[rows, : part.longest], values[rows, : part.longest]

    def entries(self, layer: int) -> Any:
        """All keys and values of a layer: ``[entries, head_dim]``."""
        return self._flat[layer]

    def segments(self, heads: int) -> list[Segment]:
        """All rows in use, split where lengths differ much; each row has ``heads`` queries."""
        spans: list[tuple[int, int, int]] = []
        for start in range(0, len(self.lengths), ROW_GROUP):
            lengths, begin = self.lengths[start : start + ROW_GROUP], start
            longest = max(lengths)
            if spans and abs(spans[-1][2] - longest) * len(lengths) * self._entry < self._min_saving:
                begin, _, previous = spans.pop()
                longest = max(longest, previous)
            spans.append((begin, start + len(lengths), longest))
        bias = self._bias()
        return [self._segment(*span, bias, heads // self._heads) for span in spans]

    def _segment(self, start: int, stop: int, longest: int, bias: Any, sharing: int) -> Segment:
        """``sharing`` queries share one head's keys and values; ``bias`` is that of all rows."""
        hidden = None if bias is None else bias[start * self._heads : stop * self._heads, :, :longest]
        if self._data.device.type != "cpu":
            return Segment(start, stop, longest, hidden, None, None)
        first = self._starts[start:stop, 1].to(torch.int32).view(-1, 1, 1).expand(-1, sharing, 1)
        values = (first + torch.arange(longest, dtype=torch.int32)).flatten()
        return Segment(start, stop, longest, hidden, values, torch.arange(0, len(values), longest, dtype=torch.int32))

    def whole(self, positions: Any, longest: int) -> Segment:
        """The first rows as one segment, up to the positions ``[rows]``, whose values only the device knows."""
        begins = (self._data.shape[4] - 1 - positions).repeat_interleave(self._heads)
        return Segment(0, len(positions), longest, self._windows(longest, begins)[..., :longest], None, None)

    def _bias(self) -> Any:
        """Minus infinity beyond each row's length, else 0: ``[rows * kv_heads, 1, aligned seq]``, or None."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return None
        begins = [self._data.shape[4] - length for length in self.lengths for _ in range(self._heads)]
        return self._windows(longest, torch.tensor(begins, device=self._mask.device))

    def _windows(self, longest: int, begins: Any) -> Any:
        return self._mask.unfold(0, -(-longest // _ALIGNED) * _ALIGNED, 1).index_select(0, begins)[:, None]
