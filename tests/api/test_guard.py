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
from koalapy.api.clusters import background_router
from koalapy.api.guard import AllowedHosts
from koalapy.api.middleware import TrustedProxies
from tests.identities import administrators
from tests.serving import AGENT_TOKENS, CSRF_HEADER, TOKEN, URL, Open, bare_application

BEARER = {"Authorization": f"Bearer {TOKEN}"}
HOST_OF_A_PAGE = "evil.example"
WEBSOCKET = "ws://127.0.0.1:8642/api/v1/agents/north/connect"
HOSTS = AllowedHosts(["Grid.example.org.", "192.0.2.1"], find_machine_names=lambda: {"head", "head.example.org"})


class Hub:
    def note_rejection(self, cluster: str, reason: str, remedy: str) -> None:
        pass

    async def serve(self, cluster: str, connection: Any) -> None:
        await connection.send("welcome")


@pytest.fixture(scope="module")
def daemon() -> Iterator[TestClient]:
    """All routes that a daemon has but those of files, network and advisor, and those of agents."""
    routers = [agents_router(Hub(), {"north": "the-secret-of-north"}), background_router(None, None, True)]  # type: ignore[arg-type]
    with TestClient(bare_application(administrators(TOKEN), routers), URL) as client:
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
    assert await HOSTS.contains(host)


@pytest.mark.evidence("W1")
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
    assert not await HOSTS.contains(host)


@given(host=st.text(max_size=30))
async def test_a_host_is_admitted_or_not_and_nothing_else(host: str) -> None:
    assert await AllowedHosts(find_machine_names=set).contains(host) in (True, False)


async def test_a_slow_name_service_is_asked_once_and_for_unknown_names_only() -> None:
    asked, answer = [], threading.Event()

    def own() -> set[str]:
        asked.append(1)
        answer.wait(30)
        return {"head"}

    hosts = AllowedHosts(find_machine_names=own)
    assert await hosts.contains("localhost")
    assert await hosts.contains("192.0.2.7")
    assert asked == []
    answer.set()
    assert [await hosts.contains(name) for name in ("head", "other", "head")] == [True, False, True]
    assert asked == [1]


@pytest.mark.evidence("W1")
@pytest.mark.parametrize("path", ["/api/v1/jobs", "/livez", "/openapi.json", "/docs", "/nowhere"])
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
        "path": "/livez",
        "query_string": b"",
        "http_version": "1.1",
        "headers": [(b"host", host.encode()) for host in hosts],
    }
    await bare_application(administrators(TOKEN))(scope, receive, send)
    assert messages[0]["status"] == 400


def test_who_shows_two_tokens_shows_none(daemon: TestClient) -> None:
    """What stands before the daemon may have looked at the other one."""
    for shown, status in (([TOKEN], 200), ([TOKEN, "another"], 401), ([TOKEN, TOKEN], 401)):
        headers = [("Authorization", f"Bearer {token}") for token in shown]
        assert daemon.get("/api/v1/whoami", headers=headers).status_code == status


@pytest.mark.evidence("N1")
def test_nothing_is_changed_without_a_token_and_no_page_is_given_leave_to_show_one(daemon: TestClient) -> None:
    paths = daemon.get("/openapi.json").json()["paths"]
    changing = [
        (path, method.upper()) for path, operations in paths.items() for method in operations if method != "get"
    ]
    assert len(changing) >= 10
    for path, method in [*changing, ("/nowhere", "POST"), ("/livez", "POST"), ("/docs", "PUT")]:
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


@pytest.mark.parametrize("path", ["/livez", "/openapi.json", "/docs"])
async def test_what_tells_no_secret_may_be_read_without_a_token(open_api: Open, path: str) -> None:
    api = await open_api(tokens=[TOKEN])
    assert (await api.get(path)).status_code == 200
    assert (await api.get("/api/v1/healthz")).status_code == 401


@pytest.mark.evidence("N1", "C6")
async def test_without_any_token_nobody_is_let_in() -> None:
    app = bare_application(administrators())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=URL) as api:
        for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Bearer"}, BEARER):
            assert (await api.get("/api/v1/jobs", headers=headers)).status_code == 401


@pytest.mark.evidence("W2")
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
    with (
        pytest.raises(WebSocketDenialResponse) as refusal,
        daemon.websocket_connect(WEBSOCKET, headers=given | headers),
    ):
        pass  # an accepted connection is closed here
    assert refusal.value.status_code == status


@pytest.mark.evidence("W2")
def test_the_guard_stands_before_every_websocket() -> None:
    app = bare_application(administrators(TOKEN))

    @app.websocket("/anything")
    async def anything(socket: WebSocket) -> None:
        await socket.accept()

    with TestClient(app, URL) as client, pytest.raises(WebSocketDenialResponse) as refusal:
        client.websocket_connect("ws://127.0.0.1/anything", headers={"Origin": "http://evil.example"}).__enter__()
    assert refusal.value.status_code == 403


CHANGES = ["/api/v1/jobs", "/api/v1/jobs/x/cancel", "/api/v1/clusters/north/drain?x=1", "/api/v1/nowhere", "/livez"]
"""Paths that are refused behind the guard as well, since there are no services."""
A_PAGES = [
    {},
    {"Content-Type": "text/plain"},
    {"Content-Type": "text/plain; application/json"},
    {"Content-Type": "TEXT/PLAIN;charset=utf-8"},
    {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "multipart/form-data; boundary=x"},
    {"Content-Type": ""},
]
"""What a page of any origin may send without being asked whether it may."""


@pytest.mark.evidence("W3")
@pytest.mark.parametrize("path", CHANGES)
def test_nothing_is_changed_by_what_a_page_can_send(daemon: TestClient, path: str) -> None:
    """Whatever shows who sits before the browser: here it is the token, which no page has."""
    for headers in A_PAGES:
        for body in (b"", b'{"command": ["true"]}', b"command=true"):
            answer = daemon.post(path, headers=BEARER | headers, content=body)
            assert (answer.status_code, answer.json()["field"]) == (403, "Content-Type"), headers
            assert "application/json" in answer.json()["hint"]
            assert "X-Requested-With: koala" in answer.json()["hint"]
    for headers in (
        CSRF_HEADER,
        {"Content-Type": "application/json"},
        {"Content-Type": "Application/JSON; charset=utf-8"},
    ):
        assert daemon.post(path, headers=BEARER | headers).status_code != 403, headers


@pytest.mark.evidence("W3")
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize(
    "elsewhere",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "https://127.0.0.1:8642"},
        {"Origin": "http://127.0.0.1"},
        {"Origin": "http://127.0.0.1:86420"},
        {"Origin": "http://localhost:8642"},
        {"Origin": f"{URL}/"},
        {"Origin": URL, "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "of a later kind"},
    ],
)
def test_nothing_is_changed_for_a_page_of_another_origin(
    daemon: TestClient, method: str, elsewhere: dict[str, str]
) -> None:
    shown = BEARER | CSRF_HEADER | {"Content-Type": "application/json"}
    answer = daemon.request(method, "/api/v1/jobs/1/cancel", headers=shown | elsewhere)
    assert (answer.status_code, answer.json()["field"]) == (403, next(reversed(elsewhere)))


def test_a_page_of_our_own_may_change_something(daemon: TestClient) -> None:
    own = {"Origin": URL, "Sec-Fetch-Site": "same-origin", "Content-Type": "application/json"}
    assert daemon.post("/api/v1/jobs", headers=BEARER | own, content=b"{}").status_code == 422
    assert daemon.get("/api/v1/whoami", headers=BEARER | {"Origin": "http://evil.example"}).status_code == 200


def assert_safe(answer: httpx2.Response) -> None:
    """It is not kept, not framed, not taken for something else, and tells nobody where it was read."""
    there = answer.headers
    assert there.get_list("cache-control") == ["no-store"]
    assert there.get_list("x-content-type-options") == ["nosniff"]
    assert there.get_list("referrer-policy") == ["no-referrer"]
    assert there.get_list("x-frame-options") == ["DENY"]
    (policy,) = there.get_list("content-security-policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert {rules[name] for name in ("default-src", "base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert "unsafe" not in policy
    assert not [name for name in there if name.startswith("access-control-")]


@pytest.mark.evidence("L3")
@pytest.mark.parametrize(
    ("scheme", "host", "has_hsts"),
    [("https", "grid.example.org", True), ("https", "localhost:8642", False), ("http", "grid.example.org", False)],
)
def test_hsts_header_is_sent_by_tls_only(scheme: str, host: str, has_hsts: bool) -> None:
    app = bare_application(administrators(TOKEN), hosts=HOSTS)
    client = TestClient(app, base_url=f"{scheme}://{host}")
    for path in ("/livez", "/api/v1/jobs", "/nowhere"):
        assert ("strict-transport-security" in client.get(path).headers) == has_hsts


@pytest.mark.evidence("W4")
def test_every_answer_is_kept_from_caches_frames_and_guesses(daemon: TestClient) -> None:
    asked = [
        ("GET", "/docs", {}, 200),
        ("GET", "/openapi.json", {}, 200),
        ("GET", "/livez", {}, 200),
        ("HEAD", "/livez", {}, 405),
        ("GET", "/nowhere", {}, 404),
        ("GET", "/api/v1/jobs", {}, 401),
        ("GET", "/api/v1/whoami", BEARER, 200),
        ("GET", "/api/v1/nowhere", BEARER, 404),
        ("PUT", "/api/v1/jobs", BEARER | CSRF_HEADER, 405),
        ("OPTIONS", "/api/v1/jobs", BEARER, 204),
        ("POST", "/api/v1/jobs", BEARER, 403),
        ("POST", "/api/v1/jobs", BEARER | {"Content-Type": "application/json"}, 422),
        ("POST", "/api/v1/jobs", BEARER | {"Content-Length": "99999999"}, 403),
        ("GET", "/livez", {"Host": HOST_OF_A_PAGE}, 421),
        ("GET", "/livez", {"Content-Length": "99999999"}, 413),
        ("PUT", "/api/v1/agents/north/results/1.1.0", {}, 404),
    ]
    for method, path, headers, status in asked:
        answer = daemon.request(method, path, headers=headers)
        assert answer.status_code == status, (method, path, headers, answer.text)
        assert_safe(answer)
    with (
        pytest.raises(WebSocketDenialResponse) as refusal,
        daemon.websocket_connect(WEBSOCKET, headers={"Origin": "http://evil.example"}),
    ):
        pass  # an accepted connection is closed here
    assert_safe(refusal.value)


@pytest.mark.evidence("W4")
def test_a_mistake_of_ours_and_too_many_requests_are_answered_like_all_else() -> None:
    app = bare_application(administrators(TOKEN), max_requests=0)

    @app.get("/mistake")
    async def mistake() -> None:
        raise RuntimeError(f"what nobody is told: {TOKEN}")

    with TestClient(app, URL, raise_server_exceptions=False) as client:
        assert_safe(busy := client.get("/mistake"))
        assert busy.status_code == 503
    app = bare_application(administrators(TOKEN))
    app.get("/mistake")(mistake)
    with TestClient(app, URL, raise_server_exceptions=False) as client:
        assert_safe(failed := client.get("/mistake", headers=BEARER))
        assert (failed.status_code, TOKEN in failed.text) == (500, False)


async def test_who_comes_past_the_proxy_is_answered_like_all_else() -> None:
    behind = TrustedProxies(bare_application(administrators(TOKEN)), [], encrypted=False)
    transport = httpx2.ASGITransport(behind, client=("192.0.2.9", 1))
    async with httpx2.AsyncClient(transport=transport, base_url=URL) as past:
        assert_safe(refused := await past.get("/livez"))
    assert refused.status_code == 403


@pytest.mark.evidence("W4")
async def test_streams_and_downloads_are_answered_like_all_else(open_api: Open, body: dict[str, Any]) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    assert (await api.post("/api/v1/jobs/1/cancel")).status_code == 200
    for path in ("/api/v1/jobs/1/events", "/api/v1/jobs/1/logs", "/api/v1/jobs/1/results", "/api/v1/metrics"):
        assert_safe(await api.get(path))
