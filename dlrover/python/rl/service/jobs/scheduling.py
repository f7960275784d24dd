# SPDX-License-Identifier: Apache-2.0
"""Which queued jobs start: by priority, then in the order of their submission.

A job that does not fit yet holds back those behind it, so that a large one is not overtaken for ever. Two kinds hold
nobody back: jobs that need more than the whole cluster has, and jobs whose owner runs as many as allowed.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dlrover.python.rl.service.jobs.records import JobPhase, JobRecord


@dataclass(frozen=True)
class QueueLimits:
    max_queued: int = 1000
    max_queued_per_owner: int = 1000
    max_running: int = 100
    max_running_per_owner: int = 100


def in_order(queued: Iterable[JobRecord]) -> list[JobRecord]:
    return sorted(queued, key=lambda record: (-record.priority, record.sequence))


def schedule(
    unfinished: Sequence[JobRecord], capacity: Mapping[str, float], limits: QueueLimits
) -> tuple[list[str], dict[str, str]]:
    """The runs to start now, and why each other queued run waits. ``capacity`` is what the whole cluster has."""
    active = [record for record in unfinished if record.phase.holds_resources]
    running = Counter(record.owner for record in active)
    free = dict(capacity)
    for record in active:
        _take(free, record.resources)
    starts: list[str] = []
    waits: dict[str, str] = {}
    blocker = ""
    for record in in_order(record for record in unfinished if record.phase is JobPhase.QUEUED):
        lack = _lack(record.resources, capacity)
        if lack:
            waits[record.run] = f"the cluster has too little: {lack}"
        elif running[record.owner] >= limits.max_running_per_owner:
            waits[record.run] = f"'{record.owner}' runs {running[record.owner]} jobs, as many as allowed"
        elif blocker:
            waits[record.run] = f"behind '{blocker}' in the queue"
        elif running.total() >= limits.max_running:
            waits[record.run] = f"{running.total()} jobs run, as many as allowed"
            blocker = record.name
        elif _lack(record.resources, free):
            waits[record.run] = f"the cluster is full: {_lack(record.resources, free)}"
            blocker = record.name
        else:
            starts.append(record.run)
            running[record.owner] += 1
            _take(free, record.resources)
    return starts, waits


def _take(free: dict[str, float], resources: Mapping[str, float]) -> None:
    for kind, amount in resources.items():
        free[kind] = free.get(kind, 0.0) - amount


def _lack(resources: Mapping[str, float], available: Mapping[str, float]) -> str:
    """What is missing, in words; empty if nothing is."""
    return ", ".join(
        f"{amount:g} {kind} needed, {max(available.get(kind, 0.0), 0.0):g} there"
        for kind, amount in sorted(resources.items())
        if amount > available.get(kind, 0.0) + 1e-9
    )
