# SPDX-License-Identifier: Apache-2.0
"""Checks of requests before the manager sees them. None of a job's modules is imported here.

Job files are read in a thread or a process, so that other calls do not wait for the milliseconds that each takes.
"""

import asyncio
import hashlib
import json
import multiprocessing
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from dlrover.python.rl.common.errors import ConfigError, InvalidJob, ServiceBusy, ServiceUnavailable
from dlrover.python.rl.common.names import check_job_name
from dlrover.python.rl.config.load import load_job_text
from dlrover.python.rl.config.secrets import seal
from dlrover.python.rl.config.spec import JobSpec
from dlrover.python.rl.control.placement import plan
from dlrover.python.rl.service.jobs.records import JobDescription, JobRecord, SubmitJob
from dlrover.python.rl.service.jobs.working_dirs import WorkingDirs
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire

MAX_TEXT = 256 * 1024
_MAX_OVERRIDES, _MAX_OVERRIDE, _MAX_OVERRIDDEN = 200, 10_000, 65_536
_MAX_PRIORITY = 100
_MAX_REASON = 500
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")
_PROCESS = re.compile(r"[a-z0-9][a-z0-9_-]{0,99}")
_RUN = re.compile(r"[0-9a-z]{1,64}")
_MAX_PATH = 1000
_MAX_WAITING = 64  # submissions of one caller that are being read, or wait for it
_MAX_S = 5.0  # hundreds of times what a job file takes


def check_submission(request: wire.SubmitRequest, owner: str, root: Path) -> SubmitJob:
    """Return the job of a request, whose paths stay below ``root``. Raises InvalidJob with all errors that are visible
    without importing the job's classes."""
    errors = _faults(request)
    base = WorkingDirs(root).find(request.working_dir) if request.working_dir else root
    folder = _folder(request.folder, base, errors)
    if errors:
        raise InvalidJob(errors)
    job = load_job_text(request.job_file, request.name, request.overrides, (str(folder),))
    placement, faults = plan(job)
    errors = [*_faults_of_job(job, root), *faults]
    if errors or placement is None:
        raise InvalidJob(errors)
    fields = [request.job_file, request.name, list(request.overrides), request.priority, request.folder]
    fields += [request.working_dir] if request.working_dir else []
    resources = dict(placement.total)
    resources["cpu"] = resources.get("cpu", 0.0) + job.master.cpu
    record = JobRecord(
        job.name,
        "",
        owner,
        request.client_token,
        fingerprint=hashlib.sha256(json.dumps(fields).encode()).hexdigest(),
        resources=resources,
        priority=request.priority,
        roles={str(role): spec.num for role, spec in job.workloads.items()},
        per_member={str(role): dict(slots[0].resources) for role, slots in placement.slots.items()},
        folder="" if job.run_folders else str(job.job_dir.resolve()),
        work_dir=str(folder.relative_to(root)),
    )
    description = JobDescription(request.job_file, tuple(request.overrides), str(folder))
    return SubmitJob(record, description, str(job.run_folders.resolve()) if job.run_folders else "")


def _faults(request: wire.SubmitRequest) -> list[ConfigError]:
    size, lengths = len(request.job_file.encode()), [len(override) for override in request.overrides]
    checks = [
        ("client_token", _TOKEN.fullmatch(request.client_token), "must be 1 to 128 letters, digits, '-' or '_'"),
        ("job_file", 0 < size <= MAX_TEXT, f"has {size} bytes; allowed are 1 to {MAX_TEXT}"),
        ("overrides", len(lengths) <= _MAX_OVERRIDES, f"are {len(lengths)}; at most {_MAX_OVERRIDES} are allowed"),
        ("overrides", max(lengths, default=0) <= _MAX_OVERRIDE, f"one has more than {_MAX_OVERRIDE} characters"),
        ("overrides", sum(lengths) <= _MAX_OVERRIDDEN, f"have more than {_MAX_OVERRIDDEN} characters together"),
        ("priority", abs(request.priority) <= _MAX_PRIORITY, f"must be from -{_MAX_PRIORITY} to {_MAX_PRIORITY}"),
    ]
    errors = [ConfigError(where, fault) for where, is_right, fault in checks if not is_right]
    return errors + (name_faults(request.name) if request.name else [])


def name_faults(name: str) -> list[ConfigError]:
    try:
        check_job_name(name)
    except ValueError as error:
        return [ConfigError("name", shown(str(error)))]
    return []


def check_name(reference: str) -> str:
    """Return a valid NAME or NAME@RUN. Raises InvalidJob."""
    name, mark, run = reference[:1000].partition("@")
    faults = name_faults(name)
    if mark and not _RUN.fullmatch(run):
        faults.append(ConfigError("name", f"{shown(run)!r} is not a run's id, as 'list' shows it"))
    if faults:
        raise InvalidJob(faults)
    return reference


def check_process(process: str) -> str:
    """Return the name of a process's log, such as ``rollout-1``. Raises InvalidJob."""
    if process and not _PROCESS.fullmatch(process):
        raise InvalidJob(
            [ConfigError("process", f"{shown(process)!r} is not a process such as 'rollout-1' or 'trainer'")]
        )
    return process


def check_path(path: str) -> tuple[str, ...]:
    """Return the parts of a relative path in a job's folder. Raises InvalidJob."""
    parts = tuple(path.split("/"))
    is_plain = 0 < len(path) <= _MAX_PATH and path.isprintable() and "\\" not in path
    if not is_plain or any(part in ("", ".", "..") for part in parts):
        raise InvalidJob([ConfigError("path", f"{shown(path)!r} is not a relative path inside the job's folder")])
    return parts


def shown(text: str) -> str:
    """Return a client's text as one printable line of limited length."""
    line = "".join(letter if letter.isprintable() else "?" for letter in text)
    return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}..."


def _folder(text: str, root: Path, errors: list[ConfigError]) -> Path:
    """Return the folder that a request names below ``root``, links resolved; ``root`` itself has no links."""
    with suppress(OSError, RuntimeError, ValueError):
        folder = (root / text).resolve()
        if len(text) <= _MAX_PATH and folder.is_relative_to(root) and folder.is_dir():
            return folder
    errors.append(ConfigError("folder", f"{shown(text)!r} is outside the service's root folder, or not a folder"))
    return root


def _faults_of_job(job: JobSpec, root: Path) -> list[ConfigError]:
    errors = [ConfigError("name", error.what) for error in name_faults(job.name)]
    if job.run_folders is None and not job.job_dir.resolve().is_relative_to(root):
        errors.append(ConfigError("job_dir", f"{shown(str(job.job_dir))!r} is outside the service's root folder"))
    if job.overwrite:
        errors.append(ConfigError("overwrite", "is not for jobs of the service, where each run has its own folder"))
    if job.checkpoint.resume != "never" and job.run_folders is not None:
        errors.append(ConfigError("checkpoint.resume", "needs a job_dir: without it each run has a new folder"))
    advice = "looks like a secret, which the service does not store: set it on the cluster"
    return errors + [ConfigError(where, advice) for where in seal(job)[1]]


in_a_thread: Callable[[], Executor] = partial(ThreadPoolExecutor, 1, "job-files")


def in_a_process() -> Executor:
    executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _end_with_the_service)
    executor.submit(os.getpid)  # starts the process
    return executor


class SubmissionReader:
    """Reads submissions in order, in one thread or process."""

    def __init__(self, make: Callable[[], Executor] = in_a_thread) -> None:
        self._make, self._executor = make, make()
        self._waiting = CallLimit(_MAX_WAITING, "submissions that are being read")

    async def read(self, request: wire.SubmitRequest, owner: str, root: Path) -> SubmitJob:
        """Check a submission. Raises InvalidJob, ServiceBusy for a caller that submits faster than files are read, and
        ServiceUnavailable if the process that reads them dies."""
        executor, loop = self._executor, asyncio.get_running_loop()
        with ExitStack() as stack:
            stack.enter_context(self._waiting.hold(owner))
            try:
                reading = executor.submit(_read, request.SerializeToString(), owner, root)
                place = stack.pop_all()
                reading.add_done_callback(lambda _: loop.call_soon_threadsafe(place.close))  # or the caller is gone
                result = await asyncio.wrap_future(reading)
            except BrokenExecutor as error:
                if executor is self._executor:
                    self._executor = self._make()
                raise ServiceUnavailable("the process that read the job file has died: try again") from error
        if isinstance(result, SubmitJob):
            return result
        raise InvalidJob(result)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _read(request: bytes, owner: str, root: Path) -> SubmitJob | tuple[ConfigError, ...]:
    """Check a submission, for ``_MAX_S`` at most in a main thread, the only one that can be interrupted."""
    may_end = threading.current_thread() is threading.main_thread()
    if may_end:
        signal.signal(signal.SIGALRM, signal.default_int_handler)  # KeyboardInterrupt: no reader handles it
        signal.setitimer(signal.ITIMER_REAL, _MAX_S)
    try:
        return check_submission(wire.SubmitRequest.FromString(request), owner, root)
    except InvalidJob as error:
        return error.errors
    except KeyboardInterrupt:
        return (ConfigError("job_file", f"takes longer than {_MAX_S:g} s to read"),)
    finally:
        if may_end:
            signal.setitimer(signal.ITIMER_REAL, 0)


def _end_with_the_service() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the service handles it, and then ends this process

    def end() -> None:
        service = multiprocessing.parent_process()
        assert service is not None, "this process was started by multiprocessing"
        service.join()  # waits: for the end of the service, however it ends
        os._exit(0)

    threading.Thread(target=end, name="end-with-the-service", daemon=True).start()


class CallLimit:
    """A limit of the calls of one caller that are answered at the same time; ``kind`` is their name in the error."""

    def __init__(self, most: int, kind: str) -> None:
        self._most, self._kind = most, kind
        self._held: Counter[str] = Counter()

    @contextmanager
    def hold(self, caller: str) -> Iterator[None]:
        """Raises ServiceBusy."""
        if self._held[caller] >= self._most:
            raise ServiceBusy(f"'{caller}' has {self._most} {self._kind}, the limit: end some, or wait")
        self._held[caller] += 1
        try:
            yield
        finally:
            self._held[caller] -= 1
            if not self._held[caller]:
                del self._held[caller]
