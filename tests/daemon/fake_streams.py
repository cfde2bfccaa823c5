"""The daemon's streams with fake agents, for tests of streams and of their WebSockets."""

import asyncio
import base64
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

from koalapy.daemon.agents.budgets import Budgets
from koalapy.daemon.agents.session import Session, Sessions
from koalapy.daemon.agents.streams import Stream, Streams
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.protocol import messages as wire
from koalapy.scheduler.queries import Queries

ADA = Identity("ada", Role.USER, "a test")
BOB = Identity("bob", Role.USER, "a test")
OPERATOR = Identity("olga", Role.OPERATOR, "a test")
ADMIN = Identity("amir", Role.ADMIN, "a test")
GANG = (
    Component(0, "north", 2, ComponentState.RUNNING, hosts=("10.0.0.1", "10.0.0.2")),
    Component(1, "south", 1, ComponentState.RUNNING, hosts=("10.0.1.1",)),
)
RUNNING = replace(
    Job(7, JobSpec(FlexibleRequest(3), ("sleep",), owner="ada"), 0.0),
    state=JobState.RUNNING,
    generation=1,
    attempt=Attempt(1, GANG, 0.0),
)


@dataclass
class Grid:
    """The daemon's streams with fake agents, which record the messages that they get."""

    job: Job | None = RUNNING
    interactive: str = "owner"
    reads: bool = True
    answers: bool = True
    """Whether nodes open every stream at once."""
    sent: list[Any] = field(default_factory=list)
    now: float = 0.0
    """Time of the clock, in seconds."""

    def __post_init__(self) -> None:
        self.sessions = {name: self._session(name) for name in ("north", "south")}
        sessions = SimpleNamespace(
            get=self.sessions.get, offer_message=lambda cluster, message: self._offer(message), budgets=Budgets()
        )
        queries = SimpleNamespace(job=lambda ident: self.job if self.job and ident == self.job.id else None)
        self.streams = Streams(cast(Queries, queries), cast(Sessions, sessions), clock=lambda: self.now)

    def _session(self, cluster: str) -> Session:
        hello = SimpleNamespace(interactive=self.interactive, version="0.1")
        session = SimpleNamespace(cluster=cluster, ready=True, hello=hello, offer_message=self._offer)
        return cast(Session, session)

    def _offer(self, message: Any) -> bool:
        if self.reads:
            self.sent.append(message)
        if self.answers and isinstance(message, wire.StreamOpen):
            cluster = "south" if message.token == RUNNING.token(1) else "north"
            opened = wire.StreamOpened(stream=message.stream, node="n1")
            asyncio.get_running_loop().call_soon(self.receive, cluster, opened)
        return self.reads

    async def open(self, caller: Identity = ADA, **request: Any) -> Stream:
        return await self.streams.open_stream(7, caller, **request)

    def receive(self, cluster: str, message: wire.StreamFromNode) -> None:
        self.streams.receive_message(self.sessions[cluster], message)


def output(stream: Stream, offset: int, data: bytes) -> wire.StreamData:
    return wire.StreamData(stream=stream.name, offset=offset, data=base64.b64encode(data).decode())
