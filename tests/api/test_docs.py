"""The OpenAPI document and its page are built in a thread."""

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


async def test_api_document_is_built_once_in_thread() -> None:
    """Building takes half a second of processor time and needs no token; it must not block the scheduler."""
    loop, begun, proceed = asyncio.get_running_loop(), asyncio.Event(), Event()
    concurrent_builds: list[int] = []
    running_builds: set[object] = set()

    def document() -> dict[str, Any]:
        running_builds.add(build := object())
        concurrent_builds.append(len(running_builds))
        loop.call_soon_threadsafe(begun.set)
        assert proceed.wait(60), "the loop was blocked"
        running_builds.remove(build)
        return DOCUMENT

    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.include_router(docs_router(document))
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://koala") as client:
        requests = [asyncio.create_task(client.get(path)) for path in ("/openapi.json", "/docs", "/openapi.json")]
        await begun.wait()
        proceed.set()
        answers = await asyncio.gather(*requests)
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert answers[0].json() == DOCUMENT
    assert "<h1>koalapy 1</h1>" in answers[1].text
    assert concurrent_builds == [1, 1, 1], "concurrent requests share one thread"
