"""Authentication of agents on every agent route."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.websockets import WebSocket
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as ws_serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

from koalapy.agent.runners import uplink as uplink_module
from koalapy.agent.runners.uplink import Uplink
from koalapy.api.agents import AgentConnection, agents_router
from koalapy.api.files import agent_files_router
from koalapy.daemon.auth.pace import FAILURES_AT_ONCE, Pace
from koalapy.protocol.frames import MAX_FRAME_SIZE
from koalapy.protocol.messages import Hello
from koalapy.store.records import StoredBundle
from tests.cli.memory_files import MemoryResults

TOKENS = {"north": "of north", "south": "of south", "none": None, "empty": ""}


class Hub:
    """Sends a welcome to each accepted agent and closes the connection."""

    def may_log(self, cluster: str) -> bool:
        return True

    def accepts_connection(self, cluster: str) -> bool:
        return True

    def note_rejection(self, cluster: str, reason: str, remedy: str) -> None:
        pass

    async def serve_connection(self, cluster: str, connection: AgentConnection) -> None:
        await connection.send(f"welcome to {cluster}")
        await connection.close("bye " * 100)


class Bundles:
    """Returns the same bundle for every ID."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get_bundle(self, bundle: str) -> StoredBundle:
        return StoredBundle(bundle, 5, 1, 0.0)

    def path_of(self, bundle: str) -> Path:
        return self._path


@asynccontextmanager
async def serve_agent_routes(path: Path) -> AsyncIterator[str]:
    """Serve the agent routes on loopback and yield their address."""
    await asyncio.to_thread(path.write_text, "files")
    app = FastAPI()
    app.include_router(agents_router(Hub(), TOKENS))
    app.include_router(agent_files_router(Bundles(path), MemoryResults(), None, TOKENS, lambda *_: True))  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical"))
    serving = asyncio.create_task(server.serve([listener]))
    yield f"127.0.0.1:{listener.getsockname()[1]}/api/v1/agents"
    server.should_exit = True
    await serving


def auth_headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}".strip()}


@pytest.mark.parametrize(
    ("cluster", "token", "status", "reason"),
    [
        ("gone", None, 404, "there is no cluster gone"),
        ("gone", "of north", 404, "there is no cluster gone"),
        ("x" * 3000, None, 404, "there is no cluster xxx"),
        ("north", None, 401, "the token is not that of cluster north"),
        ("north", "of south", 401, "the token is not that of cluster north"),
        ("north", "", 401, "the token is not that of cluster north"),
        ("none", "None", 401, "clusters.none.token is not set"),
        ("none", None, 401, "clusters.none.token is not set"),
        ("empty", "", 401, "clusters.empty.token is not set"),
        ("empty", None, 401, "clusters.empty.token is not set"),
    ],
)
async def test_agent_with_wrong_token_or_cluster_is_rejected(
    tmp_path: Path, cluster: str, token: str | None, status: int, reason: str
) -> None:
    async with (
        serve_agent_routes(tmp_path / "bundle") as address,
        httpx2.AsyncClient(trust_env=False, timeout=60.0) as http,
    ):
        with pytest.raises(InvalidStatus) as rejection:
            await connect(f"ws://{address}/{cluster}/connect", additional_headers=auth_headers(token), proxy=None)
        assert rejection.value.response.status_code == status
        assert json.loads(rejection.value.response.body)["detail"].startswith(reason)
        for answer in (
            await http.get(f"http://{address}/{cluster}/connect", headers=auth_headers(token)),
            await http.get(f"http://{address}/{cluster}/bundles/abc", headers=auth_headers(token)),
            await http.put(f"http://{address}/{cluster}/results/1.1.0", headers=auth_headers(token), content=b""),
        ):
            assert answer.status_code == status
            assert answer.json()["detail"].startswith(reason)
            assert answer.json()["hint"]


async def test_rejected_websocket_connection_is_closed_by_server(tmp_path: Path) -> None:
    """The client never answers the closing handshake that a server would wait for."""
    async with serve_agent_routes(tmp_path / "bundle") as address:
        host, port = address.partition("/")[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /api/v1/agents/north/connect HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        async with asyncio.timeout(60):
            assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_rejected_agent_reports_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with serve_agent_routes(tmp_path / "bundle") as address:
        uplink = Uplink(f"ws://{address}/north/connect", "of south", lambda: pytest.fail("was accepted"))
        monkeypatch.setattr(uplink, "_complain", lambda reason: reported.done() or reported.set_result(reason))
        running = asyncio.create_task(uplink.keep_connected(lambda _: None, lambda: None))
        async with asyncio.timeout(60):
            assert (await reported).startswith("the token is not that of cluster north: set KOALA_AGENT_TOKEN")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_uplink_with_dead_first_address_connects_to_second_without_pause(tmp_path: Path) -> None:
    hello = Hello(cluster="north", version="1", lrm="local", host="head", pid=1)
    connected = asyncio.Event()

    def make_hello() -> Hello:
        connected.set()
        return hello

    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = f"ws://127.0.0.1:{closed.getsockname()[1]}/"
    async with serve_agent_routes(tmp_path / "bundle") as address:
        uplink = Uplink(dead, "of north", make_hello, other_urls=[f"ws://{address}/north/connect"])
        running = asyncio.create_task(uplink.keep_connected(lambda _: None, lambda: None))
        async with asyncio.timeout(30):
            await connected.wait()
        assert uplink.position == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_agent_closed_after_hello_backs_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    backed_off = asyncio.Event()

    async def record_pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            backed_off.set()
            await asyncio.Event().wait()

    hello = Hello(cluster="north", version="1", lrm="local", host="head", pid=1)
    async with serve_agent_routes(tmp_path / "bundle") as address:
        uplink = Uplink(f"ws://{address}/north/connect", "of north", lambda: hello)
        monkeypatch.setattr(uplink_module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": record_pause}))
        running = asyncio.create_task(uplink.keep_connected(lambda _: None, lambda: None))
        async with asyncio.timeout(30):
            await backed_off.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert pauses == sorted(set(pauses)), "pauses grow"


async def test_agent_with_token_of_cluster_is_accepted(tmp_path: Path) -> None:
    async with (
        serve_agent_routes(tmp_path / "bundle") as address,
        httpx2.AsyncClient(trust_env=False, timeout=None) as http,
    ):
        headers = auth_headers("of north")
        async with connect(f"ws://{address}/north/connect", additional_headers=headers, proxy=None) as agent:
            assert await agent.recv() == "welcome to north"
            with pytest.raises(ConnectionClosed) as closed:
                await agent.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.reason.startswith("bye bye "), "a reason that is too long for the frame is cut"
        assert (await http.get(f"http://{address}/north/connect", headers=headers)).status_code == 204
        assert (await http.get(f"http://{address}/north/bundles/abc", headers=headers)).text == "files"


async def test_wrong_agent_tokens_beyond_limit_are_rate_limited(tmp_path: Path) -> None:
    tokens = {"north": "of north, thought of", "south": "5d1c9e0f7a6b4832915f0c7e6d3b2a48"}
    app = FastAPI()
    app.include_router(agents_router(Hub(), tokens, attempts := Pace(clock=lambda: 0.0)))
    app.include_router(agent_files_router(Bundles(tmp_path), MemoryResults(), None, tokens, lambda *_: True, attempts))  # type: ignore[arg-type]
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as http:
        routes = ("/connect", "/bundles/abc", "/results/1.1.0")
        answers = []
        for route in routes * 10:
            method = "PUT" if "results" in route else "GET"
            answers.append(await http.request(method, f"/api/v1/agents/north{route}", headers=auth_headers("x")))
        assert [answer.status_code for answer in answers] == [401] * int(FAILURES_AT_ONCE) + [429] * 10
        assert answers[-1].headers["retry-after"] == "2"
        weak_token = await http.get("/api/v1/agents/north/connect", headers=auth_headers(tokens["north"]))
        assert weak_token.status_code == 429, "a weak token is rate limited even when it is right"
        strong_token = await http.get("/api/v1/agents/south/connect", headers=auth_headers(tokens["south"]))
        assert strong_token.status_code == 204, "guesses do not lock out an agent with a strong token"


@pytest.mark.evidence("D3")
async def test_agent_closes_connection_on_frame_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compromised daemon must not exhaust the memory of an agent."""
    close_code: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def send_large_frame(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send("[" + " " * MAX_FRAME_SIZE + "]")
        await connection.wait_closed()
        close_code.done() or close_code.set_result(str(connection.close_code))

    async with ws_serve(send_large_frame, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        hello = Hello(cluster="north", version="1", lrm="local", host="h", pid=1)
        uplink = Uplink(f"ws://127.0.0.1:{port}/", "of north", lambda: hello)
        running = asyncio.create_task(uplink.keep_connected(lambda _: pytest.fail("was read"), lambda: None))
        async with asyncio.timeout(60):
            assert await close_code == "1009"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_binary_frame_of_agent_is_an_empty_text() -> None:
    messages: list[Any] = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "bytes": b"[]"},
        {"type": "websocket.disconnect", "code": 1000},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(_: object) -> None:
        pass

    socket = WebSocket({"type": "websocket"}, receive, send)
    await socket.accept()
    assert [frame async for frame in AgentConnection(socket).frames()] == [""]
