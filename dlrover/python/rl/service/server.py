# SPDX-License-Identifier: Apache-2.0
# Over 400 lines: the whole path of a call, from its connection to its answer.
"""The gRPC server: every method of the protocol has a required role, limits, and a handler.

::

    connection --> gate: token, limits --> message --> role --> checked --> manager or files --> answer
"""

import asyncio
import hashlib
import inspect
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dlrover.python.rl.common import errors
from dlrover.python.rl.common.errors import AccessDenied, DLRoverRLError, InvalidJob
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.master.process.metrics import ServiceMetrics
from dlrover.python.rl.runtime.run.files import LogReader, RunFolder
from dlrover.python.rl.service.auth import AccessRole, Caller, TokenFile
from dlrover.python.rl.service.jobs import submissions
from dlrover.python.rl.service.jobs.records import JobRecord, StopJob
from dlrover.python.rl.service.jobs.submissions import CallLimit, SubmissionReader, check_name, shown
from dlrover.python.rl.service.jobs.working_dirs import WorkingDirs
from dlrover.python.rl.service.manager import JobManager
from dlrover.python.rl.service.messages import (
    QUOTA,
    RESIZE_S,
    STREAM_OPEN,
    UPLOAD_S,
    code_of,
    details_of,
    event_message,
    job_message,
)
from dlrover.python.rl.service.proto import rl_jobs_pb2 as wire

_LOG = get_logger(__name__)

_SILENT_S = 10.0  # for the handshakes of TLS and HTTP/2, and between calls; an open stream keeps its connection
_RESERVE = 256  # descriptors for the store, files of runs, Ray and child processes; at most half of all
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_CALLS_EACH, _LONG_CALLS_EACH = 500, 400  # of one caller
_MESSAGE_S = 10.0


class Gate(grpc.aio.ServerInterceptor):
    """Wraps each handler so that a call is refused before its message is read, and soon ends if no message arrives.

    Args:
        identify: returns the caller's name from the headers of a call, or raises AccessDenied.
        denied: called when a call is refused for its token.
        short: full names of the methods that answer at once, with one message.
    """

    def __init__(
        self,
        identify: Callable[[Any], str],
        denied: Callable[[], None],
        short: frozenset[str],
        failures: "FailureLimit",
    ) -> None:
        self._identify, self._denied, self._short, self._failures = identify, denied, short, failures
        self._calls = CallLimit(_CALLS_EACH, "calls")
        self._long_calls = CallLimit(_LONG_CALLS_EACH, "streams and waits")

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:  # there is no such method
            return None
        is_long = handler.response_streaming and details.method not in self._short

        async def serve(messages: Any, context: Any) -> None:
            with ExitStack() as places:
                try:
                    headers = context.invocation_metadata()
                    caller = "" if details.method == _HEALTH_CHECK else self._identify(headers)
                    places.enter_context(self._calls.hold(caller))
                    if is_long:
                        places.enter_context(self._long_calls.hold(caller))
                except AccessDenied as error:
                    self._denied()
                    if self._failures.take(context.peer().rpartition(":")[0]):
                        await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
                    busy = "too many calls without a valid token: wait a second"
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, busy)
                except errors.ServiceBusy as error:
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
                await _answer(handler, messages, context)

        return grpc.stream_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)


async def _answer(handler: Any, messages: Any, context: Any) -> None:
    request = messages
    if not handler.request_streaming:
        try:
            async with asyncio.timeout(_MESSAGE_S):
                request = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no message arrived in time")
        if request is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call needs one message")
    act = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    answer = act(request, context)
    if inspect.isasyncgen(answer):
        async with aclosing(answer):
            async for message in answer:
                await context.write(message)
    elif (message := await answer) is not None:  # otherwise the handler has written it
        await context.write(message)


class TlsFiles:
    """The service's certificate, read again when it changes. With ``client_ca`` clients need one that it has signed."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self.certificate, self.key, self.client_ca = certificate, key, client_ca
        self._seen: list[bytes] = []

    def credentials(self) -> grpc.ServerCredentials:
        """Return credentials that follow the files; while these are unreadable or do not match, the old ones stay."""
        return grpc.dynamic_ssl_server_credentials(self.read(), self.read_changed, self.client_ca is not None)

    def read(self) -> Any:
        """Raises OSError."""
        key, certificate, *client_ca = self._seen = self._contents()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], *client_ca)

    def read_changed(self) -> Any:
        """Called by gRPC before each handshake, in its thread; return None if nothing has changed."""
        try:
            return self.read() if self._contents() != self._seen else None
        except OSError as error:
            _LOG.warning("the new certificate cannot be read; the old one stays in use: %s", error)
            return None

    def _contents(self) -> list[bytes]:
        return [path.read_bytes() for path in (self.key, self.certificate, self.client_ca) if path is not None]


class FailureLimit:
    """A limit of an address's failures: ``burst`` at once, then ``per_s``. It remembers the last ``most`` addresses."""

    def __init__(
        self, burst: float = 10.0, per_s: float = 1.0, most: int = 10_000, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._per_s, self._most, self._now_s = burst, per_s, most, now_s
        self._left: dict[str, tuple[float, float]] = {}  # remaining failures, and the time; the latest address last

    def take(self, address: str) -> bool:
        """Count a failure; return False if the limit was reached."""
        now_s = self._now_s()
        left, at_s = self._left.pop(address, (self._burst, now_s))
        left = min(left + (now_s - at_s) * self._per_s, self._burst)
        has_room = left >= 1.0
        self._left[address] = (left - has_room, now_s)
        if len(self._left) > self._most:
            del self._left[next(iter(self._left))]
        return has_room


SERVICE = wire.DESCRIPTOR.services_by_name["Jobs"]
RIGHTS = {  # the lowest role that may call each method
    **dict.fromkeys(("Get", "List", "Wait", "Watch", "Logs", "Artifacts", "Fetch"), AccessRole.READ),
    **dict.fromkeys(("Submit", "Upload", "Stop", "Resize"), AccessRole.SUBMIT),
}
MAX_MESSAGE = 4 * 1024 * 1024
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    ("grpc.max_send_message_length", MAX_MESSAGE),
    ("grpc.max_metadata_size", 16 * 1024),
    ("grpc.max_concurrent_streams", 1000),  # above a caller's limit, so that the caller gets our error
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.so_reuseport", 0),
)
_MAX_CALLS = 2_000
_UNARY_S = 30.0
_MAX_WAIT_S = 300.0
_LIMITS_S = {"Wait": _MAX_WAIT_S + _UNARY_S, "Resize": RESIZE_S, "Upload": UPLOAD_S}
_MAX_LISTED, _LISTED = 1_000, 100
_PART = 256 * 1024  # bytes of events in a message, before its last event
_ROW = 8  # bytes of a row's frame, at most
_MAX_TAIL = 100_000
_LOG_POLL_S = 0.3
_DENIALS_EVERY_S = 10.0


class JobServer:
    """Serves ``manager``. Without ``tokens`` every caller is ``admin``: for tests."""

    def __init__(
        self,
        manager: JobManager,
        tokens: TokenFile | None,
        root: Path,
        tls: TlsFiles | None = None,
        failures: FailureLimit | None = None,
        reader: SubmissionReader | None = None,
    ) -> None:
        self.metrics = ServiceMetrics(manager.counts, manager.ended)
        self._manager, self._tokens, self._root, self._tls = manager, tokens, root.resolve(), tls
        self._refused, self._refusals_logged = 0, FailureLimit(burst=1.0, per_s=1 / _DENIALS_EVERY_S)
        self._reader = reader or SubmissionReader()
        self._working_dirs = WorkingDirs(self._root)
        answer_at_once = {method.name for method in SERVICE.methods if not method.server_streaming} - {"Wait"}
        short = frozenset(f"/{SERVICE.full_name}/{name}" for name in answer_at_once)
        gate = Gate(lambda headers: self._identify(headers).name, self._denied, short, failures or FailureLimit())
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # each connection needs a descriptor: as many as possible
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        silent = dict.fromkeys(("server_handshake_timeout_ms", "max_connection_idle_ms"), round(_SILENT_S * 1000))
        limits = {**silent, "max_allowed_incoming_connections": hard - min(_RESERVE, hard // 2)}
        options = (*_OPTIONS, *((f"grpc.{name}", limit) for name, limit in limits.items()))
        self._server = grpc.aio.server(interceptors=[gate], options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        handlers = {method.name: self._handler(method) for method in SERVICE.methods}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE.full_name, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, address: str) -> int:
        """Listen at ``address`` (``host:port``, port 0 for any), and return the port. Raises JobConflict."""
        try:
            if self._tls is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._tls.credentials())
        except RuntimeError as error:
            raise errors.JobConflict(f"cannot listen at {address}: is another service running there?") from error
        await self._server.start()
        for name in ("", SERVICE.full_name):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return int(port)

    async def close(self, grace_s: float = 1.0) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        self._reader.close()

    def _identify(self, metadata: Any) -> Caller:
        """Return the caller of a request. Raises AccessDenied unless it has exactly one valid token."""
        if self._tokens is None:
            return Caller("admin", AccessRole.ADMIN)
        match [value for key, value in metadata or () if key == "authorization"]:
            case [str(header)] if header.startswith("Bearer "):
                return self._tokens.caller(header.removeprefix("Bearer "))
        raise AccessDenied("this request needs one header 'authorization: Bearer TOKEN'")

    def _denied(self) -> None:
        """Count a refused call, and log refusals seldom, so that their senders cannot fill the disk."""
        self._refused += 1
        if self._refusals_logged.take(""):
            _LOG.warning("refused %d calls without a valid token", self._refused)
            self._refused = 0
        self.metrics.count("any", grpc.StatusCode.UNAUTHENTICATED.name)

    # -- handlers -----------------------------------------------------------------------------------------------------

    def _handler(self, method: Any) -> grpc.RpcMethodHandler:
        """Make a handler that answers with a stream; for most methods it has one message, and a time limit."""
        name, kind = method.name, getattr(wire, method.input_type.name)
        implementation = getattr(self, f"_{name.lower()}")

        async def handle(body: bytes, context: Any) -> AsyncIterator[Any]:
            began_s = time.monotonic()
            async with self._answering(name, context) as caller:
                try:
                    request = kind.FromString(body)  # after the sender is authenticated
                except DecodeError as error:
                    raise InvalidJob([errors.ConfigError("message", f"is not a {kind.DESCRIPTOR.name}")]) from error
                if method.server_streaming:
                    await context.send_initial_metadata(((STREAM_OPEN, "1"),))
                    async for message in implementation(request, caller):
                        yield message
                    return
                async with asyncio.timeout(_LIMITS_S.get(name, _UNARY_S)):
                    answer = await implementation(request, caller)
                self.metrics.time(name, time.monotonic() - began_s)
                yield answer

        serialize = getattr(wire, method.output_type.name).SerializeToString
        return grpc.unary_stream_rpc_method_handler(handle, None, serialize)

    def _enter(self, method: str, context: Any) -> Caller:
        caller = self._identify(context.invocation_metadata())
        if method not in RIGHTS:
            raise AccessDenied(f"{method} cannot be called")
        caller.check(RIGHTS[method])
        return caller

    @asynccontextmanager
    async def _answering(self, method: str, context: Any) -> AsyncIterator[Caller]:
        """Convert every error to a status; an unexpected one goes to the log, and not to the client."""
        code, text, is_quota = grpc.StatusCode.CANCELLED, "", False
        try:
            yield self._enter(method, context)
            code = grpc.StatusCode.OK
        except DLRoverRLError as error:
            code, text = code_of(error), details_of(error)
            is_quota = isinstance(error, errors.QuotaReached)
        except TimeoutError:
            code, text = grpc.StatusCode.DEADLINE_EXCEEDED, f"{method} took too long"
        except Exception as error:  # noqa: BLE001 -- clients see no internals
            number = hashlib.sha256(repr((time.time(), error)).encode()).hexdigest()[:8]
            _LOG.error("%s failed (%s)", method, number, exc_info=error)
            code, text = grpc.StatusCode.INTERNAL, f"{method} failed: see the service's log, {number}"
        finally:
            self.metrics.count(method, code.name)
        if code is not grpc.StatusCode.OK:
            await context.abort(code, text, ((QUOTA, "1"),) if is_quota else ())

    # -- the methods of the protocol ----------------------------------------------------------------------------------

    async def _submit(self, request: wire.SubmitRequest, caller: Caller) -> wire.Job:
        operation = await self._reader.read(request, caller.name, self._root)
        for owner in self._manager.owners(operation.job.folder):
            caller.check_owner(owner)
        return job_message(await self._manager.ask(operation))

    async def _upload(self, request: wire.UploadRequest, caller: Caller) -> wire.UploadResponse:
        if not request.data:  # the first of an upload
            await asyncio.to_thread(self._working_dirs.remove_unused, self._manager.work_dirs())
        part = request.digest, caller.name, request.size, request.offset, request.data
        return wire.UploadResponse(received=await asyncio.to_thread(self._working_dirs.add_part, *part))

    async def _get(self, request: wire.GetRequest, caller: Caller) -> wire.Job:
        return job_message(self._named(request))

    async def _list(self, request: wire.ListRequest, caller: Caller) -> wire.ListResponse:
        limit = min(max(request.limit, 0) or _LISTED, _MAX_LISTED)
        every = self._manager.list_jobs(request.all)
        unfinished = sum(not record.phase.ended for record in every)
        jobs = list(_fitting(map(_bare_message, every[: unfinished + limit])))
        return wire.ListResponse(jobs=jobs, left_out=len(every) - len(jobs))

    async def _wait(self, request: wire.WaitRequest, caller: Caller) -> wire.Job:
        record = self._named(request)
        timeout_s = min(max(request.timeout_s, 0.0), _MAX_WAIT_S) if request.timeout_s == request.timeout_s else 0.0
        return job_message(await self._manager.wait(record.reference, timeout_s))

    async def _watch(self, request: wire.WatchRequest, caller: Caller) -> AsyncIterator[wire.WatchResponse]:
        name = check_name(request.name) if request.name else ""
        async for page in self._manager.watch(name, max(request.after, 0), request.follow):
            events = (event for event in page if not (request.without_steps and event.kind == "step"))
            for part in _parts(map(event_message, events)):
                yield wire.WatchResponse(events=part)

    async def _stop(self, request: wire.StopRequest, caller: Caller) -> wire.Job:
        record = self._named(request)
        caller.check_owner(record.owner)
        if record.phase.ended and "@" in request.name:  # another run may have the name
            return job_message(record)
        reason = shown(request.reason) or f"stopped by {caller.name}"
        return job_message(await self._manager.ask(StopJob(record.name, record.run, reason, request.hard)))

    async def _resize(self, request: wire.ResizeRequest, caller: Caller) -> wire.Job:
        caller.check_owner(self._named(request).owner)
        return job_message(await self._manager.resize(request.name, shown(request.role).upper(), request.num))

    async def _logs(self, request: wire.LogsRequest, caller: Caller) -> AsyncIterator[wire.LogChunk]:
        record, process = self._named(request), submissions.check_process(request.process)
        tail = min(max(request.tail, 0), _MAX_TAIL)
        while request.follow and not record.results and not record.phase.ended:
            record = await self._manager.wait(record.reference, 0.5)
        if not record.results:
            return
        reader = LogReader(_folder(record), process, tail)
        while True:
            ended = self._manager.get(record.reference).phase.ended
            await asyncio.to_thread(reader.check, record.roles if request.follow and not ended else None)
            lines = reader.read()
            while chunk := await asyncio.to_thread(next, lines, None):
                yield wire.LogChunk(process=chunk[0], text=chunk[1])
            if ended or not request.follow:
                return
            await asyncio.sleep(_LOG_POLL_S)

    async def _artifacts(self, request: wire.ArtifactsRequest, caller: Caller) -> wire.ArtifactsResponse:
        record = self._named(request)
        files = await asyncio.to_thread(_folder(record).list_files) if record.results else []
        return wire.ArtifactsResponse(files=_fitting(wire.Artifact(path=file.path, bytes=file.size) for file in files))

    async def _fetch(self, request: wire.FetchRequest, caller: Caller) -> AsyncIterator[wire.FileChunk]:
        record, parts = self._named(request), submissions.check_path(request.path)
        chunks = _folder(record).read(parts, max(request.offset, 0))
        try:
            while chunk := await asyncio.to_thread(next, chunks, b""):
                yield wire.FileChunk(data=chunk)
        finally:
            chunks.close()

    def _named(self, request: Any) -> JobRecord:
        return self._manager.get(check_name(request.name))


def _bare_message(record: JobRecord) -> wire.Job:
    """Return a message without the fields that may be large."""
    message = job_message(record)
    message.ClearField("detail")
    message.ClearField("members")
    return message


def _fitting(rows: Iterable[Any]) -> Iterator[Any]:
    """Yield the first rows of an answer, as many as fit in one message."""
    room = MAX_MESSAGE
    for row in rows:
        room -= row.ByteSize() + _ROW
        if room < 0:
            return
        yield row


def _parts(messages: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield all messages, in lists of about ``_PART`` bytes."""
    part, size = list[Any](), 0
    for message in messages:
        part.append(message)
        size += message.ByteSize()
        if size >= _PART:
            yield part
            part, size = [], 0
    if part:
        yield part


def _folder(record: JobRecord) -> RunFolder:
    return RunFolder(Path(record.results or "/nonexistent"))
