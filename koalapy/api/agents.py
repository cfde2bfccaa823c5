"""The WebSocket on which a cluster's agent connects, and a way to ask whether it would be let in."""

import hmac
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import structlog
from fastapi import APIRouter, Request, Response, WebSocket, WebSocketDisconnect
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketState

from koalapy.api.problems import problem
from koalapy.service.hub import Hub

log = structlog.get_logger()

CLOSED = 4000
UNAUTHORIZED = 401
MAX_REASON_SIZE = 123
"""Bytes."""
Tokens = Mapping[str, str | None]
"""Of each configured cluster's agent."""


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
                await self._socket.close(CLOSED, _short(reason))
            except (WebSocketDisconnect, RuntimeError):
                return


def agents_router(hub: Hub, tokens: Tokens) -> APIRouter:
    """The route for agents; ``tokens`` by cluster: what its agent must show."""
    router = APIRouter()

    @router.websocket("/api/v1/agents/{cluster}/connect")
    async def connect(socket: WebSocket, cluster: str) -> None:
        if why := refusal(socket, cluster, tokens):
            log.warning("agent refused", action="agent-rejected", cluster=cluster[:100], error=why.reason)
            if cluster in tokens:
                hub.note_rejection(cluster, why.reason, why.hint)
            # By HTTP, which is over then: for the end of a WebSocket we would wait, and for any number of strangers'.
            await socket.send_denial_response(why.answer())
            return
        await socket.accept()
        await hub.serve(cluster, AgentConnection(socket))

    @router.get("/api/v1/agents/{cluster}/connect", include_in_schema=False)
    async def would_connect(request: Request, cluster: str) -> Response:
        """Whether an agent that shows this token would be let in."""
        why = refusal(request, cluster, tokens)
        return why.answer() if why else Response(status_code=204)

    return router


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an agent is not let in, and what to do about it."""

    status: int
    reason: str
    hint: str

    def answer(self) -> Response:
        headers = {"WWW-Authenticate": "Bearer"} if self.status == UNAUTHORIZED else None
        return problem(self.status, self.reason, field="cluster", hint=self.hint, headers=headers)


def refusal(asking: HTTPConnection, cluster: str, tokens: Tokens) -> Refusal | None:
    """Decides for every route of agents: only those of configured clusters come in, and only with their token.

    A cluster that left the configuration is none, also while it still holds components: nobody could say whose agent
    it is that connects in its name.
    """
    if cluster not in tokens:
        return Refusal(404, f"there is no cluster {cluster[:100]}", "add it to the daemon's configuration")
    expected = tokens[cluster]
    if expected and _shows(asking, expected):
        return None
    reason = f"the token is not that of cluster {cluster}"
    if not expected:
        reason = f"clusters.{cluster}.token is not set in the daemon's configuration"
    hint = f"set KOALA_AGENT_TOKEN to clusters.{cluster}.token of the daemon's configuration"
    return Refusal(UNAUTHORIZED, reason, hint)


def _shows(asking: HTTPConnection, token: str) -> bool:
    shown = asking.headers.get("authorization", "").removeprefix("Bearer ").strip()
    return hmac.compare_digest(shown.encode(), token.encode())


def _short(reason: str) -> str:
    """As much of a reason as a closing frame takes."""
    return reason.encode()[:MAX_REASON_SIZE].decode(errors="ignore")
