# SPDX-License-Identifier: Apache-2.0
"""Jobs on a cluster of Ray: starts a checked job and follows it; lists, shows, resizes and stops running jobs."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import hint, master_name, nearest, resume_command
from dlrover.python.rl.config.secrets import seal
from dlrover.python.rl.config.spec import RUNS, JobSpec
from dlrover.python.rl.control.events import CauseKind
from dlrover.python.rl.control.state import Phase
from dlrover.python.rl.master.client import jobs
from dlrover.python.rl.master.client.resume import SavedRun, find_saved_run, wait_for_lost_owner
from dlrover.python.rl.master.client.run import CheckedJob
from dlrover.python.rl.master.client.views import JobOperations, JobView, check_name, view_of_status
from dlrover.python.rl.master.process.rl_master import RLMaster
from dlrover.python.rl.master.process.status import INTERRUPTED, JobStatus, Position, Update
from dlrover.python.rl.runtime.interrupts import noted_signals
from dlrover.python.rl.runtime.ray.cluster.api import RayClusterApi
from dlrover.python.rl.runtime.ray.cluster.cluster import current_address, lost_process, other_addresses, ray_cluster
from dlrover.python.rl.runtime.ray.processes.actors import ask, end, find, launch, sweep, wait_gone
from dlrover.python.rl.runtime.run.folder import CLUSTER, LATEST, ON_RAY, begin, newest_owner, write_shared
from dlrover.python.rl.trainer.trainer import Announcer, Reporter, announce_nothing, report_nothing

_LOG = get_logger(__name__)

FOLLOW_S = 1.0
ANSWER_S = 60.0
_LOST_S = 3.0
_ANSWER_S = 30.0
_RESIZE_S = 240.0
_STOP_S = 60.0
_FOLLOWER_S = 3.0
_MASTER = "/master"
_CLUSTERS = frozenset(CauseKind) - {CauseKind.USER_ERROR, CauseKind.START_FAILED, CauseKind.NO_SPACE}
"""Causes of a failure that the loss of the cluster may explain."""


def run_on_cluster(  # noqa: PLR0913 -- its listeners, and where it runs
    checked: CheckedJob,
    report: Reporter,
    announce: Announcer,
    address: str | None = None,
    connected: bool = False,
    folder: Path | None = None,
    again: bool = False,
) -> JobStatus:
    """Start the job's master on a cluster and follow it; Ctrl-C stops the job.

    Args:
        folder: for the files of a cluster that is started here.
        again: a process that followed this job was lost; the job's master may still run.

    Raises:
        MasterLost: the master, or the cluster that was started here.
        JobConflict, ClusterUnavailable: as :func:`start_master` and :func:`ray_cluster`.
    """
    job, total, own = checked.job, dict(checked.placement.total), address is None and not connected
    total["cpu"] = total.get("cpu", 0.0) + job.master.cpu
    if not connected:
        announce("starting Ray" if own else f"connecting to Ray at {address}")
    cluster = nullcontext() if connected else ray_cluster(address, total, folder=folder)
    with noted_signals(signal.SIGINT) as interrupts, cluster:
        if interrupts:
            return interrupted(job)
        with suppress(OSError):  # without a folder its master claims it
            write_shared(job.job_dir / CLUSTER, current_address().encode())
        try:
            master = _remaining_master(job) if again else None
            if master is None:
                announce("starting the master")
                master = start_master(replace(checked, job=wait_for_lost_owner(job) if again else job), claims=not own)
            if checked.opening and not own and not again:  # the master holds the folder now
                announce(checked.opening)
            status = follow(master, report, interrupts, announce=announce)
        except errors.MasterLost as error:
            # A master that exists but does not answer still owns its job, perhaps another one.
            if find(master_name(job.name)) is not None:
                raise
            sweep(job.name)
            raise errors.MasterLost(f"{error}; to resume: {resume_command(job.job_dir)}") from error
        may_be_the_clusters = status.cause is None or status.cause.kind in _CLUSTERS
        if own and status.phase is Phase.FAILED and may_be_the_clusters and lost_process(_LOST_S):
            raise errors.MasterLost(f"a process of Ray has died: {status.reason}")
        if status.phase.terminal:
            end(master)
        return status


def interrupted(job: JobSpec) -> JobStatus:
    """Return the status of a job that was interrupted before it began."""
    return JobStatus(job.name, Phase.STOPPED, 0, 0, INTERRUPTED, None, folder=str(job.job_dir))


def _remaining_master(job: JobSpec) -> Any:
    """Return the master of this run, which a lost process has started; None if there is none."""
    master = find(master_name(job.name))
    if master is None:
        return None
    status: JobStatus = ask(master.status.remote, ANSWER_S)
    return master if status.folder == str(job.job_dir) and not status.phase.terminal else None


def start_master(
    checked: CheckedJob, claims: bool = True, launched: Callable[[Any], None] = lambda master: None
) -> Any:
    """Launch the master of a checked job on the connected cluster, pass it to ``launched``, and start it. It ``claims``
    the job's folder unless this process has. Raises JobConflict while a job of this name runs or another run holds the
    folder, and MasterLost."""
    job = begin(checked.job)
    name = master_name(job.name)
    earlier = find(name)
    if earlier is not None and not ask(earlier.status.remote, ANSWER_S).phase.terminal:
        raise errors.JobConflict(f"a job named '{job.name}' is running on this cluster: stop it or choose another name")
    for actor in sweep(job.name):
        if actor != name:
            _LOG.warning("ended %s, which a job of this name had left behind", actor)
    wait_gone(name, ANSWER_S)
    needs = {"cpu": job.master.cpu, "memory": job.master.memory}
    sealed, secrets = seal(job)  # Ray stores the arguments of actors
    plain = replace(checked.inspection, config=None, renamed=None, about=())
    arguments = (sealed, checked.placement, plain, claims)
    master = launch(RLMaster, name, arguments, needs, job.master.max_restart)
    launched(master)
    try:
        ask(partial(master.start.remote, secrets), max(ANSWER_S, job.liveness.start_timeout_s))
    except (errors.JobConflict, errors.InvalidJob):
        end(master)
        raise
    return master


def stop_master(master: Any, reason: str) -> None:
    ask(lambda: master.stop.remote(reason), ANSWER_S)


def follow(
    master: Any,
    report: Reporter = report_nothing,
    interrupts: list[int] | None = None,
    deadline_s: float | None = None,
    announce: Announcer = announce_nothing,
) -> JobStatus:
    """Pass step reports to ``report``, and activities to ``announce``, until the job has ended; return its status. The
    first of ``interrupts`` stops the job; the second, or ``deadline_s``, ends the waiting."""
    position: Position = ("", 0)
    stopping, began_s, activity = False, time.monotonic(), ""
    while True:
        update: Update = ask(partial(master.follow.remote, position, FOLLOW_S), ANSWER_S)
        status, position = update.status, update.position
        if status.activity not in ("", activity):
            announce(status.activity)
        activity = status.activity
        for step_report in () if stopping else update.reports:
            report(step_report)
        if status.phase.terminal:
            return status
        interrupted = len(interrupts or ())
        if interrupted and not stopping:
            stop_master(master, INTERRUPTED)
            stopping = True
        elif interrupted > 1 or (deadline_s is not None and time.monotonic() - began_s > deadline_s):
            return replace(status, reason=status.reason or INTERRUPTED)


@contextmanager
def ray_jobs(address: str, name: str | None = None) -> Iterator[JobOperations]:
    """Connect to the jobs on a cluster, or to the job ``name``. ``auto`` is the cluster where a process of this machine
    runs that job, or the newest cluster; without any, only runs in ``runs/`` are there. Raises ClusterUnavailable."""
    run, where = (_last_run(name) if address == "auto" and name else None), ""
    if run is not None and (holder := jobs.holder_of(run.folder)) is not None and holder.runtime == ON_RAY:
        where = jobs.address_in(run.folder)
    unavailable = None
    with ExitStack() as stack:
        try:
            stack.enter_context(ray_cluster(where or address, {}))
        except errors.ClusterUnavailable as error:
            if address != "auto" or name is None:
                raise
            unavailable = error
        yield RayJobs(unavailable)


def _last_run(name: str) -> SavedRun | None:
    with suppress(errors.InvalidJob):
        run = find_saved_run(name)
        return run if run.owner.job == name else None
    return None


class RayJobs(jobs.SavedRuns):
    """The jobs on the connected cluster; if it was ``unavailable``, the runs in their folders."""

    def __init__(self, unavailable: errors.ClusterUnavailable | None = None) -> None:
        self._unavailable = unavailable

    def list_jobs(self) -> tuple[list[JobView], int]:
        views = []
        for name in self._names():
            with suppress(errors.MasterLost):  # it has just ended
                views.append(view_of_status(ask(self._master(name).status.remote, _ANSWER_S)))
        return views, 0

    def _names(self) -> list[str]:
        actors = RayClusterApi().list_actors("")
        return sorted(actor.removesuffix(_MASTER) for actor in actors if actor.endswith(_MASTER))

    def _find(self, name: str) -> Any:
        name = check_name(name)
        return find(master_name(name)) if self._unavailable is None else None

    def get(self, name: str) -> JobView:
        with suppress(errors.MasterLost):
            if (master := self._find(name)) is not None:
                return view_of_status(ask(master.status.remote, _ANSWER_S))
        return self._saved(name)

    def _master(self, name: str) -> Any:
        """Return the master of a running job. Raises InvalidJob, or MasterLost if it has ended."""
        master = self._find(name)
        if master is None:
            self._ended(name)
            raise errors.MasterLost(f"'{name}' has ended")
        return master

    def _ended(self, name: str) -> JobView:
        """Return the last run of a name. Raises InvalidJob if it runs elsewhere."""
        view = self._saved(name)
        if not view.ended:
            where = f"it runs elsewhere: {newest_owner(Path(view.folder))}"
            raise errors.InvalidJob([errors.ConfigError(name, f"is not on this cluster, {where}; end it there")])
        return view

    def _saved(self, name: str) -> JobView:
        """Return the last run of a name in ``runs/``. Raises InvalidJob or ClusterUnavailable if there is none."""
        run = _last_run(name)
        if run is not None:
            return jobs.view_of_run(run, "" if self._unavailable else current_address())
        saved = [path.name for path in RUNS.glob("*") if (path / LATEST).is_dir()]
        if self._unavailable is not None:
            close = nearest(name, saved)
            more = f"did you mean '{close}'?" if close else "status, explain and logs also take the folder of a run"
            message = f"no run named '{name}' in ./runs, and {self._unavailable}; {more}"
            raise errors.ClusterUnavailable(message) from self._unavailable
        addresses = ", ".join(other_addresses())
        where = "on this cluster, and no run of it in ./runs"
        where += f"; for another cluster on this machine pass --address: {addresses}" if addresses else ""
        near = hint(name, [*self._names(), *saved])
        raise errors.InvalidJob([errors.ConfigError("name", f"no job named '{name}' {where}{near}")])

    def wait(self, name: str, timeout_s: float | None) -> JobView:
        return self.attach(name, report_nothing, announce_nothing, timeout_s)

    def attach(self, name: str, report: Reporter, announce: Announcer, deadline_s: float | None = None) -> JobView:
        before = self.get(name)
        if before.ended:
            return before
        try:
            return view_of_status(follow(self._master(name), report, deadline_s=deadline_s, announce=announce))
        except errors.MasterLost:
            return _end_of(before)

    def stop(self, name: str, hard: bool) -> JobView:
        """Stop a job; without a master, end the processes that it has left behind."""
        master = self._find(name)
        if master is None:
            if self._unavailable is None:
                sweep(name)
            return self._ended(name)
        before = self.get(name)
        try:
            view = before
            if not (hard or before.ended):
                stop_master(master, "stopped from the command line")
                view = view_of_status(follow(master, deadline_s=_STOP_S))
        except errors.MasterLost:  # the process that follows the job has removed it
            return _end_of(before)
        if view.ended:
            # The process that runs the job also follows it, and removes the master once it has seen the end.
            with suppress(TimeoutError):
                wait_gone(master_name(name), _FOLLOWER_S)
                return view
        end(master)
        sweep(name)
        return view if view.ended else replace(view, phase="stopped", ended=True, reason="its processes were ended")

    def resize(self, name: str, role: str, num: int) -> JobView:
        master = self._master(name)
        ask(partial(master.resize.remote, role.upper(), num), _RESIZE_S)
        return view_of_status(ask(master.status.remote, _ANSWER_S))


def _end_of(seen: JobView) -> JobView:
    """Return the end of a job that was ``seen`` before, from its folder if that is readable here."""
    with suppress(errors.JournalCorrupt):
        folder = Path(seen.folder)
        if seen.folder and (history := jobs.read_history(folder)) is not None:
            return jobs.view_of_folder(seen.name, folder, history, current_address())
    return seen
