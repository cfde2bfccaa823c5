"""Streams of open pages: contents that all viewers with the same query and rights share, made anew after changes."""

import asyncio
import re
import struct
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import structlog

from koalapy.daemon.jobs.changes import IDLE_INTERVAL, MIN_INTERVAL, Changes
from koalapy.model.errors import KoalaError

log = structlog.get_logger()

LEVEL = 5
GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_LINE_END = re.compile("\r\n?|\n")
CPU_SHARE = 0.035
"""Share of a core for keeping open pages up to date; with more work, changes appear later."""
STREAM_COST_S = 0.00006
"""CPU time for sending a page to one stream."""
MAX_WEIGHT = 25
"""Number of viewers beyond which a page is refreshed at the same rate: one user may have many streams."""

Load = Callable[[], Coroutine[Any, Any, Any]]
Render = Callable[[Any], Coroutine[Any, Any, tuple[str, float]]]


@dataclass(frozen=True, slots=True)
class Event:
    """A server-sent event, and the same as a part of a gzip stream that refers to no earlier part."""

    plain: bytes
    compressed: bytes


KEEP_ALIVE = Event(b":\n\n", struct.pack("<BHH", 0, 3, 0xFFFF ^ 3) + b":\n\n")
"""A comment, in place of a content that does not differ; its compressed form is a stored block."""


def as_event_data(text: str) -> str:
    """Return a text as the data of a server-sent event; its id and end must follow."""
    return "data: " + _LINE_END.sub("\ndata: ", text) + "\n"


def make_event(text: str, version: str) -> Event:
    """Return a text as an event with its version as id."""
    plain = f"{as_event_data(text)}id: {version}\n\n".encode()
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return Event(plain, compressor.compress(plain) + compressor.flush(zlib.Z_FULL_FLUSH))


@dataclass(slots=True, eq=False)
class _LivePage:
    """A page that streams show; ``load`` and ``render`` have the rights and arguments of its viewers."""

    load: Load
    """Returns the view."""
    render: Render
    """Returns the text of a view, and the CPU time that it took in a thread."""
    pause: float
    """Least seconds between two refreshes."""
    requested_number: int = -1
    """Number of changes that the content includes, or will include after the refresh under way."""
    number: int = -1
    """Number of changes that the content includes."""
    view: Any = None
    event: Event | None = None
    loaded_at: float = float("-inf")
    rendered_at: float = float("-inf")
    cost_s: float = 0.0
    """CPU time of the last refresh."""
    followers: int = 0
    task: "asyncio.Task[None] | None" = None


class LivePages:
    """A cache of the pages that are open in browsers, by query and rights. A page is refreshed for a waiting viewer.

    The pause between two refreshes grows with the CPU time of all open pages, less for a page of many viewers. A slow
    or hanging reader costs nothing: it gets the newest content when it has read the last one.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._pages: dict[Hashable, _LivePage] = {}

    async def follow(
        self, key: Hashable, load: Load, render: Render, pause: float = MIN_INTERVAL, since: str = ""
    ) -> AsyncGenerator[Event]:
        """Yield a page as an event whenever it differs, and ``KEEP_ALIVE`` first and while it does not.

        ``since``: the version that the viewer has. Errors of the first refresh are raised; later ones end the iterator,
        as does the daemon's end.
        """
        page = self._pages.setdefault(key, _LivePage(load, render, pause))
        page.followers += 1
        try:
            loop, seen_number = asyncio.get_running_loop(), self._changes.number_of(since)
            is_due = page.task is not None or loop.time() - page.loaded_at >= MIN_INTERVAL
            if seen_number < self._changes.number and is_due:
                await self._refresh(page)
            sent = page.event if seen_number == page.number else None
            yield KEEP_ALIVE
            if page.event is not None and page.event is not sent and seen_number < page.number:
                yield (sent := page.event)
            sent_at = loop.time()
            async for _ in self._changes.follow_changes():
                while (seconds := self._seconds_until_due(page)) > 0 and not self._changes.ended:
                    await asyncio.sleep(min(seconds, MIN_INTERVAL))
                    if loop.time() - sent_at >= IDLE_INTERVAL:
                        yield KEEP_ALIVE
                        sent_at = loop.time()
                try:
                    await self._refresh(page)
                except Exception:  # noqa: BLE001 logged by the task; its browsers get it as a response
                    return
                if self._changes.ended:
                    return
                yield KEEP_ALIVE if page.event is None or page.event is sent else page.event
                sent, sent_at = page.event, loop.time()
        finally:
            page.followers -= 1
            if not page.followers:
                if page.task is not None:
                    page.task.cancel()
                if self._pages.get(key) is page:
                    del self._pages[key]

    def _seconds_until_due(self, page: _LivePage) -> float:
        """Return the seconds until a page may be refreshed: all keep their share of a core at the least mean delay."""
        if page.requested_number == self._changes.number:
            return 0.0
        weights = sum(sqrt(followed.cost_s * min(followed.followers, MAX_WEIGHT)) for followed in self._pages.values())
        pause = max(page.pause, sqrt(page.cost_s / min(page.followers, MAX_WEIGHT)) * weights / CPU_SHARE)
        return page.loaded_at + pause - asyncio.get_running_loop().time()

    async def _refresh(self, page: _LivePage) -> None:
        """Make a page's content anew if anything changed or it is old, once for all followers that wait for it."""
        is_old = asyncio.get_running_loop().time() - page.loaded_at >= IDLE_INTERVAL
        if page.task is None and (page.number != self._changes.number or is_old):
            page.task = asyncio.create_task(self._make_content(page))
            page.task.add_done_callback(_log_error)
        if page.task is not None:
            await asyncio.shield(page.task)

    async def _make_content(self, page: _LivePage) -> None:
        """Load a page's view, and render it if it differs from the last one or that is old: ages grow."""
        number, now = self._changes.number, asyncio.get_running_loop().time()
        page.loaded_at, page.requested_number = now, number
        loading, render_s = _Measured(page.load()), 0.0
        try:
            view = await loading
            if page.event is None or page.view != view or now - page.rendered_at >= IDLE_INTERVAL:
                text, render_s = await page.render(view)
                event = make_event(text, self._changes.version_of(number))
                page.view, page.event, page.rendered_at = view, event, now
            page.number = number
        except BaseException:
            page.loaded_at, page.requested_number = float("-inf"), -1
            raise
        finally:
            page.cost_s = loading.seconds + render_s + STREAM_COST_S * page.followers
            page.task = None


def _log_error(task: "asyncio.Task[None]") -> None:
    """Log an unexpected error of a page. Others are not logged, since browsers get them as responses."""
    error = None if task.cancelled() else task.exception()
    if error is not None and not isinstance(error, KoalaError):
        log.error("an open page cannot be rendered", action="page-failed", exc_info=error)


class _Measured(Generator[Any, Any, Any]):
    """An awaitable that runs a coroutine and measures the CPU time of its steps."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, Any]:
        return self

    def send(self, value: Any) -> Any:
        """Run the next step."""
        start = time.thread_time()
        try:
            return self._coroutine.send(value)
        finally:
            self.seconds += time.thread_time() - start

    def throw(self, *error: Any) -> Any:
        """Run the next step with an error, such as a cancellation."""
        return self._coroutine.throw(*error)
