"""How much of the daemon's disk the files of others may take, those that are still coming included."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from koalapy.model.errors import FullError
from koalapy.model.quantities import bytes_text

Lacking = Callable[[], int]
"""How many bytes there are too few just now."""


class Room:
    """Counts the bytes of one sort of files; ``free`` is asked to remove some when there would be too many."""

    def __init__(
        self, setting: str, limit: int, used: int, free: Callable[[Lacking], Awaitable[None]], why: str
    ) -> None:
        self._setting = setting
        self._limit = limit
        self.used = used
        """Bytes that are kept or on their way."""
        self._free = free
        self._why = why
        """What may be said of files that were not removed."""

    @contextmanager
    def taken(self) -> Iterator["Taken"]:
        """For a file that comes: what is not kept of it in the end takes no room any more."""
        taken = Taken(self)
        try:
            yield taken
        finally:
            self.used -= taken.size

    async def make(self, size: int = 0) -> None:
        """Have room for so many bytes more; ``FullError`` when there is none to be had."""

        def lacking() -> int:
            return self.used + size - self._limit

        if lacking() > 0:
            await self._free(lacking)
        if lacking() > 0:
            raise FullError(
                f"there is no room for it: {self._setting} is {bytes_text(self._limit)}, and {self._why}",
                field="body",
                hint=f"try again later, or have the daemon's operator raise {self._setting}",
            )


class Taken:
    """What one file takes while it comes."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self.size = 0

    async def more(self, size: int) -> None:
        """So many bytes more; ``FullError`` when there is no room for them."""
        await self._room.make(size)
        self._room.used += size
        self.size += size

    def keep(self, instead_of: int = 0) -> None:
        """The file is there to stay, in place of others of so many bytes."""
        self._room.used -= instead_of
        self.size = 0
