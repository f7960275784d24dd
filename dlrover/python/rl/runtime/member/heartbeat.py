# SPDX-License-Identifier: Apache-2.0
"""Heartbeats of a process to the master, the lease without which it ends itself, the stacks of one that hangs, and the
notice that its node will go.

::

    process --observe--> Heartbeat --send--> master          every ``beat_s``
       '<-- current: continue | replaced: end at once --'
    no answer for ``lease_s``: the process ends itself

Ray lets the processes of a partitioned node run beside their replacements; a lease ends them.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import FrameType

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.config.spec import LivenessSpec
from dlrover.python.rl.control.events import Cause, CauseKind, Process
from dlrover.python.rl.control.liveness import Work

_LOG = get_logger(__name__)

LEASE_OVER = 75  # exit code of a process whose lease ran out, or that was replaced (EX_TEMPFAIL)
CONSTRUCTING = "__init__"  # the method of a process that is being started; the time limit of calls does not apply
_COUNTS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))  # the first one counts all cgroups
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Heartbeat:
    """The activity of a process."""

    process_id: ProcessId
    number: int  # its incarnation, or its epoch
    method: str = ""  # the current call, "" when it is idle or waits for other processes
    age_s: float = 0.0  # since that call's last progress or its begin
    step: int = -1  # of that call, -1 for none
    notice: str = ""  # that its node will be removed
    work: Work = Work()  # of a worker, so far
    pending: tuple[tuple[str, int], ...] = ()  # of a trainer: roles, and how many of their calls are under way
    oom_kills: int = field(default=-1, compare=False)  # on its host since it booted, -1 for unknown


class BeatAnswer(StrEnum):
    """The master's answer to a heartbeat."""

    CURRENT = "current"
    PEER_LOST = "peer lost"  # it leaves its group, and returns as a later incarnation in this process
    REPLACED = "replaced"  # another process has taken the sender's place
    WITHOUT_SECRETS = "without secrets"  # current; the restarted master requests the job's secrets


def leave(why: str) -> None:
    _LOG.error("this process ends itself: %s", why)
    os._exit(LEASE_OVER)


class HeartbeatSender:
    """Sends heartbeats from a thread, also while the process is busy. ``send`` returns False if this process was
    replaced, and raises if it cannot reach the master; ``end`` is called once, when this process must end."""

    def __init__(
        self,
        observe: Callable[[], Heartbeat],
        send: Callable[[Heartbeat], bool],
        settings: LivenessSpec,
        end: Callable[[str], None] = leave,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observe, self._send, self._settings, self._end = observe, send, settings, end
        self._now_s = now_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlrover-beats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        reached_s = self._now_s()
        while not self._stopped.wait(self._settings.beat_s):
            try:
                is_current = self._send(replace(self._observe(), oom_kills=count_oom_kills()))
            except Exception as error:  # noqa: BLE001 -- the lease decides
                silent_s = self._now_s() - reached_s
                if silent_s > self._settings.lease_s:
                    self._end(f"no master for {silent_s:.0f} s ({type(error).__name__})")
                    return
                continue
            reached_s = self._now_s()
            if not is_current:
                self._end("another process has taken its place")
                return


# -- stacks and log lines -------------------------------------------------------------------------------------------
# They are read without the help of the process; nothing raises or exceeds its deadline.

_TAIL_BYTES = 64 * 1024
_MOST_THREADS = 20
_AGAIN_S = 0.05
_RAYS_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # lines for Ray's log reader that name the process


def stacks_of(pid: int, deadline_s: float = 2.0, dumper: str = "py-spy") -> str:
    """Return the Python stacks of all threads of a local process, read by the program ``dumper`` without stopping it:
    it may run, wait, be stopped, or hold the GIL. Otherwise return the kernel's view of its threads, and the reason."""
    until_s = time.monotonic() + deadline_s
    beside = Path(sys.executable).parent / dumper
    program = str(beside) if beside.exists() else shutil.which(dumper)
    if program is None:
        return _from_kernel(pid, f"{dumper} is not installed")
    why = ""
    while (remaining_s := until_s - time.monotonic()) > 0.1:
        # A stack that changes while it is read is unreadable: try again.
        text, why, final = _dump(program, pid, remaining_s)
        if text or final:
            return text or _from_kernel(pid, why)
        time.sleep(_AGAIN_S)
    return _from_kernel(pid, why or "no time")


def ray_worker_log_tail(session_dir: str | Path, pid: int, lines: int = 20) -> str:
    """Return a Ray worker's last lines, of stderr first; ``session_dir`` is Ray's on the node of the process."""
    tail: list[str] = []
    for ending in ("err", "out"):
        count = lines - len(tail)
        if count > 0:
            tail = _tail_of_newest(Path(session_dir) / "logs", f"worker-*-{pid}.{ending}", count) + tail
    return "\n".join(tail)


def _dump(program: str, pid: int, timeout_s: float) -> tuple[str, str, bool]:
    """Return the stacks, or the reason why there are none, and True if a retry is useless."""
    name, command = Path(program).name, [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        result = subprocess.run(command, capture_output=True, errors="replace", timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return "", f"{name} took longer than {timeout_s:.1f} s", True
    except OSError as error:
        return "", f"{name} could not be started: {error}", True
    # A process that is just starting or ending has no threads to show.
    if result.returncode == 0 and "\nThread " in result.stdout:
        return result.stdout.strip(), "", True
    errors = [line for line in result.stderr.splitlines() if line.strip()]
    why = errors[-1].strip() if errors else f"{name} found no stacks"
    is_gone = not Path(f"/proc/{pid}").exists()
    return "", why, is_gone or "ermission" in result.stderr or "not permitted" in result.stderr


def _from_kernel(pid: int, why: str) -> str:
    """Return state, memory and each thread's place in the kernel, from ``/proc``."""
    report = [f"no Python stacks of process {pid}: {why}"]
    process = Path(f"/proc/{pid}")
    if not process.exists():
        return report[0] if "No such process" in why else f"{report[0]}; there is no such process"
    command = _read(process / "cmdline").replace("\0", " ").strip()
    keys = ("State:", "Threads:", "VmRSS:")
    states = [" ".join(line.split()) for line in _read(process / "status").splitlines() if line.startswith(keys)]
    report += [line for line in (command[:200], ", ".join(states)) if line]
    with suppress(OSError):
        for folder in sorted((process / "task").iterdir())[:_MOST_THREADS]:
            name, place = _read(folder / "comm").strip(), _read(folder / "wchan").strip()
            state = _read(folder / "stat").rpartition(") ")[2][:1]
            asleep = f" in {place}" if place not in ("", "0") else ""
            report.append(f"thread {folder.name} {name}: {state or '?'}{asleep}")
    kernel = _read(process / "stack").strip()
    return "\n".join([*report, f"kernel stack:\n{kernel}"] if kernel else report)


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _tail_of_newest(folder: Path, pattern: str, lines: int) -> list[str]:
    try:
        newest = max(folder.glob(pattern), key=lambda file: file.stat().st_mtime, default=None)
        if newest is None:
            return []
        with newest.open("rb") as stream:
            stream.seek(max(0, newest.stat().st_size - _TAIL_BYTES))
            text = stream.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    tail = [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith(_RAYS_MARKS)]
    return tail[-lines:]


class DepartureNotice:
    """A notice of this process's end: ``file`` (``""``: none) exists, or the main thread got the first SIGTERM."""

    def __init__(self, file: str = "") -> None:
        self._file = Path(file) if file else None
        self._notice, self._before = "", signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._take)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._notice = "it was sent SIGTERM"
        signal.signal(number, self._before or signal.SIG_DFL)

    def read(self) -> str:
        with suppress(OSError):
            if not self._notice and self._file is not None and self._file.exists():
                self._notice = f"{self._file} exists"
        return self._notice


def count_oom_kills(files: tuple[Path, ...] = _COUNTS) -> int:
    """Count the processes that the kernel has killed for memory on this host since it booted; -1 for unknown."""
    for file in files:
        with suppress(OSError):
            if match := _COUNT.search(file.read_text(encoding="ascii")):
                return int(match[1])
    return -1


@dataclass
class OomKills:
    """The kills for memory on a job's hosts, as the heartbeats of its processes count them."""

    host: str = field(default_factory=socket.gethostname)
    files: tuple[Path, ...] = _COUNTS
    _before: dict[ProcessId, int] = field(default_factory=dict)
    _now: dict[str, int] = field(default_factory=dict)

    def note(self, process_id: ProcessId, process: Process | None, count: int) -> None:
        if process is not None and count >= 0:
            self._before[process_id] = count
            self._now[process.host] = max(count, self._now.get(process.host, 0))

    def explain(self, process_id: ProcessId, process: Process | None, cause: Cause) -> Cause:
        """Return the cause of a death: memory, if the kernel has killed for it on its host since the last heartbeat."""
        before = self._before.pop(process_id, None)
        if cause.kind is not CauseKind.PROCESS_DIED or process is None or before is None:
            return cause
        is_here = process.host == self.host
        if (count_oom_kills(self.files) if is_here else self._now[process.host]) <= before:
            return cause
        message = f"the kernel's OOM killer has ended a process of its host: {cause.message}"
        return replace(cause, kind=CauseKind.OUT_OF_MEMORY, message=message)
