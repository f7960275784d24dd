# SPDX-License-Identifier: Apache-2.0
"""Deaths by the kernel's OOM killer, which leaves nothing in the process that it ends.

::

    heartbeat of a process  --> the kernel's count of such kills on its host, then
    a process is gone       --> that count now: this host's from the kernel, another one's from its last heartbeat
    it has grown            --> out_of_memory instead of process_died
"""

import re
import socket
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from dlrover.python.rl.common.names import ProcessId
from dlrover.python.rl.control.events import Cause, CauseKind, Process

_COUNTS = (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events"))  # the first one includes those of all cgroups
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def count_oom_kills(files: tuple[Path, ...] = _COUNTS) -> int:
    """The processes of this host that the kernel has ended since it booted because memory ran out; -1 for unknown."""
    for file in files:
        with suppress(OSError):
            if match := _COUNT.search(file.read_text(encoding="ascii")):
                return int(match[1])
    return -1


@dataclass
class OomKills:
    """The counts of a job's hosts, in the heartbeats of its processes."""

    host: str = field(default_factory=socket.gethostname)
    files: tuple[Path, ...] = _COUNTS
    _before: dict[ProcessId, int] = field(default_factory=dict)
    _now: dict[str, int] = field(default_factory=dict)

    def note(self, process_id: ProcessId, process: Process | None, count: int) -> None:
        """Record the count that a heartbeat brings."""
        if process is not None and count >= 0:
            self._before[process_id] = count
            self._now[process.host] = max(count, self._now.get(process.host, 0))

    def explain(self, process_id: ProcessId, process: Process | None, cause: Cause) -> Cause:
        """The cause of a death: memory, if the kernel has killed for it on that host since the last heartbeat."""
        before = self._before.pop(process_id, None)
        if cause.kind is not CauseKind.PROCESS_DIED or process is None or before is None:
            return cause
        is_here = process.host == self.host
        if (count_oom_kills(self.files) if is_here else self._now[process.host]) <= before:
            return cause
        message = f"the kernel's OOM killer has ended a process of its host: {cause.message}"
        return replace(cause, kind=CauseKind.OUT_OF_MEMORY, message=message)
