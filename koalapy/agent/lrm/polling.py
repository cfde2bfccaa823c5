"""When to look at a resource manager that cannot tell of changes by itself."""

import asyncio
from collections.abc import AsyncIterator


class Polling:
    """At once, then at a fixed rate, and whenever something was done or heard."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._soon = asyncio.Event()
        self._closed = False

    def soon(self, after: float = 0.0) -> None:
        """Look ``after`` seconds from now."""
        if after > 0:
            asyncio.get_running_loop().call_later(after, self._soon.set)
        else:
            self._soon.set()

    def close(self) -> None:
        self._closed = True
        self._soon.set()

    async def changes(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._closed:
            self._soon.clear()
            yield
            now = loop.time()
            while due <= now:
                due += self._interval
            try:
                async with asyncio.timeout_at(due):
                    await self._soon.wait()
            except TimeoutError:
                pass
