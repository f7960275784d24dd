# SPDX-License-Identifier: Apache-2.0
"""The report of a step, its receivers, and the pace of steps; without numpy, so that commands import it quickly."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from dlrover.python.rl.trainer.port import CallCounts


@dataclass(frozen=True)
class StepReport:
    """The metrics of a step; ``total_steps`` is 0 if it is unknown."""

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    calls: CallCounts = field(default_factory=dict)
    """Durations of the calls since the last report, if the runtime measures them."""

    pending: Mapping[str, int] = field(default_factory=dict)
    """Role to the number of its calls that were running or waiting for a worker."""

    commit_bytes: int = 0
    """Bytes that commits have written since the last report."""

    at_s: float = 0.0
    """When it was reported, Unix time; 0: now."""


Reporter: TypeAlias = Callable[[StepReport], None]
"""Receives step reports; must return at once."""

Announcer: TypeAlias = Callable[[str], None]
"""Receives a text that tells people what the run does until its next step report; must return at once."""


def announce_nothing(activity: str) -> None:
    pass


def report_nothing(report: StepReport) -> None:
    pass


class StepPace:
    """The pace over the last ``window`` reports, so that a slow start or an outage does not count for long."""

    def __init__(self, window: int = 20) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=window)

    def note(self, step: int, now_s: float) -> None:
        if self._seen and step <= self._seen[-1][0]:  # steps are repeated after a recovery
            self._seen.clear()
        self._seen.append((step, now_s))

    @property
    def step_s(self) -> float:
        """0 if unknown."""
        (first, began_s), (last, ended_s) = (self._seen[0], self._seen[-1]) if self._seen else ((0, 0.0), (0, 0.0))
        return (ended_s - began_s) / (last - first) if last > first else 0.0
