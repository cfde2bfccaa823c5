"""How many requests are served at a time, and how long their bodies may take: agents always find room, and no user
takes it from all others."""

import asyncio
from collections import Counter

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api.access import AGENTS, identity_of
from koalapy.api.guard import UPLOADS
from koalapy.api.problems import problem
from koalapy.model.errors import ProblemCode

BODY_TIMEOUT = 60.0
"""Seconds; large ones, for which there is a route of their own, may take as long as they go on."""

SHARE = 4
"""One in so many of all requests at a time may be one user's: streams, for one, last as long as he likes."""


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
            await problem(ProblemCode.OVERLOADED, detail, hint="try again", headers={"Retry-After": "1"})(
                scope, receive, send
            )
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


class Shares:
    """Answers 429 to a user who has his share of all requests under way; it stands behind what knows who asks."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._most = max(1, max_requests // SHARE)
        self._served: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        identity = identity_of(scope)
        if identity is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        user = identity.user
        if self._served[user] >= self._most:
            detail = f"{self._served[user]} requests of {user} are being served, and no user has more at a time"
            hint = "end some that follow or wait for something"
            await problem(ProblemCode.TOO_MANY_REQUESTS, detail, hint=hint, headers={"Retry-After": "1"})(
                scope, receive, send
            )
            return
        self._served[user] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._served[user] -= 1
            if not self._served[user]:
                del self._served[user]
