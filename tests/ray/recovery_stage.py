# SPDX-License-Identifier: Apache-2.0
"""Runs a :mod:`toy_job` on real Ray, strikes it from outside, and tells everything about how it went."""

import json
import os
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray

from dlrover.python.rl.common.errors import JournalCorrupt
from dlrover.python.rl.common.names import NAMESPACE, master_name, member_name
from dlrover.python.rl.config.builder import JobBuilder
from dlrover.python.rl.config.spec import CheckpointSpec, JobSpec
from dlrover.python.rl.control.events import (
    MasterStarted,
    MemberLost,
    MemberStarted,
    StandbyReady,
    Submitted,
    TrainerStarted,
)
from dlrover.python.rl.control.journal import decode
from dlrover.python.rl.master.job import check_job, run_on_ray
from dlrover.python.rl.runtime.checkpoint.journal_store import read_lines
from dlrover.python.rl.runtime.ray.processes.actors import find, sweep
from tests.support.commands import ROOT, command_of, wait_for
from tests.support.toy_job import expected_totals, mark_of

MEMORY = Path(f"/dev/shm/dlrover-rl-{os.geteuid()}")
HANG_AFTER_S = 3.0


@dataclass(frozen=True)
class Shape:
    """The settings that differ between jobs."""

    actor: str = "Worker"
    trainer: str = "Loop"
    steps: int = 6
    rollouts: int = 2
    standby: int = 0
    checkpoint: CheckpointSpec = CheckpointSpec(commit_every=1)  # only the open step is repeated


def describe(name: str, folder: Path, faults, shape: Shape = Shape()) -> JobSpec:
    """A job of two actors and some rollouts that works in ``folder``."""
    folder.mkdir()
    builder = JobBuilder().device_type("CPU").device_per_node(8).trainer("tests.support.toy_job", shape.trainer)
    builder.config({"folder": str(folder), "faults": list(faults), "steps": shape.steps})
    builder.actor("tests.support.toy_job", shape.actor).total(2).hang_after(HANG_AFTER_S)
    if shape.rollouts:
        rollout = builder.rollout("tests.support.toy_job", "Worker").total(shape.rollouts)
        rollout.standby(shape.standby).hang_after(HANG_AFTER_S)
    builder.trainer_hang_after(HANG_AFTER_S)
    builder.restart_limits(job_max_restart=5, backoff_s=0.1)
    job = builder.spec(name, (str(ROOT),))
    master = replace(job.master, max_restart=10)
    return replace(job, job_dir=folder / "out", master=master, checkpoint=shape.checkpoint)


@dataclass
class Stage:
    """One job, while it runs and afterwards."""

    job: JobSpec
    folder: Path
    status: object = None
    reports: list = field(default_factory=list)
    seen: set = field(default_factory=set)

    def run(self, strike=None, **options):
        """Run the job to its end. ``strike(stage, step)`` is called with each report, here and now."""

        def report(step_report):
            self.reports.append(step_report)
            if strike is not None:
                strike(self, step_report.step)

        try:
            self.status = run_on_ray(check_job(self.job), report, connected=True, **options)
        finally:
            if self.status is None:
                sweep(self.job.name)  # whatever went wrong, the next test finds nothing of this one
        return self

    def ask(self):
        """The master's own word."""
        return ray.get(find(master_name(self.job.name)).status.remote(), timeout=60)

    def pids(self):
        """Who is up: name to process id."""
        pids = {process: pid for process, _, pid, _ in self.ask().members}
        self.seen.update(pids.values())
        return pids

    def master_pid(self):
        pid = self.events(MasterStarted)[-1].pid
        self.seen.add(pid)
        return pid

    def kill(self, *pids, number=signal.SIGKILL):
        """Kill processes, all at once."""
        for pid in pids:
            os.kill(pid, number)

    def held(self, fault):
        """Wait until the job has come to a fault that holds it."""
        wait_for(mark_of(self.folder, fault).exists)

    def let_go(self, fault):
        """Let the stopped process continue."""
        mark = mark_of(self.folder, fault)
        mark.with_name(mark.name + ".go").touch()

    def member(self, role, rank, incarnation):
        """A worker's actor."""
        name = member_name(self.job.name, self.run_id, role, rank, incarnation)
        return ray.get_actor(name, namespace=NAMESPACE)

    @property
    def journal(self):
        return self.job.job_dir / "journal.jsonl"

    def timed(self, kind=object):
        """The journal's events of a kind, with their times."""
        return [(at_s, event) for at_s, event in decode(read_lines(self.journal)) if isinstance(event, kind)]

    def events(self, kind=object):
        return [event for _, event in self.timed(kind)]

    @property
    def run_id(self):
        return self.events(Submitted)[0].run

    def losses(self):
        """Return each lost process with its kind, once."""
        return sorted((event.cause.who, event.cause.kind.value) for event in self.events() if hasattr(event, "cause"))

    def pids_of(self, role):
        """Every process that has become a worker of a role, by its rank and incarnation."""
        started = [event for event in self.events(MemberStarted) if event.role == role]
        return {(event.rank, event.incarnation): event.process.pid for event in started}

    def incarnations(self, role):
        return sorted(self.pids_of(role))

    def epochs(self):
        return [event.epoch for event in self.events(TrainerStarted)]

    def notes(self):
        """Every call that a worker has begun: worker, method, step and process id."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [(process, method, int(step), int(pid)) for process, method, step, pid in map(str.split, lines)]

    def repeated(self):
        """The calls that were begun more than once."""
        counts = Counter(note[:3] for note in self.notes())
        assert max(counts.values()) <= 2, counts
        return {call for call, count in counts.items() if count > 1}

    def delay_s(self, role, rank):
        """Return the seconds from the loss of a worker to its replacement."""
        lost = next(at_s for at_s, event in self.timed(MemberLost) if (event.role, event.rank) == (role, rank))
        came = [at_s for at_s, event in self.timed(MemberStarted) if (event.role, event.rank) == (role, rank)]
        return min(at_s for at_s in came if at_s >= lost) - lost

    def starts(self):
        """Return how often the trainer was started from its beginning."""
        return (self.folder / "starts").read_text().count("started") if (self.folder / "starts").exists() else 0

    def result_is_exact(self):
        """Return True if the totals equal an undisturbed run's, to the last bit."""
        result = json.loads((self.folder / "result.json").read_text())
        return result["totals"] == expected_totals(self.job.config.steps, rollouts="ROLLOUT" in self.job.workloads)

    def nothing_is_left(self):
        """No actor, no reserved resource, no memory and no process."""
        with suppress(AssertionError):
            wait_for(lambda: not self.left(), 20.0)
        assert self.left() == []
        return True

    def left(self):
        prefix = f"{self.job.name}/"
        actors = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        groups = [group["name"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
        memory = [str(folder) for folder in memory_of(self.job.name)]
        named = [name for name in (*actors, *groups) if name.startswith(prefix)]
        return named + memory + [pid for pid in self._every_pid() if command_of(pid).startswith("ray::")]

    def _every_pid(self):
        """Every process that the journal, its workers or this test have named."""
        with suppress(JournalCorrupt, FileNotFoundError):
            self.seen.update(event.process.pid for event in self.events(MemberStarted | TrainerStarted | StandbyReady))
            self.seen.update(event.pid for event in self.events(MasterStarted))
        if (self.folder / "calls").exists():
            self.seen.update(pid for *_, pid in self.notes())
        return self.seen


def memory_of(job):
    """Return the shared memory of a job's runs on this machine; a run's name has eight digits."""
    return list(MEMORY.glob(f"{job}-{'?' * 8}"))
