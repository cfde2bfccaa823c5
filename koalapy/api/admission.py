"""How many requests are served at a time, and how long their bodies may take: agents always find room."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api.access import AGENTS
from koalapy.api.guard import UPLOADS
from koalapy.api.problems import problem

BODY_TIMEOUT = 60.0
"""Seconds; large ones, for which there is a route of their own, may take as long as they go on."""


class Admission:
    """Answers 503 to a user's request beyond so many at a time, and 408 to a body that does not come to its end."""

    def __init__(self, app: ASGIApp, max_requests: int, body_timeout: float = BODY_TIMEOUT) -> None:
        self._app = app
        self._max_requests = max_requests
        self._body_within = body_timeout
        self._served = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(AGENTS):
            await self._app(scope, receive, send)
            return
        if self._served >= self._max_requests:
            detail = f"{self._served} requests are being served, and no more are at a time"
            await problem(503, detail, hint="try again", headers={"Retry-After": "1"})(scope, receive, send)
            return
        self._served += 1
        try:
            await self._app(scope, receive if scope["path"] == UPLOADS else self._timely(receive), send)
        finally:
            self._served -= 1

    def _timely(self, receive: Receive) -> Receive:
        deadline: float | None = asyncio.get_running_loop().time() + self._body_within

        async def timely() -> Message:
            nonlocal deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                # FastAPI passes this one on, and takes any other error for broken JSON.
                raise HTTPException(408, f"the body was not complete within {self._body_within:g} seconds") from None
            if not message.get("more_body", False):
                deadline = None  # what comes now is the end of the connection, whenever that is
            return message

        return timely
