"""Cancelling work of disconnected clients, over real sockets on loopback."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import NoReturn

import pytest
from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException

from koalapy.api.forecasts import forecasts_router
from koalapy.api.problems import add_error_handlers
from koalapy.api.routes import cancel_on_disconnect
from koalapy.daemon.forecast.forecasts import Forecasts
from koalapy.daemon.listener.connections import OWN_FILES, Connections, HttpServer
from koalapy.model.errors import BusyError
from koalapy.policies.registry import load_policies
from koalapy.simulation.record.format import People
from tests.daemon.test_forecasts import Clock, queries_at

WHAT_IF = (
    b"POST /api/v1/what-if HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
)
TIMEOUT_S = 60.0
"""Half the time limit of the work, and far more than any step of these tests takes."""


class Work:
    """Work that runs until it is cancelled."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[None] = asyncio.Queue()
        self.ended: asyncio.Queue[None] = asyncio.Queue()

    async def __call__(self, _: object = None) -> NoReturn:
        self.begun.put_nowait(None)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.put_nowait(None)
        raise AssertionError("the work went on")


def make_forecasts_router(work: Work) -> APIRouter:
    service = Forecasts(queries_at(50.0), People(), Clock(), load_policies, work)
    return forecasts_router(service, None)  # type: ignore[arg-type]  # used by other routes only


@contextlib.asynccontextmanager
async def serve_router(router: APIRouter) -> AsyncIterator[int]:
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
        server.should_exit = server.force_exit = True  # after a failure, a client is still being served
        await running


async def send_request(port: int, request: bytes) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    return writer


async def test_work_is_cancelled_when_client_disconnects() -> None:
    work = Work()
    async with serve_router(make_forecasts_router(work)) as port, asyncio.timeout(TIMEOUT_S):
        for _ in range(2):
            client = await send_request(port, WHAT_IF)
            await work.begun.get()
            client.close()
            await work.ended.get()


async def test_work_is_cancelled_with_its_waiting_request() -> None:
    """Cancel the request as the guard does after its token is revoked."""
    work, request = Work(), Request({"type": "http"}, wait_forever)
    waiting = asyncio.create_task(cancel_on_disconnect(request, work()))
    await work.begun.get()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not work.ended.empty()
    assert len(asyncio.all_tasks()) == 1


async def test_cancel_on_disconnect_raises_errors_of_work_and_request() -> None:
    async def raise_busy() -> None:
        raise BusyError("too long", retry_after=1.0)

    with pytest.raises(BusyError):
        await cancel_on_disconnect(Request({"type": "http"}, wait_forever), raise_busy())

    async def raise_too_large() -> NoReturn:
        raise HTTPException(413)

    with pytest.raises(HTTPException):
        await cancel_on_disconnect(Request({"type": "http"}, raise_too_large), Work()())


async def wait_forever() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("the wait ended")
