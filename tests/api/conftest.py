"""The whole daemon in this process, but for its clusters: their agents never connect."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from koalapy.api.app import create_app
from koalapy.placement.registry import builtin
from koalapy.ports import ClusterRecord
from koalapy.scheduling.grid import ClusterBook
from koalapy.scheduling.rules import Rules
from koalapy.scheduling.scheduler import Scheduler
from koalapy.service.engine import Engine
from koalapy.service.jobs import Jobs
from koalapy.service.outbox import Outbox
from koalapy.store.migrate import migrate
from koalapy.store.sql import SqlStore, make_engine

Open = Callable[..., Any]


@asynccontextmanager
async def serving(path: Path, tokens: list[str], rules: Rules) -> AsyncIterator[httpx2.AsyncClient]:
    database = make_engine(f"sqlite:///{path}")
    migrate(database)
    store = SqlStore(database, 0.0)
    books = [ClusterBook("north"), ClusterBook("south")]
    for book in books:
        book.total = 4
    scheduler = Scheduler(rules, builtin(), books)

    def describe(name: str) -> ClusterRecord:
        book = scheduler.grid[name]
        return ClusterRecord(name, "local", str(book.state), book.total, 0, 0, 0, 0, 0, book.why, None, 1, 1.0,
                             unusable=book.unusable, drained=book.drained)  # fmt: skip

    engine = Engine(scheduler, store, Outbox((), store.epoch), epoch=store.epoch, describe=describe)
    app = create_app(Jobs(engine, store, 1, describe), tokens)
    loop = asyncio.create_task(engine.run())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://koala") as client:
        yield client
    engine.drain()
    engine.stop()
    await loop
    store.close()


@pytest_asyncio.fixture
async def open_api(tmp_path: Path) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def start(tokens: list[str] | None = None, **rules: Any) -> httpx2.AsyncClient:
            return await stack.enter_async_context(serving(tmp_path / "koala.db", tokens or [], Rules(**rules)))

        yield start


@pytest.fixture
def body() -> dict[str, Any]:
    return {"request": {"type": "flexible", "total_size": 6}, "command": ["true"], "owner": "ada"}
