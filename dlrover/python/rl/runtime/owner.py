# SPDX-License-Identifier: Apache-2.0
"""The record of a start of a run, which names the process that holds the run's folder."""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from dlrover.python.rl.common.no_links import open_file
from dlrover.python.rl.common.private_files import share_file
from dlrover.python.rl.config.spec import JobSpec

RUNNING, FINISHED, FAILED = "running", "finished", "failed"
IN_PROCESS, ON_RAY, LAUNCHED = "one process", "Ray", "torchrun"


@dataclass(frozen=True)
class Owner:
    """A start of a run. ``pid`` 0: it is not bound to one process, and lives until its record was not touched for
    ``lease_s`` seconds; the same holds for a process on another machine."""

    job: str
    run: str
    runtime: str
    host: str
    machine: str
    pid: int
    began: str
    since_s: float
    lease_s: float
    work_dir: str
    search_path: tuple[str, ...]
    state: str = RUNNING
    given: str = ""

    @property
    def is_here(self) -> bool:
        return self.machine == _machine()

    def __str__(self) -> str:
        process = f"process {self.pid} on" if self.pid else "on"
        since = datetime.fromtimestamp(self.since_s).strftime("%Y-%m-%d %H:%M:%S")
        return f"run {self.run} of '{self.job}' ({self.runtime}, {process} {self.host}, since {since})"


def owner_of(job: JobSpec, runtime: str, bound: bool) -> Owner:
    pid = os.getpid() if bound else 0
    return Owner(
        job=job.name,
        run=job.run,
        runtime=runtime,
        host=socket.gethostname(),
        machine=_machine(),
        pid=pid,
        began=_began(pid) if pid else "",
        since_s=time.time(),
        lease_s=job.liveness.lease_s,
        work_dir=job.work_dir,
        search_path=job.search_path,
        given=job.given,
    )


def newest_owner(folder: Path) -> Owner | None:
    record = newest_record(folder)
    return read_owner(record) if record is not None else None


def records_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("owner.*.json"), key=number_of)


def newest_record(folder: Path) -> Path | None:
    records = records_in(folder)
    return records[-1] if records else None


def number_of(record: Path | None) -> int:
    digits = record.name.split(".")[1] if record is not None else "0"
    return int(digits) if digits.isdigit() else 0


def encode_owner(owner: Owner) -> bytes:
    return json.dumps(asdict(owner), indent=1).encode()


def read_owner(record: Path) -> Owner | None:
    """The content of a record; None if it is gone or damaged."""
    try:
        with open_file(record) as file:
            fields: dict[str, Any] = json.load(file)
        return Owner(**{**fields, "search_path": tuple(fields["search_path"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def create_record(record: Path, owner: Owner) -> bool:
    """Write a record that does not exist yet; False if it does."""
    temporary = record.with_name(f".{record.name}.{uuid4().hex}.tmp")
    try:
        temporary.write_bytes(encode_owner(owner))
        share_file(temporary)
        os.link(temporary, record)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def is_alive(owner: Owner, record: Path) -> bool:
    if owner.state != RUNNING:
        return False
    if owner.pid and owner.is_here:
        return _began(owner.pid) == owner.began
    try:
        return _now_s(record.parent) - record.stat().st_mtime < owner.lease_s
    except OSError:
        return True  # a disk that does not answer is no reason to take over


def _now_s(folder: Path) -> float:
    """The time of the file system, which may be another machine's."""
    probe = folder / f".now.{uuid4().hex}.tmp"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _machine() -> str:
    """This boot of this machine, and the container's own numbers of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _began(pid: int) -> str:
    """When the process of this number began, in ticks since the boot; empty if there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else fields[18]
