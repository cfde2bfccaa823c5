"""The WebSocket of a cluster's agent, and a route that checks its token without connecting."""

import hmac
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from math import ceil

import structlog
from fastapi import APIRouter, Request, Response, WebSocket, WebSocketDisconnect
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketState

from koalapy.api.middleware import client_address
from koalapy.api.problems import problem
from koalapy.daemon.agents.budgets import NO_CLUSTER
from koalapy.daemon.agents.hub import Hub
from koalapy.daemon.auth.pace import Pace
from koalapy.model.errors import ProblemCode

log = structlog.get_logger()

CLOSE_CODE = 4000
MIN_RANDOM_LENGTH, MIN_RANDOM_CHARACTERS = 32, 8
"""Minimum length, and minimum number of different characters, of a token that cannot be guessed."""
MAX_REASON_BYTES = 123
Tokens = Mapping[str, str | None]
"""Tokens of the configured clusters' agents, None where the configuration sets none."""


class AgentConnection:
    """A WebSocket as a connection of the hub."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def frames(self) -> AsyncIterator[str]:
        """Yield the texts that the agent sends, until the connection ends. A binary frame is an empty text."""
        while True:
            try:
                yield await self._socket.receive_text()
            except KeyError:  # it has bytes: the hub rejects an empty text like any other invalid one
                yield ""
            except (WebSocketDisconnect, RuntimeError):
                return

    async def send(self, frame: str) -> None:
        """Send a text to the agent; do nothing if the connection has ended."""
        try:
            await self._socket.send_text(frame)
        except (WebSocketDisconnect, RuntimeError):
            return

    async def close(self, reason: str) -> None:
        """Close the connection with a reason, cut to the length that WebSockets allow."""
        if self._socket.application_state is not WebSocketState.DISCONNECTED:
            try:
                await self._socket.close(CLOSE_CODE, reason.encode()[:MAX_REASON_BYTES].decode(errors="ignore"))
            except (WebSocketDisconnect, RuntimeError):
                return


def agents_router(hub: Hub, tokens: Tokens, attempts: Pace | None = None) -> APIRouter:
    """Return the routes on which agents connect with the tokens of their clusters."""
    attempts = attempts or Pace()
    router = APIRouter()

    @router.websocket("/api/v1/agents/{cluster}/connect")
    async def connect(socket: WebSocket, cluster: str) -> None:
        """Authenticate an agent and serve its connection until it ends, or send an HTTP response that rejects it."""
        if rejection := check_agent_token(socket, cluster, tokens, attempts):
            if hub.may_log(NO_CLUSTER):
                log.warning("agent rejected", action="agent-rejected", cluster=cluster[:100], error=rejection.reason)
            if cluster in tokens and rejection.code is not ProblemCode.TOO_MANY_WRONG_TOKENS:
                hub.note_rejection(cluster, rejection.reason, rejection.hint)
            # An HTTP response ends the connection; an accepted WebSocket would wait for the client to close it.
            await socket.send_denial_response(rejection.to_response())
            return
        if not hub.accepts_connection(cluster):
            await socket.send_denial_response(TOO_MANY_CONNECTIONS.to_response())
            return
        await socket.accept()
        await hub.serve_connection(cluster, AgentConnection(socket))

    @router.get("/api/v1/agents/{cluster}/connect", include_in_schema=False)
    async def would_connect(request: Request, cluster: str) -> Response:
        """Check the token of an agent: 204 if it could connect."""
        rejection = check_agent_token(request, cluster, tokens, attempts)
        return rejection.to_response() if rejection else Response(status_code=204)

    return router


@dataclass(frozen=True, slots=True)
class Rejection:
    """The reason for which an agent may not connect, with a hint."""

    code: ProblemCode
    reason: str
    hint: str
    retry_after_s: float = 0.0

    def to_response(self) -> Response:
        """Return the problem response, with the wait before the next try if there is one."""
        headers = {"WWW-Authenticate": "Bearer"} if self.code is ProblemCode.NOT_LOGGED_IN else None
        if self.retry_after_s:
            headers = {"Retry-After": str(ceil(self.retry_after_s))}
        return problem(self.code, self.reason, field="cluster", hint=self.hint, headers=headers)


TOO_MANY_CONNECTIONS = Rejection(
    ProblemCode.BUSY, "the agent of this cluster connects too often", "find out why its connections end", 5.0
)


def check_agent_token(connection: HTTPConnection, cluster: str, tokens: Tokens, attempts: Pace) -> Rejection | None:
    """Return None if a request shows the token of a configured cluster, else the reason for its rejection.

    The agent of a cluster that was removed from the configuration is rejected even while jobs still run there.
    """
    if cluster not in tokens:
        return Rejection(
            ProblemCode.CLUSTER_NOT_FOUND,
            f"there is no cluster {cluster[:100]}",
            "add it to the daemon's configuration",
        )
    expected, address = tokens[cluster], client_address(connection.scope)
    wait = attempts.block_time(address)
    token = connection.headers.get("authorization", "").removeprefix("Bearer ").strip()
    # Random tokens of ``openssl rand -hex 24`` or the daemon are longer and more varied.
    is_guessable = len(expected or "") < MIN_RANDOM_LENGTH or len(set(expected or "")) < MIN_RANDOM_CHARACTERS
    if expected and not (wait and is_guessable) and hmac.compare_digest(token.encode(), expected.encode()):
        return None
    if wait:
        reason = f"too many wrong tokens were sent from {address}, the last for cluster {cluster}"
        hint = "stop the agent that uses an old token; a token made by openssl rand -hex 24 is accepted at once"
        return Rejection(ProblemCode.TOO_MANY_WRONG_TOKENS, reason, hint, wait)
    attempts.count_failure(address)
    reason = f"the token is not that of cluster {cluster}"
    if not expected:
        reason = f"clusters.{cluster}.token is not set in the daemon's configuration"
    hint = f"set KOALA_AGENT_TOKEN to clusters.{cluster}.token of the daemon's configuration"
    return Rejection(ProblemCode.NOT_LOGGED_IN, reason, hint)
