# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: each decision about jobs, which queued one starts among them.
"""What an operation does to the jobs, as a pure decision: no clock, disk or runner.

::

    Draft(ledger, new_run).decide(operation, at_s) -> answer; changed records and events stay in the draft
    ledger.adopt(draft)                            once they are saved

Several operations share a draft, each deciding on top of the one before.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from difflib import get_close_matches
from itertools import chain, islice
from math import isnan, nan

from dlrover.python.rl.common.errors import (
    CallError,
    DLRoverRLError,
    JobConflict,
    ServiceBusy,
    UnknownJob,
)
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


KEPT_ENDED = 10_000
"""Ended jobs that are remembered, and so their client tokens."""

_MOST_COMPARED = 500


class Ledger:
    """The saved jobs, by run; the newest run of each name; the run of each client token of an owner."""

    def __init__(self, limits: QueueLimits, records: Iterable[JobRecord] = (), last_event: int = 0) -> None:
        self.limits = limits
        self.last_event = last_event
        self.capacity: Mapping[str, float] = {}
        self._records: dict[str, JobRecord] = {}
        self._newest: dict[str, str] = {}
        self._tokens: dict[tuple[str, str], str] = {}
        self._unfinished: dict[str, JobRecord] = {}
        self._ended: dict[str, None] = {}  # in the order of their end
        ordered = sorted(records, key=lambda record: (record.phase.ended, record.revision))
        for record in sorted(ordered, key=lambda record: record.sequence):
            self._newest[record.name] = record.run
            self._tokens[record.owner, record.client_token] = record.run
        for record in ordered:
            self._put(record)

    def find(self, name: str) -> JobRecord | None:
        run = self._newest.get(name)
        return None if run is None else self._records[run]

    def get(self, name: str) -> JobRecord:
        record = self.find(name)
        if record is None:
            raise unknown_job(name, self.names)
        return record

    def by_run(self, run: str) -> JobRecord | None:
        return self._records.get(run)

    def by_token(self, owner: str, token: str) -> JobRecord | None:
        run = self._tokens.get((owner, token))
        return None if run is None else self._records.get(run)

    def unfinished(self) -> Iterator[JobRecord]:
        return iter(self._unfinished.values())

    def newest_first(self, ended: bool) -> Iterator[JobRecord]:
        """Runs that have not ended, then those that have ``ended``, in the opposite order of their submission."""
        records = self._records.values() if ended else self._unfinished.values()
        return iter(sorted(records, key=lambda record: (record.phase.ended, -record.sequence)))

    def count(self, ended: bool) -> int:
        return len(self._records if ended else self._unfinished)

    def waiting_reasons(self) -> Mapping[str, str]:
        """Why each queued run has not started."""
        return schedule(list(self.unfinished()), self.capacity, self.limits)[1]

    @property
    def names(self) -> Iterable[str]:
        """The newest first."""
        return reversed(self._newest)

    def adopt(self, draft: "Draft") -> list[str]:
        """Take over what a saved draft has changed; return the runs that are forgotten."""
        for record in draft.changed.values():
            if record.run not in self._records:
                self._newest[record.name] = record.run
                self._tokens[record.owner, record.client_token] = record.run
            self._put(record)
        self.last_event = draft.last_event
        return [self._forget() for _ in range(len(self._ended) - KEPT_ENDED)]

    def _put(self, record: JobRecord) -> None:
        self._records[record.run] = record
        if not record.phase.ended:
            self._unfinished[record.run] = record
        else:
            self._unfinished.pop(record.run, None)
            self._ended.setdefault(record.run)

    def _forget(self) -> str:
        run = next(iter(self._ended))
        del self._ended[run]
        record = self._records.pop(run)
        self._tokens.pop((record.owner, record.client_token), None)
        if self._newest.get(record.name) == run:
            del self._newest[record.name]
        return run


def unknown_job(name: str, names: Iterable[str]) -> UnknownJob:
    near = get_close_matches(name, islice(names, _MOST_COMPARED), n=1)
    return UnknownJob(f"no job named '{name}'" + (f": did you mean '{near[0]}'?" if near else ""))


@dataclass(frozen=True)
class Refused:
    """The answer to an operation that changes nothing because of ``error``."""

    error: DLRoverRLError


Answer = JobRecord | Refused | None


class Draft:
    """Decisions on top of a ledger that are not saved yet."""

    def __init__(self, ledger: Ledger, new_run: Callable[[], str]) -> None:
        """``new_run`` makes ids, which may be those of earlier runs."""
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
                    self._schedule(at_s)
                    return None
                case Observed():
                    return self._observe(operation, at_s)
        except DLRoverRLError as error:
            return Refused(error)

    # -- the jobs as they are with this draft ------------------------------------------------------------------------

    def _now(self, record: JobRecord) -> JobRecord:
        return self.changed.get(record.run, record)

    def _find(self, name: str) -> JobRecord | None:
        drafted = [record for record in self.changed.values() if record.name == name]
        saved = self._ledger.find(name)
        if saved is not None:
            drafted.append(self._now(saved))
        return max(drafted, key=lambda record: record.sequence, default=None)

    def _unfinished(self) -> list[JobRecord]:
        saved = [self._now(record) for record in self._ledger.unfinished()]
        added = [record for record in self.changed.values() if self._ledger.by_run(record.run) is None]
        return [record for record in (*saved, *added) if not record.phase.ended]

    # -- operations ---------------------------------------------------------------------------------------------------

    def _submit(self, wanted: SubmitJob, at_s: float) -> JobRecord:
        before = self._by_token(wanted)
        if before is not None:
            if before.fingerprint != wanted.fingerprint:
                raise CallError(f"client_token '{wanted.client_token}' was used for another submission")
            return before
        earlier = self._find(wanted.name)
        if earlier is not None and not earlier.phase.ended:
            raise JobConflict(f"a job named '{wanted.name}' is {earlier.phase}: stop it first or choose another name")
        self._check_room(wanted.owner)
        run = self._unused_run()
        self.descriptions[run] = wanted.description
        record = JobRecord(
            name=wanted.name,
            run=run,
            owner=wanted.owner,
            client_token=wanted.client_token,
            fingerprint=wanted.fingerprint,
            resources=wanted.resources,
            roles=wanted.roles,
            per_member=wanted.per_member,
            priority=wanted.priority,
            sequence=self.last_event + 1,
            submitted_s=at_s,
            folder=_folder(wanted, run, at_s),
        )
        return self._change(record, at_s, "submitted", f"by {wanted.owner}")

    def _unused_run(self) -> str:
        while (run := self._new_run()) in self.changed or self._ledger.by_run(run) is not None:
            pass
        return run

    def _by_token(self, wanted: SubmitJob) -> JobRecord | None:
        key = (wanted.owner, wanted.client_token)
        for record in self.changed.values():
            if (record.owner, record.client_token) == key:
                return record
        return self._ledger.by_token(*key)

    def _check_room(self, owner: str) -> None:
        queued = [record for record in self._unfinished() if record.phase is JobPhase.QUEUED]
        limits = self._ledger.limits
        if len(queued) >= limits.max_queued:
            raise ServiceBusy(f"the queue is full: {len(queued)} jobs wait; try again later")
        own = sum(record.owner == owner for record in queued)
        if own >= limits.max_queued_per_owner:
            raise ServiceBusy(f"'{owner}' has {own} jobs in the queue, as many as allowed; try again later")

    def _stop(self, wanted: StopJob, at_s: float) -> JobRecord:
        record = self._find(wanted.name)
        if record is None:
            raise unknown_job(wanted.name, chain((record.name for record in self.changed.values()), self._ledger.names))
        _check_run(wanted, record)
        if record.phase is JobPhase.QUEUED:
            stopped = replace(record, phase=JobPhase.STOPPED, reason=wanted.reason, ended_s=at_s)
            return self._change(stopped, at_s, "stopped", wanted.reason)
        if record.phase.ended or (record.phase is JobPhase.STOPPING and (record.hard or not wanted.hard)):
            return record
        stopping = replace(record, phase=JobPhase.STOPPING, reason=wanted.reason, hard=wanted.hard)
        return self._change(stopping, at_s, "stopping", "at once" if wanted.hard else wanted.reason)

    def _schedule(self, at_s: float) -> None:
        unfinished = self._unfinished()
        by_run = {record.run: record for record in unfinished}
        starts, _ = schedule(unfinished, self._ledger.capacity, self._ledger.limits)
        for run in starts:
            self._change(replace(by_run[run], phase=JobPhase.STARTING, started_s=at_s), at_s, "starting")

    def _observe(self, seen: Observed, at_s: float) -> JobRecord | None:
        record = self._find(seen.name)
        if record is None or record.run != seen.run or not record.phase.holds_resources:
            return None
        reward = seen.metrics.get("reward/mean", seen.metrics.get("reward", nan))
        after = replace(
            record,
            phase=_next_phase(record.phase, seen.phase),
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
            reason = (was_asked and record.reason) or seen.reason
            after = replace(after, reason=reason, cause=seen.cause, detail=seen.detail, ended_s=at_s)
        elif record == after:
            return record
        told = record
        if after.restarts > told.restarts:
            told = self._change(replace(told, restarts=after.restarts), at_s, "restarted", seen.last_failure)
        if sum(after.recoveries.values()) > sum(told.recoveries.values()):
            told = self._change(replace(told, recoveries=after.recoveries), at_s, "recovered", seen.last_failure)
        if after.roles != told.roles:
            message = ", ".join(f"{role} x{num}" for role, num in sorted(after.roles.items()))
            told = self._change(_resized(told, after.roles), at_s, "resized", message)
            after = replace(after, resources=told.resources, places=told.places)
        if after.step > told.step:
            stepped = replace(told, step=after.step, total_steps=after.total_steps, reward=after.reward)
            told = self._change(stepped, at_s, "step", metrics=seen.metrics)
        if after.phase is not record.phase:
            told = self._change(replace(after, revision=told.revision), at_s, after.phase.value, after.reason)
        elif replace(after, revision=told.revision) != told:  # what it does: no event
            told = replace(after, revision=told.revision)
            self.changed[told.run] = told
        return told

    def _change(
        self, record: JobRecord, at_s: float, kind: str, message: str = "", metrics: Mapping[str, float] | None = None
    ) -> JobRecord:
        self.last_event += 1
        record = replace(record, revision=self.last_event)
        self.changed[record.run] = record
        self.events.append(
            JobEvent(
                self.last_event, at_s, record.name, record.run, kind, message, record.phase, record.step, metrics or {}
            )
        )
        return record


def _folder(wanted: SubmitJob, run: str, at_s: float) -> str:
    """Where the files of a run go: a later process may have another time zone or root."""
    if wanted.job_dir or not wanted.run_folders:
        return wanted.job_dir
    return f"{wanted.run_folders}/{datetime.fromtimestamp(at_s).strftime('%Y%m%d-%H%M%S')}-{run}"


def _check_run(wanted: StopJob, record: JobRecord) -> None:
    """Whoever may stop one run may not be allowed to stop the next one, which may have been submitted meanwhile."""
    if record.run != wanted.run:
        raise CallError(f"a new job has taken the name '{wanted.name}' meanwhile: look at it first")


def _next_phase(now: JobPhase, seen: JobPhase) -> JobPhase:
    """A job that is being stopped stays so until it has ended."""
    return now if now is JobPhase.STOPPING and not seen.ended else seen


def _resized(record: JobRecord, roles: Mapping[str, int]) -> JobRecord:
    """A role that grows takes more of the cluster; one that shrinks keeps its places."""
    resources, places = dict(record.resources), dict(record.places)
    for role, num in roles.items():
        held = places.get(role, record.roles.get(role, 0))
        places[role] = max(held, num)
        for name, amount in record.per_member.get(role, {}).items():
            resources[name] = resources.get(name, 0.0) + amount * (places[role] - held)
    return replace(record, roles=roles, resources=resources, places=places)
