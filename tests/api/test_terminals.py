"""The WebSockets of terminals and of standard input."""

import asyncio
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from starlette.testclient import TestClient, WebSocketDenialResponse

from koalapy.api import terminals
from koalapy.api.app import create_app
from koalapy.api.terminals import terminals_router
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.listener.connections import WebSockets
from koalapy.daemon.observability.audit import Audit
from koalapy.model.audit import AuditEntry, AuditFilter
from koalapy.model.job import Job
from koalapy.protocol import messages as wire
from koalapy.validation.permissions import check_job_access
from tests.daemon.fake_streams import ADA, ADMIN, BOB, OPERATOR, RUNNING, Grid, output
from tests.memory_stores import memory_stores
from tests.serving import Deferred
from tests.signals import until

TERMINAL, INPUT = "/api/v1/jobs/7/terminal", "/api/v1/jobs/7/input"
CALLERS = {"ada": ADA, "bob": BOB, "olga": OPERATOR, "amir": ADMIN}
INTERACTIVE = replace(RUNNING, spec=replace(RUNNING.spec, interactive=True))


class FakeJobs:
    """The one job of the daemon, of which nothing changes."""

    def __init__(self, job: Job) -> None:
        self.job = job

    async def get(self, _: int) -> JobRecord:
        return JobRecord(self.job, "")

    async def get_owned(self, _: int, caller: Any) -> JobRecord:
        check_job_access(caller, self.job)
        return JobRecord(self.job, "")

    async def follow_job(self, _: int, line_number: int) -> Any:
        yield SimpleNamespace(record=JobRecord(self.job, ""))


class Daemon:
    """The application with these WebSockets over fake agents."""

    def __init__(self, job: Job = INTERACTIVE) -> None:
        self.grid, self.audit = Grid(job), Audit(memory_stores().audit, time.time)
        services: dict[str, Any] = {}
        service: Any = Deferred(lambda: services["jobs"])
        attendance: Any = SimpleNamespace(attend=lambda _: nullcontext())
        router = terminals_router(self.grid.streams, cast(Jobs, service), attendance, self.audit)
        identities = Identities(CALLERS, None)
        self.app = create_app(service, service, identities, [router], audit=self.audit)
        services["jobs"] = FakeJobs(job)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def client(daemon: Daemon) -> Iterator[TestClient]:
    with TestClient(daemon.app, base_url="http://127.0.0.1") as client:
        yield client


def connect(client: TestClient, path: str, token: str = "ada", **headers: str) -> Any:
    return client.websocket_connect(f"ws://127.0.0.1{path}", headers={"Authorization": f"Bearer {token}", **headers})


@pytest.mark.evidence("U18")
@pytest.mark.parametrize(
    ("path", "token", "headers", "status", "text"),
    [
        (TERMINAL, "", {}, 401, "no valid token"),
        (TERMINAL, "wrong", {}, 401, "no valid token"),
        (TERMINAL, "ada", {"Origin": "http://127.0.0.1"}, 403, "web pages may not connect"),
        (TERMINAL, "bob", {}, 403, "job 7 is not yours"),
        (TERMINAL, "olga", {}, 403, "only its owner may open a terminal"),
        (TERMINAL, "amir", {}, 403, "allows terminals on its nodes to the owners of jobs only"),
        (INPUT, "amir", {}, 403, "only its owner may send it input"),
        (f"{TERMINAL}?rows=-1", "ada", {}, 422, "rows is"),
        (f"{TERMINAL}?rows=x", "ada", {}, 422, "rows is 'x'"),
        (f"{TERMINAL}?term=a%00b", "ada", {}, 422, "term is"),
        (f"{TERMINAL}?cluster=west", "ada", {}, 404, "has no nodes on west"),
        ("/api/v1/jobs/seven/terminal", "ada", {}, 422, "job is 'seven'"),
    ],
)
def test_stream_of_a_wrong_request_is_rejected_with_a_problem(
    client: TestClient, path: str, token: str, headers: dict[str, str], status: int, text: str
) -> None:
    with pytest.raises(WebSocketDenialResponse) as rejection, connect(client, path, token, **headers):
        pass
    assert rejection.value.status_code == status
    assert text in rejection.value.json()["detail"]


def test_input_of_a_job_that_reads_none_is_rejected() -> None:
    with TestClient(Daemon(RUNNING).app, base_url="http://127.0.0.1") as client:
        with pytest.raises(WebSocketDenialResponse) as rejection, connect(client, INPUT):
            pass
        assert rejection.value.status_code == 409
        assert "reads no input of clients" in rejection.value.json()["detail"]


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [
        (TERMINAL, "wrong", 401),
        (TERMINAL, "bob", 403),
        (f"{TERMINAL}?cluster=west", "ada", 404),
        (f"{TERMINAL}?rows=x", "ada", 422),
    ],
)
async def test_rejected_stream_is_answered_once_and_logs_no_error(
    daemon: Daemon, caplog: pytest.LogCaptureFixture, path: str, token: str, status: int
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(daemon.app, ws=WebSockets, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve([listener]))
    try:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        request = (
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
            f"Authorization: Bearer {token}\r\n\r\n"
        )
        writer.write(request.encode())
        answer = await reader.read()
        writer.close()
    finally:
        server.should_exit = True
        await serving
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert answer.count(b"HTTP/1.1") == 1
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def _read_audit(daemon: Daemon, count: int) -> Sequence[AuditEntry]:
    """Return the audit entries once there are ``count``."""
    while len(entries := await daemon.audit.read_entries(AuditFilter())) < count:  # noqa: ASYNC110 - nothing signals an entry
        await asyncio.sleep(0)
    return entries


@pytest.mark.parametrize("path", [f"{TERMINAL}?rows=24&columns=80&term=xterm&command=top&command=-d1", INPUT])
def test_stream_passes_bytes_and_messages_both_ways(daemon: Daemon, client: TestClient, path: str) -> None:
    grid = daemon.grid
    with connect(client, path) as socket:
        assert socket.receive_json() == {"opened": "n1", "cluster": "north", "used": 0}
        order = grid.sent[0]
        (stream,) = grid.streams._streams.values()
        assert order.command == (["top", "-d1"] if path != INPUT else [])
        socket.send_bytes(b"ls\n")
        socket.send_json({"rows": 50, "columns": 132})
        socket.send_json({"end_of_input": True})
        client.portal.call(grid.receive, "north", output(stream, 0, b"file"))
        assert socket.receive_bytes() == b"file"
        socket.send_json({"credit": 4})
        client.portal.call(grid.receive, "north", wire.StreamCredit(stream=stream.name, offset=3))
        assert socket.receive_json() == {"credit": 3}
        client.portal.call(until, lambda: len(grid.sent) == 5)
        client.portal.call(grid.receive, "north", wire.StreamEnd(stream=stream.name, code=3))
        assert socket.receive_json() == {"end": {"code": 3, "error": ""}}
        assert socket.receive()["type"] == "websocket.close"
    kinds = [message.type for message in grid.sent[1:5]]
    assert kinds == ["stream_data", "stream_resize", "stream_data", "stream_credit"]
    # The end is recorded after the client has received it.
    entries = client.portal.call(_read_audit, daemon, 0 if path == INPUT else 2)
    details = [entry.detail for entry in entries]
    assert all(detail.startswith("node n1 of north, ") for detail in details)
    assert "file" not in str(entries), "the content is not recorded"


@pytest.mark.parametrize("frame", ["{", '{"rows": -1}', '{"unknown": 1}', '{"credit": 99}', "[]"])
def test_stream_with_invalid_frame_ends_with_a_reason(daemon: Daemon, client: TestClient, frame: str) -> None:
    with connect(client, TERMINAL) as socket:
        socket.receive_json()
        socket.send_text(frame)
        assert "update the client" in socket.receive_json()["end"]["error"]
    assert isinstance(daemon.grid.sent[-1], wire.StreamEnd)
    assert daemon.grid.streams._streams == {}


def test_closed_client_ends_its_stream(daemon: Daemon, client: TestClient) -> None:
    with connect(client, TERMINAL) as socket:
        socket.receive_json()
    assert isinstance(daemon.grid.sent[-1], wire.StreamEnd)


async def test_stream_that_opens_while_client_leaves_is_closed(daemon: Daemon) -> None:
    streams, leaving = daemon.grid.streams, asyncio.get_running_loop().create_future()
    open_stream = streams.open_stream

    async def open_and_leave(*arguments: Any) -> Any:
        stream = await open_stream(*arguments)
        leaving.set_result({"type": "websocket.disconnect"})
        return stream

    async def receive() -> Any:
        return await leaving

    async def send(_: str) -> None:
        raise RuntimeError("the client has disconnected")

    socket: Any = SimpleNamespace(receive=receive, send_text=send, close=send)
    attended: Any = SimpleNamespace(open_stream=open_and_leave, close_stream=streams.close_stream)
    await terminals._attend_job(socket, attended, cast(Jobs, FakeJobs(INTERACTIVE)), 7, ADA)
    assert streams._streams == {}
    assert isinstance(daemon.grid.sent[-1], wire.StreamEnd)
