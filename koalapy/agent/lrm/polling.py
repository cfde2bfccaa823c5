"""When to look at a resource manager that cannot tell of changes by itself."""

import asyncio
from collections.abc import AsyncIterator

from koalapy.agent.lrm.port import Lrm


class PolledLrm(Lrm):
    """The part of adapters that is alike: they look at a fixed rate, and keep no key for runners."""

    def __init__(self, poll_interval: float) -> None:
        self._poll_interval = poll_interval
        self._soon = asyncio.Event()
        self._closed = False

    async def close(self) -> None:
        """End the changes."""
        self._closed = True
        self._soon.set()

    def poll_soon(self, after: float = 0.0) -> None:
        """Have a change told ``after`` seconds from now: something was done or heard."""
        if after > 0:
            asyncio.get_running_loop().call_later(after, self._soon.set)
        else:
            self._soon.set()

    async def watch_changes(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while not self._closed:
            self._soon.clear()
            yield
            now = loop.time()
            while due <= now:
                due += self._poll_interval
            try:
                async with asyncio.timeout_at(due):
                    await self._soon.wait()
            except TimeoutError:
                pass

    def runners_key(self) -> bytes:
        return b""
