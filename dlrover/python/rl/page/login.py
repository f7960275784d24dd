# SPDX-License-Identifier: Apache-2.0
"""The door of a page with tokens: a log-in form, a cookie, or ``Authorization: Bearer TOKEN``."""

from collections.abc import Callable
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dlrover.python.rl.common.errors import AccessDenied

_COOKIE, _AGE_S = "dlrover_rl_token", 7 * 24 * 3600
_LONGEST = 4096  # bytes of a form

_FORM = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Log in - DLRover RL</title>
<meta name="viewport" content="width=device-width,initial-scale=1"></head><body><main><h1>DLRover RL</h1>
<form method="post" action="login"><p><label for="token">Token</label></p>
<p><input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button>Log in</button></p><p role="alert">{message}</p></form>
<p>An administrator makes a token with <code>dlrover-rl token add NAME --role read</code>.</p></main></body></html>"""


class LoginGate:
    """Lets requests with a valid token pass. ``check`` raises AccessDenied for any other; ``may_fail`` counts a failure
    of a client's address and returns False once there were too many."""

    def __init__(self, app: ASGIApp, check: Callable[[str], object], may_fail: Callable[[str], bool]) -> None:
        self._app, self._check, self._may_fail = app, check, may_fail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        name = request.url.path.rpartition("/")[2]
        if request.method == "POST" and name == "login":
            answer = await self._log_in(request)
        elif self._is_valid(self._token_of(request)):
            await self._app(scope, receive, send)
            return
        elif name in ("", "login"):
            answer = HTMLResponse(_FORM.format(message=""), 401)
        else:
            answer = JSONResponse({"error": "this page needs a valid token: log in again"}, 401)
        await answer(scope, receive, send)

    async def _log_in(self, request: Request) -> Response:
        client = request.client.host if request.client else ""
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LONGEST:
                return JSONResponse({"error": "a log-in is shorter"}, 413)
        token = parse_qs(body.decode("latin-1")).get("token", [""])[0].strip()
        if not self._is_valid(token):
            if not self._may_fail(client):
                return HTMLResponse(_FORM.format(message="Too many wrong tokens: wait a second."), 429)
            return HTMLResponse(_FORM.format(message="That token is not valid."), 401)
        answer = RedirectResponse(".", 303)
        is_safe = request.url.scheme == "https"
        answer.set_cookie(_COOKIE, token, max_age=_AGE_S, httponly=True, samesite="strict", secure=is_safe)
        return answer

    def _is_valid(self, token: str) -> bool:
        try:
            self._check(token)
        except AccessDenied:
            return False
        return True

    @staticmethod
    def _token_of(request: Request) -> str:
        header = request.headers.get("authorization", "")
        return header.removeprefix("Bearer ") if header.startswith("Bearer ") else request.cookies.get(_COOKIE, "")
