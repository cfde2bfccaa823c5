"""Who goes away takes the work on his answer with him, and others have their turn: real sockets on loopback."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException

from koalapy.api.forecasts import forecasts_router
from koalapy.api.history import sharing_router
from koalapy.api.problems import add_error_handlers
from koalapy.api.routes import cancel_on_disconnect
from koalapy.daemon.engine.daemon import HttpServer
from koalapy.daemon.forecast.forecasts import Forecasts
from koalapy.daemon.forecast.sharing import Sharing
from koalapy.daemon.jobs.changes import Changes
from koalapy.daemon.jobs.history import History
from koalapy.daemon.listener.connections import OWN_FILES, Connections
from koalapy.dashboard.dashboard import PageCache
from koalapy.model.errors import BusyError
from koalapy.policies.installed import load_policies
from koalapy.record.beginning import People
from tests.daemon.test_forecasts import Clock, queries_at
from tests.memory_stores import memory_stores

WHAT_IF = (
    b"POST /api/v1/what-if HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
)
SHARING = b"GET /api/v1/sharing HTTP/1.1\r\nHost: here\r\n\r\n"
PAGE = b"GET /page HTTP/1.1\r\nHost: here\r\n\r\n"
SECONDS = 60.0
"""Half of what the work may take by itself, and far more than any of this takes."""


class Work:
    """Never comes to its end by itself."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[None] = asyncio.Queue()
        self.ended: asyncio.Queue[None] = asyncio.Queue()

    async def __call__(self, _: object = None) -> NoReturn:
        self.begun.put_nowait(None)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.put_nowait(None)
        raise AssertionError("it was never to go on")


def forecasts(work: Work) -> APIRouter:
    service = Forecasts(queries_at(50.0), People(), Clock(), load_policies, work)
    return forecasts_router(service, None)  # type: ignore[arg-type]  # for other routes


def sharing(work: Work) -> APIRouter:
    queries, clock = queries_at(50.0), Clock()
    history = memory_stores().history
    return sharing_router(Sharing(history, queries, clock, work), History(history, clock, queries.jobs))


def page(work: Work) -> APIRouter:
    """As the dashboard's pages are made, one at a time."""
    router, cache, one_at_a_time = APIRouter(), PageCache(Changes()), asyncio.Lock()

    async def make() -> bytes:
        async with one_at_a_time:
            await work()

    @router.get("/page")
    async def show(request: Request) -> Any:
        return await cancel_on_disconnect(request, cache.get("page", make))

    return router


@contextlib.asynccontextmanager
async def served(router: APIRouter) -> AsyncIterator[int]:
    app = FastAPI()
    app.include_router(router)
    add_error_handlers(app)
    listener = socket.create_server(("127.0.0.1", 0))
    started = asyncio.Event()
    server = HttpServer(app, Connections(OWN_FILES), started.set)
    running = asyncio.create_task(server.serve([listener]))
    await started.wait()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True  # where it failed, somebody is still served
        await running


async def ask(port: int, request: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    return writer


@pytest.mark.parametrize(
    ("router", "request_"), [(forecasts, WHAT_IF), (sharing, SHARING), (page, PAGE)], ids=["what-if", "sharing", "page"]
)
async def test_the_next_one_does_not_wait_for_what_nobody_asks_for_any_more(
    router: Callable[[Work], APIRouter], request_: bytes
) -> None:
    work = Work()
    async with served(router(work)) as port, asyncio.timeout(SECONDS):
        for _ in range(2):
            asker = await ask(port, request_)
            await work.begun.get()
            asker.close()
            await work.ended.get()


async def test_who_goes_away_takes_a_page_from_no_other_who_waits_for_it() -> None:
    cache, ready = PageCache(Changes()), asyncio.Event()

    async def make() -> bytes:
        await ready.wait()
        return b"page"

    first, second = (asyncio.create_task(cache.get("page", make)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    ready.set()
    assert await second == b"page"


async def test_work_ends_with_who_waits_for_it() -> None:
    """As when a token is revoked."""
    work, request = Work(), Request({"type": "http"}, _never)
    waiting = asyncio.create_task(cancel_on_disconnect(request, work()))
    await work.begun.get()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not work.ended.empty()
    assert len(asyncio.all_tasks()) == 1


async def test_what_is_wrong_with_the_work_or_the_request_is_told() -> None:
    async def fails() -> None:
        raise BusyError("too long", retry_after=1.0)

    with pytest.raises(BusyError):
        await cancel_on_disconnect(Request({"type": "http"}, _never), fails())

    async def too_large() -> NoReturn:
        raise HTTPException(413)

    with pytest.raises(HTTPException):
        await cancel_on_disconnect(Request({"type": "http"}, too_large), Work()())


async def _never() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("nobody is to come")
