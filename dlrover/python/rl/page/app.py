# SPDX-License-Identifier: Apache-2.0
"""The server of the page: JSON from the folders of runs, server-sent events, and the files of the page itself.

All addresses are relative, so the page works behind a tunnel or a proxy under any path. On loopback the ``Host`` header
must name loopback, which keeps out pages whose names were rebound to it.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from dlrover.python.rl.common.errors import CallError, DLRoverRLError
from dlrover.python.rl.common.sockets import is_loopback
from dlrover.python.rl.page.login import LoginGate
from dlrover.python.rl.page.run_data import Plain, RunFolders, RunView, number_in

STATIC = files("dlrover.python.rl.page") / "static"
_KINDS = {".js": "text/javascript", ".css": "text/css"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)

_POLL_S, _PING_S = 1.0, 15.0
_MOST_STREAMS = 50

Query: TypeAlias = Mapping[str, str]


def _of_run(call: Callable[[RunView, Query], Plain]) -> Callable[[RunFolders, Query], Plain]:
    return lambda runs, query: call(runs.get(query.get("id", ".")), query)


def _events(run: RunView, query: Query) -> Plain:
    after, process, search = (query.get(name, "") for name in ("after", "process", "q"))
    return run.events(after, process, search, number_in(query, "limit", 500))


ANSWERS: dict[str, Callable[[RunFolders, Query], Plain]] = {
    "runs": lambda runs, query: {"runs": runs.rows(), "now_s": time.time()},
    "diff": lambda runs, query: runs.diff([unquote(each) for each in query.get("ids", "").split(",") if each]),
    "run": _of_run(lambda run, query: run.overview()),
    "metrics": _of_run(lambda run, query: run.metrics()),
    "curves": _of_run(
        lambda run, query: run.curves(
            list(filter(None, query.get("names", "").split(","))), number_in(query, "points", 1000)
        )
    ),
    "marks": _of_run(lambda run, query: run.marks()),
    "step": _of_run(lambda run, query: run.step(number_in(query, "step"))),
    "samples": _of_run(lambda run, query: run.samples(query)),
    "evaluations": _of_run(lambda run, query: run.evaluations(query.get("prompt", ""))),
    "events": _of_run(_events),
}
"""The answers of ``api/<name>``, each a function of the runs and the query."""


def create_app(
    runs: RunFolders,
    check: Callable[[str], object] | None = None,
    may_fail: Callable[[str], bool] = lambda address: True,
    names: Collection[str] = (),
) -> Starlette:
    """Return the application, behind :class:`~dlrover.python.rl.page.login.LoginGate` if there is a ``check`` of
    tokens. On loopback the ``Host`` header may also be one of the ``names`` of proxies."""
    streams = asyncio.BoundedSemaphore(_MOST_STREAMS)

    async def index(request: Request) -> Response:
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html")

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        kind = _KINDS.get(Path(name).suffix)
        if kind is None or not (STATIC / Path(name).name).is_file():
            return JSONResponse({"error": "there is no such file"}, 404)
        content = (STATIC / Path(name).name).read_bytes()
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    async def answer(request: Request) -> Response:
        name, query = request.path_params["name"], dict(request.query_params)
        return await run_in_threadpool(_answer, runs, name, query)

    async def trace_file(request: Request) -> Response:
        first, _, last = request.query_params.get("steps", "").partition(":")
        steps = [number_in({"steps": text}, "steps") for text in (first, last or first)]
        run = await run_in_threadpool(runs.get, request.query_params.get("id", "."))
        content = await run_in_threadpool(run.trace, *steps)
        name = f"steps-{steps[0]}-{steps[1]}.pftrace"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(content, media_type="application/octet-stream", headers=headers)

    async def stream(request: Request) -> Response:
        run = await run_in_threadpool(runs.get, request.query_params.get("id", "."))
        if streams.locked():
            return JSONResponse({"error": f"{_MOST_STREAMS} pages are open already"}, 503)
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(_changes(run, streams), media_type="text/event-stream", headers=headers)

    routes = [
        Route("/", index),
        Route("/static/{name}", asset),
        Route("/api/trace", trace_file),
        Route("/api/stream", stream),
        Route("/api/{name}", answer),
    ]
    gate = [Middleware(LoginGate, check=check, may_fail=may_fail)] if check is not None else []
    layers = [Middleware(PageHeaders, names=names), *gate, Middleware(GZipMiddleware, minimum_size=2000)]
    return Starlette(routes=routes, middleware=layers, exception_handlers={DLRoverRLError: _refuse})


def _answer(runs: RunFolders, name: str, query: Query) -> Response:
    if name not in ANSWERS:
        return JSONResponse({"error": f"there is no 'api/{name}'"}, 404)
    try:
        return JSONResponse(ANSWERS[name](runs, query))
    except DLRoverRLError:
        raise
    except Exception as error:  # noqa: BLE001 -- a job may write anything to its folder
        return JSONResponse({"error": f"its files cannot be shown: {type(error).__name__}: {error}"}, 500)


async def _changes(run: RunView, streams: asyncio.BoundedSemaphore) -> AsyncIterator[bytes]:
    """Yield an event whenever the run has changed, and a ping when it has not for a while."""
    before: Plain | None = None
    sent_s = 0.0
    async with streams:
        while True:
            now = await run_in_threadpool(run.version)
            if now != before:
                before, sent_s = now, time.monotonic()
                yield f"event: change\ndata: {json.dumps(now)}\n\n".encode()
            elif time.monotonic() - sent_s > _PING_S:
                sent_s = time.monotonic()
                yield b"event: ping\ndata: {}\n\n"
            await asyncio.sleep(_POLL_S)


async def _refuse(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400 if isinstance(error, CallError) else 404)


class PageHeaders:
    """Refuses requests that a page of another site caused, and adds the headers that confine this one."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "").rpartition(":")[0].strip("[]") or headers.get(b"host", "")
        server = (scope.get("server") or ("", 0))[0]
        is_foreign = headers.get(b"sec-fetch-site", "none") not in ("none", "same-origin")
        is_rebound = is_loopback(server) and not is_loopback(host) and host not in self._names
        if is_rebound or (is_foreign and scope["path"].startswith("/api")):
            refusal = JSONResponse({"error": f"this page is not served under the name '{host[:100]}'"}, 403)
            await refusal(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = {b"content-security-policy": POLICY, b"x-content-type-options": "nosniff",
                         b"referrer-policy": "no-referrer"}  # fmt: skip
                message["headers"] = [*message["headers"], *((name, text.encode()) for name, text in extra.items())]
            await send(message)

        with suppress(ConnectionError):
            await self._app(scope, receive, send_with_headers)
