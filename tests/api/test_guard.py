"""Checks of host, token and origin before a request is served."""

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
from tests.serving import CSRF_HEADER, TOKEN, URL, Open, bare_application

BEARER = {"Authorization": f"Bearer {TOKEN}"}
FOREIGN_HOST = "evil.example"
WEBSOCKET = "ws://127.0.0.1:8642/api/v1/agents/north/connect"
HOSTS = AllowedHosts(["Grid.example.org.", "192.0.2.1"], find_machine_names=lambda: {"head", "head.example.org"})


class Hub:
    def note_rejection(self, cluster: str, reason: str, remedy: str) -> None:
        pass

    def accepts_connection(self, cluster: str) -> bool:
        return True

    async def serve_connection(self, cluster: str, connection: Any) -> None:
        await connection.send("welcome")


@pytest.fixture(scope="module")
def daemon() -> Iterator[TestClient]:
    """Yield a client of the daemon's routes, without those of files, network and advisor."""
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
async def test_allowed_hosts_contain_addresses_and_machine_names(host: str) -> None:
    assert await HOSTS.contains(host)


@pytest.mark.evidence("W1")
@pytest.mark.parametrize(
    "host",
    [
        "",
        FOREIGN_HOST,
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
async def test_allowed_hosts_exclude_other_names(host: str) -> None:
    assert not await HOSTS.contains(host)


@given(host=st.text(max_size=30))
async def test_allowed_hosts_accept_any_text(host: str) -> None:
    assert await AllowedHosts(find_machine_names=set).contains(host) in (True, False)


async def test_machine_names_are_queried_once_for_unknown_hosts() -> None:
    queries, answered = [], threading.Event()

    def find_machine_names() -> set[str]:
        queries.append(1)
        answered.wait(30)
        return {"head"}

    hosts = AllowedHosts(find_machine_names=find_machine_names)
    assert await hosts.contains("localhost")
    assert await hosts.contains("192.0.2.7")
    assert queries == []
    answered.set()
    assert [await hosts.contains(name) for name in ("head", "other", "head")] == [True, False, True]
    assert queries == [1]


@pytest.mark.evidence("W1")
@pytest.mark.parametrize("path", ["/api/v1/jobs", "/livez", "/openapi.json", "/docs", "/nowhere"])
async def test_request_for_foreign_host_returns_421(open_api: Open, path: str) -> None:
    answer = await (await open_api()).get(path, headers={"Host": f"{FOREIGN_HOST}:8642"})
    assert (answer.status_code, answer.headers["content-type"]) == (421, "application/problem+json")
    assert "allowed_hosts" in answer.json()["hint"]
    assert answer.json()["value"] == f"{FOREIGN_HOST}:8642"


@pytest.mark.parametrize("hosts", [[], ["127.0.0.1", "127.0.0.1"], ["127.0.0.1", FOREIGN_HOST]])
async def test_request_without_single_host_header_returns_400(open_api: Open, hosts: list[str]) -> None:
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


def test_request_with_two_tokens_returns_401(daemon: TestClient) -> None:
    """A proxy before the daemon may have checked the first token only."""
    for tokens, status in (([TOKEN], 200), ([TOKEN, "another"], 401), ([TOKEN, TOKEN], 401)):
        headers = [("Authorization", f"Bearer {token}") for token in tokens]
        assert daemon.get("/api/v1/whoami", headers=headers).status_code == status


@pytest.mark.evidence("N1")
def test_change_without_token_returns_401_without_cors_headers(daemon: TestClient) -> None:
    paths = daemon.get("/openapi.json").json()["paths"]
    changing = [
        (path, method.upper()) for path, operations in paths.items() for method in operations if method != "get"
    ]
    assert len(changing) >= 10
    for path, method in [*changing, ("/nowhere", "POST"), ("/livez", "POST"), ("/docs", "PUT")]:
        url = path.format(job=1, name="north", cluster="north", bundle="0" * 64, token="1.1.0")
        for headers in ({}, {"Origin": "http://evil.example", "Content-Type": "text/plain"}, {"Cookie": TOKEN}):
            assert daemon.request(method, url, headers=headers).status_code == 401, (method, path)
        preflight = {
            "Origin": "http://evil.example",
            "Access-Control-Request-Method": method,
            "Access-Control-Request-Headers": "authorization",
        }
        answer = daemon.options(url, headers=preflight)
        assert not [name for name in answer.headers if name.startswith("access-control-")], (method, path)


@pytest.mark.parametrize("path", ["/livez", "/openapi.json", "/docs"])
async def test_public_paths_need_no_token(open_api: Open, path: str) -> None:
    api = await open_api(tokens=[TOKEN])
    assert (await api.get(path)).status_code == 200
    assert (await api.get("/api/v1/healthz")).status_code == 401


@pytest.mark.evidence("N1", "C6")
async def test_daemon_without_tokens_rejects_every_request() -> None:
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
        ({"Host": FOREIGN_HOST}, 421),
    ],
)
def test_websocket_from_web_page_is_rejected(daemon: TestClient, headers: dict[str, str], status: int) -> None:
    token_header = {"Authorization": "Bearer the-secret-of-north"}
    with daemon.websocket_connect(WEBSOCKET, headers=token_header) as socket:
        assert socket.receive_text() == "welcome"
    with (
        pytest.raises(WebSocketDenialResponse) as refusal,
        daemon.websocket_connect(WEBSOCKET, headers=token_header | headers),
    ):
        pass  # an accepted connection is closed here
    assert refusal.value.status_code == status


@pytest.mark.evidence("W2")
def test_guard_covers_every_websocket() -> None:
    app = bare_application(administrators(TOKEN))

    @app.websocket("/anything")
    async def anything(socket: WebSocket) -> None:
        await socket.accept()

    with TestClient(app, URL) as client, pytest.raises(WebSocketDenialResponse) as refusal:
        client.websocket_connect("ws://127.0.0.1/anything", headers={"Origin": "http://evil.example"}).__enter__()
    assert refusal.value.status_code == 403


CHANGING_PATHS = [
    "/api/v1/jobs",
    "/api/v1/jobs/x/cancel",
    "/api/v1/clusters/north/drain?x=1",
    "/api/v1/nowhere",
    "/livez",
]
"""Paths that fail behind the guard as well, since there are no services."""
SIMPLE_REQUEST_HEADERS = [
    {},
    {"Content-Type": "text/plain"},
    {"Content-Type": "text/plain; application/json"},
    {"Content-Type": "TEXT/PLAIN;charset=utf-8"},
    {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "multipart/form-data; boundary=x"},
    {"Content-Type": ""},
]
"""Headers that a page of any origin may send without a preflight request."""


@pytest.mark.evidence("W3")
@pytest.mark.parametrize("path", CHANGING_PATHS)
def test_simple_cross_origin_request_returns_403(daemon: TestClient, path: str) -> None:
    """Here the token authenticates the user; a browser could also do so by a cookie."""
    for headers in SIMPLE_REQUEST_HEADERS:
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
    "foreign_headers",
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
def test_request_from_other_origin_returns_403(
    daemon: TestClient, method: str, foreign_headers: dict[str, str]
) -> None:
    own_headers = BEARER | CSRF_HEADER | {"Content-Type": "application/json"}
    answer = daemon.request(method, "/api/v1/jobs/1/cancel", headers=own_headers | foreign_headers)
    assert (answer.status_code, answer.json()["field"]) == (403, next(reversed(foreign_headers)))


def test_request_from_own_origin_is_accepted(daemon: TestClient) -> None:
    own_headers = {"Origin": URL, "Sec-Fetch-Site": "same-origin", "Content-Type": "application/json"}
    assert daemon.post("/api/v1/jobs", headers=BEARER | own_headers, content=b"{}").status_code == 422
    assert daemon.get("/api/v1/whoami", headers=BEARER | {"Origin": "http://evil.example"}).status_code == 200


def assert_secure_headers(answer: httpx2.Response) -> None:
    """Check the headers against caching, framing, content sniffing and referrers."""
    headers = answer.headers
    assert headers.get_list("cache-control") == ["no-store"]
    assert headers.get_list("x-content-type-options") == ["nosniff"]
    assert headers.get_list("referrer-policy") == ["no-referrer"]
    assert headers.get_list("x-frame-options") == ["DENY"]
    (policy,) = headers.get_list("content-security-policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert {rules[name] for name in ("default-src", "base-uri", "form-action", "frame-ancestors")} == {"'none'"}
    assert "unsafe" not in policy
    assert not [name for name in headers if name.startswith("access-control-")]


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
def test_every_answer_has_security_headers(daemon: TestClient) -> None:
    requests = [
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
        ("GET", "/livez", {"Host": FOREIGN_HOST}, 421),
        ("GET", "/livez", {"Content-Length": "99999999"}, 413),
        ("PUT", "/api/v1/agents/north/results/1.1.0", {}, 404),
    ]
    for method, path, headers, status in requests:
        answer = daemon.request(method, path, headers=headers)
        assert answer.status_code == status, (method, path, headers, answer.text)
        assert_secure_headers(answer)
    with (
        pytest.raises(WebSocketDenialResponse) as refusal,
        daemon.websocket_connect(WEBSOCKET, headers={"Origin": "http://evil.example"}),
    ):
        pass  # an accepted connection is closed here
    assert_secure_headers(refusal.value)


@pytest.mark.evidence("W4")
def test_server_error_and_busy_answer_have_security_headers() -> None:
    app = bare_application(administrators(TOKEN), max_requests=0)

    @app.get("/mistake")
    async def raise_error() -> None:
        raise RuntimeError(f"secret: {TOKEN}")

    with TestClient(app, URL, raise_server_exceptions=False) as client:
        assert_secure_headers(busy := client.get("/mistake"))
        assert busy.status_code == 503
    app = bare_application(administrators(TOKEN))
    app.get("/mistake")(raise_error)
    with TestClient(app, URL, raise_server_exceptions=False) as client:
        assert_secure_headers(server_error := client.get("/mistake", headers=BEARER))
        assert (server_error.status_code, TOKEN in server_error.text) == (500, False)


async def test_rejection_past_proxy_has_security_headers() -> None:
    app = TrustedProxies(bare_application(administrators(TOKEN)), [], encrypted=False)
    transport = httpx2.ASGITransport(app, client=("192.0.2.9", 1))
    async with httpx2.AsyncClient(transport=transport, base_url=URL) as client:
        assert_secure_headers(answer := await client.get("/livez"))
    assert answer.status_code == 403


@pytest.mark.evidence("W4")
async def test_streams_and_downloads_have_security_headers(open_api: Open, body: dict[str, Any]) -> None:
    api = await open_api()
    await api.post("/api/v1/jobs", json=body)
    assert (await api.post("/api/v1/jobs/1/cancel")).status_code == 200
    for path in ("/api/v1/jobs/1/events", "/api/v1/jobs/1/logs", "/api/v1/jobs/1/results", "/api/v1/usage"):
        assert_secure_headers(await api.get(path))
