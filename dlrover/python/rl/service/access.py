# SPDX-License-Identifier: Apache-2.0
"""The service's door: its certificate, and the gate that every call passes, also to other services of the server.

::

    call --> token? --> places of its caller left? --> message in time? --> handler
               | no                | no
               v                   v
         UNAUTHENTICATED    RESOURCE_EXHAUSTED, as for an address that fails too often

Only the check of health needs no token. A valid token is admitted however often its address has failed: an address may
have several users.
"""

import asyncio
import inspect
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any

import grpc

from dlrover.python.rl.common.errors import AccessDenied, ServiceBusy
from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.service.jobs.submissions import CallLimit

_LOG = get_logger(__name__)

_SILENT_S = 10.0
"""Time for a connection to agree on TLS and HTTP/2, and then between its calls. A stream, such as one that watches,
keeps its connection."""

_RESERVE = 256
"""Descriptors for the store, files of runs, Ray and child processes; half of them all where that is less."""

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_MAX_CALLS, _MAX_LONG = 500, 400
_MESSAGE_S = 10.0


class Gate(grpc.aio.ServerInterceptor):
    """Each handler becomes one that reads its message itself: a call is refused before its message has come, and does
    not hold its place for long when none comes.

    Args:
        identify: the caller's name from the headers of a call. Raises AccessDenied.
        denied: called at each refusal for want of a token.
        short: full names of methods that answer at once, with one message.
    """

    def __init__(
        self,
        identify: Callable[[Any], str],
        denied: Callable[[], None],
        short: frozenset[str],
        failures: "FailureLimit",
    ) -> None:
        self._identify, self._denied, self._short, self._failures = identify, denied, short, failures
        self._calls = CallLimit(_MAX_CALLS, "calls")
        self._long_calls = CallLimit(_MAX_LONG, "streams and waits")

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:  # no such method
            return None
        is_long = handler.response_streaming and details.method not in self._short

        async def serve(messages: Any, context: Any) -> None:
            with ExitStack() as places:
                try:
                    caller = "" if details.method == _HEALTH_CHECK else self._admit(context)
                    places.enter_context(self._calls.hold(caller))
                    if is_long:
                        places.enter_context(self._long_calls.hold(caller))
                except AccessDenied as error:
                    await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
                except ServiceBusy as error:
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
                await _answer(handler, messages, context)

        return grpc.stream_stream_rpc_method_handler(serve, handler.request_deserializer, handler.response_serializer)

    def _admit(self, context: Any) -> str:
        try:
            return self._identify(context.invocation_metadata())
        except AccessDenied:
            self._denied()
            address = context.peer().rpartition(":")[0]
            if not self._failures.take(address):
                raise ServiceBusy("too many calls without a valid token: wait a second") from None
            raise


async def _answer(handler: Any, messages: Any, context: Any) -> None:
    request = messages
    if not handler.request_streaming:
        try:
            async with asyncio.timeout(_MESSAGE_S):
                request = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no message has come")
        if request is grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call has one message")
    act = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    answer = act(request, context)
    if inspect.isasyncgen(answer):
        async with aclosing(answer):
            async for message in answer:
                await context.write(message)
    elif (message := await answer) is not None:  # else it has written itself
        await context.write(message)


class TlsFiles:
    """The service's certificate, read again when its files change. With ``client_ca`` clients must show a certificate
    that it has signed."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self.certificate, self.key, self.client_ca = certificate, key, client_ca
        self._seen: list[tuple[int, int, int]] = []

    def credentials(self) -> grpc.ServerCredentials:
        """For new connections what the files hold then; while they cannot be read or do not fit, what they held
        before."""
        return grpc.dynamic_ssl_server_credentials(self.read(), self.read_changed, self.client_ca is not None)

    def read(self) -> Any:
        """Raises OSError."""
        self._seen = self._state()
        pair = (self.key.read_bytes(), self.certificate.read_bytes())
        ca = self.client_ca.read_bytes() if self.client_ca else None
        return grpc.ssl_server_certificate_configuration([pair], ca)

    def read_changed(self) -> Any:
        """Called before each handshake, in a thread of gRPC; None: nothing new."""
        try:
            return self.read() if self._state() != self._seen else None
        except OSError as error:
            _LOG.warning("the certificate stays as it is: %s", error)
            return None

    def _state(self) -> list[tuple[int, int, int]]:
        states = [path.stat() for path in (self.certificate, self.key, self.client_ca) if path is not None]
        return [(state.st_mtime_ns, state.st_ino, state.st_size) for state in states]


class FailureLimit:
    """How often an address may fail: ``burst`` times at once, then ``per_s``. Of all addresses the ``most`` that failed
    last are remembered."""

    def __init__(
        self, burst: float = 10.0, per_s: float = 1.0, most: int = 10_000, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst, self._per_s, self._most, self._now_s = burst, per_s, most, now_s
        self._left: dict[str, tuple[float, float]] = {}  # failures that are left, and when; the latest address last

    def take(self, address: str) -> bool:
        """Count a failure; False if there was none left."""
        now_s = self._now_s()
        left, at_s = self._left.pop(address, (self._burst, now_s))
        left = min(left + (now_s - at_s) * self._per_s, self._burst)
        has_room = left >= 1.0
        self._left[address] = (left - has_room, now_s)
        if len(self._left) > self._most:
            del self._left[next(iter(self._left))]
        return has_room


def connection_options() -> tuple[tuple[str, int], ...]:
    """Raise this process's limit of open files as far as it may, and return gRPC's options that fit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    silent_ms = round(_SILENT_S * 1000)
    return (
        ("grpc.server_handshake_timeout_ms", silent_ms),
        ("grpc.max_connection_idle_ms", silent_ms),
        ("grpc.max_allowed_incoming_connections", hard - min(_RESERVE, hard // 2)),
    )
