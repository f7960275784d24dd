# SPDX-License-Identifier: Apache-2.0
"""How often a commit has the whole states; in between the calls of each step will do."""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dlrover.python.rl.runtime.checkpoint.storage.state_file import StateFile

_SHARE = 0.005
_MOST = 8  # steps from one to the next


@dataclass
class Cadence:
    """Whole states at every ``every``-th commit; None: such that they take 0.5 % of the time, at least at every eighth
    step, and before the calls take more room than the states."""

    every: int | None = None
    now_s: Callable[[], float] = time.monotonic
    _calls: int = 0  # commits of calls since the last one of states
    _call_bytes: int = 0
    _state_bytes: int = 0
    _state_s: float = 0.0
    _step_s: float = math.inf
    _at_s: float | None = field(default=None, repr=False)

    def is_due(self) -> bool:
        """Whether the next commit has the states."""
        if self.every is not None:
            return self._calls + 1 >= self.every
        steps = self._calls + 1
        cheap = self._step_s < math.inf and self._state_s <= _SHARE * self._step_s * steps
        per_step = self._call_bytes / self._calls if self._calls else 0.0
        return cheap or steps >= _MOST or self._call_bytes + per_step > self._state_bytes

    def go_on(self, calls: int) -> None:
        """The last commit is the one of ``calls`` steps after the states."""
        self._calls, self._call_bytes = calls, 0

    def note_states(self, files: Collection[StateFile], seconds: float) -> None:
        """States that were written beside commits of calls, of which the slowest took ``seconds`` from its member."""
        self._state_s, self._state_bytes = seconds, sum(file.nbytes for file in files)

    def note(self, files: Collection[StateFile], seconds: float, whole: bool) -> None:
        """A commit of these files, of which the slowest took ``seconds``."""
        now_s, nbytes = self.now_s(), sum(file.nbytes for file in files)
        if self._at_s is not None:
            step_s = now_s - self._at_s
            self._step_s = step_s if self._step_s == math.inf else 0.8 * self._step_s + 0.2 * step_s
        self._at_s = now_s
        if whole:
            self._calls = self._call_bytes = 0
            self._state_s, self._state_bytes = seconds, nbytes
        else:
            self._calls, self._call_bytes = self._calls + 1, self._call_bytes + nbytes
