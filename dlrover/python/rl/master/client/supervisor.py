# SPDX-License-Identifier: Apache-2.0
"""Run a job in a child process, which is connected to Ray, and resume it when the child or its cluster is lost.

::

    supervisor --checked job--> child: cluster, master, follow
        '<-- reports, activities, in the end a status or an error --'
    the child ends before the job --> the processes that it has started are killed --> commits in memory are saved
        --> the next child begins at the last commit

Ray ends every process that is connected through a raylet which has died, so the supervisor is not connected. The
processes that a child has started are found by a variable of its environment, which they inherit.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import IO, Any, TypeAlias
from uuid import uuid4

import cloudpickle

from dlrover.python.rl.common.disk_space import retry_io
from dlrover.python.rl.common.errors import ClusterUnavailable, MasterLost
from dlrover.python.rl.common.log import configure_logging, get_logger
from dlrover.python.rl.common.names import resume_command
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.master.client.on_ray import interrupted, run_on_cluster
from dlrover.python.rl.master.client.resume import last_commit
from dlrover.python.rl.master.client.run import CheckedJob
from dlrover.python.rl.master.process.status import JobStatus
from dlrover.python.rl.runtime.interrupts import noted_signals, sigterm_unwinds
from dlrover.python.rl.runtime.ray.cluster.cluster import RAYS_ERRORS, lost_process, private_folder
from dlrover.python.rl.runtime.run.folder import ON_RAY, claim, held, new_run
from dlrover.python.rl.trainer.step_report import Announcer, Reporter, StepReport

_LOG = get_logger(__name__)

_MARK = "DLROVER_RL_SUPERVISED"
_POLL_S = 0.2
_END_S = 60.0
_KILL_S = 20.0
_LONGEST_PAUSE_S = 60.0
_MODULE = "dlrover.python.rl.master.client.supervisor"  # the child runs it as __main__
_READY = "ready"  # the first message: before it there is nothing that Ctrl-C must stop
_PR_SET_PDEATHSIG = 1
_LOOK_S = 0.5
_RAYLET_S = 2.0
_GCS_S = 30.0  # it is restarted
_LOST = 76


Errand: TypeAlias = tuple[CheckedJob, str | None, Path | None, bool]
"""A job; the address of its cluster, or the folder for the files of a new one; True if an earlier child was lost."""


def run_supervised(checked: CheckedJob, report: Reporter, announce: Announcer, address: str | None = None) -> JobStatus:
    """Run a job to its end, on the cluster of ``address`` or on a new one.

    Raises:
        MasterLost: the cluster was lost more often in a row than the job may restart, without a further commit.
        ClusterUnavailable: there was none at the start.
    """
    job, is_resumed, last_step, losses = checked.job, False, -1, 0
    with noted_signals(signal.SIGINT) as interrupts, sigterm_unwinds():
        while True:
            try:
                return _attempt(replace(checked, job=job), address, is_resumed, report, announce, interrupts)
            except MasterLost as lost:
                loss = lost
            if not interrupts:
                commit = retry_io(partial(last_commit, job, job.job_dir, job.archive), job.job_dir)
                step = commit.step if commit is not None else 0
                last_step, losses = step, losses + 1 if step == last_step else 1
                where = f"after step {step}" if step else "from the beginning"
                _check_losses(job, loss, losses, where)
                announce(f"resuming {where}")
                _pause(job.restart.backoff_s * 2 ** (losses - 2) if losses > 1 else 0.0, interrupts)
            if interrupts:
                return interrupted(job)
            job = replace(job, run=new_run(), overwrite=False, checkpoint=replace(job.checkpoint, resume="latest"))
            is_resumed = True


def _check_losses(job: JobSpec, loss: MasterLost, losses: int, where: str) -> None:
    """Raise MasterLost after too many ``losses`` in a row without a commit."""
    if losses > job.restart.job_max_restart:
        repeated = f"{losses} times in a row {where}"
        raise MasterLost(f"{loss}, {repeated}; to resume: {resume_command(job.job_dir)}") from loss
    _LOG.warning("%s: %s; resuming %s", job.name, loss, where)


def _pause(seconds: float, interrupts: list[int]) -> None:
    until_s = time.monotonic() + min(seconds, _LONGEST_PAUSE_S)
    while not interrupts and time.monotonic() < until_s:
        time.sleep(_POLL_S)


def _attempt(
    checked: CheckedJob,
    address: str | None,
    is_resumed: bool,
    report: Reporter,
    announce: Announcer,
    interrupts: list[int],
) -> JobStatus:
    """Run the job in one child. Raises MasterLost if the child, its cluster or its master ends before the job, and the
    errors of :func:`run_on_cluster`."""
    if address is not None:
        with _Child((checked, address, None, is_resumed)) as child:
            return child.follow(report, announce, interrupts)
    with (
        held(claim(checked.job, ON_RAY, bound=True)) as claimed,
        private_folder() as folder,
        _Child((checked, None, folder, is_resumed)) as child,
    ):
        if checked.opening and not is_resumed:
            announce(checked.opening)
        status = child.follow(report, announce, interrupts)
        claimed.end(status.phase.value)
    return status


class _Child:
    """A process that runs an errand; at the end of the block it and all processes that it has started have ended."""

    def __init__(self, errand: Errand) -> None:
        self._errand = errand
        self._mark = f"{_MARK}={uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._connection, remote = Pipe()
        command = [sys.executable, "-m", _MODULE, str(os.getpid()), str(remote.fileno())]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[remote.fileno()],
            process_group=0,  # this process passes Ctrl-C on to it
            text=True,
            errors="replace",
        )
        remote.close()
        self._pumps = [_pump(self._process.stdout, "stdout"), _pump(self._process.stderr, "stderr")]
        self._ended = self._is_ready = False
        self._passed_on = 0

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            if not self._ended:
                self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._process.wait(_END_S)
        _kill_marked(self._mark.encode())
        for pump in self._pumps:
            pump.join(_POLL_S)
        self._connection.close()

    def follow(self, report: Reporter, announce: Announcer, interrupts: list[int]) -> JobStatus:
        with suppress(BrokenPipeError):
            self._connection.send((sys.path, sys.argv))
            self._connection.send_bytes(cloudpickle.dumps(self._errand))
        while True:
            self._pass_on(interrupts)
            if not self._connection.poll(_POLL_S):
                continue
            try:
                message = self._connection.recv()  # waits: not at all, it was polled for
            except (EOFError, ConnectionError):
                raise MasterLost(f"Ray was lost ({self._how_it_ended()})") from None
            match message:
                case str() if message == _READY:
                    self._is_ready = True
                case StepReport():
                    report(message)
                case str():
                    announce(message)
                case JobStatus():
                    self._ended = True
                    return message
                case BaseException():
                    self._ended = True
                    *_, is_resumed = self._errand
                    if isinstance(message, ClusterUnavailable) and is_resumed:
                        raise MasterLost(str(message)) from message
                    raise message

    def _pass_on(self, interrupts: list[int]) -> None:
        """Pass a Ctrl-C on; end a child that has nothing to stop yet."""
        if len(interrupts) > self._passed_on:
            self._passed_on += 1
            self._process.send_signal(signal.SIGINT if self._is_ready else signal.SIGTERM)

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(_END_S)
            self._ended = True
            return f"the process that held it ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"
        return "the process that held it does not end"


def _pump(stream: IO[str] | None, to: str) -> threading.Thread:
    """Copy lines to this process's ``stdout`` or ``stderr``, where a progress bar makes room for them. Read all lines,
    even once they cannot be written: the child would block."""

    def copy() -> None:
        with stream or nullcontext(()) as lines:
            for line in lines:
                with suppress(OSError, ValueError):  # closed
                    getattr(sys, to).write(line)

    thread = threading.Thread(target=copy, name=f"dlrover-{to}", daemon=True)
    thread.start()
    return thread


def _kill_marked(mark: bytes) -> None:
    """End every process with ``mark`` in its environment."""
    until_s = time.monotonic() + _KILL_S
    while pids := [pid for pid, environment in _environments() if mark in environment.split(b"\0")]:
        if time.monotonic() > until_s:
            _LOG.error("processes %s of a lost cluster do not end", pids)
            return
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S / 4)


def _environments() -> Iterator[tuple[int, bytes]]:
    """Yield the process ids and environments of this machine's processes, if readable."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(folder.name), (folder / "environ").read_bytes()


def main() -> None:
    """Run the errand that the parent sends, and send back the job's reports and its end."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # when the parent ends
    if os.getppid() != int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    connection, lock = Connection(int(sys.argv[2])), threading.Lock()
    os.set_inheritable(connection.fileno(), False)
    configure_logging()
    # waits: for the parent, with which this process ends
    sys.path[:], sys.argv[:] = connection.recv()  # Ray's workers get them from here
    job = connection.recv_bytes()  # waits: likewise
    checked, address, folder, is_resumed = cloudpickle.loads(job)  # noqa: TID251 -- of the parent

    def send(message: Any) -> None:
        with lock:
            connection.send(message)

    threading.Thread(target=_end_if_lost, args=(send,), name="dlrover-lost", daemon=True).start()
    outcome: JobStatus | Exception
    try:
        send(_READY)
        outcome = run_on_cluster(checked, send, send, address, folder=folder, again=is_resumed)
    except KeyboardInterrupt:
        outcome = interrupted(checked.job)
    except RAYS_ERRORS as error:
        outcome = MasterLost(f"Ray was lost: {type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 -- the parent raises it
        outcome = error
    send(outcome)


def _end_if_lost(send: Callable[[Any], None]) -> None:
    """End this process if a process of Ray has died for good: the parent starts another cluster."""
    limits_s, since_s = {"raylet": _RAYLET_S, "gcs_server": _GCS_S}, dict[str, float]()
    while True:
        time.sleep(_LOOK_S)
        lost = lost_process()
        since_s = {lost: since_s.get(lost, time.monotonic())} if lost else {}
        if lost and time.monotonic() - since_s[lost] > limits_s[lost]:
            send(MasterLost(f"Ray's {lost} has died"))
            os._exit(_LOST)


if __name__ == "__main__":
    main()
