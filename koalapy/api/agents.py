"""The WebSocket on which a cluster's agent connects, and a way to ask whether it would be let in."""

import hmac
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from fastapi import APIRouter, Request, Response, WebSocket, WebSocketDisconnect
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketState

from koalapy.api.problems import problem

REFUSED = 4401
CLOSED = 4000


class AgentHub(Protocol):
    async def serve(self, cluster: str, connection: "AgentConnection") -> None: ...


class AgentConnection:
    """A WebSocket in the words of the hub."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def frames(self) -> AsyncIterator[str]:
        while True:
            try:
                yield await self._socket.receive_text()
            except (WebSocketDisconnect, RuntimeError):
                return

    async def send(self, frame: str) -> None:
        try:
            await self._socket.send_text(frame)
        except (WebSocketDisconnect, RuntimeError):
            return

    async def close(self, reason: str) -> None:
        if self._socket.application_state is not WebSocketState.DISCONNECTED:
            try:
                await self._socket.close(CLOSED, reason)
            except (WebSocketDisconnect, RuntimeError):
                return


def agents_router(hub: AgentHub, tokens: Mapping[str, str | None]) -> APIRouter:
    """The route for agents; ``tokens`` by cluster: what its agent must show."""
    router = APIRouter()

    @router.websocket("/api/v1/agents/{cluster}/connect")
    async def connect(socket: WebSocket, cluster: str) -> None:
        await socket.accept()
        connection = AgentConnection(socket)
        why = refused(socket, cluster, tokens)
        if cluster in tokens and why:
            await socket.close(REFUSED, why)
        else:
            await hub.serve(cluster, connection)

    @router.get("/api/v1/agents/{cluster}/connect", include_in_schema=False)
    async def would_connect(request: Request, cluster: str) -> Response:
        """Whether an agent that shows this token would be let in."""
        if cluster not in tokens:
            return problem(404, f"there is no cluster {cluster}", hint="add it to the daemon's configuration")
        if why := refused(request, cluster, tokens):
            hint = f"set KOALA_AGENT_TOKEN to clusters.{cluster}.token of the daemon's configuration"
            return problem(401, why, hint=hint, headers={"WWW-Authenticate": "Bearer"})
        return Response(status_code=204)

    return router


def refused(asking: HTTPConnection, cluster: str, tokens: Mapping[str, str | None]) -> str:
    """Why an agent is not let in; empty when it is."""
    expected = tokens.get(cluster)
    if expected is None:
        return f"clusters.{cluster}.token is not set in the daemon's configuration"
    return "" if _shows(asking, expected) else f"the token is not that of cluster {cluster}"


def _shows(asking: HTTPConnection, token: str) -> bool:
    shown = asking.headers.get("authorization", "").removeprefix("Bearer ").strip()
    return hmac.compare_digest(shown.encode(), token.encode())
