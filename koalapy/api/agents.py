"""The WebSocket on which a cluster's agent connects, and a way to ask whether it would be let in."""

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
from koalapy.daemon.agents.hub import Hub
from koalapy.daemon.auth.pace import AgentAttempts
from koalapy.model.errors import ProblemCode

log = structlog.get_logger()

CLOSED = 4000
MIN_RANDOM_LENGTH, MIN_RANDOM_SIGNS = 32, 8
"""Characters of a token that cannot be guessed, and how many different ones are among them."""
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
                await self._socket.close(CLOSED, reason.encode()[:MAX_REASON_SIZE].decode(errors="ignore"))
            except (WebSocketDisconnect, RuntimeError):
                return


def agents_router(hub: Hub, tokens: Tokens, attempts: AgentAttempts | None = None) -> APIRouter:
    """The route for agents; ``tokens`` by cluster: what its agent must show."""
    attempts = attempts or AgentAttempts()
    router = APIRouter()

    @router.websocket("/api/v1/agents/{cluster}/connect")
    async def connect(socket: WebSocket, cluster: str) -> None:
        if why := refusal(socket, cluster, tokens, attempts):
            log.warning("agent refused", action="agent-rejected", cluster=cluster[:100], error=why.reason)
            if cluster in tokens and why.code is not ProblemCode.TOO_MANY_WRONG_TOKENS:
                hub.note_rejection(cluster, why.reason, why.hint)
            # By HTTP, which is over then: for the end of a WebSocket we would wait, and for any number of strangers'.
            await socket.send_denial_response(why.answer())
            return
        await socket.accept()
        await hub.serve(cluster, AgentConnection(socket))

    @router.get("/api/v1/agents/{cluster}/connect", include_in_schema=False)
    async def would_connect(request: Request, cluster: str) -> Response:
        """Whether an agent that shows this token would be let in."""
        why = refusal(request, cluster, tokens, attempts)
        return why.answer() if why else Response(status_code=204)

    return router


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why an agent is not let in, and what to do about it."""

    code: ProblemCode
    reason: str
    hint: str
    retry_after: float = 0.0
    """Seconds."""

    def answer(self) -> Response:
        headers = {"WWW-Authenticate": "Bearer"} if self.code is ProblemCode.NOT_LOGGED_IN else None
        if self.retry_after:
            headers = {"Retry-After": str(ceil(self.retry_after))}
        return problem(self.code, self.reason, field="cluster", hint=self.hint, headers=headers)


def refusal(asking: HTTPConnection, cluster: str, tokens: Tokens, attempts: AgentAttempts) -> Rejection | None:
    """Return why a request of an agent's route is refused: only agents of configured clusters come in, by their token.

    A cluster that left the configuration is none, also while it still holds components: nobody could say whose agent
    it is that connects in its name.
    """
    if cluster not in tokens:
        return Rejection(
            ProblemCode.CLUSTER_NOT_FOUND,
            f"there is no cluster {cluster[:100]}",
            "add it to the daemon's configuration",
        )
    expected, address = tokens[cluster], client_address(asking.scope)
    wait = attempts.wait(cluster, address)
    shown = asking.headers.get("authorization", "").removeprefix("Bearer ").strip()
    # Shorter than what ``openssl rand -hex 24`` or the daemon makes: people think of such.
    is_guessable = len(expected or "") < MIN_RANDOM_LENGTH or len(set(expected or "")) < MIN_RANDOM_SIGNS
    if expected and not (wait and is_guessable) and hmac.compare_digest(shown.encode(), expected.encode()):
        attempts.admitted(cluster, address)
        return None
    if wait:
        reason = f"too many wrong tokens of the agent of {cluster} were shown, the last from {address}"
        hint = "see that no agent shows an old one; a token made by openssl rand -hex 24 is taken all the same"
        return Rejection(ProblemCode.TOO_MANY_WRONG_TOKENS, reason, hint, wait)
    attempts.failed(cluster, address)
    reason = f"the token is not that of cluster {cluster}"
    if not expected:
        reason = f"clusters.{cluster}.token is not set in the daemon's configuration"
    hint = f"set KOALA_AGENT_TOKEN to clusters.{cluster}.token of the daemon's configuration"
    return Rejection(ProblemCode.NOT_LOGGED_IN, reason, hint)
