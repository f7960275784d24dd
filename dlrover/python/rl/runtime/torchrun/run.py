"""A job from its beginning to its end, in each of the processes of a launch.

::

    rank 0   lead:   meet -> a thread: start the members -> trainer -> end
                          '-> the main thread: rank 0's own members
    others   follow: meet -> the main thread: this rank's members, until rank 0 says it is the end, or is gone
"""

import json
import os
import socket
import threading
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import uuid4

from dlrover.python.rl.common.errors import (
    InvalidJob,
    InvocationError,
    JobConflict,
    Problem,
    WorkloadDied,
    WorkloadStartError,
)
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import member_name
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.durability import checkpoints_of, roots_of
from dlrover.python.rl.runtime.fence import take_lock
from dlrover.python.rl.runtime.making import trainer_maker
from dlrover.python.rl.runtime.node_memory import forget_memory
from dlrover.python.rl.runtime.ports import HeldPort
from dlrover.python.rl.runtime.state_file import new_file
from dlrover.python.rl.runtime.stored import Stored
from dlrover.python.rl.runtime.torchrun.links import Link, Place
from dlrover.python.rl.runtime.torchrun.port import Drop, Fetch, Fetched, TorchrunPort
from dlrover.python.rl.runtime.torchrun.worker import End, Key, Worker
from dlrover.python.rl.trainer.runner import run_trainer
from dlrover.python.rl.trainer.trainer import Reporter, TrainerLink
from dlrover.python.rl.trainer.workload import MemberContext

_LOG = get_logger(__name__)

CLOSE_S = 30.0
"""How long members may take to close when the job is done."""

ABORT_S = 3.0
"""The same when it has failed, the call included that is under way."""

_ECHO_S = 1.0
"""How long a process that has died takes at most to show: until then an error may be its echo."""

_PREDECESSOR_S = 15.0
_RUN, _LOCK = "torchrun.json", "torchrun.lock"


@dataclass(frozen=True)
class Begun:
    """Which run a start belongs to.

    Attributes:
        run: its name; the same each time the run goes on.
        number: of the start, from 1.
    """

    run: str
    number: int


@contextmanager
def begun(job: JobSpec) -> Iterator[Begun]:
    """Hold the job's directory, and say which run this is: the last one there, if it is to go on, else a new one.

    Raises:
        InvalidJob: it cannot be written to.
        JobConflict: a process that is still there holds it.
    """
    path = job.job_dir / _LOCK
    try:
        job.job_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise InvalidJob([Problem("job_dir", f"cannot be written to: {error}")]) from error
    try:
        try:
            take_lock(handle, path, _PREDECESSOR_S)
        except TimeoutError:
            raise JobConflict(f"another start of this job is running in {job.job_dir}") from None
        known = _last_start(job)
        if known is None:
            forget_memory(job.name)
        now = Begun(known.run, known.number + 1) if known is not None else Begun(uuid4().hex[:8], 1)
        with new_file(job.job_dir / _RUN, durable=True) as file:
            file.write(json.dumps({"run": now.run, "start": now.number}).encode())
        (job.job_dir / "job.yaml").write_text(job_to_yaml(job, hide_secrets=True), encoding="utf-8")
        yield now
    finally:
        os.close(handle)


def _last_start(job: JobSpec) -> Begun | None:
    file = job.job_dir / _RUN
    if job.checkpoint.resume == "never" or not file.exists():
        return None
    try:
        said = json.loads(file.read_bytes())
        return Begun(str(said["run"]), int(said["start"]))
    except (ValueError, KeyError, TypeError):
        _LOG.warning("%s is damaged: this is a new run, which goes on from the newest checkpoint", file)
        return None


@dataclass
class Lead:
    """Rank 0 of a job.

    Args:
        job: what to run; every role has a member in each process.
        place: which process this is.
        links: with the others.
        report: where step reports go.

    Attributes:
        error: what the job has failed of, None while it has not.
    """

    job: JobSpec
    place: Place
    links: dict[int, Link]
    report: Reporter
    error: BaseException | None = None
    _ports: dict[str, HeldPort] = field(default_factory=dict)

    def run(self) -> BaseException | None:
        """Run the job. What it has failed of, None when it is done; then the other processes are ending."""
        with begun(self.job) as now:
            port = TorchrunPort(self.place, self.links)
            trainer = threading.Thread(target=self._direct, args=(port, now), name="dlrover-trainer", daemon=True)
            trainer.start()
            port.worker.run()
            trainer.join(CLOSE_S)
            for link in self.links.values():
                link.ended.wait(ABORT_S if self.error else CLOSE_S)
                link.end()
            for held in self._ports.values():
                held.give_back()
            if self.error is None:
                roots_of(self.job, now.run, now.number, socket.gethostname()).commit_store("").remove()
        return self.error

    def _direct(self, port: TorchrunPort, now: Begun) -> None:
        try:
            self._start_members(port, now)
            link = TrainerLink(
                port=port,
                report=self.report,
                job=self.job.name,
                job_dir=self.job.job_dir,
                resources={role: dict(spec.resource) for role, spec in self.job.workloads.items()},
                checkpoints=checkpoints_of(self.job, now.run, now.number, socket.gethostname()),
            )
            run_trainer(partial(trainer_maker(self.job), link), link)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the boundary of the job
            self.error = self._first_cause(port, error)
            what, trace = str(self.error).partition("\n")[0], traceback.format_exception(self.error, chain=False)
            _LOG.error("%s failed: %s\n%s", self.job.name, what, "".join(trace).rstrip())
        finally:
            port.end(clean=self.error is None)
            _end_soon(port.worker, clean=self.error is None)

    def _first_cause(self, port: TorchrunPort, error: BaseException) -> BaseException:
        """``error``, or the death that it is the echo of: who waits for a dead rank hears of it in many ways."""
        if not isinstance(error, InvocationError) or isinstance(error, WorkloadDied) or not self.links:
            return error
        lost = port.loses(_ECHO_S)
        if lost is None:
            return error
        died = WorkloadDied(f"the process of rank {lost} is gone", role=error.role, rank=lost, method=error.method)
        died.__cause__ = error
        return died

    def _start_members(self, port: TorchrunPort, now: Begun) -> None:
        starts: dict[Future[Stored], str] = {}
        for role, spec in self.job.workloads.items():
            self._ports[role] = held = HeldPort()
            number = held.take(self.job.preferred_ports(role))
            for rank in range(spec.num):
                context = MemberContext(
                    name=member_name(self.job.name, now.run, role, rank, now.number),
                    role=role,
                    rank=rank,
                    world_size=spec.num,
                    master_addr=self.place.address,
                    master_port=number,
                    collocation=",".join(self.job.workloads) if len(self.job.workloads) > 1 else "",
                )
                starts[port.start(self.job, now.run, context)] = f"{role}[{rank}]"
        limit_s = self.job.liveness.start_timeout_s
        ended, late = wait_for(starts, limit_s, FIRST_EXCEPTION)
        for start in ended:
            start.result(0)
        if late:
            who = ", ".join(starts[start] for start in starts if start in late)
            raise WorkloadStartError(who, f"it took longer than {limit_s:g} s")


def follow(place: Place, link: Link) -> bool:
    """Run the members of a process that is not rank 0, until the end. Whether it was a clean one."""
    asked: dict[Key, Future[Stored]] = {}

    def obtain(key: Key) -> Future[Stored]:
        asked[key] = found = Future[Stored]()
        link.send(Fetch(key))
        return found

    worker = Worker(place, link.send, obtain)
    told = threading.Event()

    def take(message: Any) -> None:
        if isinstance(message, Drop):
            worker.drop(message.numbers)
        elif isinstance(message, Fetch):
            key = message.key
            worker.kept(key.number).add_done_callback(lambda future: link.send(Fetched.of(key, future)))
        elif isinstance(message, Fetched):
            message.settle(asked.pop(message.key))
        else:
            worker.assign(message)
            if isinstance(message, End):
                told.set()
                _end_soon(worker, message.clean)

    def lose() -> None:
        if not told.is_set():
            _LOG.error("rank 0 is gone: rank %d ends", place.rank)
            worker.assign(End(clean=False))
            _end_soon(worker, clean=False)

    link.begin(take, lose)
    try:
        return worker.run()
    finally:
        link.end()


def _end_soon(worker: Worker, clean: bool) -> None:
    """End this process if ``worker`` does not: it may be in a call that nothing else ends, a collective of which others
    are missing."""

    def watch() -> None:
        if not worker.ended.wait(CLOSE_S if clean else ABORT_S):
            _LOG.warning("the members took too long to close")
            os._exit(0 if clean else 1)

    threading.Thread(target=watch, name="dlrover-end", daemon=True).start()
