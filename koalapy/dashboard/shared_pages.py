"""Pages that many browsers share: compressed once for all, and rendered again after changes for all that show them.

A browser shows a page over a stream of server-sent events. ``LivePages`` renders a page that several of them show once
after a change, and only if the page's view differs. Only the session's token in the forms is inserted for each of them.
"""

import asyncio
import re
import struct
import time
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Hashable
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any

import structlog

from koalapy.daemon.jobs.changes import IDLE_INTERVAL, MIN_INTERVAL, Changes
from koalapy.model.errors import KoalaError

log = structlog.get_logger()

LEVEL = 5
GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_LAST_BLOCK = b"\x03\x00"
"""An empty block that ends DEFLATE data."""
_LINE_END = re.compile("\r\n?|\n")


@dataclass(frozen=True, slots=True)
class SharedPage:
    """A page in pieces, to be joined by a text that differs between viewers.

    Each piece is compressed by itself, so that a page for one viewer is made without compressing it again.
    """

    pieces: tuple[bytes, ...]
    compressed: tuple[bytes, ...]
    """The pieces as raw DEFLATE data; each ends at a byte, and none refers to an earlier one."""

    def as_bytes(self, inserted: bytes) -> bytes:
        """Return the page with a text between its pieces."""
        return inserted.join(self.pieces)

    def as_deflate(self, inserted: bytes) -> bytes:
        """Return the page as DEFLATE data without an end, with a text between its pieces."""
        return store(inserted).join(self.compressed)

    def as_gzip(self, inserted: bytes) -> bytes:
        """Return the page compressed by gzip, with at most 65,535 bytes inserted, uncompressed, between its pieces."""
        checksum, length = 0, len(inserted) * (len(self.pieces) - 1)
        for index, piece in enumerate(self.pieces):
            checksum = zlib.crc32(piece, zlib.crc32(inserted, checksum) if index else checksum)
            length += len(piece)
        trailer = struct.pack("<II", checksum, length & 0xFFFFFFFF)
        return b"".join((GZIP_HEADER, self.as_deflate(inserted), _LAST_BLOCK, trailer))


def store(data: bytes) -> bytes:
    """Return at most 65,535 bytes as DEFLATE data, uncompressed and without an end."""
    return struct.pack("<BHH", 0, len(data), 0xFFFF ^ len(data)) + data


def compress_page(text: str, placeholder: str) -> SharedPage:
    """Return a page with gaps in place of a placeholder."""
    pieces = text.encode().split(placeholder.encode()) if placeholder else [text.encode()]
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    compressed = [compressor.compress(piece) + compressor.flush(zlib.Z_FULL_FLUSH) for piece in pieces]
    return SharedPage(tuple(pieces), tuple(compressed))


def as_event_data(text: str) -> str:
    """Return a text as the data of a server-sent event, whose id and end must follow."""
    lines = _LINE_END.sub("\ndata: ", text)
    return f"data: {lines}\n"


CPU_SHARE = 0.035
"""Share of a core for keeping open pages up to date; with more work, changes appear later."""
MAX_CREDIT_S = 0.1
"""Most CPU time that is saved up while nothing changes."""
STREAM_COST_S = 0.00006
"""CPU time for sending a page to one stream."""
PATIENCE_S = 0.1
"""Time after which the refresh of the next page begins although the last one is still being computed."""

Load = Callable[[], Coroutine[Any, Any, Any]]
Render = Callable[[Any], Coroutine[Any, Any, tuple[SharedPage, float]]]


@dataclass(frozen=True, slots=True)
class LiveSource:
    """How a page is made, with the rights and arguments of its viewers."""

    load: Load
    """Returns the view."""
    render: Render
    """Returns the page of a view, and the CPU time that it took in a thread."""
    family: Hashable
    """Pages of a family whose views are equal are the same; None: of no family."""
    subject: str
    """The job, user or cluster that the page shows, as in ``Changes.subjects``; empty if it shows many.

    Other changes also concern the page, but less urgently.
    """
    pause: float
    """Least seconds between two refreshes."""


@dataclass(slots=True, eq=False)
class _LivePage:
    """A page that streams show."""

    source: LiveSource
    checked_at: float
    number: int
    """Number of changes that the content includes."""
    content: SharedPage | None = None
    view: Any = None
    rendered_at: float = float("-inf")
    has_direct_change: bool = False
    followers: int = 0
    waiting: int = 0
    """Followers that have received the content; the others are still reading an earlier one."""
    updated: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a new one, at each new content."""
    task: "asyncio.Task[None] | None" = None
    is_over: bool = False
    context: Context = field(default_factory=copy_context)

    def needs_refresh(self, number: int, now: float) -> bool:
        """Return whether a follower waits for content that may have changed. Ages change without an event."""
        is_old = self.number < number or now - self.checked_at >= IDLE_INTERVAL
        return self.waiting > 0 and self.task is None and is_old

    def end(self) -> None:
        """End all streams of the page."""
        self.is_over = True
        self.wake()

    def wake(self) -> None:
        """Wake the followers that wait."""
        updated, self.updated = self.updated, asyncio.Event()
        updated.set()


class LivePages:
    """The pages that are open in browsers, and the task that refreshes them within a share of the CPU time.

    Pages whose subject changed come first, then those that were refreshed longest ago. A slow or hanging reader costs
    nothing: it gets the newest content when it has read the last one.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._pages: dict[Hashable, _LivePage] = {}
        self._task: asyncio.Task[None] | None = None
        self._credit = MAX_CREDIT_S
        self._credited_at = float("-inf")

    async def follow(
        self, key: Hashable, source: LiveSource, since: str = ""
    ) -> AsyncGenerator[tuple[str, SharedPage] | None]:
        """Yield the version and content of a page whenever it differs; None first, and after a time without difference.

        ``since``: the version that the viewer has. Errors of the first rendering are raised; later ones end the
        iterator, as does the daemon's end.
        """
        changes, now = self._changes, asyncio.get_running_loop().time()
        seen, shown = changes.number_of(since), None
        page = self._pages.get(key)
        if page is None or page.is_over:
            page = self._pages[key] = _LivePage(source, now, seen)
        page.followers += 1
        if self._task is None:
            changes.subjects = set()
            self._task = asyncio.create_task(self._run(), context=Context())
        try:
            is_recent = page.content is not None and now - page.checked_at < MIN_INTERVAL
            if seen < changes.number and page.number < changes.number and not is_recent:
                await asyncio.shield(self._refresh(page, is_opening=True))
            if seen == page.number:
                shown = page.content
            yield None
            while not page.is_over:
                if page.content is not None and page.content is not shown and page.number > seen:
                    shown, seen = page.content, -1
                    yield changes.version_of(page.number), shown
                    continue
                page.waiting += 1
                try:
                    async with asyncio.timeout(IDLE_INTERVAL):
                        await page.updated.wait()
                    continue
                except TimeoutError:
                    pass
                finally:
                    page.waiting -= 1
                yield None
        finally:
            page.followers -= 1
            if not page.followers:
                self._drop(key, page)

    def _drop(self, key: Hashable, page: _LivePage) -> None:
        """Forget a page without followers; without any page, end the task."""
        if page.task is not None:
            page.task.cancel()
        if self._pages.get(key) is page:
            del self._pages[key]
        if not self._pages and self._task is not None:
            self._task.cancel()
            self._task = self._changes.subjects = None

    async def _run(self) -> None:
        """Refresh pages after changes until the daemon ends."""
        changes = self._changes
        try:
            async for _ in changes.follow_changes():
                while not changes.ended:
                    pause = await self._refresh_due()
                    if pause is None:
                        break
                    await asyncio.sleep(pause)
        finally:
            if self._task is asyncio.current_task():
                self._task = changes.subjects = None
                for page in self._pages.values():
                    page.end()

    async def _refresh_due(self) -> float | None:
        """Refresh pages that are due, within the credit.

        Return the seconds until the next ones may be refreshed, or None if none waits for it.
        """
        changes, now = self._changes, asyncio.get_running_loop().time()
        subjects, changes.subjects = changes.subjects or set(), set()
        for page in self._pages.values():
            if not page.source.subject or page.source.subject in subjects:
                page.has_direct_change = True
        old = [page for page in self._pages.values() if page.needs_refresh(changes.number, now)]
        if not old:
            return None
        self._credit = min(MAX_CREDIT_S, self._credit + CPU_SHARE * (now - self._credited_at))
        self._credited_at = now
        due = [page for page in old if now - page.checked_at >= page.source.pause]
        for page in sorted(due, key=lambda page: (not page.has_direct_change, page.checked_at)):
            if self._credit <= 0:
                break
            if page.followers and page.task is None:
                await asyncio.wait([self._refresh(page)], timeout=PATIENCE_S)
        next_at = min(page.checked_at + page.source.pause for page in old)
        wait = max(next_at - asyncio.get_running_loop().time(), -self._credit / CPU_SHARE)
        return min(MIN_INTERVAL, max(0.02, wait))

    def _refresh(self, page: _LivePage, *, is_opening: bool = False) -> "asyncio.Task[None]":
        """Return the task that refreshes a page. What the opening of pages costs is not taken from the credit."""
        if page.task is None:
            work = self._render(page, is_opening=is_opening)
            page.task = asyncio.create_task(work, context=page.context)
            page.task.add_done_callback(_log_error)
        return page.task

    async def _render(self, page: _LivePage, *, is_opening: bool) -> None:
        """Compute a page's view, and render it if it differs from the current one or is old."""
        changes, now = self._changes, asyncio.get_running_loop().time()
        number, page.has_direct_change, page.checked_at = changes.number, False, now
        loading = _Measured(page.source.load())
        seconds = 0.0
        try:
            view = await loading
            content = page.content
            if content is None or page.view != view or now - page.rendered_at >= IDLE_INTERVAL:
                content, page.rendered_at = self._find_equal(page, view, now), now
                if content is None:
                    content, seconds = await page.source.render(view)
            page.view, page.number = view, number
            if page.content is None or content.pieces != page.content.pieces:
                page.content = content
                seconds += STREAM_COST_S * page.followers
                page.wake()
        except BaseException:
            # Its streams end; their browsers follow it again and get the error as a response.
            page.end()
            raise
        finally:
            if not is_opening:
                self._credit -= loading.seconds + seconds
            page.task = None

    def _find_equal(self, page: _LivePage, view: Any, now: float) -> SharedPage | None:
        """Return the content that was rendered from an equal view for other viewers; None if there is none."""
        if page.source.family is None:
            return None
        for other in self._pages.values():
            is_similar = other is not page and other.source.family == page.source.family
            if is_similar and now - other.rendered_at < IDLE_INTERVAL and other.content and other.view == view:
                return other.content
        return None


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
