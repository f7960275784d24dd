# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: a folder, its owner's records and the claim on it are read together.
"""The folder of a run, and its owner.

::

    runs/<name>/20261123-071500-1a2b3c4d/   by default each run has a separate folder
    runs/<name>/latest                      link to the folder of the last start
    <job_dir>/owner.<n>.json                the n-th start in this folder; the highest number counts

A start claims its folder by creating the next record, which only one of several processes can, and touches the record
while it runs. There is no lock, since a lost node's lock on a shared disk would stay. A record and its job are on disk
before anything refers to them; until then the older ones stay.
"""

import getpass
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import yaml

from dlrover.python.rl.common.errors import CheckpointMissing, ConfigError, InvalidJob, JobConflict
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.common.names import resume_command
from dlrover.python.rl.common.private_files import open_file, share_file
from dlrover.python.rl.common.spans import SPANS
from dlrover.python.rl.config.layout import job_to_yaml
from dlrover.python.rl.config.spec import RUNS, JobSpec
from dlrover.python.rl.runtime.checkpoint.node_memory import RunMemory, list_memory, memory_path
from dlrover.python.rl.runtime.checkpoint.runs import STATES, files_of, newest_commit, resumed_layout
from dlrover.python.rl.runtime.checkpoint.state_file import make_folder, new_file, sync_folder
from dlrover.python.rl.runtime.run.files import RECORDS
from dlrover.python.rl.runtime.run.machine import describe_origin, process_began, record_environment
from dlrover.python.rl.runtime.run.names import DESCRIPTION, METRICS, MODEL, SUMMARY

_LOG = get_logger(__name__)

RUNNING, FINISHED, FAILED = "running", "finished", "failed"
IN_PROCESS, ON_RAY, LAUNCHED = "one process", "Ray", "torchrun"

COMMITTED = "step-*[1-9]*.e*"  # the folder of a step, except step 0, the start
_UNKNOWN = "unknown"

LATEST, CLUSTER = "latest", "cluster"
BEAT_S = 5.0
_QUIET_S = 600.0
_OWN_FOLDER = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
_RESULTS = (METRICS, SUMMARY, MODEL, *(f"{name}/*/step-*" for name in STATES))


@dataclass(frozen=True)
class Owner:
    """A start of a run. ``pid`` 0: it is bound to no process, and lives until its record was not touched for
    ``lease_s`` seconds, as a start on another machine does."""

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
    user: str = ""  # of the operating system

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
        given=job.description_digest,
        user=_user(),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container, the user may have no name
        return str(os.getuid())


def newest_owner(folder: Path) -> Owner | None:
    """Return the owner in the newest record. If that is damaged, or missing although commits exist, return a running
    owner from the older records or the job's description; None if these have none."""
    records = records_in(folder)
    if any(record.is_symlink() for record in records):
        return None  # no start here writes links
    if records and (newest := read_owner(records[-1])) is not None:
        return newest
    older = next(filter(None, map(read_owner, reversed(records[:-1]))), None)
    if older is not None:
        return replace(older, state=RUNNING)
    if not records and not has_commits_on_disk(folder):
        return None
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
    """Return the content of a record; None if it is gone or damaged."""
    try:
        with open_file(record) as file:
            fields: dict[str, Any] = json.load(file)
        return Owner(**{**fields, "search_path": tuple(fields["search_path"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_shared(path: Path, content: bytes, exclusive: bool = False) -> None:
    """Write a whole file, as readable as its folder, to disk. Raises FileExistsError if ``exclusive``."""
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
    probe = record.parent / f".now.{uuid4().hex}.tmp"  # the file system may use another machine's clock
    try:
        probe.touch()
        return probe.stat().st_mtime - record.stat().st_mtime < owner.lease_s
    except OSError:
        return True  # a disk that does not answer is no reason for a takeover
    finally:
        with suppress(OSError):
            probe.unlink()


def _machine() -> str:
    """Identify this boot of this machine, and the namespace of its process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def new_run() -> str:
    return os.urandom(4).hex()


def folder_name(run: str) -> str:
    return f"{datetime.now().strftime('%Y%m%d-%H%M%S')}-{run}"


def begin(job: JobSpec) -> JobSpec:
    """Return the job with the id and the folder of a new run; a job with an id stays the same."""
    if job.run:
        return job
    run = new_run()
    folder = job.run_folders / folder_name(run) if job.run_folders else job.job_dir
    return replace(job, run=run, job_dir=folder, origin=describe_origin(job))


def has_commits(folder: Path) -> bool:
    """Return True if a run has committed a step, in its folder or in this machine's memory."""
    owner = newest_owner(folder)
    in_memory = owner is not None and any(memory_path(owner.job, owner.run).glob(COMMITTED))
    return in_memory or has_commits_on_disk(folder)


def ended_memory() -> list[RunMemory]:
    """List the ended runs with commits in this node's memory: they have no process here, and their folder is not in use
    or, if it is not visible, nothing was written for ``_QUIET_S``, since a run may be between two processes."""
    ended = []
    for memory in list_memory():
        if memory.is_held:  # the memory of a running job is not looked through
            continue
        folder = Path(memory.saved_to).parent.parent
        if memory.saved_to and newest_record(folder) is not None:
            is_over = not in_use(folder)
        else:
            is_over = time.time() - max((state.st_mtime for state in memory.states()), default=0.0) > _QUIET_S
        if is_over:
            ended.append(memory)
    return ended


def conflict(job: JobSpec) -> str:
    """Return the reason why a run of ``job`` must not begin in its folder; empty if it may."""
    folder, record = job.job_dir, newest_record(job.job_dir)
    owner = read_owner(record) if record is not None else None
    if job.run_folders is not None or (owner is not None and owner.run == job.run and not owner.pid):
        return ""
    if record is not None and owner is not None and is_alive(owner, record):
        return f"{folder} is in use by {owner}"
    if job.checkpoint.resume == "latest" or job.overwrite:
        return ""
    is_kept = owner is not None and (owner.state == FINISHED or memory_path(owner.job, owner.run).exists())
    files = (path for pattern in _RESULTS for path in folder.glob(pattern))
    if not is_kept and not any(path.is_dir() or path.stat().st_size for path in files):
        return ""  # nothing to continue from, in the folder or in this machine's memory
    whose = f"{owner}, {owner.state if owner.state != RUNNING else 'ended'}" if owner is not None else "an earlier run"
    is_launched = owner is not None and owner.runtime == LAUNCHED
    how = "the same command, or checkpoint.resume=latest," if is_launched else f"'{resume_command(folder)}'"
    return (
        f"{folder} has the results of {whose}: {how} continues, overwrite=true replaces them, "
        "and without job_dir each run has a separate folder"
    )


def claim(job: JobSpec, runtime: str, *, bound: bool) -> "Claim":
    """Make this process the owner of the folder of the job's run; ``bound``: the run ends with it. Raises JobConflict
    if another run is there, InvalidJob if the folder cannot be created or written to."""
    folder, owner = job.job_dir, owner_of(job, runtime, bound)
    try:
        make_folder(folder, durable=True)
    except OSError as error:
        raise InvalidJob([ConfigError("job_dir", f"cannot be created: {error}")]) from error
    earlier, resumes = newest_owner(folder), job.checkpoint.resume == "latest"
    resumes = resumes and (has_commits(folder) or bool(job.archive and newest_commit(folder, job.archive)))
    record = _create_record(job, owner)
    try:
        replaced = _describe(job, earlier, resumes)
    except BaseException:
        record.unlink(missing_ok=True)  # the earlier owner's record remains
        raise
    for older in records_in(folder):
        if number_of(older) < number_of(record):
            older.unlink(missing_ok=True)
    record_environment(job, number_of(record), runtime, on_ray=runtime == ON_RAY)
    if _is_own_folder(job):
        link = folder.parent / f".{LATEST}.{uuid4().hex}.tmp"
        with suppress(OSError):  # a file system without links
            link.symlink_to(folder.name)
            link.replace(folder.parent / LATEST)
            sync_folder(folder.parent)
        for path in superseded(job):
            _LOG.warning("removing %s: checkpoint.keep_runs", path)
            shutil.rmtree(path, ignore_errors=True)
    return Claim(record, owner, job, replaced)


def _create_record(job: JobSpec, owner: Owner) -> Path:
    """Create the next record in the job's folder, which only one of several processes can."""
    while True:
        newest = newest_record(job.job_dir)
        if why := conflict(job):
            raise JobConflict(why)
        record = job.job_dir / f"owner.{number_of(newest) + 1}.json"
        try:
            write_shared(record, encode_owner(owner), exclusive=True)
        except FileExistsError:
            continue
        except OSError as error:
            why = f"{job.job_dir} cannot be written to: {error.strerror or error}"
            raise InvalidJob([ConfigError("job_dir", why)]) from error
        if newest_record(job.job_dir) == record:
            return record
        record.unlink()  # another start has claimed the folder since


def _describe(job: JobSpec, earlier: Owner | None, resumes: bool) -> bytes:
    """Write the job's description. Returns the description of the run that it resumes; else removes its commits."""
    path = job.job_dir / DESCRIPTION
    before = path.read_bytes() if path.is_file() else b""
    try:
        _write_description(job, job_to_yaml(job, hide_secrets=True).encode())
    except BaseException:
        with suppress(OSError):
            if before:
                write_shared(path, before)
            else:
                path.unlink(missing_ok=True)
        raise
    is_fresh = job.overwrite and job.checkpoint.resume != "latest"
    if is_fresh and (earlier is None or earlier.run != job.run):
        memory = [memory_path(earlier.job, earlier.run)] if earlier is not None else []
        for folder in (*(job.job_dir / name for name in (*STATES, SPANS)), *memory):
            shutil.rmtree(folder, ignore_errors=True)
    return before if resumes else b""


def _write_description(job: JobSpec, description: bytes) -> None:
    """Write it also to the job's object store, for a continuation on another machine, or raise InvalidJob."""
    path, files = job.job_dir / DESCRIPTION, files_of(job)
    write_shared(path, description)
    try:
        if files is not None:
            files.put(DESCRIPTION)
    except (OSError, CheckpointMissing) as error:
        raise InvalidJob([ConfigError("job_dir", f"{job.archive} cannot be written: {error}")]) from error


def superseded(job: JobSpec) -> list[Path]:
    """List the states of ended runs of this name in default folders, except the newest ``checkpoint.keep_runs``."""
    parent = job.run_folders or (job.job_dir.parent if _is_own_folder(job) else None)
    if parent is None:
        return []
    folders = [folder for folder in parent.iterdir() if _OWN_FOLDER.fullmatch(folder.name)] if parent.is_dir() else []
    records = [record for folder in folders if (record := newest_record(folder)) is not None]
    ended = [record.parent for record in records if not in_use(record.parent) and record.parent != job.job_dir]
    return [
        path
        for folder in sorted(ended, reverse=True)[job.checkpoint.keep_runs :]
        for name in STATES
        if (path := folder / name).is_dir()
    ]


def _is_own_folder(job: JobSpec) -> bool:
    """Return True if the run has its default folder, by its names: a master works in another directory."""
    parent = job.job_dir.parent
    return (parent.parent.name, parent.name) == (RUNS.name, job.name) and bool(_OWN_FOLDER.fullmatch(job.job_dir.name))


@dataclass
class Claim:
    """A claimed folder, whose owner calls :meth:`beat` every ``BEAT_S`` seconds, and :meth:`end` once."""

    record: Path
    owner: Owner
    job: JobSpec
    replaced: bytes = b""  # the description of the run that this one continues

    @property
    def number(self) -> int:
        return number_of(self.record)

    def beat(self) -> None:
        """Touch the record. Raises JobConflict if another start has taken the folder over."""
        with suppress(OSError):  # a disk may not answer for a while
            newest = newest_record(self.record.parent)
            if newest is not None and newest != self.record:
                raise JobConflict(f"{self.record.parent} was taken over by {read_owner(newest)}")
            os.utime(self.record)

    def end(self, state: str) -> None:
        """Record the final ``state``. A run that fails before its first commit may not fit the state that it should
        have resumed: the description of the run before returns."""
        with suppress(OSError, InvalidJob, CheckpointMissing):
            if state == FAILED and self.replaced and not self._has_committed():
                _write_description(self.job, self.replaced)
        with suppress(OSError):
            write_shared(self.record, encode_owner(replace(self.owner, state=state)))

    def _has_committed(self) -> bool:
        job = self.job
        newest = newest_commit(job.job_dir, job.archive) if job.archive else None
        in_store = newest is not None and newest[0].run == job.run and newest[1].step > 0
        in_memory = any(memory_path(job.name, job.run).glob(COMMITTED))
        return in_store or in_memory or has_commits_on_disk(job.job_dir, job.run)


@contextmanager
def held(claimed: Claim) -> Iterator[Claim]:
    """Touch the record in a thread until the block ends, which calls ``end`` or fails. When another run has taken the
    folder over, for example from a stopped process, this process is interrupted."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            try:
                claimed.beat()
            except JobConflict as error:
                _LOG.error("%s", error)
                os.kill(os.getpid(), signal.SIGINT)
                return

    thread = threading.Thread(target=beat, name="dlrover-owner", daemon=True)
    thread.start()
    try:
        yield claimed
    except BaseException:
        claimed.end(FAILED)
        raise
    finally:
        over.set()
        thread.join(BEAT_S)


def repeated(job: JobSpec) -> JobSpec:
    """Continue in the folder of the last run if it had this command and has not finished; else begin a new run."""
    folder = (job.run_folders / LATEST).resolve() if job.run_folders else job.job_dir
    owner = newest_owner(folder)
    if owner is not None and owner.given == job.description_digest and owner.state != FINISHED:
        return replace(job, job_dir=folder)
    return replace(job, checkpoint=replace(job.checkpoint, resume="never"))


def continued(job: JobSpec) -> JobSpec:
    """Continue a job without ``job_dir`` in the last run of its name with ``checkpoint.resume: latest``. Only a command
    (``given``) with other arguments continues a finished run."""
    if job.run_folders is None or job.checkpoint.resume != "latest":
        return job
    last = (job.run_folders / LATEST).resolve()
    owner = newest_owner(last)
    if owner is None or (
        owner.state == FINISHED and (job.description_digest in ("", owner.given) or not has_commits(last))
    ):
        return job
    return replace(job, job_dir=last)


def earlier_description(job: JobSpec) -> str:
    """Return the description of the run whose state ``job`` resumes; empty if there is none."""
    if job.checkpoint.resume != "latest" or not (has_commits(job.job_dir) or resumed_layout(job)):
        return ""
    path, files = job.job_dir / DESCRIPTION, files_of(job)
    archived = "" if files is None else files.read(DESCRIPTION)  # a folder here may be another run's
    return archived or (path.read_text(encoding="utf-8") if path.is_file() else "")
