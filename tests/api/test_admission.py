"""Limits on concurrent requests and on the time of request bodies."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from koalapy.api.access import set_identity
from koalapy.api.middleware import MAX_USER_FRACTION, RequestLimiter, UserRequestLimiter
from koalapy.model.identity import Identity, Role
from tests.serving import AGENT_TOKENS, Open, app_of

Body = dict[str, Any]


def limit_requests(api: Any, max_requests: int = 100, body_timeout: float = 0.1) -> httpx2.AsyncClient:
    """Return a client of the same daemon behind a request limit."""
    app = RequestLimiter(app_of(api), max_requests, body_timeout)
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url=api.base_url, headers=api.headers)


@pytest.mark.evidence("N3")
async def test_request_beyond_limit_returns_503_except_for_agents(open_api: Open, body: Body) -> None:
    unlimited = await open_api()
    await unlimited.post("/api/v1/jobs", json=body)
    api = limit_requests(unlimited, max_requests=2)
    waiting = [asyncio.create_task(api.get("/api/v1/jobs/1?wait=30")) for _ in range(2)]
    while (busy := await api.get("/api/v1/clusters")).status_code == 200:
        await asyncio.wait(waiting, timeout=0.001)
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
    assert busy.headers["content-type"] == "application/problem+json"
    agents = "/api/v1/agents/north/bundles/" + "a" * 64
    answer = await api.get(agents, headers={"authorization": f"Bearer {AGENT_TOKENS['north']}"})
    assert answer.status_code == 404, "agents are not limited"
    await unlimited.post("/api/v1/jobs/1/cancel")
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
    assert (await api.get("/api/v1/clusters")).status_code == 200


@pytest.mark.evidence("U12")
async def test_request_limit_per_user_leaves_capacity_for_others() -> None:
    begun, finish = asyncio.Semaphore(0), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.release()
        await finish.wait()
        await PlainTextResponse("served")(scope, receive, send)

    shares = UserRequestLimiter(app, 3 * MAX_USER_FRACTION)

    async def request_events(user: str) -> int:
        async def identified_app(scope: Scope, receive: Receive, send: Send) -> None:
            if user:
                set_identity(scope, Identity(user, Role.USER, "a test"))
            await shares(scope, receive, send)

        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(identified_app), base_url="http://koala"
        ) as client:
            return (await client.get("/api/v1/events")).status_code

    streams = [asyncio.create_task(request_events("mallory")) for _ in range(3)]
    for _ in streams:
        await begun.acquire()
    assert await request_events("mallory") == 429, "the share of one user is used up"
    other_requests = [asyncio.create_task(request_events(user)) for user in ("ada", "bob", "", "", "", "")]
    for _ in other_requests:
        await begun.acquire()
    finish.set()
    assert await asyncio.gather(*streams, *other_requests) == [200] * 9
    assert await request_events("mallory") == 200


@pytest.mark.parametrize("first", [b"", b'{"request":'])
async def test_body_not_completed_in_time_returns_408(open_api: Open, first: bytes) -> None:
    api = limit_requests(await open_api())

    async def send_slowly() -> AsyncIterator[bytes]:
        yield first
        await asyncio.Event().wait()

    headers = {"content-type": "application/json"}
    answer = await api.post("/api/v1/jobs", content=send_slowly(), headers=headers)
    assert (answer.status_code, answer.json()["status"]) == (408, 408)
    assert "not complete within 0.1 seconds" in answer.json()["detail"]


async def test_body_timeout_does_not_limit_answers(open_api: Open, body: Body) -> None:
    api = limit_requests(await open_api())
    await api.post("/api/v1/jobs", json=body)
    assert (await api.get("/api/v1/jobs/1?wait=0.3")).status_code == 200
    following = asyncio.create_task(api.get("/api/v1/jobs/1/events"))
    await api.get("/api/v1/jobs/1?wait=0.3")
    await api.post("/api/v1/jobs/1/cancel")
    assert '"cancelled"' in (await following).text
