"""Who is let in: by the host that is asked for, by a token, and never a web page."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from fastapi import WebSocket
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient, WebSocketDenialResponse

from koalapy.api.agents import agents_router
from koalapy.api.app import create_app
from koalapy.api.background import background_router
from koalapy.api.hosts import Hosts
from tests.api.conftest import AGENT_TOKENS, TOKEN, URL, Open
from tests.cli.memory import MemoryService
from tests.identities import administrators

BEARER = {"Authorization": f"Bearer {TOKEN}"}
HOST_OF_A_PAGE = "evil.example"
WEBSOCKET = "ws://127.0.0.1:8642/api/v1/agents/north/connect"
HOSTS = Hosts(["Grid.example.org.", "192.0.2.1"], own=lambda: {"head", "head.example.org"})


class Hub:
    async def serve(self, cluster: str, connection: Any) -> None:
        await connection.send("welcome")


@pytest.fixture
def daemon() -> Iterator[TestClient]:
    """All routes that a daemon has but those of files, network and advisor, and those of agents."""
    routers = [agents_router(Hub(), {"north": "the-secret-of-north"}), background_router(MemoryService(), None, True)]  # type: ignore[arg-type]
    with TestClient(create_app(MemoryService(), MemoryService(), administrators(TOKEN), routers), URL) as client:
        yield client


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8642",
        "10.1.2.3:1",
        "0.0.0.0:80",
        "[::1]",
        "[::1]:8642",
        "[fe80::1%25eth0]:1",
        "localhost",
        "LOCALHOST.:8642",
        "grid.example.org:443",
        "head",
        "head.example.org",
        "localhost:",
    ],
)
async def test_our_own_names_and_every_address_are_admitted(host: str) -> None:
    assert await HOSTS.admits(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        HOST_OF_A_PAGE,
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1:8642:80",
        "::1",
        "[::1",
        "[::1]x",
        "[evil.example]",
        "[127.0.0.1]",
        "2130706433",
        "0x7f.1",
        "localhost@evil.example",
        "localhost/",
        "local host",
        "head.example.com",
        "127.0.0.1, evil.example",
        "localhost:port",
        "[]",
        ":8642",
        ".",
    ],
)
async def test_no_other_name_is_admitted(host: str) -> None:
    assert not await HOSTS.admits(host)


@given(host=st.text(max_size=30))
async def test_a_host_is_admitted_or_not_and_nothing_else(host: str) -> None:
    assert await Hosts(own=set).admits(host) in (True, False)


async def test_a_slow_name_service_is_asked_once_and_for_unknown_names_only() -> None:
    asked, answer = [], threading.Event()

    def own() -> set[str]:
        asked.append(1)
        answer.wait(30)
        return {"head"}

    hosts = Hosts(own=own)
    assert await hosts.admits("localhost")
    assert await hosts.admits("192.0.2.7")
    assert asked == []
    answer.set()
    assert [await hosts.admits(name) for name in ("head", "other", "head")] == [True, False, True]
    assert asked == [1]


@pytest.mark.parametrize("path", ["/api/v1/jobs", "/healthz", "/openapi.json", "/docs", "/nowhere"])
async def test_a_page_whose_name_was_bound_to_our_address_gets_nothing(open_api: Open, path: str) -> None:
    answer = await (await open_api()).get(path, headers={"Host": f"{HOST_OF_A_PAGE}:8642"})
    assert (answer.status_code, answer.headers["content-type"]) == (421, "application/problem+json")
    assert "allowed_hosts" in answer.json()["hint"]
    assert answer.json()["value"] == f"{HOST_OF_A_PAGE}:8642"


@pytest.mark.parametrize("hosts", [[], ["127.0.0.1", "127.0.0.1"], ["127.0.0.1", HOST_OF_A_PAGE]])
async def test_a_request_names_one_host(open_api: Open, hosts: list[str]) -> None:
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/healthz",
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(b"host", host.encode()) for host in hosts],
    }
    await create_app(MemoryService(), MemoryService(), administrators(TOKEN))(scope, receive, send)
    assert messages[0]["status"] == 400


def test_nothing_is_changed_without_a_token_and_no_page_is_given_leave_to_show_one(daemon: TestClient) -> None:
    paths = daemon.get("/openapi.json").json()["paths"]
    changing = [
        (path, method.upper()) for path, operations in paths.items() for method in operations if method != "get"
    ]
    assert len(changing) >= 10
    for path, method in [*changing, ("/nowhere", "POST"), ("/healthz", "POST"), ("/docs", "PUT")]:
        url = path.format(job=1, name="north", cluster="north", bundle="0" * 64, token="1.1.0")
        for headers in ({}, {"Origin": "http://evil.example", "Content-Type": "text/plain"}, {"Cookie": TOKEN}):
            assert daemon.request(method, url, headers=headers).status_code == 401, (method, path)
        asked = {
            "Origin": "http://evil.example",
            "Access-Control-Request-Method": method,
            "Access-Control-Request-Headers": "authorization",
        }
        answer = daemon.options(url, headers=asked)
        assert not [name for name in answer.headers if name.startswith("access-control-")], (method, path)


async def test_agents_may_not_change_anything_without_a_token_either(open_api: Open) -> None:
    api = await open_api(tokens=[TOKEN])
    for cluster in AGENT_TOKENS:
        assert (await api.put(f"/api/v1/agents/{cluster}/results/1.1.0", content=b"")).status_code == 401


@pytest.mark.parametrize("path", ["/healthz", "/openapi.json", "/docs"])
async def test_what_tells_no_secret_may_be_read_without_a_token(open_api: Open, path: str) -> None:
    api = await open_api(tokens=[TOKEN])
    assert (await api.get(path)).status_code == 200
    assert (await api.get("/api/v1/healthz")).status_code == 401


async def test_without_any_token_nobody_is_let_in() -> None:
    app = create_app(MemoryService(), MemoryService(), administrators())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL) as api:
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer"}, BEARER):
            assert (await api.get("/api/v1/jobs", headers=headers)).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": URL}, 403),
        ({"Host": HOST_OF_A_PAGE}, 421),
    ],
)
def test_a_page_opens_no_websocket(daemon: TestClient, headers: dict[str, str], status: int) -> None:
    given = {"Authorization": "Bearer the-secret-of-north"}
    with daemon.websocket_connect(WEBSOCKET, headers=given) as socket:
        assert socket.receive_text() == "welcome"
    with pytest.raises(WebSocketDenialResponse) as refusal:
        daemon.websocket_connect(WEBSOCKET, headers=given | headers).__enter__()
    assert refusal.value.status_code == status


def test_the_guard_stands_before_every_websocket() -> None:
    app = create_app(MemoryService(), MemoryService(), administrators(TOKEN))

    @app.websocket("/anything")
    async def anything(socket: WebSocket) -> None:
        await socket.accept()

    with TestClient(app, URL) as client, pytest.raises(WebSocketDenialResponse) as refusal:
        client.websocket_connect("ws://127.0.0.1/anything", headers={"Origin": "http://evil.example"}).__enter__()
    assert refusal.value.status_code == 403
