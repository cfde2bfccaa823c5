"""What the API says of itself is made beside the loop."""

import asyncio
from threading import Event
from typing import Any

import httpx2
from fastapi import FastAPI

from koalapy.api.app import docs_router

DOCUMENT: dict[str, Any] = {
    "info": {"title": "koalapy", "version": "1", "description": "One."},
    "paths": {},
    "tags": [],
    "components": {"schemas": {}},
}


async def test_who_asks_first_what_the_api_is_keeps_nobody_else_waiting() -> None:
    """It takes half a second of processor time, and no token: the scheduler stood still meanwhile."""
    loop, begun, goes_on = asyncio.get_running_loop(), asyncio.Event(), Event()
    at_once: list[int] = []
    under_way: set[object] = set()

    def document() -> dict[str, Any]:
        under_way.add(me := object())
        at_once.append(len(under_way))
        loop.call_soon_threadsafe(begun.set)
        assert goes_on.wait(60), "only the loop ends this"
        under_way.remove(me)
        return DOCUMENT

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(docs_router(document))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://koala") as client:
        asked = [asyncio.create_task(client.get(path)) for path in ("/openapi.json", "/docs", "/openapi.json")]
        await begun.wait()
        goes_on.set()
        answers = await asyncio.gather(*asked)
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert answers[0].json() == DOCUMENT
    assert "<h1>koalapy 1</h1>" in answers[1].text
    assert at_once == [1, 1, 1], "many that ask at once take one thread"
