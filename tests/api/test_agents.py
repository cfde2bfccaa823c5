"""Which agents are let in, on every route that they have."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import uvicorn
from fastapi import FastAPI
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection
from websockets.asyncio.server import serve as ws_serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

from koalapy.agent.runners import uplink as uplink_module
from koalapy.agent.runners.uplink import Uplink
from koalapy.api.agents import AgentConnection, agents_router
from koalapy.api.files import agent_files_router
from koalapy.daemon.auth.pace import FAILURES_AT_ONCE, AgentAttempts
from koalapy.ports import StoredBundle
from koalapy.protocol.messages import MAX_FRAME_SIZE, Hello
from tests.cli.memory_files import MemoryResults

TOKENS = {"north": "of north", "south": "of south", "none": None, "empty": ""}


class Hub:
    """Greets whoever is let in."""

    def note_rejection(self, cluster: str, reason: str, remedy: str) -> None:
        pass

    async def serve(self, cluster: str, connection: AgentConnection) -> None:
        await connection.send(f"welcome to {cluster}")
        await connection.close("bye " * 100)


class Bundles:
    """Has one bundle, whatever it is called."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get(self, bundle: str) -> StoredBundle:
        return StoredBundle(bundle, 5, 1, 0.0)

    def path(self, bundle: str) -> Path:
        return self._path


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[str]:
    """The address of the agents' routes."""
    await asyncio.to_thread(path.write_text, "files")
    app = FastAPI()
    app.include_router(agents_router(Hub(), TOKENS))
    app.include_router(agent_files_router(Bundles(path), MemoryResults(), TOKENS, lambda *_: True))  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical"))
    serving = asyncio.create_task(server.serve([listener]))
    yield f"127.0.0.1:{listener.getsockname()[1]}/api/v1/agents"
    server.should_exit = True
    await serving


def shown(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}".strip()}


@pytest.mark.parametrize(
    ("cluster", "token", "status", "why"),
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
async def test_who_is_no_agent_of_a_configured_cluster_stays_outside(
    tmp_path: Path, cluster: str, token: str | None, status: int, why: str
) -> None:
    async with served(tmp_path / "bundle") as address, httpx2.AsyncClient(trust_env=False, timeout=60.0) as http:
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://{address}/{cluster}/connect", additional_headers=shown(token), proxy=None)
        assert refused.value.response.status_code == status
        assert json.loads(refused.value.response.body)["detail"].startswith(why)
        for answer in (
            await http.get(f"http://{address}/{cluster}/connect", headers=shown(token)),
            await http.get(f"http://{address}/{cluster}/bundles/abc", headers=shown(token)),
            await http.put(f"http://{address}/{cluster}/results/1.1.0", headers=shown(token), content=b""),
        ):
            assert answer.status_code == status
            assert answer.json()["detail"].startswith(why)
            assert answer.json()["hint"]


async def test_a_stranger_holds_no_connection_open_by_asking_for_a_websocket(tmp_path: Path) -> None:
    """It does not answer the end of one, for which a server waits."""
    async with served(tmp_path / "bundle") as address:
        host, port = address.partition("/")[0].split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"GET /api/v1/agents/north/connect HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
            b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        async with asyncio.timeout(60):
            assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
        writer.close()


async def test_an_agent_that_is_not_let_in_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with served(tmp_path / "bundle") as address:
        uplink = Uplink(f"ws://{address}/north/connect", "of south", lambda: pytest.fail("was let in"))
        monkeypatch.setattr(uplink, "_complain", lambda reason: said.done() or said.set_result(reason))
        running = asyncio.create_task(uplink.keep_connected(lambda _: None, lambda: None))
        async with asyncio.timeout(60):
            assert (await said).startswith("the token is not that of cluster north: set KOALA_AGENT_TOKEN")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_who_is_turned_away_after_its_hello_comes_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    enough = asyncio.Event()

    async def rest(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 4:
            enough.set()
            await asyncio.Event().wait()

    hello = Hello(cluster="north", version="1", lrm="local", host="head", pid=1)
    async with served(tmp_path / "bundle") as address:
        uplink = Uplink(f"ws://{address}/north/connect", "of north", lambda: hello)
        monkeypatch.setattr(uplink_module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": rest}))
        running = asyncio.create_task(uplink.keep_connected(lambda _: None, lambda: None))
        async with asyncio.timeout(30):
            await enough.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert pauses == sorted(set(pauses)), "each is longer than the one before"


async def test_an_agent_that_shows_its_clusters_token_comes_in(tmp_path: Path) -> None:
    async with served(tmp_path / "bundle") as address, httpx2.AsyncClient(trust_env=False, timeout=None) as http:
        headers = shown("of north")
        async with connect(f"ws://{address}/north/connect", additional_headers=headers, proxy=None) as agent:
            assert await agent.recv() == "welcome to north"
            with pytest.raises(ConnectionClosed) as closed:
                await agent.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.reason.startswith("bye bye "), "a reason that is too long for the frame is cut"
        assert (await http.get(f"http://{address}/north/connect", headers=headers)).status_code == 204
        assert (await http.get(f"http://{address}/north/bundles/abc", headers=headers)).text == "files"


async def test_wrong_agent_tokens_beyond_the_bound_are_not_looked_at(tmp_path: Path) -> None:
    tokens = {"north": "of north, thought of", "south": "5d1c9e0f7a6b4832915f0c7e6d3b2a48"}
    app = FastAPI()
    app.include_router(agents_router(Hub(), tokens, attempts := AgentAttempts(lambda: 0.0)))
    app.include_router(agent_files_router(Bundles(tmp_path), MemoryResults(), tokens, lambda *_: True, attempts))  # type: ignore[arg-type]
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://localhost") as http:
        routes = ("/connect", "/bundles/abc", "/results/1.1.0")
        asked = []
        for route in routes * 10:
            method = "PUT" if "results" in route else "GET"
            asked.append(await http.request(method, f"/api/v1/agents/north{route}", headers=shown("x")))
        assert [answer.status_code for answer in asked] == [401] * int(FAILURES_AT_ONCE) + [429] * 10
        assert asked[-1].headers["retry-after"] == "2"
        guessed = await http.get("/api/v1/agents/north/connect", headers=shown(tokens["north"]))
        assert guessed.status_code == 429, "nothing is told of a token that could be guessed"
        random = await http.get("/api/v1/agents/south/connect", headers=shown(tokens["south"]))
        assert random.status_code == 204, "guesses keep no agent out whose token cannot be guessed"


@pytest.mark.evidence("D3")
async def test_agent_refuses_a_frame_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that was taken over does not exhaust the memory of an agent."""
    said: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def flood(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send("[" + " " * MAX_FRAME_SIZE + "]")
        await connection.wait_closed()
        said.done() or said.set_result(str(connection.close_code))

    async with ws_serve(flood, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        hello = Hello(cluster="north", version="1", lrm="local", host="h", pid=1)
        uplink = Uplink(f"ws://127.0.0.1:{port}/", "of north", lambda: hello)
        running = asyncio.create_task(uplink.keep_connected(lambda _: pytest.fail("was read"), lambda: None))
        async with asyncio.timeout(60):
            assert await said == "1009"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
