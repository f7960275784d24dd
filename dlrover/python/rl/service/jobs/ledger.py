# SPDX-License-Identifier: Apache-2.0
"""Decisions about the jobs of the service, without a clock, a disk or a runner.

::

    Draft(ledger, new_run).decide(operation, at_s) -> answer; the draft collects changed records and events
    ledger.adopt(draft)                            once they are saved

Several operations share a draft; each sees the changes of those before it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from math import isnan, nan
from typing import TypeAlias

from dlrover.python.rl.common.errors import CallError, DLRoverRLError, JobConflict, QuotaReached, UnknownJob
from dlrover.python.rl.common.names import nearest
from dlrover.python.rl.service.jobs.records import (
    JobDescription,
    JobEvent,
    JobPhase,
    JobRecord,
    Observed,
    Operation,
    Schedule,
    StopJob,
    SubmitJob,
)

KEPT_ENDED = 10_000  # ended jobs that are remembered, with their client tokens
_MOST_COMPARED = 500
_MOST_NAMED = 5

Answer: TypeAlias = JobRecord | DLRoverRLError | None  # an error has changed nothing


@dataclass(frozen=True)
class QueueLimits:
    max_queued: int = 1000
    max_queued_per_owner: int = 1000
    max_running: int = 100
    max_running_per_owner: int = 100


def schedule(
    unfinished: Sequence[JobRecord], capacity: Mapping[str, float], limits: QueueLimits
) -> tuple[list[str], dict[str, str]]:
    """Return the runs to start now, and why each other queued run waits. ``capacity`` is the whole cluster's."""
    active = [record for record in unfinished if record.phase.holds_resources]
    running = Counter(record.owner for record in active)
    free = dict(capacity)
    for record in active:
        _take(free, record.resources)
    starts: list[str] = []
    waits: dict[str, str] = {}
    blocker = ""
    queued = [record for record in unfinished if record.phase is JobPhase.QUEUED]
    for record in sorted(queued, key=lambda record: (-record.priority, record.sequence)):
        lack = _lack(record.resources, capacity)
        if lack:
            waits[record.run] = f"the cluster has too little: {lack}"
        elif running[record.owner] >= limits.max_running_per_owner:
            jobs = f"{running[record.owner]} job{'s' * (running[record.owner] != 1)}"
            waits[record.run] = f"'{record.owner}' runs {jobs}, the limit"
        elif blocker:
            waits[record.run] = f"behind '{blocker}' in the queue"
        elif running.total() >= limits.max_running:
            waits[record.run] = f"{running.total()} jobs run, the limit"
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
    """Describe the missing resources; empty if none is missing."""
    return ", ".join(
        f"{amount:g} {kind} needed, {max(available.get(kind, 0.0), 0.0):g} available"
        for kind, amount in sorted(resources.items())
        if amount > available.get(kind, 0.0) + 1e-9
    )


class Ledger:
    """The saved jobs: ``records`` by run, the ``unfinished`` ones among them, the ``newest`` run of each name, and the
    run of each owner's client token. Only drafts change it."""

    def __init__(self, limits: QueueLimits, records: Iterable[JobRecord] = (), last_event: int = 0) -> None:
        self.limits = limits
        self.last_event = last_event
        self.capacity: Mapping[str, float] = {}
        self.records: dict[str, JobRecord] = {}
        self.unfinished: dict[str, JobRecord] = {}
        self.newest: dict[str, str] = {}
        self.tokens: dict[tuple[str, str], str] = {}
        self._ended: dict[str, None] = {}  # in the order of their end
        self._waits: tuple[object, Mapping[str, str]] = (None, {})  # the reasons, and the state they are valid for
        ordered = sorted(records, key=lambda record: (record.phase.ended, record.revision))
        for record in sorted(ordered, key=lambda record: record.sequence):
            self.newest[record.name] = record.run
            self.tokens[record.owner, record.client_token] = record.run
        for record in ordered:
            self._put(record)

    def get(self, reference: str) -> JobRecord:
        """Return the newest run of a name, or the run of NAME@RUN. Raises UnknownJob."""
        name, _, run = reference.partition("@")
        if name not in self.newest:
            raise unknown_job(name, reversed(self.newest))
        record = self.records.get(run or self.newest[name])
        if record is None or record.name != name:
            runs = [record.run for record in self.records.values() if record.name == name]
            raise UnknownJob(f"'{name}' has no run '{run}'; it has {', '.join(runs[-_MOST_NAMED:])}")
        return record

    def waiting_reasons(self) -> Mapping[str, str]:
        """Return why each queued run has not started."""
        now = (self.last_event, self.capacity)
        if self._waits[0] != now:
            self._waits = now, schedule(list(self.unfinished.values()), self.capacity, self.limits)[1]
        return self._waits[1]

    def adopt(self, draft: "Draft") -> list[str]:
        """Take over the changes of a saved draft; return the runs that are forgotten."""
        for record in draft.changed.values():
            if record.run not in self.records:
                self.newest[record.name] = record.run
                self.tokens[record.owner, record.client_token] = record.run
            self._put(record)
        self.last_event = draft.last_event
        forgotten = list(islice(self._ended, max(len(self._ended) - KEPT_ENDED, 0)))
        for run in forgotten:
            del self._ended[run]
            record = self.records.pop(run)
            self.tokens.pop((record.owner, record.client_token), None)
            if self.newest.get(record.name) == run:
                del self.newest[record.name]
        return forgotten

    def _put(self, record: JobRecord) -> None:
        self.records[record.run] = record
        if not record.phase.ended:
            self.unfinished[record.run] = record
        else:
            self.unfinished.pop(record.run, None)
            self._ended.setdefault(record.run)


def unknown_job(name: str, names: Iterable[str]) -> UnknownJob:
    near = nearest(name, list(islice(names, _MOST_COMPARED)))
    return UnknownJob(f"no job named '{name}'" + (f": did you mean '{near}'?" if near else ""))


class Draft:
    """Unsaved decisions on top of a ledger. ``new_run`` makes ids, which need not be unique."""

    def __init__(self, ledger: Ledger, new_run: Callable[[], str]) -> None:
        self._ledger, self._new_run = ledger, new_run
        self.last_event = ledger.last_event
        self.changed: dict[str, JobRecord] = {}
        self.events: list[JobEvent] = []
        self.descriptions: dict[str, JobDescription] = {}

    def decide(self, operation: Operation, at_s: float) -> Answer:
        try:
            match operation:
                case SubmitJob():
                    return self._submit(operation, at_s)
                case StopJob():
                    return self._stop(operation, at_s)
                case Schedule():
                    queue = {record.run: record for record in self._unfinished()}
                    for run in schedule(list(queue.values()), self._ledger.capacity, self._ledger.limits)[0]:
                        self._change(replace(queue[run], phase=JobPhase.STARTING, started_s=at_s), at_s, "starting")
                    return None
                case Observed():
                    return self._observe(operation, at_s)
        except DLRoverRLError as error:
            return error

    def _find(self, name: str) -> JobRecord | None:
        """Return the newest run of a name, with this draft's changes."""
        records = [record for record in self.changed.values() if record.name == name]
        if (saved := self._ledger.newest.get(name)) is not None:
            records.append(self.changed.get(saved, self._ledger.records[saved]))
        return max(records, key=lambda record: record.sequence, default=None)

    def _unfinished(self) -> list[JobRecord]:
        records = {**self._ledger.unfinished, **self.changed}
        return [record for record in records.values() if not record.phase.ended]

    def _submit(self, wanted: SubmitJob, at_s: float) -> JobRecord:
        ledger, job, key = self._ledger, wanted.job, (wanted.job.owner, wanted.job.client_token)
        drafted = (record for record in self.changed.values() if (record.owner, record.client_token) == key)
        before = next(drafted, None) or ledger.records.get(ledger.tokens.get(key, ""))
        if before is not None:
            if before.fingerprint != job.fingerprint:
                raise CallError(f"client_token '{job.client_token}' was used for another submission")
            return before
        earlier = self._find(job.name)
        if earlier is not None and not earlier.phase.ended:
            raise JobConflict(f"a job named '{job.name}' is {earlier.phase}: stop it first or choose another name")
        self._check_room(job.owner)
        while (run := self._new_run()) in self.changed or run in ledger.records:
            pass
        self.descriptions[run] = wanted.description
        folder = job.folder
        if not folder and wanted.run_folders:  # fixed now: a later process may have another time zone or root
            folder = f"{wanted.run_folders}/{datetime.fromtimestamp(at_s).strftime('%Y%m%d-%H%M%S')}-{run}"
        record = replace(job, run=run, sequence=self.last_event + 1, submitted_s=at_s, folder=folder)
        return self._change(record, at_s, "submitted", f"by {job.owner}")

    def _check_room(self, owner: str) -> None:
        queued = [record for record in self._unfinished() if record.phase is JobPhase.QUEUED]
        limits = self._ledger.limits
        if len(queued) >= limits.max_queued:
            raise QuotaReached(f"the queue is full: {len(queued)} jobs wait, the limit")
        own = sum(record.owner == owner for record in queued)
        if own >= limits.max_queued_per_owner:
            raise QuotaReached(f"'{owner}' has {own} jobs in the queue, the limit")

    def _stop(self, wanted: StopJob, at_s: float) -> JobRecord:
        record = self._find(wanted.name)
        if record is None:
            names = [record.name for record in self.changed.values()]
            raise unknown_job(wanted.name, [*names, *reversed(self._ledger.newest)])
        _check_run(wanted, record)
        if record.phase is JobPhase.QUEUED:
            stopped = replace(record, phase=JobPhase.STOPPED, reason=wanted.reason, ended_s=at_s)
            return self._change(stopped, at_s, "stopped", wanted.reason)
        if record.phase.ended or (record.phase is JobPhase.STOPPING and (record.hard or not wanted.hard)):
            return record
        stopping = replace(record, phase=JobPhase.STOPPING, reason=wanted.reason, hard=wanted.hard)
        return self._change(stopping, at_s, "stopping", "at once" if wanted.hard else wanted.reason)

    def _observe(self, seen: Observed, at_s: float) -> JobRecord | None:
        record = self._find(seen.name)
        if record is None or record.run != seen.run or not record.phase.holds_resources:
            return None
        stays_stopping = record.phase is JobPhase.STOPPING and not seen.phase.ended
        reward = seen.metrics.get("reward/mean", seen.metrics.get("reward", nan))
        after = replace(
            record,
            phase=record.phase if stays_stopping else seen.phase,
            step=max(record.step, seen.step),
            total_steps=seen.total_steps or record.total_steps,
            reward=record.reward if isnan(reward) else reward,
            restarts=max(record.restarts, seen.restarts),
            results=seen.results or record.results,
            activity="" if seen.phase.ended else seen.activity,
            roles=seen.roles or record.roles,
            members=() if seen.phase.ended else seen.members,
            step_s=seen.step_s or record.step_s,
            recoveries=seen.recoveries or record.recoveries,
        )
        if seen.phase.ended:
            was_asked = record.phase is JobPhase.STOPPING and seen.phase is JobPhase.STOPPED
            reason = record.reason if was_asked and record.reason else seen.reason
            after = replace(after, reason=reason, cause=seen.cause, detail=seen.detail, ended_s=at_s)
        elif record == after:
            return record
        current = record
        if after.restarts > current.restarts:
            current = self._change(replace(current, restarts=after.restarts), at_s, "restarted", seen.last_failure)
        if sum(after.recoveries.values()) > sum(current.recoveries.values()):
            current = self._change(replace(current, recoveries=after.recoveries), at_s, "recovered", seen.last_failure)
        if after.roles != current.roles:
            message = ", ".join(f"{role} x{num}" for role, num in sorted(after.roles.items()))
            current = self._change(_resized(current, after.roles), at_s, "resized", message)
            after = replace(after, resources=current.resources, places=current.places)
        if after.step > current.step:
            after = replace(after, last_step_s=at_s)
            stepped = replace(current, step=after.step, total_steps=after.total_steps, reward=after.reward)
            stepped = replace(stepped, last_step_s=at_s)
            current = self._change(stepped, at_s, "step", metrics=seen.metrics)
        if after.phase is not record.phase:
            current = self._change(replace(after, revision=current.revision), at_s, after.phase.value, after.reason)
        elif replace(after, revision=current.revision) != current:  # a new activity, for example: no event
            current = self.changed[current.run] = replace(after, revision=current.revision)
        return current

    def _change(
        self, record: JobRecord, at_s: float, kind: str, message: str = "", metrics: Mapping[str, float] | None = None
    ) -> JobRecord:
        number = self.last_event = self.last_event + 1
        record = self.changed[record.run] = replace(record, revision=number)
        about = (record.name, record.run, kind, message, record.phase, record.step, metrics or {})
        self.events.append(JobEvent(number, at_s, *about))
        return record


def _check_run(wanted: StopJob, record: JobRecord) -> None:
    """Raise CallError for a newer run of the name, which the caller may not be allowed to stop."""
    if record.run != wanted.run:
        raise CallError(f"a new job has taken the name '{wanted.name}': look at it first")


def _resized(record: JobRecord, roles: Mapping[str, int]) -> JobRecord:
    """Resize roles: one that grows takes more of the cluster, one that shrinks keeps its places."""
    resources, places = dict(record.resources), dict(record.places)
    for role, num in roles.items():
        before = places.get(role, record.roles.get(role, 0))
        places[role] = max(before, num)
        for name, amount in record.per_member.get(role, {}).items():
            resources[name] = resources.get(name, 0.0) + amount * (places[role] - before)
    return replace(record, roles=roles, resources=resources, places=places)
