# SPDX-License-Identifier: Apache-2.0
"""Goodput: the share of a job's time in which it makes progress, and where the rest goes.

Each moment of a job has one use:

- ``start``: from its submission until its trainer enters ``steps()`` for the first time;
- ``useful``: steps run, and nothing is being recovered;
- ``recovery``: from a loss within ``steps()`` until the next progress; it has the steps that are done again;
- ``restart``: from a failure that ends all processes until the next progress;
- ``ending``: from the decided outcome until everything is released.

A recovery, a restart, and the end of a job that failed have a cause: that of the failure with which they began. The
journal alone decides it, so that anybody can check the figure afterwards.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from dlrover.python.rl.control.events import (
    Event,
    Failed,
    MemberLost,
    NodeLost,
    Progressed,
    StandbyLost,
    StepsOpened,
    TrainerLost,
    Unplaced,
)
from dlrover.python.rl.control.machine import step
from dlrover.python.rl.control.state import JobState, Phase

LOSSES = (MemberLost, StandbyLost, TrainerLost, NodeLost, Unplaced, Failed)
"""Events that have a cause."""


class TimeUse(StrEnum):
    START = "start"
    USEFUL = "useful"
    RECOVERY = "recovery"
    RESTART = "restart"
    ENDING = "ending"


@dataclass
class TimeAccount:
    """Seconds by use and cause, a CauseKind or ""; ``since_s`` is the Unix time up to which they are booked, 0 before
    the first event."""

    use: TimeUse = TimeUse.START
    cause: str = ""
    since_s: float = 0.0
    over: bool = False
    seconds: dict[tuple[TimeUse, str], float] = field(default_factory=dict)

    def take(self, at_s: float, before: JobState, after: JobState, event: Event) -> None:
        if self.over:
            return
        self.book(at_s)
        use = _next_use(self.use, before, after, event)
        if use is not self.use:
            self.use, self.cause = use, _cause_of(use, after, event)
        self.over = after.phase.terminal

    def book(self, now_s: float) -> None:
        """Count the time up to now."""
        if self.since_s and not self.over:
            key = self.use, self.cause
            self.seconds[key] = self.seconds.get(key, 0.0) + max(now_s - self.since_s, 0.0)
        self.since_s = max(now_s, self.since_s)

    def spent_s(self, use: TimeUse) -> float:
        return sum(seconds for (booked, _), seconds in self.seconds.items() if booked is use)

    @property
    def goodput(self) -> float:
        """From 0 to 1; 0 before any time has passed."""
        total = sum(self.seconds.values())
        return self.spent_s(TimeUse.USEFUL) / total if total else 0.0


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


def _cause_of(use: TimeUse, after: JobState, event: Event) -> str:
    if use is TimeUse.ENDING:
        return after.failure.kind.value if after.failure is not None else ""
    is_loss = use in (TimeUse.RECOVERY, TimeUse.RESTART)
    return event.cause.kind.value if is_loss and isinstance(event, LOSSES) else ""


def account_of(events: Iterable[tuple[float, Event]]) -> TimeAccount:
    """The account of a whole journal."""
    account, state = TimeAccount(), JobState()
    for at_s, event in events:
        before, (state, _) = state, step(state, event, at_s)
        account.take(at_s, before, state, event)
    return account
