"""The WebSocket on which a cluster's agent connects."""

import hmac
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from starlette.websockets import WebSocketState

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
        expected = tokens.get(cluster)
        if cluster in tokens and expected is None:
            await socket.close(REFUSED, f"clusters.{cluster}.token is not set in the daemon's configuration")
        elif cluster in tokens and not _shows(socket, expected or ""):
            await socket.close(REFUSED, f"the token is not that of cluster {cluster}")
        else:
            await hub.serve(cluster, connection)

    return router


def _shows(socket: WebSocket, token: str) -> bool:
    shown = socket.headers.get("authorization", "").removeprefix("Bearer ").strip()
    return hmac.compare_digest(shown.encode(), token.encode())
