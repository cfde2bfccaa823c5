"""The complete daemon of ``koala serve`` in this process, with a clock that a test advances.

Agents are connected in memory, and requests are sent to the application directly.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx2

from koalapy.config.settings import Settings
from koalapy.daemon import core, main
from koalapy.daemon.engine.engine import WorkItem
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.effects import Effects
from koalapy.scheduler.events import Event
from koalapy.system.clock import Clock
from koalapy.system.local_token import TOKEN_FILE
from koalapy.system.process import ServiceManager

MAX_WAIT_S = 120.0
"""Seconds of real time."""
START_TIME = 1_000_000_000.0
"""The clock's time at the start of the first daemon."""
URL = "http://127.0.0.1:8642"


class SetClock(Clock):
    """The clock of a machine that changes only when a test sets ``time``."""

    def __init__(self, time: float) -> None:
        self.time = time

    def now(self) -> float:
        return self.time

    monotonic = since_boot = now


class WatchedDaemon:
    """A daemon without listener and agents, which reports each step of its scheduler."""

    def __init__(self, ready: "asyncio.Future[WatchedDaemon]", clock: Any, parts: tuple[Any, ...]) -> None:
        self.engine, self.store, self.hub, self.app = parts[:4]
        self.clock = clock
        self.queries = self.engine.queries
        self.scheduler = self.engine._scheduler
        self.on_effects: Callable[[Effects], object] = lambda effects: None
        """Called with the effects of each scheduler step before they are stored."""
        self._step, self.scheduler.step = self.scheduler.step, self._observe_step
        self._ready, self._end = ready, asyncio.Event()
        self.loop: asyncio.Task[Exception | None] | None = None
        """Runs the engine; its result is the error that ended the engine."""

    def _observe_step(self, events: Sequence[Event], now: float) -> Effects:
        effects: Effects = self._step(events, now)
        self.on_effects(effects)
        return effects

    async def run(self) -> None:
        """Run the engine until ``end`` is called. Raise the error that ended the engine."""
        self.loop = asyncio.create_task(self._run_engine())
        self._ready.set_result(self)
        ended = asyncio.create_task(self._end.wait())
        await asyncio.wait({self.loop, ended}, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        self.engine.drain()
        await self.hub.close()
        self.engine.stop()
        await self.loop
        self._raise_engine_error()

    async def _run_engine(self) -> Exception | None:
        # Returned, since reading a task's result twice drops the traceback of its error.
        try:
            await self.engine.run()
        except Exception as error:  # noqa: BLE001
            return error
        return None

    def _raise_engine_error(self) -> None:
        assert self.loop is not None
        if (error := self.loop.result()) is not None:
            raise error

    def stop(self) -> None:
        self._end.set()

    async def wait_until_settled(self) -> None:
        """Return when all work items and their consequences are written. Raise the error that ended the engine."""
        for _ in range(2):
            assert self.loop is not None
            committing = asyncio.ensure_future(self.engine.commit(WorkItem(decided=True)))
            async with asyncio.timeout(MAX_WAIT_S):
                await asyncio.wait({committing, self.loop}, return_when=asyncio.FIRST_COMPLETED)
            if self.loop.done():
                committing.cancel()
                self._raise_engine_error()
            await committing


@asynccontextmanager
async def running_daemon(
    settings: Settings, directory: Path, now: float = START_TIME, clock: Clock | None = None, first_nonce: int = 0xFA
) -> AsyncIterator[WatchedDaemon]:
    """Run a daemon on a data directory, by ``clock``, or with a clock that stays at ``now``."""
    ready: asyncio.Future[WatchedDaemon] = asyncio.get_running_loop().create_future()
    clock, nonces = clock or SetClock(now), count(first_nonce)
    os.makedirs(directory, 0o700, exist_ok=True)
    with (
        patch.object(main, "Daemon", lambda *parts, **options: WatchedDaemon(ready, clock, parts)),
        patch.object(core, "make_nonce", lambda: f"{next(nonces):x}"),
        patch.dict(os.environ, {"XDG_STATE_HOME": str(directory / "state")}),
    ):
        daemon_run = asyncio.create_task(
            main.run(
                settings,
                builtin_policies(),
                "127.0.0.1",
                0,
                lambda: directory,
                0o077,
                lambda url: None,
                ServiceManager(),
                machine=clock,
            )
        )
        await asyncio.wait({daemon_run, ready}, return_when=asyncio.FIRST_COMPLETED)
        if daemon_run.done():
            daemon_run.result()
        daemon = await ready
        try:
            yield daemon
        finally:
            daemon.stop()
            await daemon_run


def admin_client(daemon: WatchedDaemon, directory: Path) -> httpx2.AsyncClient:
    """Return a client with the daemon's token."""
    headers = {"Authorization": f"Bearer {(directory / TOKEN_FILE).read_text().strip()}"}
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(daemon.app), base_url=URL, headers=headers)
