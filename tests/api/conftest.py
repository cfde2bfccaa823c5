"""One daemon without agents for each test."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from koalapy.model.limits import Limits
from koalapy.scheduler.fair_share import FairShares
from koalapy.scheduler.rules import Rules
from tests.daemon.sites import Sites
from tests.serving import Open, serving


@pytest_asyncio.fixture
async def open_api(tmp_path: Path) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def start(
            tokens: list[str] | None = None,
            sites: Sites | None = None,
            limits: Limits | None = None,
            shares: FairShares | None = None,
            **rules: Any,
        ) -> httpx2.AsyncClient:
            serve = serving(tmp_path / "koala.db", tokens or [], Rules(**rules), sites, limits=limits, shares=shares)
            return await stack.enter_async_context(serve)

        yield start


@pytest.fixture
def body() -> dict[str, Any]:
    return {"request": {"type": "flexible", "total_size": 6}, "command": ["true"], "owner": "ada"}
