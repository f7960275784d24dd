# SPDX-License-Identifier: Apache-2.0
"""Divide rows over ranks so that each has about as many tokens, and gather them in their order."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class Partition:
    """The row indices of each group, rising; every row is in one. A group may be empty."""

    groups: tuple[tuple[int, ...], ...]

    def gather(self, parts: Sequence[Batch]) -> Batch:
        """Concatenate a part per group, in the order of the divided rows.

        Raises:
            DataError: a part has another number of rows than its group.
        """
        sizes, expected = [len(part) for part in parts], [len(group) for group in self.groups]
        if sizes != expected:
            raise DataError(f"parts of {expected} rows came back with {sizes}")
        order = [row for group in self.groups for row in group]
        positions = sorted(range(len(order)), key=order.__getitem__)
        return Batch.concat([part for part in parts if len(part)] or list(parts[:1])).take(positions)


def partition(lengths: Sequence[int], groups: int, together: int = 1) -> Partition:
    """Divide rows into ``groups`` of nearly equal token counts; ``together`` neighbours (2 for pairs) stay in one.

    By the largest differencing method of Karmarkar and Karp ("The differencing method of set partitioning", 1982), or
    longest first to the lightest group if that gives a smaller maximum.

    Raises:
        DataError: the number of rows is not a multiple of ``together``.
        ValueError: ``groups`` or ``together`` is not positive.
    """
    if groups < 1 or together < 1:
        raise ValueError(f"groups and together must be positive, not {groups} and {together}")
    if len(lengths) % together:
        raise DataError(f"{len(lengths)} rows are not a multiple of {together}, which stay together")
    items = [sum(lengths[at : at + together]) for at in range(0, len(lengths), together)]
    order = sorted(range(len(items)), key=lambda item: -items[item])
    ways = (largest_differencing(items, groups), lightest_first(order, items, groups))
    best = min(ways, key=lambda way: max(sum(items[item] for item in group) for group in way))
    rows = (tuple(item * together + at for item in sorted(group) for at in range(together)) for group in best)
    return Partition(tuple(rows))


def largest_differencing(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Divide items into ``count`` groups of indices by Karmarkar and Karp's largest differencing method.

    Each item starts as a division with one filled group. The two most uneven divisions are joined, the heaviest group
    of one with the lightest of the other, until one is left.
    """
    divisions = [_Division([(length, (item,))] + [(0, ())] * (count - 1), item) for item, length in enumerate(lengths)]
    heapq.heapify(divisions)
    while len(divisions) > 1:
        one = heapq.heappop(divisions)
        heapq.heapreplace(divisions, one.join(divisions[0]))
    return [_flat(members) for _, members in divisions[0].groups] if divisions else [[] for _ in range(count)]


class _Division:
    """Groups, heaviest first; members are nested tuples, so joining copies nothing."""

    __slots__ = ("first", "groups", "uneven")

    def __init__(self, groups: "Sequence[tuple[int, tuple[object, ...]]]", first: int) -> None:
        self.groups, self.first = groups, first
        self.uneven = groups[0][0] - groups[-1][0]

    def __lt__(self, other: "_Division") -> bool:
        return (-self.uneven, self.first) < (-other.uneven, other.first)

    def join(self, other: "_Division") -> "_Division":
        pairs = zip(self.groups, reversed(other.groups), strict=True)
        groups = [(one + two, (left, right)) for (one, left), (two, right) in pairs]
        return _Division(sorted(groups, key=lambda group: -group[0]), min(self.first, other.first))


def _flat(members: tuple[object, ...]) -> list[int]:
    items: list[int] = []
    pending: list[object] = [members]
    while pending:
        item = pending.pop()
        if isinstance(item, tuple):
            pending.extend(item)
        elif isinstance(item, int):
            items.append(item)
    return items


def lightest_first(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Give each item, in ``order``, to the currently lightest group: indices of the items of each group."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, group) for group in range(count)]
    for item in order:
        load, group = loads[0]
        groups[group].append(item)
        heapq.heapreplace(loads, (load + lengths[item], group))
    return groups
