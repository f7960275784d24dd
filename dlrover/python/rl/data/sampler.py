# SPDX-License-Identifier: Apache-2.0
"""The order in which rows are sampled, and their division over ranks with about as many tokens each."""

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrover.python.rl.common.errors import ConfigError, DataError
from dlrover.python.rl.data.batch import Batch


class PromptCursor:
    """Samples row indices without replacement, each epoch shuffled by (seed, epoch).

    A batch that reaches the end of an epoch continues in the next: no row is dropped. ``total`` limits the number of
    indices: the last batch is shorter, and later ones are empty. ``batch_size`` and ``total`` may differ between runs
    that share a state. Raises ValueError if ``rows`` or ``batch_size`` is not positive, or ``seed`` or ``total``
    negative."""

    def __init__(self, rows: int, batch_size: int, seed: int = 0, total: int | None = None) -> None:
        if rows < 1 or batch_size < 1 or seed < 0:
            raise ValueError(f"need rows >= 1, batch_size >= 1 and seed >= 0, not {rows}, {batch_size} and {seed}")
        if total is not None and total < 0:
            raise ValueError(f"total must be at least 0, not {total}")
        self._rows, self._batch_size, self._seed, self._total = rows, batch_size, seed, total
        self._position = 0
        self._order_epoch = 0
        self._order = self._shuffled(0)

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return self._position // self._rows

    def next(self, count: int | None = None) -> list[int]:
        """Return the next ``count`` (default: ``batch_size``) row indices; fewer, or none, at the end of ``total``."""
        batch: list[int] = []
        size = self._batch_size if count is None else count
        if self._total is not None:
            size = min(size, max(self._total - self._position, 0))
        while len(batch) < size:
            epoch, offset = divmod(self._position, self._rows)
            if epoch != self._order_epoch:
                self._order_epoch, self._order = epoch, self._shuffled(epoch)
            indices = self._order[offset : offset + size - len(batch)].tolist()
            batch += indices
            self._position += len(indices)
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"rows": self._rows, "seed": self._seed, "drawn": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume; raise DataError with an error for each of ``rows``, ``seed`` and ``drawn`` that does not fit."""
        own, position = {"rows": self._rows, "seed": self._seed}, state.get("drawn")
        errors = [
            ConfigError(name, f"is {value}, and {state.get(name)} in the state, which does not fit")
            for name, value in own.items()
            if state.get(name) != value
        ]
        if isinstance(position, int) and position >= 0 and not errors:
            self._position = position
            return
        if not isinstance(position, int) or position < 0:
            errors.append(ConfigError("drawn", f"is {position} in the state, which does not fit"))
        raise DataError(errors)

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        # RandomState's stream is frozen by numpy's policy; Generator's may change, and with it a resumed run's order.
        bits = np.random.MT19937(np.random.SeedSequence((self._seed, epoch)))
        return np.random.RandomState(bits).permutation(self._rows).astype(np.int64)


def gather_parts(groups: Sequence[Sequence[int]], parts: Sequence[Batch]) -> Batch:
    """Concatenate the parts of :func:`partition` in the original order; raises DataError for parts of other sizes."""
    sizes, expected = [len(part) for part in parts], [len(group) for group in groups]
    if sizes != expected:
        raise DataError(f"parts of {expected} rows came back with {sizes}")
    order = [row for group in groups for row in group]
    positions = sorted(range(len(order)), key=order.__getitem__)
    return Batch.concat([part for part in parts if len(part)] or list(parts[:1])).take(positions)


def partition(lengths: Sequence[int], groups: int, together: int = 1) -> tuple[tuple[int, ...], ...]:
    """Divide rows into ``groups`` of nearly equal token counts; ``together`` neighbours (2 for pairs) stay in one.

    Returns the rising indices of each group, which may be empty. The method is the largest differencing method
    (Karmarkar and Karp, "The differencing method of set partitioning", 1982), or longest first to the lightest group if
    that has a smaller maximum. Raises DataError if the number of rows is not a multiple of ``together``, ValueError if
    ``groups`` or ``together`` is not positive."""
    if groups < 1 or together < 1:
        raise ValueError(f"groups and together must be positive, not {groups} and {together}")
    if len(lengths) % together:
        raise DataError(f"{len(lengths)} rows are not a multiple of {together}, which stay together")
    if groups == 1:
        return (tuple(range(len(lengths))),)
    items = [sum(lengths[at : at + together]) for at in range(0, len(lengths), together)]
    order = sorted(range(len(items)), key=lambda item: -items[item])
    ways = (largest_differencing(items, groups), lightest_first(order, items, groups))
    best = min(ways, key=lambda way: max(sum(items[item] for item in group) for group in way))
    return tuple(tuple(item * together + at for item in sorted(group) for at in range(together)) for group in best)


def largest_differencing(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return the indices of ``count`` groups. Each item starts as a division with one filled group; the two most uneven
    divisions are joined, the heaviest group of one with the lightest of the other, until one is left."""
    # A division: its negative imbalance; its first item, which is unique; and its groups, heaviest first.
    divisions: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-length if count > 1 else 0, item, [(length, [item]), *((0, list[int]()) for _ in range(count - 1))])
        for item, length in enumerate(lengths)
    ]
    heapq.heapify(divisions)
    while len(divisions) > 1:
        (_, item, groups), (_, other_item, other_groups) = heapq.heappop(divisions), divisions[0]
        joined = []
        for (size, members), (other_size, other_members) in zip(groups, reversed(other_groups), strict=True):
            shorter, longer = sorted((members, other_members), key=len)
            longer += shorter
            joined.append((size + other_size, longer))
        joined.sort(key=lambda group: -group[0])
        heapq.heapreplace(divisions, (joined[-1][0] - joined[0][0], min(item, other_item), joined))
    return [members for _, members in divisions[0][2]] if divisions else [[] for _ in range(count)]


def lightest_first(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Add each item, in ``order``, to the currently lightest group; return the indices of each group."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, group) for group in range(count)]
    for item in order:
        load, group = loads[0]
        groups[group].append(item)
        heapq.heapreplace(loads, (load + lengths[item], group))
    return groups
