# SPDX-License-Identifier: Apache-2.0
"""Goodput: the share of a job's time in which it makes progress, and where the rest goes.

Each moment of a job has one use:

- ``start``: from its submission until its trainer enters ``steps()`` for the first time;
- ``useful``: steps run, and nothing is being recovered;
- ``recovery``: from a loss within ``steps()`` until the next progress; it has the steps that are done again;
- ``restart``: from a failure that ends all processes until the next progress;
- ``ending``: from the decided outcome until everything is released.

The journal alone decides it, so that anybody can check the figure afterwards.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from dlrover.python.rl.control.events import (
    Event,
    MemberLost,
    NodeLost,
    Progressed,
    StepsOpened,
    TrainerLost,
)
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.state import JobState, Phase


class TimeUse(StrEnum):
    START = "start"
    USEFUL = "useful"
    RECOVERY = "recovery"
    RESTART = "restart"
    ENDING = "ending"


@dataclass
class TimeAccount:
    """Seconds by use; ``since_s`` is the Unix time up to which they are booked, 0 before the first event."""

    use: TimeUse = TimeUse.START
    since_s: float = 0.0
    over: bool = False
    seconds: dict[TimeUse, float] = field(default_factory=lambda: dict.fromkeys(TimeUse, 0.0))

    def take(self, at_s: float, before: JobState, after: JobState, event: Event) -> None:
        if self.over:
            return
        self.book(at_s)
        self.use = _next_use(self.use, before, after, event)
        self.over = after.phase.terminal

    def book(self, now_s: float) -> None:
        """Count the time up to now."""
        if self.since_s and not self.over:
            self.seconds[self.use] += max(now_s - self.since_s, 0.0)
        self.since_s = max(now_s, self.since_s)

    @property
    def goodput(self) -> float:
        """From 0 to 1; 0 before any time has passed."""
        total = sum(self.seconds.values())
        return self.seconds[TimeUse.USEFUL] / total if total else 0.0


def _next_use(use: TimeUse, before: JobState, after: JobState, event: Event) -> TimeUse:
    if after.phase is Phase.ENDING or after.phase.terminal:
        return TimeUse.ENDING
    if after.phase is Phase.RESTARTING and before.phase is not Phase.RESTARTING:
        return TimeUse.RESTART
    if isinstance(event, StepsOpened) and use is TimeUse.START and after.incarnation <= 1:
        return TimeUse.USEFUL
    if isinstance(event, Progressed) and use in (TimeUse.RECOVERY, TimeUse.RESTART):
        return TimeUse.USEFUL
    if isinstance(event, MemberLost | TrainerLost | NodeLost) and after is not before and use is TimeUse.USEFUL:
        return TimeUse.RECOVERY
    return use


def account_of(events: Iterable[tuple[float, Event]]) -> TimeAccount:
    """The account of a whole journal."""
    account, state = TimeAccount(), JobState()
    for at_s, event in events:
        before, (state, _) = state, step(state, event, at_s)
        account.take(at_s, before, state, event)
    return account
