# SPDX-License-Identifier: Apache-2.0
"""How long the steps of a run take."""

from collections import deque


class StepPace:
    """Over the last ``kept`` reports, so that a slow start or an outage does not count for long."""

    def __init__(self, kept: int = 20) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=kept)

    def note(self, step: int, now_s: float) -> None:
        if self._seen and step <= self._seen[-1][0]:  # steps are repeated after a recovery
            self._seen.clear()
        self._seen.append((step, now_s))

    @property
    def step_s(self) -> float:
        """0 if unknown."""
        (first, began_s), (last, ended_s) = (self._seen[0], self._seen[-1]) if self._seen else ((0, 0.0), (0, 0.0))
        return (ended_s - began_s) / (last - first) if last > first else 0.0
