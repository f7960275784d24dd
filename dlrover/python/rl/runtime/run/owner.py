# SPDX-License-Identifier: Apache-2.0
"""The record of a start of a run, which names the process that holds the run's folder.

A record, and the job beside it, are on disk before anything refers to them; until then the older ones stay.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from dlrover.python.rl.common.private_files import open_file, share_file
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.runtime.checkpoint.runs import STATES
from dlrover.python.rl.runtime.checkpoint.storage.state_file import new_file

RUNNING, FINISHED, FAILED = "running", "finished", "failed"
IN_PROCESS, ON_RAY, LAUNCHED = "one process", "Ray", "torchrun"

DESCRIPTION, RECORDS = "job.yaml", "owner.*.json"
COMMITTED = "step-*[1-9]*.e*"  # a step's folder, but for step 0, which is the start
_UNKNOWN = "unknown"


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
        began=process_began(pid) if pid else "",
        since_s=time.time(),
        lease_s=job.liveness.lease_s,
        work_dir=job.work_dir,
        search_path=job.search_path,
        given=job.given,
    )


def newest_owner(folder: Path) -> Owner | None:
    """The owner in the newest record. If that is damaged, or missing beside commits, the start has no outcome, and what
    the older records or the job's description tell of it counts; None if that is nothing."""
    records = records_in(folder)
    if any(record.is_symlink() for record in records):
        return None  # no start here writes links
    if records and (newest := read_owner(records[-1])) is not None:
        return newest
    older = next(filter(None, map(read_owner, reversed(records[:-1]))), None)
    if older is not None:
        return replace(older, state=RUNNING)
    return _described_owner(folder) if records or has_commits_on_disk(folder) else None


def _described_owner(folder: Path) -> Owner | None:
    """An owner with nothing but the name of the job that the folder describes."""
    try:
        with open_file(folder / DESCRIPTION) as file:
            name = yaml.safe_load(file)["name"]
    except (OSError, yaml.YAMLError, TypeError, KeyError):
        return None
    return Owner(str(name), _UNKNOWN, ON_RAY, _UNKNOWN, "", 0, "", 0.0, 0.0, "", ())


def has_commits_on_disk(folder: Path, run: str = "*") -> bool:
    return any(any(folder.glob(f"{name}/{run}/{COMMITTED}")) for name in STATES)


def records_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(RECORDS), key=number_of)


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


def write_shared(path: Path, content: bytes, exclusive: bool = False) -> None:
    """Write a file that is as readable as its folder: whole, and on disk when this returns. Raises FileExistsError if
    it is ``exclusive`` and exists."""
    with new_file(path, durable=True, exclusive=exclusive) as file:
        share_file(Path(file.name))
        file.write(content)


def in_use(folder: Path) -> bool:
    record = newest_record(folder)
    owner = read_owner(record) if record is not None else None
    return record is not None and owner is not None and is_alive(owner, record)


def is_alive(owner: Owner, record: Path) -> bool:
    if owner.state != RUNNING:
        return False
    if owner.pid and owner.is_here:
        return process_began(owner.pid) == owner.began
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


def process_began(pid: int) -> str:
    """When the process of this number began, in ticks since the boot; empty if there is none."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else fields[18]
