# SPDX-License-Identifier: Apache-2.0
"""One job in the processes of a launch.

::

    rank 0   Leader:          a thread: start the workers -> trainer -> end
                              main thread: rank 0's workers
    others   run_follower():  main thread: this rank's workers, until rank 0 sends End or is lost
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from dlrover.python.rl.common.errors import InvocationError, WorkloadDied, WorkloadStartError, user_traceback
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import member_name
from dlrover.python.rl.common.sockets import HeldPort
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.commits import checkpoints_of
from dlrover.python.rl.runtime.checkpoint.node_memory import forget_memory
from dlrover.python.rl.runtime.checkpoint.runs import roots_of
from dlrover.python.rl.runtime.interrupts import insistent_interrupts
from dlrover.python.rl.runtime.local import TrainerRun
from dlrover.python.rl.runtime.member.arguments import Stored
from dlrover.python.rl.runtime.member.loading import cause_of
from dlrover.python.rl.runtime.run import folder
from dlrover.python.rl.runtime.run.progress import redraw
from dlrover.python.rl.runtime.torchrun.links import LaunchEnv, Link
from dlrover.python.rl.runtime.torchrun.port import TorchrunPort
from dlrover.python.rl.runtime.torchrun.worker import End, Worker
from dlrover.python.rl.trainer.trainer import Announcer, Reporter, announce_nothing
from dlrover.python.rl.trainer.workload import MemberContext

_LOG = get_logger(__name__)

CLOSE_S = 30.0  # how long workers may take to close after the job has finished
ABORT_S = 3.0  # the same for a failed job, including the running call
_ECHO_S = 1.0  # until the loss of a process is noticed: errors of other ranks may be its consequence
_PREDECESSOR_S = 15.0
_POLL_S = 0.1


@contextmanager
def open_run(job: JobSpec, alone: bool = False) -> Iterator[tuple[JobSpec, folder.Claim]]:
    """Claim the folder of a begun job, to begin its run or to resume an earlier launch's; ``alone``: in one process.
    Raises InvalidJob, and JobConflict if an earlier start does not end in time: 15 s here, its lease elsewhere."""
    previous = folder.newest_owner(job.job_dir)
    if previous is not None and previous.runtime != folder.ON_RAY and job.checkpoint.resume == "latest":
        deadline_s = time.monotonic() + (_PREDECESSOR_S if previous.is_here else job.liveness.lease_s + folder.BEAT_S)
        while folder.in_use(job.job_dir) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        job = replace(job, run=previous.run)
    else:
        forget_memory(job.name)
    with folder.held(folder.claim(job, folder.IN_PROCESS if alone else folder.LAUNCHED, bound=True)) as claimed:
        yield job, claimed


@dataclass
class Leader:
    """Rank 0 of a job with ``links`` to the other ranks, each of which has a worker of every role."""

    job: JobSpec
    start: folder.Claim
    launch: LaunchEnv
    links: dict[int, Link]
    report: Reporter
    announce: Announcer = announce_nothing
    note_failure: Callable[[BaseException], None] = lambda error: None
    error: BaseException | None = None
    _tcp_ports: dict[str, HeldPort] = field(default_factory=dict)
    _trainer: TrainerRun | None = None

    def run(self) -> BaseException | None:
        """Run the job until all processes end. Returns its error, None if it finished."""
        port = TorchrunPort(self.launch, self.links)
        trainer = threading.Thread(target=self._run_trainer, args=(port,), name="dlrover-trainer", daemon=True)
        trainer.start()
        try:
            with insistent_interrupts() if self.launch.world_size == 1 else nullcontext():
                port.worker.run()
        except KeyboardInterrupt:
            redraw(self.job.job_dir)
            if self._trainer is not None:
                self._trainer.stop()
            raise
        trainer.join(CLOSE_S)
        for link in self.links.values():
            link.ended.wait(ABORT_S if self.error else CLOSE_S)
            link.end()
        for holder in self._tcp_ports.values():
            holder.give_back()
        if self.error is None:
            roots_of(self.job, self.job.run, self.start.number, socket.gethostname()).commit_store("").remove()
            self.start.end(folder.FINISHED)
        return self.error

    def _run_trainer(self, port: TorchrunPort) -> None:
        try:
            self.announce("starting the roles")
            self._start_members(port)
            job, node = self.job, socket.gethostname()
            checkpoints = checkpoints_of(job, job.run, self.start.number, node)
            resources = {role: dict(spec.resource) for role, spec in job.workloads.items()}
            reports = self.report, self.announce
            self._trainer = TrainerRun(job, port, checkpoints, resources, *reports, attempt=self.start.number)
            self._trainer.run()
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the boundary of the job
            self.error = self._first_cause(port, error)
            cause = cause_of(self.error, "trainer", user_traceback(self.error, chain=False), alone=True)
            detail = f"\n{cause.detail.rstrip()}" if cause.detail else ""
            _LOG.error("%s failed: %s: %s%s", self.job.name, cause.who, cause.message, detail)
            redraw(self.job.job_dir)
            self.start.end(folder.FAILED)  # a launcher ends this process as soon as the other ones have failed
            self.note_failure(self.error)
        finally:
            port.end(clean=self.error is None)
            _end_process_after_timeout(port.worker, clean=self.error is None)

    def _first_cause(self, port: TorchrunPort, error: BaseException) -> BaseException:
        """Return ``error``, or the loss of a process that caused it: ranks that wait for a lost one may fail first."""
        if not isinstance(error, InvocationError) or isinstance(error, WorkloadDied) or not self.links:
            return error
        lost = port.wait_for_loss(_ECHO_S)
        if lost is None:
            return error
        died = WorkloadDied(f"the process of rank {lost} is gone", role=error.role, rank=lost, method=error.method)
        died.__cause__ = error
        return died

    def _start_members(self, port: TorchrunPort) -> None:
        starts: dict[Future[Stored], str] = {}
        for role, spec in self.job.workloads.items():
            self._tcp_ports[role] = holder = HeldPort()
            tcp_port = holder.take(self.job.preferred_ports(role))
            for rank in range(spec.num):
                context = MemberContext(
                    name=member_name(self.job.name, self.job.run, role, rank, self.start.number),
                    role=role,
                    rank=rank,
                    world_size=spec.num,
                    master_addr=self.launch.address,
                    master_port=tcp_port,
                    collocation=",".join(self.job.workloads) if len(self.job.workloads) > 1 else "",
                )
                starts[port.start(self.job, self.job.run, context)] = f"{role}[{rank}]"
        limit_s = self.job.liveness.start_timeout_s
        finished, late = wait_for(starts, limit_s, FIRST_EXCEPTION)
        for future in finished:
            future.result(0)
        if late:
            members = ", ".join(starts[future] for future in starts if future in late)
            raise WorkloadStartError(members, f"it took longer than {limit_s:g} s")


def run_follower(launch: LaunchEnv, link: Link) -> bool:
    """Run the workers of another rank until the job ends. Returns True if it ended cleanly."""
    worker = Worker(launch, link.send)
    end_received = threading.Event()

    def handle(message: Any) -> None:
        worker.handle(message)
        if isinstance(message, End):
            end_received.set()
            _end_process_after_timeout(worker, message.clean)

    def lose_rank_0() -> None:
        if not end_received.is_set():
            _LOG.error("rank 0 is gone: rank %d ends", launch.rank)
            handle(End(clean=False))

    link.start(handle, lose_rank_0)
    try:
        return worker.run()
    finally:
        link.end()


def _end_process_after_timeout(worker: Worker, clean: bool) -> None:
    """End this process if ``worker`` does not end: its call may be a collective that waits for a lost rank."""

    def watch() -> None:
        if not worker.ended.wait(CLOSE_S if clean else ABORT_S):
            _LOG.warning("the workers took too long to close")
            os._exit(0 if clean else 1)

    threading.Thread(target=watch, name="dlrover-end", daemon=True).start()
