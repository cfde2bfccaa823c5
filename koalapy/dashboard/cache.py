"""Pages that several show at once are made once."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass

from koalapy.daemon.jobs.changes import Changes

SHORT = 0.5
"""Seconds for which a page may be shown again though something has changed since, until that is told."""
LONG = 5.0
"""Seconds for which it may be shown again when nothing has."""
MAX_PAGES = 500


@dataclass(slots=True)
class _Made:
    page: "asyncio.Task[bytes]"
    at: float
    version: str
    asked_by: int = 0
    """As many as wait for it now."""


class PageCache:
    """By what they show, and to whom."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._pages: dict[Hashable, _Made] = {}

    def clear(self) -> None:
        """Somebody has changed something here, and will look."""
        self._pages.clear()

    async def get(self, key: Hashable, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """The page: as it was made just now for another, or made now."""
        loop = asyncio.get_running_loop()
        now, made = loop.time(), self._pages.get(key)
        if made is None or not self._is_good(made, now):
            if len(self._pages) >= MAX_PAGES:
                self._pages.clear()
            made = self._pages[key] = _Made(asyncio.ensure_future(make()), now, self._changes.version)
        made.asked_by += 1
        try:
            # One who goes away does not take the page from the others.
            return await asyncio.shield(made.page)
        except BaseException:
            if made.asked_by == 1:  # nobody waits for it any more
                made.page.cancel()
            if (made.asked_by == 1 or made.page.done()) and self._pages.get(key) is made:
                del self._pages[key]
            raise
        finally:
            made.asked_by -= 1

    def _is_good(self, made: _Made, now: float) -> bool:
        if made.at <= self._changes.told_at:
            return False
        return now - made.at < (LONG if made.version == self._changes.version else SHORT)
