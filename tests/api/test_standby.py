"""Requests to a standby daemon."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from koalapy.api.standby import StandbyGate
from koalapy.config.settings import Settings
from koalapy.daemon import standby
from koalapy.daemon.engine.database import Threads
from koalapy.daemon.listener.certificate import Certificate
from koalapy.daemon.services import KEYS_INTERVAL
from koalapy.policies.registry import load_policies
from koalapy.store.opening import open_stores
from koalapy.store.output import OutputStore
from koalapy.store.standby import LeaseReader, LeaseState
from koalapy.system.process import ServiceManager
from tests.certificates import CertificateAuthority
from tests.daemon.test_oidc import EC, RSA, Keys, make_token, make_verifier, public_keys
from tests.signals import pass_time, until

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


async def test_standby_rejects_tokens_of_withdrawn_keys_and_shows_renewed_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, authority, data = Keys(EC), CertificateAuthority(tmp_path / "authority"), tmp_path / "data"
    data.mkdir()
    url = f"sqlite:///{data}/koala.db"
    open_stores(url, OutputStore(data / "output", 1000)).jobs.close()
    held = LeaseState(1, 0, f"{socket.gethostname()}:7", ACTIVE, 1000.0, is_locked=True, may_live=True, has_schema=True)
    monkeypatch.setattr(LeaseReader, "read", lambda _: held)  # the lock is one of PostgreSQL
    monkeypatch.setattr(standby, "load_provider", lambda _: make_verifier(keys=keys, clock=time.time))
    signalled, files = asyncio.Event(), authority.issue()
    daemon = standby.Standby(
        Settings(database=url, allowed_hosts=["second"]),
        load_policies(),
        "127.0.0.1",
        data,
        certificate := Certificate(files.certificate, files.key, data),
        "the-token-of-the-daemon",
        ServiceManager(),
        Threads(1, "lease"),
        lambda url, active: None,
        signalled,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = asyncio.create_task(daemon.run(listener))
        app = await until(lambda: daemon._app)
        token = make_token(EC, iat=int(time.time()), exp=int(time.time()) + 300)
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://second") as http:
            answer = await http.get("/api/v1/jobs", headers=headers)
            assert answer.status_code == 200, answer.text
            keys.content, before = public_keys(RSA), certificate.fingerprint
            files.replace_with(authority.issue())
            await pass_time(KEYS_INTERVAL + 1.0)
            assert (await http.get("/api/v1/jobs", headers=headers)).status_code == 401
            assert certificate.fingerprint != before
        signalled.set()
        assert await running is None
