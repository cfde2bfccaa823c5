"""Whose turn it is to pull: a site lets only so many pulls run at once."""

import asyncio
import itertools
from bisect import insort
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Given in the order of arrival; who was cut and comes again still goes before all that came later."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._places = itertools.count()
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def arrive(self) -> int:
        """A place in the order, for as many turns as it takes."""
        return next(self._places)

    @asynccontextmanager
    async def turn(self, place: int) -> AsyncIterator[None]:
        """Wait, however long it takes, and have a turn until the end of the block."""
        await self._wait(place)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, place: int) -> None:
        if self._free:
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        insort(self._waiting, (place, given))
        try:
            await given
        except asyncio.CancelledError:
            if given.cancelled():
                self._waiting.remove((place, given))
            else:
                self._pass_on()  # It was given in the very moment in which nobody wanted it any more.
            raise

    def _pass_on(self) -> None:
        """To whoever has waited longest. One that gave up in this moment has not left the line yet."""
        for index, (_, given) in enumerate(self._waiting):
            if not given.done():
                del self._waiting[index]
                given.set_result(None)
                return
        self._free += 1
