# SPDX-License-Identifier: Apache-2.0
"""What every call passes, those of services beside ours too.

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
from collections.abc import Callable
from contextlib import ExitStack, aclosing
from typing import Any

import grpc

from dlrover.python.rl.common.errors import AccessDenied, ServiceBusy
from dlrover.python.rl.service.access.limits import CallLimit, FailureLimit

_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_MAX_CALLS, _MAX_LONG = 500, 400
_MESSAGE_S = 10.0


class Gate(grpc.aio.ServerInterceptor):
    """Each handler becomes one that reads its message itself: a call is refused before its message has come, and does
    not hold its place for long when none comes.

    Args:
        identify: the caller's name from the headers of a call. Raises AccessDenied.
        denied: told of each refusal for want of a token.
        waiting: full names of methods that answer late, beside those that stream.
    """

    def __init__(
        self,
        identify: Callable[[Any], str],
        denied: Callable[[], None],
        waiting: frozenset[str],
        failures: FailureLimit,
    ) -> None:
        self._identify, self._denied, self._waiting, self._failures = identify, denied, waiting, failures
        self._calls = CallLimit(_MAX_CALLS, "calls")
        self._long_calls = CallLimit(_MAX_LONG, "streams and waits")

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:  # no such method
            return None
        is_long = handler.response_streaming or details.method in self._waiting

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
    request = messages if handler.request_streaming else await _message(context)
    act = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    answer = act(request, context)
    if inspect.isasyncgen(answer):
        async with aclosing(answer):
            async for message in answer:
                await context.write(message)
    elif (message := await answer) is not None:  # else it has written itself
        await context.write(message)


async def _message(context: Any) -> Any:
    message = grpc.aio.EOF
    try:
        async with asyncio.timeout(_MESSAGE_S):
            message = await context.read()
    except TimeoutError:
        await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no message has come")
    if message is grpc.aio.EOF:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call has one message")
    return message
