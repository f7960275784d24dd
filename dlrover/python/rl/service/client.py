# SPDX-License-Identifier: Apache-2.0
"""The client of the job service, for Python and for the command line.

Requests are repeated until their deadline while the service is unreachable or busy. A repeated submission carries the
same token, and so makes no second job; a watcher continues after the last event that it has received.
"""

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from dlrover.python.rl.common.errors import CallError, QuotaReached, ServiceBusy, ServiceUnavailable
from dlrover.python.rl.common.private_files import read_token
from dlrover.python.rl.common.sockets import is_loopback
from dlrover.python.rl.master.client.views import SHARED_FIELDS, JobHistory, JobView, log_of
from dlrover.python.rl.master.process.status import RunningProcess
from dlrover.python.rl.runtime.run.names import LOGS, SUFFIX
from dlrover.python.rl.service.auth import TOKEN, default_state
from dlrover.python.rl.service.jobs.records import JobPhase
from dlrover.python.rl.service.jobs.working_dirs import PART
from dlrover.python.rl.service.messages import RESIZE_S, STREAM_OPEN, UPLOAD_S, error_of, phase_of
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire
from dlrover.python.rl.trainer.step_report import Announcer, Reporter, StepReport

_SERVICE = wire.DESCRIPTOR.services_by_name["Jobs"]
_CALL_S = 15.0
_PATIENCE_S = 60.0
_WAIT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_STEADY_S = 2.0  # a stream that was open for this long shows that the service can be reached
_OPTIONS = (
    ("grpc.max_receive_message_length", 8 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.keepalive_time_ms", 30_000),  # ends a stream when the network goes silent
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # for keepalive's pings
    ("grpc.http2.max_pings_without_data", 0),  # unlimited, for quiet streams
)


@dataclass(frozen=True)
class ClientTls:
    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    @classmethod
    def from_env(cls) -> "ClientTls | None":
        """Read ``DLROVER_RL_TLS_CA``, and a client certificate's ``DLROVER_RL_TLS_CERT`` and ``DLROVER_RL_TLS_KEY``."""
        named = [os.environ.get(f"DLROVER_RL_TLS_{name}") for name in ("CA", "CERT", "KEY")]
        ca, certificate, key = [Path(path) if path else None for path in named]
        return cls(ca, certificate, key) if ca else None


class ServiceClient(AbstractContextManager["ServiceClient"]):
    """A connection to a job service. Its methods raise the service's errors, and ServiceUnavailable.

    Args:
        address: ``host:port``. Beyond loopback it needs ``tls``, so that the token is not sent in the clear.
        token: by default read from the file ``DLROVER_RL_TOKEN_FILE``, or from the state of a service on this machine.
        patience_s: how long a request is repeated while the service does not answer.
    """

    def __init__(
        self, address: str, token: str | None = None, tls: ClientTls | None = None, patience_s: float = _PATIENCE_S
    ) -> None:
        if tls is None and not is_loopback(address.rpartition(":")[0]):
            advice = "pass tls=ClientTls(...), or for commands set DLROVER_RL_TLS_CA"
            raise CallError(f"{address} is beyond loopback, where the token needs TLS: {advice}")
        if not token:
            named = os.environ.get("DLROVER_RL_TOKEN_FILE")
            try:
                token = read_token(Path(named) if named else default_state() / TOKEN)
            except CallError as error:
                hint = "" if named else "; for another service set DLROVER_RL_TOKEN_FILE"
                raise CallError(f"{error}{hint}") from error
        self._patience_s, self._metadata = patience_s, (("authorization", f"Bearer {token}"),)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            own = (tls.key.read_bytes(), tls.certificate.read_bytes()) if tls.key and tls.certificate else (None, None)
            credentials = grpc.ssl_channel_credentials(tls.ca.read_bytes(), *own)
            self._channel = grpc.secure_channel(address, credentials, options=_OPTIONS)
        self._calls: dict[str, Any] = {}
        for method in _SERVICE.methods:
            make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
            request, answer = getattr(wire, method.input_type.name), getattr(wire, method.output_type.name)
            path = f"/{_SERVICE.full_name}/{method.name}"
            self._calls[method.name] = make(path, request.SerializeToString, answer.FromString)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def submit(  # noqa: PLR0913 -- the fields of a submission
        self,
        job_file: str,
        name: str = "",
        overrides: Sequence[str] = (),
        priority: int = 0,
        folder: str = "",
        client_token: str = "",
        working_dir: str = "",
    ) -> wire.Job:
        """Queue a job in YAML. ``folder`` is relative to the service's root, or to the uploaded folder whose digest is
        ``working_dir``. A ``client_token`` makes one job."""
        request = wire.SubmitRequest(job_file=job_file, name=name, overrides=overrides, priority=priority)
        request.folder, request.client_token = folder, client_token or secrets.token_urlsafe(16)
        request.working_dir = working_dir
        return self._job("Submit", request)

    def upload(self, archive: BinaryIO, digest: str) -> None:
        """Send an archive of :func:`pack`, or as much of it as the service lacks."""
        request = wire.UploadRequest(digest=digest, size=archive.seek(0, os.SEEK_END))
        while (received := self._ask("Upload", request, UPLOAD_S).received) < request.size:
            archive.seek(received)
            request.offset, request.data = received, archive.read(PART)

    def get(self, name: str) -> wire.Job:
        return self._job("Get", wire.GetRequest(name=name))

    def list_jobs(self, ended: bool = False, limit: int = 0) -> list[wire.Job]:
        """Return all unfinished jobs, and with ``ended`` up to ``limit`` ended ones (0: 100), each the newest first."""
        return list(self.list_with_count(ended, limit).jobs)

    def list_with_count(self, ended: bool = False, limit: int = 0) -> wire.ListResponse:
        """Return the same jobs, and as ``left_out`` the number of older ones."""
        answer: wire.ListResponse = self._ask("List", wire.ListRequest(all=ended, limit=limit))
        return answer

    def stop(self, name: str, hard: bool = False, reason: str = "") -> wire.Job:
        return self._job("Stop", wire.StopRequest(name=name, hard=hard, reason=reason))

    def resize(self, name: str, role: str, num: int) -> wire.Job:
        return self._job("Resize", wire.ResizeRequest(name=name, role=role, num=num), RESIZE_S)

    def wait(self, name: str, timeout_s: float | None = None) -> wire.Job:
        """Return the job once it has ended, or as it is after ``timeout_s``."""
        deadline_s = time.monotonic() + (timeout_s if timeout_s is not None else inf)
        while True:
            span_s = max(min(_WAIT_S, deadline_s - time.monotonic()), 0.0)
            job = self._job("Wait", wire.WaitRequest(name=name, timeout_s=span_s), _CALL_S + span_s)
            if phase_of(job).ended or time.monotonic() >= deadline_s:
                return job

    def watch(
        self, name: str = "", after: int = 0, follow: bool = True, without_steps: bool = False
    ) -> Iterator[wire.Event]:
        """Yield the events above number ``after``, each once, even if the service restarts; ends with the named job."""
        request = wire.WatchRequest(name=name, after=after, follow=follow, without_steps=without_steps)
        for message in self._resumed("Watch", request):
            for event in message.events:
                request.after = event.number
                yield event

    def logs(self, name: str, process: str = "", follow: bool = False, tail: int = 0) -> Iterator[wire.LogChunk]:
        request = wire.LogsRequest(name=name, process=process, follow=follow, tail=tail)
        try:
            yield from self._calls["Logs"](request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of(error) from None

    def artifacts(self, name: str) -> list[wire.Artifact]:
        return list(self._ask("Artifacts", wire.ArtifactsRequest(name=name)).files)

    def fetch(self, name: str, path: str, file: BinaryIO) -> int:
        """Copy a file of a job to ``file``, resuming where it was cut off; return the number of bytes."""
        request = wire.FetchRequest(name=name, path=path)
        for chunk in self._resumed("Fetch", request):
            request.offset += file.write(chunk.data)
        return request.offset

    def _job(self, method: str, request: Any, timeout_s: float = _CALL_S) -> wire.Job:
        job: wire.Job = self._ask(method, request, timeout_s)
        return job

    def _ask(self, method: str, request: Any, timeout_s: float = _CALL_S) -> Any:
        began_s, pause_s = time.monotonic(), _FIRST_PAUSE_S
        while True:
            try:
                return self._calls[method](request, timeout=timeout_s, metadata=self._metadata)
            except grpc.RpcError as error:
                self._raise_unless_passing(error, began_s)
            time.sleep(pause_s * (0.5 + secrets.randbelow(1000) / 1000))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _resumed(self, method: str, request: Any) -> Iterator[Any]:
        """Yield the messages of a stream, which ``request`` resumes after a failure: the caller keeps it up to date."""
        lost_s = inf
        while True:
            opened_s = inf
            try:
                stream = self._calls[method](request, metadata=self._metadata)
                if dict(stream.initial_metadata() or ()).get(STREAM_OPEN):  # waits: for the service, or the call's end
                    opened_s = time.monotonic()
                for message in stream:
                    lost_s = inf
                    yield message
                return
            except grpc.RpcError as error:
                now_s = time.monotonic()  # not the time of the last message: a stream may be quiet
                lost_s = now_s if now_s - opened_s >= _STEADY_S else min(lost_s, now_s)
                self._raise_unless_passing(error, lost_s)
            time.sleep(_FIRST_PAUSE_S)

    def _raise_unless_passing(self, error: grpc.RpcError, began_s: float) -> None:
        failure = error_of(error)
        may_pass = isinstance(failure, ServiceUnavailable | ServiceBusy) and not isinstance(failure, QuotaReached)
        if not may_pass or time.monotonic() - began_s >= self._patience_s:
            raise failure from None


def has_ended(job: wire.Job) -> bool:
    return phase_of(job).ended


# -- the verbs of the command line -------------------------------------------------------------------------------------

_OF_SERVICE = ("cause", "detail", "owner", "priority", "submitted_s", "devices")
_FAILURES = ("recovered", "restarted", "failed")
_STOP_S = 60.0
_COMMAND_PATIENCE_S = 10.0
_RECENT_S = 5


def connected(address: str) -> ServiceClient:
    """Connect a command, which gives up soon."""
    return ServiceClient(address, tls=ClientTls.from_env(), patience_s=_COMMAND_PATIENCE_S)


class RemoteJobs:
    def __init__(self, client: ServiceClient) -> None:
        self._client = client

    def list_jobs(self) -> tuple[list[JobView], int]:
        answer = self._client.list_with_count(ended=True)
        return [view_of_message(job) for job in answer.jobs], answer.left_out

    def get(self, name: str) -> JobView:
        return view_of_message(self._client.get(name))

    def history(self, view: JobView) -> JobHistory | None:
        job = self._client.get(view.reference)
        since_s, phase, failures = job.submitted_s, wire.PHASE_QUEUED, list[tuple[float, str]]()
        for event in self._client.watch(view.reference, follow=False, without_steps=True):
            if event.phase != phase:
                since_s, phase = event.at_s, event.phase
            if event.kind in _FAILURES and event.message:
                failures.append((event.at_s, event.message))
        log = log_of(failures)
        files = {file.path for file in self._client.artifacts(view.reference)} if log else set()
        where = f"dlrover-rl logs {view.reference} {log}" if f"{LOGS}/{log}{SUFFIX}" in files else ""
        return JobHistory(since_s, tuple(failures), "the service's events", where)

    def attach(self, name: str, report: Reporter, announce: Announcer) -> JobView:
        job = self._client.get(name)
        total, reference = job.total_steps, f"{job.name}@{job.run}"
        for event in self._client.watch(reference):
            if event.kind == "step":
                total = total or self._client.get(reference).total_steps
                report(StepReport(event.step, total, dict(event.metrics), at_s=event.at_s))
            else:
                age_s = round(time.time() - event.at_s)
                before = f" ({age_s} s ago)" if age_s > _RECENT_S else ""
                announce(f"{event.kind} {event.message}".strip() + before)
        return self.get(reference)

    def wait(self, name: str, timeout_s: float | None) -> JobView:
        return view_of_message(self._client.wait(name, timeout_s))

    def stop(self, name: str, hard: bool) -> JobView:
        self._client.stop(name, hard)
        return view_of_message(self._client.wait(name, _STOP_S))

    def resize(self, name: str, role: str, num: int) -> JobView:
        return view_of_message(self._client.resize(name, role, num))

    def logs(self, name: str, process: str, follow: bool, tail: int) -> Iterator[tuple[str, str]]:
        return ((chunk.process, chunk.text) for chunk in self._client.logs(name, process, follow, tail))


def view_of_message(job: wire.Job) -> JobView:
    phase = phase_of(job)
    until_s = job.ended_s or time.time()
    return JobView(
        phase=phase.value,
        ended=phase.ended,
        reward=job.reward if job.step else nan,
        elapsed_s=until_s - job.started_s if job.started_s else 0.0,
        roles=dict(job.roles),
        recoveries=dict(job.recoveries),
        members=tuple(RunningProcess(each.process, each.node, each.pid, each.devices) for each in job.members),
        **{name: getattr(job, name) for name in (*SHARED_FIELDS, *_OF_SERVICE)},
    )


__all__ = ["ClientTls", "JobPhase", "RemoteJobs", "ServiceClient", "connected", "has_ended", "phase_of"]
