# SPDX-License-Identifier: Apache-2.0
"""The state machine with its journal: an event is saved before its commands are returned. Runs a job without Ray."""

import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TypeAlias

from dlrover.python.rl.common.errors import CallError, ConfigError, InvalidJob, JobConflict, JournalCorrupt
from dlrover.python.rl.common.names import RLRoleType
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.commands import Command, Release
from dlrover.python.rl.control.events import Cause, CauseKind, Event, RoleSettings, StopRequested, Submitted
from dlrover.python.rl.control.journal import decode, encode
from dlrover.python.rl.control.machine import can_resize, replay, step
from dlrover.python.rl.control.placement import Placement
from dlrover.python.rl.control.state import JobState, Phase
from dlrover.python.rl.master.process.status import JobStatus, status_of
from dlrover.python.rl.runtime.checkpoint.journal_store import FileStateStore, StateStore, read_lines
from dlrover.python.rl.runtime.local import LocalExecutor
from dlrover.python.rl.runtime.member.inspection import Inspection
from dlrover.python.rl.runtime.run.folder import new_run
from dlrover.python.rl.trainer.trainer import Announcer, Reporter, StepReport, announce_nothing

JOURNAL = "journal.jsonl"


Handled: TypeAlias = tuple[Event, JobState, JobState, tuple[Command, ...]]
"""An event, the states before and after it, and its commands."""


class Brain:
    """Replays the journal of ``store``, then journals events and returns their commands. Raises JournalCorrupt.

    Events get the time of the wall clock at the start, advanced by ``steady_s``, so that setting the clock changes no
    window. After a restart it starts at the time of the last event if the wall clock is behind it."""

    def __init__(
        self, store: StateStore, wall_s: Callable[[], float] = time.time, steady_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.store, self._steady_s = store, steady_s
        events = decode(store.read())
        self.began_s, last_s = (events[0][0], events[-1][0]) if events else (0.0, 0.0)
        self._offset_s = max(wall_s(), last_s) - steady_s()
        self.state: JobState = replay(events)

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Save ``event``, unless it changes nothing, and return its commands; after an OSError nothing has changed."""
        ((_, _, _, commands),) = self.handle_all((event,))
        return commands

    def handle_all(self, events: Sequence[Event]) -> list[Handled]:
        """Handle several events like :meth:`handle`, but save them together."""
        at_s, state, handled = self._steady_s() + self._offset_s, self.state, []
        for event in events:
            after, commands = step(state, event, at_s)
            handled.append((event, state, after, commands))
            state = after
        lines = [encode(at_s, event) for event, before, after, commands in handled if after is not before]
        if lines:
            self.store.append(*lines)
        self.state = state
        return handled

    def fail(self, error: Exception) -> None:
        """Mark the job as failed, without the journal, since its master cannot continue because of ``error``."""
        trace = "".join(traceback.format_exception(error))
        cause = Cause(CauseKind.INTERNAL, "master", f"{type(error).__name__}: {error}", trace)
        causes, reason = (*self.state.causes, cause), f"master: {error}"
        failed = Phase.FAILED
        self.state = replace(self.state, phase=failed, outcome=failed, causes=causes, failure=cause, reason=reason)


def submission(job: JobSpec, run: str, inspection: Inspection, brain: Brain) -> Submitted:
    """Return the first event of a run of ``job``. Raises JobConflict if the journal already has one."""
    if brain.state.settings is not None:
        raise JobConflict(f"the journal already holds a run of '{brain.state.settings.job}'")
    limits = job.restart
    max_restarts = {role.upper(): limit for role, limit in limits.workload_max_restart.items()}
    return Submitted(
        job=job.name,
        run=run,
        roles={
            str(role): RoleSettings(
                spec.num,
                inspection.scope_of(role),
                spec.standby,
                max_restarts.get(role),
                spec.min,
                role in inspection.rejoining and not job.preferred_ports(role),  # torch keeps a left group's port
            )
            for role, spec in job.workloads.items()
        },
        job_max_restart=limits.job_max_restart,
        trainer_max_restart=limits.trainer_max_restart,
        backoff_s=limits.backoff_s,
        window_s=limits.window_s,
        node_max_failures=limits.node_max_failures,
        first=_first_number(job, run),
    )


_BEYOND_ANY = 1_000_000
"""Exceeds the number of any process, for a damaged journal."""

_HEAD = 4
"""Lines of a journal that include its submission."""


def _first_number(job: JobSpec, run: str) -> int:
    """Return the number of the run's first processes, higher than any before the run lost its cluster."""
    last = 0
    for number in range(1, 1 + _newest_kept(job)):
        file = job.job_dir / f"journal.{number}.jsonl"
        try:
            lines = read_lines(file) if file.exists() else []
            head = [event for _, event in decode(lines[:_HEAD])]
            if not any(isinstance(event, Submitted) and event.run == run for event in head):
                continue
            state = replay(decode(lines))
        except JournalCorrupt:
            last = max(last, _BEYOND_ANY * number)
            continue
        numbers = [member.incarnation for member in state.members.values()]
        last = max(last, state.epoch, *numbers, *state.retired.values())
    return 1 + last


def fresh_journal(job: JobSpec) -> Path:
    """Return the path of a new journal in the job's claimed folder; rename an earlier run's journal there."""
    journal = job.job_dir / JOURNAL
    if journal.exists():
        journal.rename(job.job_dir / f"journal.{1 + _newest_kept(job)}.jsonl")
    return journal


def _newest_kept(job: JobSpec) -> int:
    """Return the number of the last journal that was renamed, 0 for none."""
    return max((int(file.suffixes[0][1:]) for file in job.job_dir.glob("journal.[0-9]*.jsonl")), default=0)


def earlier_journal(job: JobSpec, run: str) -> Brain | None:
    """Return the brain of an earlier master process of this run, None if it had not begun. Raises JournalCorrupt."""
    journal = job.job_dir / JOURNAL
    if not journal.exists():
        return None
    brain = Brain(FileStateStore(journal, must_exist=True))
    if brain.state.settings is not None and brain.state.settings.run == run:
        return brain
    brain.store.close()
    return None


def run_local(
    job: JobSpec,
    placement: Placement,
    report: Reporter,
    store: StateStore | None = None,
    enforce_deadlines: bool = False,
    announce: Announcer = announce_nothing,
) -> JobStatus:
    """Run ``job`` to its end without Ray; Ctrl-C or SIGTERM stops it cleanly. The default journal is in memory.
    ``enforce_deadlines`` lets calls with a timeout fail when they take longer."""
    brain = Brain(store or StateStore())
    last: list[StepReport] = []

    def noting(step_report: StepReport) -> None:
        last[:] = [step_report]
        report(step_report)

    run = job.run or new_run()
    executor = LocalExecutor(job, placement, noting, enforce_deadlines, run, announce)
    commands: deque[Command] = deque()

    def emit(event: Event) -> None:
        for command in brain.handle(event):
            if isinstance(command, Release):
                commands.clear()  # starts that are still pending
            commands.append(command)

    with closing(brain.store):
        emit(submission(job, run, Inspection(), brain))
        while commands:
            try:
                executor.execute(commands.popleft(), emit)
            except KeyboardInterrupt:
                emit(StopRequested("interrupted"))
    return status_of(job, brain.state, last[0] if last else None)


MAX_MEMBERS = 10_000


def resizable(job: JobSpec, state: JobState, inspection: Inspection, role: str, num: int) -> JobSpec:
    """Return the resized job. Raises InvalidJob for a role that never can be, CallError for a job that cannot now."""
    name = job.name
    check_new_size(name, role, num, job.workloads)
    if why := never_resized(job, inspection, role):
        raise InvalidJob([ConfigError("role", f"{role} of '{name}' cannot be resized: {why}")])
    if not can_resize(state, role):
        raise CallError(f"'{name}' can be resized once its steps run, but not while it restarts or ends")
    sizes = {other: spec.num for other, spec in state.settings.roles.items()} if state.settings else {}
    return job.with_sizes({**sizes, role: num})


def check_new_size(name: str, role: str, num: int, roles: Collection[str]) -> None:
    """Raise InvalidJob unless the job ``name`` has the role, and it may have ``num`` workers."""
    if role not in roles:
        near = get_close_matches(role, list(roles), n=1, cutoff=0.4)
        hint = f": did you mean '{near[0]}'?" if near else f"; it has {', '.join(sorted(roles))}"
        raise InvalidJob([ConfigError("role", f"'{name}' has no role '{role}'{hint}")])
    if not 1 <= num <= MAX_MEMBERS:
        raise InvalidJob([ConfigError("num", f"{num} is not between 1 and {MAX_MEMBERS}")])


def validate_least(job: JobSpec, inspection: Inspection) -> list[ConfigError]:
    """Return an error for each role that names ``min`` but cannot continue with fewer workers."""
    errors = []
    for role, spec in job.workloads.items():
        why = never_resized(job, inspection, role) if spec.min else ""
        if spec.min > spec.num:
            why = f"num is {spec.num}"
        if spec.min and job.scheduling_strategy == "SIMPLE":
            why = "scheduling_strategy SIMPLE reserves nothing, so missing places are not noticed"
        errors += [ConfigError(f"workload.{role.lower()}.min", f"{spec.min} cannot be: {why}")] if why else []
    return errors


def never_resized(job: JobSpec, inspection: Inspection, role: str) -> str:
    """Return why the role cannot have another number of workers while its job runs; empty if it can."""
    if role in inspection.stateful:
        return "its workers hold a state that is committed for each rank"
    if role in inspection.collectives:
        return "its workers meet in collectives"
    if together := [other for other in job.collocation_of(RLRoleType(role)) if other != role]:
        return f"it shares devices with {', '.join(together)}"
    return ""
