"""Requests to a standby daemon."""

from typing import Any

import httpx2
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from koalapy.api.standby import StandbyGate

ACTIVE = "https://first.example.org:8642"


async def read_app(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(f"{scope['path']}?{scope['query_string'].decode()}")(scope, receive, send)


async def request(path: str, method: str = "GET", gate: StandbyGate | None = None, **options: Any) -> httpx2.Response:
    gate = gate or StandbyGate(lambda: read_app, lambda: ("first:7", ACTIVE))
    transport = httpx2.ASGITransport(app=gate)  # type: ignore[arg-type]
    async with httpx2.AsyncClient(transport=transport, base_url="http://second") as http:
        return await http.request(method, path, **options)


@pytest.mark.parametrize(
    "path", ["/livez", "/api/v1/jobs", "/api/v1/jobs/7", "/api/v1/jobs/7/timeline", "/api/v1/clusters/north"]
)
async def test_gate_passes_reads(path: str) -> None:
    assert (await request(path)).text == f"{path}?"


async def test_gate_drops_order_that_needs_queue() -> None:
    answer = await request("/api/v1/jobs?active=true&sort=queue&offset=3&limit=9")
    assert answer.text == "/api/v1/jobs?active=true&limit=9"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/v1/jobs"),
        ("POST", "/api/v1/jobs/7"),
        ("GET", "/api/v1/jobs/7?wait=5"),
        ("GET", "/api/v1/jobs/7/logs"),
        ("GET", "/api/v1/jobs/7/../../tokens"),
        ("GET", "/api/v1/tokens"),
        ("GET", "/readyz"),
        ("GET", "/"),
    ],
)
async def test_gate_rejects_other_requests_with_active_daemon(method: str, path: str) -> None:
    answer = await request(path, method)
    assert answer.status_code == 503
    assert (answer.json()["code"], answer.json()["active"]) == ("daemon-standby", ACTIVE)
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-content-type-options"] == "nosniff"


async def test_gate_while_database_cannot_be_read_rejects_reads() -> None:
    gate = StandbyGate(lambda: None, lambda: ("", ""))
    answer = await request("/api/v1/jobs", gate=gate)
    assert answer.status_code == 503
    assert answer.json()["detail"] == "this daemon stands by; none is active now"


async def test_gate_shows_browser_page_with_escaped_link() -> None:
    gate = StandbyGate(lambda: read_app, lambda: ("first:7", 'https://x/"><script>'))
    answer = await request("/", gate=gate, headers={"Accept": "text/html"})
    assert answer.status_code == 503
    assert "<script>" not in answer.text
    assert "is active" in answer.text
