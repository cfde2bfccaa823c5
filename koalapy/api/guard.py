"""What stands before every route: who may come in, and how large a body may be."""

import hmac
from collections.abc import Sequence

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api.problems import problem

AGENTS = "/api/v1/agents/"
UPLOADS = "/api/v1/bundles"
"""Where large bodies go; that route has a limit of its own."""
LARGEST_BODY = 1024 * 1024
"""Bytes."""

TOO_LARGE = f"the body is larger than {LARGEST_BODY} bytes; put large data into files that the job reads"


class Guard:
    """Lets in who shows a token, and no body that is too large, whether its length was announced or not."""

    def __init__(self, app: ASGIApp, tokens: Sequence[str]) -> None:
        self._app = app
        self._tokens = [token.encode() for token in tokens]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The agents' routes look at tokens of their own.
        if scope["type"] != "http" or scope["path"].startswith(AGENTS):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._tokens and scope["path"].startswith("/api/") and not self._knows(headers):
            await _unauthorized()(scope, receive, send)
            return
        if scope["path"] == UPLOADS:
            await self._app(scope, receive, send)
            return
        announced = headers.get("content-length", "0")
        if not announced.isdecimal() or int(announced[:20]) > LARGEST_BODY:
            await problem(413, TOO_LARGE, field="body")(scope, receive, send)
            return
        await self._app(scope, _measured(receive), send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        # Every token is compared, so that the time taken tells nothing about them.
        matches = [hmac.compare_digest(shown.strip().encode(), token) for token in self._tokens]
        return scheme.lower() == "bearer" and any(matches)


def _unauthorized() -> JSONResponse:
    return problem(
        401, "no valid token was shown", hint="set KOALA_TOKEN, or send Authorization: Bearer TOKEN",
        headers={"WWW-Authenticate": "Bearer"},
    )  # fmt: skip


def _measured(receive: Receive) -> Receive:
    """Receive a body, but for one that grows too large without having said so."""
    size = 0

    async def measured() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > LARGEST_BODY:
            # FastAPI passes this one on, and takes any other error for broken JSON.
            raise HTTPException(413, TOO_LARGE)
        return message

    return measured
