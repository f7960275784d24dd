# SPDX-License-Identifier: Apache-2.0
"""The distance between two commits, in steps."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_SHARE = 0.01
_MOST_STEPS, _MOST_S = 8, 10.0


@dataclass
class Stride:
    """A commit at every ``every``-th step. None: at every step, or if they are ``deterministic`` (repeated ones have
    the same bits), with the fewest steps between commits that take at most 1 % of the time, at most 8 and 10 s."""

    every: int | None = None
    deterministic: bool = False
    now_s: Callable[[], float] = time.monotonic
    _last: int = 0
    _commit_s: float = 0.0
    _step_s: float = math.inf
    _at: tuple[int, float] | None = field(default=None, repr=False)

    @property
    def steps(self) -> int:
        if self.every is not None or not self.deterministic or not 0 < self._step_s < math.inf:
            return self.every or 1
        most = min(_MOST_STEPS, int(_MOST_S / self._step_s))
        return max(min(math.ceil(self._commit_s / (_SHARE * self._step_s)), most), 1)

    def start_after(self, step: int) -> None:
        """``step`` is the last one whose commit has begun."""
        self._last = step

    def is_due(self, step: int) -> bool:
        """Return True if ``step``, which has just ended, is to be committed."""
        now_s = self.now_s()
        if self._at is not None and step == self._at[0] + 1:
            step_s = now_s - self._at[1]
            self._step_s = step_s if self._step_s == math.inf else 0.8 * self._step_s + 0.2 * step_s
        self._at = step, now_s
        return step - self._last >= self.steps

    def note_commit(self, seconds: float) -> None:
        """A commit has taken ``seconds`` from the steps."""
        self._commit_s = seconds


@dataclass
class CommitTimer:
    """Adds up the ``seconds`` between each start and the stop after it."""

    seconds: float = 0.0
    _began_s: float | None = None

    def start(self) -> None:
        self._began_s = time.monotonic() if self._began_s is None else self._began_s

    def stop(self) -> None:
        if self._began_s is not None:
            self.seconds += time.monotonic() - self._began_s
        self._began_s = None
