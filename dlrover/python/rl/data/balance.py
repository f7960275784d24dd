"""Rows over ranks so that each has about as many tokens, and back into their order.

A plan is a value: two that are in use at a time know nothing of each other.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from dlrover.python.rl.common.errors import DataError
from dlrover.python.rl.data.batch import Batch


@dataclass(frozen=True)
class Partition:
    """Which rows go where.

    Attributes:
        groups: the row indices of each group, rising; every row is in one. A group may be empty.
    """

    groups: tuple[tuple[int, ...], ...]

    def gather(self, parts: Sequence[Batch]) -> Batch:
        """What the groups became, as one batch in the order of the rows that were divided.

        Args:
            parts: of each group as many rows as it was given, in their order.

        Raises:
            DataError: a part has another number of rows.
        """
        sizes, expected = [len(part) for part in parts], [len(group) for group in self.groups]
        if sizes != expected:
            raise DataError(f"parts of {expected} rows came back with {sizes}")
        order = [row for group in self.groups for row in group]
        places = sorted(range(len(order)), key=order.__getitem__)
        return Batch.concat([part for part in parts if len(part)] or list(parts[:1])).take(places)


def partition(lengths: Sequence[int], groups: int, together: int = 1) -> Partition:
    """Divide rows into ``groups`` of nearly equal token counts, whatever the numbers of both.

    By the largest differencing method of Karmarkar and Karp ("The differencing method of set partitioning", 1982), or
    longest first each to the lightest group where that leaves a smaller largest one.

    Args:
        lengths: tokens of each row.
        groups: at least 1.
        together: so many neighbouring rows stay in one group: 2 for pairs.

    Raises:
        DataError: the rows are no multiple of ``together``.
        ValueError: ``groups`` or ``together`` is not positive.
    """
    if groups < 1 or together < 1:
        raise ValueError(f"groups and together must be positive, not {groups} and {together}")
    if len(lengths) % together:
        raise DataError(f"{len(lengths)} rows are no multiple of {together}, which stay together")
    items = [sum(lengths[at : at + together]) for at in range(0, len(lengths), together)]
    order = sorted(range(len(items)), key=lambda item: -items[item])
    ways = (differenced(items, groups), lightest_first(order, items, groups))
    best = min(ways, key=lambda way: max(sum(items[item] for item in group) for group in way))
    rows = (tuple(item * together + at for item in sorted(group) for at in range(together)) for group in best)
    return Partition(tuple(rows))


def differenced(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Divide items into ``count`` groups by Karmarkar and Karp's largest differencing method.

    Each item begins as a division of its own, one group of which holds it. The two divisions that are most uneven are
    joined, the heaviest group of one with the lightest of the other, until one is left.

    Returns:
        Indices of the items of each group, in no order.
    """
    divisions = [_Division([(length, (item,))] + [(0, ())] * (count - 1), item) for item, length in enumerate(lengths)]
    heapq.heapify(divisions)
    while len(divisions) > 1:
        one = heapq.heappop(divisions)
        heapq.heapreplace(divisions, one.joined(divisions[0]))
    return [_flat(members) for _, members in divisions[0].groups] if divisions else [[] for _ in range(count)]


class _Division:
    """Groups, heaviest first; the members of a group are nested tuples, for joining must cost no copy."""

    __slots__ = ("first", "groups", "uneven")

    def __init__(self, groups: "Sequence[tuple[int, tuple[object, ...]]]", first: int) -> None:
        self.groups, self.first = groups, first
        self.uneven = groups[0][0] - groups[-1][0]

    def __lt__(self, other: "_Division") -> bool:
        return (-self.uneven, self.first) < (-other.uneven, other.first)

    def joined(self, other: "_Division") -> "_Division":
        pairs = zip(self.groups, reversed(other.groups), strict=True)
        groups = [(one + two, (ours, theirs)) for (one, ours), (two, theirs) in pairs]
        return _Division(sorted(groups, key=lambda group: -group[0]), min(self.first, other.first))


def _flat(members: tuple[object, ...]) -> list[int]:
    found: list[int] = []
    left: list[object] = [members]
    while left:
        item = left.pop()
        if isinstance(item, tuple):
            left.extend(item)
        elif isinstance(item, int):
            found.append(item)
    return found


def lightest_first(order: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Give the items, in this order, each to the group that is the lightest then.

    Returns:
        Indices of the items of each group, in the order given.
    """
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, group) for group in range(count)]
    for item in order:
        load, group = loads[0]
        groups[group].append(item)
        heapq.heapreplace(loads, (load + lengths[item], group))
    return groups
