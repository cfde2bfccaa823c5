"""The ``koala`` command in this process, against a server with fake services on a free port."""

import asyncio
import io
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
import uvicorn

from koalapy.api.agents import AgentConnection, agents_router
from koalapy.api.app import create_app
from koalapy.api.files import files_router
from koalapy.api.forecasts import advisor_router, forecasts_router
from koalapy.api.history import history_router
from koalapy.api.monitoring import alerts_router
from koalapy.api.network import network_router
from koalapy.api.tokens import limits_router
from koalapy.cli.jobs import waiting
from koalapy.cli.main import main
from koalapy.client.timeouts import ClientTimeouts
from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.jobs.history import History
from koalapy.daemon.observability.audit import Audit
from koalapy.model.alert import AlertRules
from tests.cli.memory import MemoryService
from tests.cli.memory_advisor import MemoryAdvisor
from tests.cli.memory_files import MemoryBundles, MemoryResults
from tests.cli.memory_network import MemoryNetwork
from tests.identities import administrators
from tests.memory_stores import memory_stores

TOKEN = "a-token-for-tests"
"""The token that commands send by default."""


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str


FAST = ClientTimeouts(wait_report_delay_s=0.01, sleep=lambda _: None)
"""Timeouts for commands that print the cause of a wait at once."""
PATIENT = ClientTimeouts(completion_s=60.0, last_report_s=60.0, wait_report_delay_s=60.0, sleep=lambda _: None)
"""Timeouts that a slow machine does not reach."""


class RejectingHub:
    def may_log(self, cluster: str) -> bool:
        return True

    def note_rejection(self, cluster: str, reason: str, remedy: str) -> None:
        pass

    async def serve_connection(self, cluster: str, connection: AgentConnection) -> None:
        raise AssertionError(f"an agent of {cluster} has connected")


@dataclass
class Server:
    """The API with fake services, served in a thread while the block runs.

    After ``end``, ``start`` serves on the same port again.
    """

    service: MemoryService = field(default_factory=MemoryService)
    bundles: MemoryBundles = field(default_factory=MemoryBundles)
    results: MemoryResults = field(default_factory=MemoryResults)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    advisor: MemoryAdvisor = field(default_factory=MemoryAdvisor)
    tokens: tuple[str, ...] = (TOKEN,)
    limits: Any = None
    """The limits served; without them the API has no route for limits."""
    identities: Identities | None = None
    """Accepted callers; by default each of the tokens is an administrator's."""
    agents: dict[str, str | None] = field(default_factory=dict)
    """The expected token of each cluster's agent."""
    history: History | None = None
    audit: Audit = field(default_factory=lambda: Audit(memory_stores().audit, time.time))
    alerts: Alerts = field(default_factory=lambda: Alerts((), AlertRules(), time.time))
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        routers = [
            agents_router(RejectingHub(), self.agents),
            network_router(self.network),
            advisor_router(self.advisor.advisor),
            forecasts_router(self.service, self.service),
            alerts_router(self.alerts, None),  # type: ignore[arg-type]
            files_router(None, self.bundles, self.results),  # type: ignore[arg-type]
            *([limits_router(self.limits)] if self.limits else []),
            *([history_router(self.history)] if self.history else []),
        ]
        identities = self.identities or administrators(*self.tokens)
        app = create_app(self.service, self.service, identities, routers, audit=self.audit)
        config = uvicorn.Config(app, lifespan="off", log_level="critical", timeout_graceful_shutdown=1)
        self._uvicorn = uvicorn.Server(config)
        # Earlier connections wait in the listener's queue.
        self._thread = threading.Thread(target=asyncio.run, args=(self._uvicorn.serve([listener]),))
        self._thread.start()

    def end(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


Koala = Callable[..., CommandResult]


@pytest.fixture
def koala(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Koala:
    """Return a function that runs a command and returns its exit code and output."""
    monkeypatch.setenv("KOALA_URL", server.url)
    monkeypatch.setenv("KOALA_TOKEN", TOKEN)
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setenv("LOGNAME", "ada")

    def run(*arguments: str, timeouts: ClientTimeouts = PATIENT) -> CommandResult:
        monkeypatch.setattr(sys, "argv", ["koala", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main(timeouts)
        out, err = capsys.readouterr()
        assert isinstance(exit_.value.code, int)
        return CommandResult(exit_.value.code, out, err)

    return run


@pytest.fixture
def interrupted_wait(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Interrupt a command at its first message about the wait; return the messages."""
    messages: list[str] = []

    def report(line: str) -> None:
        messages.append(line)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    monkeypatch.setattr(waiting, "_report_line", report)
    return messages


class StandardError:
    """Replaces standard error by a string stream, which is a terminal of the given size or none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, terminal: bool = True, *, columns: int = 20, lines: int = 24) -> io.StringIO:
        stream = io.StringIO()
        self._monkeypatch.setattr(sys, "stderr", stream)
        self._monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
        for name, value in {"TERM": "xterm", "COLUMNS": str(columns), "LINES": str(lines)}.items():
            self._monkeypatch.setenv(name, value)
        return stream


@pytest.fixture
def standard_error(monkeypatch: pytest.MonkeyPatch) -> StandardError:
    return StandardError(monkeypatch)
