"""Which requests decode and in which row of the cache: integers only, no tensor is known here."""

from collections import deque
from collections.abc import Collection, Iterable

GROUP = 16
"""Rows that stay side by side: those of a group are about equally old."""

TOGETHER = 16
"""One of so many rows has to be free before waiting requests are seated."""


class Scheduler:
    """Requests, by number, in two states: waiting in order, or seated in rows 0, 1, 2, ... without a gap.

    What is computed is always the first rows of the cache, and older requests sit before newer ones, group by group:
    the row of one that ends is taken by the oldest of the next group, whose row is taken likewise, and so on; those
    that wait take the last rows. So rows that are about equally long lie together, at a few moves.

    Attributes:
        rows: most requests that are seated at a time.
        seated: the request in each row.
        waiting: the others, the next first.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.seated: list[int] = []
        self.waiting: deque[int] = deque()

    @property
    def busy(self) -> bool:
        """Whether there are any."""
        return bool(self.seated or self.waiting)

    def add(self, numbers: Iterable[int]) -> None:
        """Let requests wait, behind those that do."""
        self.waiting.extend(numbers)

    def admit(self) -> list[int]:
        """Seat as many as there is room for, in the rows after those that are taken; returns them.

        Reading a single prompt takes nearly as long as reading several, so a few free rows are waited for if there are
        many rows.
        """
        room = max(0, min(self.rows - len(self.seated), len(self.waiting)))
        if room < min(self.rows // TOGETHER, len(self.waiting)):
            return []
        admitted = [self.waiting.popleft() for _ in range(room)]
        self.seated += admitted
        return admitted

    def next(self) -> list[int]:
        """The request that will be seated next; empty when none waits."""
        return [self.waiting[0]] if self.waiting else []

    def end(self, numbers: Collection[int]) -> list[int]:
        """Take requests out, waiting or seated.

        Returns:
            For each row that is left, the row that its request had before: its own or a later one.
        """
        gone = set(numbers)
        self.waiting = deque(number for number in self.waiting if number not in gone)
        free = {row for row, number in enumerate(self.seated) if number in gone}
        order = list(range(len(self.seated) - len(free)))
        for row in order:
            if row in free:
                order[row] = self._follower(row, free)
                free.add(order[row])
        self.seated = [self.seated[row] for row in order]
        return order

    def _follower(self, row: int, free: Collection[int]) -> int:
        """Who takes the free ``row``: a later one, so that rows can be moved in ascending order."""
        behind = [later for later in range(row + 1, len(self.seated)) if later not in free]
        following = [later for later in behind if later // GROUP > row // GROUP]
        if not following:
            return behind[-1]
        group = following[0] // GROUP
        return min((later for later in following if later // GROUP == group), key=self.seated.__getitem__)

    def unseat(self) -> None:
        """Let all wait, in the order of their numbers: nothing of them is in the cache any more."""
        self.waiting = deque(sorted([*self.seated, *self.waiting]))
        self.seated = []
