# SPDX-License-Identifier: Apache-2.0
"""The HTTP endpoint of a rollout worker, to which the agents of its episodes send their requests.

It has a thread with its own event loop, which reads, checks and answers requests: slow clients take no turn of the
engine's loop, and wrong requests are answered even between calls of the trainer. A checked request is rendered and
encoded in the rollouts' loop. Each episode has its own address and an unguessable key. A body is read into memory only
after the request's key has been checked, and up to a limit; longer ones are read to their end and refused."""

import asyncio
import hmac
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dlrover.python.rl.common.log import get_logger
from dlrover.python.rl.recipe.rollout.agents import AgentSession
from dlrover.python.rl.recipe.rollout.chat_api import (
    MODEL,
    Answer,
    ApiError,
    Kind,
    parse_ask,
    write_answer,
    write_chunks,
)
from dlrover.python.rl.runtime.http import ThreadServer, listen

_LOG = get_logger(__name__)

_BODY_BYTES, _ALL_BODIES_BYTES = 4 << 20, 256 << 20
_PATIENCE_S = 30.0  # for headers, for a body, and for a client that reads


@dataclass(eq=False)
class _Episode:
    session: AgentSession
    key: str
    open: int = 0  # requests


class _Answering(StreamingResponse):
    """An answer to a request, which stays open until the client has read it or has left."""

    def __init__(self, episode: _Episode, chunks: Iterable[bytes], media_type: str, headers: dict[str, str]) -> None:
        super().__init__(_send_later(chunks), media_type=media_type, headers=headers)
        self._episode = episode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._episode.open -= 1


class AgentEndpoint:
    """Serves sessions at ``host``, whose address the agents use."""

    def __init__(self, host: str = "127.0.0.1", patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._episodes: dict[str, _Episode] = {}
        self._numbers = itertools.count()
        self._body_bytes = 0
        routes = [
            Route("/episodes/{episode}/v1/chat/completions", partial(self._answer, "chat"), methods=["POST"]),
            Route("/episodes/{episode}/v1/completions", partial(self._answer, "text"), methods=["POST"]),
            Route("/episodes/{episode}/v1/models", self._models, methods=["GET"]),
        ]
        refusals = {ApiError: _refuse, HTTPException: _refuse_http, Exception: _report_fault}
        app = Starlette(routes=routes, exception_handlers=refusals)
        listener = listen(host, 0, "the agents' endpoint")
        shown = f"[{host}]" if ":" in host else host
        self._address = f"http://{shown}:{listener.getsockname()[1]}/episodes"
        self._server = ThreadServer(app, listener, patience_s)

    def open(self, session: AgentSession) -> tuple[str, str]:
        number, key = f"{next(self._numbers)}", f"sk-{secrets.token_urlsafe(32)}"
        self._episodes[number] = _Episode(session, key)
        return f"{self._address}/{number}/v1", key

    def end(self, address: tuple[str, str]) -> None:
        self._episodes.pop(address[0].split("/")[-2], None)

    def close(self) -> None:
        self._server.close()

    def _find(self, request: Request) -> _Episode:
        episode = self._episodes.get(request.path_params["episode"])
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        if episode is None or not hmac.compare_digest(key.encode(), episode.key.encode()):
            raise ApiError(401, "this key does not open this episode, or the episode has ended", "invalid_api_key")
        return episode

    async def _models(self, request: Request) -> Response:
        self._find(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "dlrover-rl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _answer(self, kind: Kind, request: Request) -> Response:
        try:
            episode = self._find(request)
            if episode.open >= episode.session.most_open:
                message = f"the episode has {episode.open} open requests: wait for their answers"
                raise ApiError(429, message, "rate_limit_exceeded", retry=True)
        except ApiError:
            await self._read(request, 0)  # a client may read no answer before it has sent its body
            raise
        episode.open += 1
        try:
            ask = parse_ask(kind, await self._read(request, _BODY_BYTES))
            answer = await _ask_session(episode.session, ask)
            headers = {f"x-ratelimit-{name}": str(value) for name, value in answer.limits.items()}
            if ask.stream:
                return _Answering(episode, write_chunks(answer), "text/event-stream", headers)
            whole = json.dumps(write_answer(answer)).encode()
            return _Answering(episode, [whole], "application/json", {**headers, "content-length": str(len(whole))})
        except BaseException:
            episode.open -= 1
            raise

    async def _read(self, request: Request, limit: int) -> bytes:
        """Return the body. Raises ApiError if it is longer than the limit, which is 0 for a body that is not wanted,
        late, or one too many in memory."""
        body = bytearray()
        size = 0
        try:
            async with asyncio.timeout(self._patience_s):
                async for chunk in request.stream():
                    size += len(chunk)
                    self._keep_chunk(body, chunk if size <= limit else b"")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._patience_s:g} s", "timeout") from None
        except ClientDisconnect:
            raise ApiError(400, "the client has left") from None
        finally:
            self._body_bytes -= len(body)
        if 0 < limit < size:
            raise ApiError(413, f"the body has {size} bytes, {limit} at most", "request_too_large")
        return bytes(body)

    def _keep_chunk(self, body: bytearray, chunk: bytes) -> None:
        if self._body_bytes + len(chunk) > _ALL_BODIES_BYTES:
            raise ApiError(503, "other requests fill the memory for bodies", "overloaded", retry=True)
        self._body_bytes += len(chunk)
        body += chunk


async def _ask_session(session: AgentSession, ask: Any) -> Answer:
    """Pass a request on to the rollouts' event loop."""
    pending = asyncio.run_coroutine_threadsafe(session.answer(ask), session.loop)
    try:
        return await asyncio.wrap_future(pending)  # waits: until the episode's deadline
    except ApiError:
        raise
    except asyncio.CancelledError:
        if not pending.cancelled():
            raise
        raise ApiError(503, "the rollout worker is ending", "shutting_down") from None


async def _send_later(chunks: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks; each is sent when the client has read most of the earlier ones, and so is the end."""
    for chunk in chunks:
        yield chunk


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "it is registered for these"
    headers = {"x-should-retry": "true" if error.retry else "false"}
    return JSONResponse({"error": error.body}, error.status, headers=headers)


async def _refuse_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "it is registered for these"
    return await _refuse(
        request, ApiError(error.status_code, f"{request.method} {request.url.path[:200]}: {error.detail}")
    )


async def _report_fault(request: Request, error: Exception) -> Response:
    """Answer a request that failed; the server then logs the error with its traceback."""
    return await _refuse(request, ApiError(500, f"{type(error).__name__}: {error}"[:500], "internal_error"))
