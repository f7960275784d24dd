# SPDX-License-Identifier: Apache-2.0
"""The jobs of a Ray cluster, and those that have left it but whose folder is here."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dlrover.python.rl.common.errors import ClusterUnavailable, ConfigError, InvalidJob, JournalCorrupt, MasterLost
from dlrover.python.rl.common.names import master_name, nearest
from dlrover.python.rl.config.spec import RUNS
from dlrover.python.rl.master.operations.history import read_history
from dlrover.python.rl.master.operations.jobs import (
    JobOperations,
    JobView,
    address_in,
    check_name,
    holder_of,
    no_such_job,
    view_of_folder,
    view_of_status,
)
from dlrover.python.rl.master.operations.saved_runs import SavedRuns, view_of_run
from dlrover.python.rl.master.process.status import JobStatus
from dlrover.python.rl.master.ray_run import follow, stop_master
from dlrover.python.rl.master.saved_run import SavedRun, find_saved_run
from dlrover.python.rl.runtime.ray.cluster.api import RayClusterApi
from dlrover.python.rl.runtime.ray.cluster.cluster import current_address, other_addresses, ray_cluster
from dlrover.python.rl.runtime.ray.processes.actors import ask, end, find, sweep, wait_gone
from dlrover.python.rl.runtime.run.folder import LATEST
from dlrover.python.rl.runtime.run.owner import ON_RAY
from dlrover.python.rl.trainer.trainer import Announcer, Reporter, announce_nothing, report_nothing

_ANSWER_S = 30.0
_RESIZE_S = 240.0
_STOP_S = 60.0
_FOLLOWER_S = 3.0
_MASTER = "/master"


@contextmanager
def ray_jobs(address: str, name: str | None = None) -> Iterator[JobOperations]:
    """Jobs, or the one of this ``name``, on a cluster; ``auto`` is the one where a process of this machine runs it, or
    the newest one, and without any what ``runs/`` has of it is there. Raises ClusterUnavailable."""
    unavailable = None
    with ExitStack() as stack:
        try:
            stack.enter_context(ray_cluster(_cluster_of(name) if address == "auto" and name else address, {}))
        except ClusterUnavailable as error:
            if address != "auto" or name is None:
                raise
            unavailable = error
        yield RayJobs(unavailable)


def _cluster_of(name: str) -> str:
    run = _last_run(name)
    holder = None if run is None else holder_of(run.folder)
    if run is None or holder is None or holder.runtime != ON_RAY:
        return "auto"
    return address_in(run.folder) or "auto"


def _last_run(name: str) -> SavedRun | None:
    with suppress(InvalidJob):
        run = find_saved_run(name)
        return run if run.owner.job == name else None
    return None


class RayJobs(SavedRuns):
    """Uses the cluster that this process is connected to; without one, which was ``unavailable``, the run folders."""

    def __init__(self, unavailable: ClusterUnavailable | None = None) -> None:
        self._unavailable = unavailable

    def list_jobs(self) -> tuple[list[JobView], int]:
        views = []
        for name in self._names():
            with suppress(MasterLost):  # it has ended meanwhile
                views.append(view_of_status(ask(self._master(name).status.remote, _ANSWER_S)))
        return views, 0

    def _names(self) -> list[str]:
        actors = RayClusterApi().list_actors("")
        return sorted(actor.removesuffix(_MASTER) for actor in actors if actor.endswith(_MASTER))

    def _find(self, name: str) -> Any:
        name = check_name(name)
        return find(master_name(name)) if self._unavailable is None else None

    def get(self, name: str) -> JobView:
        master = self._find(name)
        if master is None:
            return self._saved(name)
        try:
            return view_of_status(ask(master.status.remote, _ANSWER_S))
        except MasterLost:
            return self._saved(name)

    def _master(self, name: str) -> Any:
        """The master of a job that runs. Raises InvalidJob, and MasterLost if it has ended."""
        master = self._find(name)
        if master is None:
            self._ended(name)
            raise MasterLost(f"'{name}' has ended")
        return master

    def _ended(self, name: str) -> JobView:
        """What :meth:`_saved` returns. Raises InvalidJob if it runs."""
        view = self._saved(name)
        if not view.ended:
            raise InvalidJob([ConfigError(name, f"is not on this cluster, {view.reason}; end it there")])
        return view

    def _saved(self, name: str) -> JobView:
        """The last run of a name in ``runs/``. Raises InvalidJob or ClusterUnavailable if there is none."""
        run = _last_run(name)
        if run is not None:
            return view_of_run(run, "" if self._unavailable else current_address())
        saved = [path.name for path in RUNS.glob("*") if (path / LATEST).is_dir()]
        if self._unavailable is not None:
            close = nearest(name, saved)
            more = f"did you mean '{close}'?" if close else "status, explain and logs also take the folder of a run"
            what = f"no run named '{name}' in ./runs, and {self._unavailable}; {more}"
            raise ClusterUnavailable(what) from self._unavailable
        others = other_addresses()
        where = "on this cluster, and no run of it in ./runs"
        where += f"; of other clusters on this machine --address takes {', '.join(others)}" if others else ""
        raise no_such_job(name, [*self._names(), *saved], where)

    def attach(self, name: str, report: Reporter, announce: Announcer) -> JobView:
        return self._followed(name, report, announce, None)

    def wait(self, name: str, timeout_s: float | None) -> JobView:
        return self._followed(name, report_nothing, announce_nothing, timeout_s)

    def _followed(self, name: str, report: Reporter, announce: Announcer, deadline_s: float | None) -> JobView:
        before = self.get(name)
        if before.ended:
            return before
        try:
            return view_of_status(follow(self._master(name), report, deadline_s=deadline_s, announce=announce))
        except MasterLost:
            return _end_of(before)

    def stop(self, name: str, hard: bool) -> JobView:
        """Without a master, what it has left is ended."""
        master = self._find(name)
        if master is None:
            if self._unavailable is None:
                sweep(name)
            return self._ended(name)
        before = self.get(name)
        try:
            view = before if hard or before.ended else view_of_status(_stopped(master))
        except MasterLost:  # who follows the job has removed it
            return _end_of(before)
        if view.ended:
            # The process that runs the job follows it too, and removes the master when it has read the end.
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
    """How a job has ended that was ``seen`` before: as its folder says, wherever that is."""
    folder = Path(seen.folder)
    history = _history(folder) if seen.folder else None
    return view_of_folder(seen.name, folder, history, current_address()) if history is not None else seen


def _stopped(master: Any) -> JobStatus:
    stop_master(master, "stopped from the command line")
    return follow(master, deadline_s=_STOP_S)


def _history(folder: Path) -> Any:
    with suppress(JournalCorrupt):
        return read_history(folder)
    return None
