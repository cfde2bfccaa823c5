"""How much of the daemon's disk the files of others may take, those that are still coming included."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from koalapy.model.errors import FullError
from koalapy.model.quantities import format_bytes

Excess = Callable[[], int]
"""How many bytes there are too many just now."""


@dataclass(frozen=True, slots=True)
class StorageLimits:
    """Bytes of one archive, and of all of its sort together."""

    archive: int
    quota: int


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that are kept of one sort of files, and that may be."""

    used: int
    limit: int


class Quota:
    """Counts the bytes of one sort of files; ``free`` is asked to remove some when there would be too many."""

    def __init__(
        self, setting: str, limit: int, used: int, free: Callable[[Excess], Awaitable[None]], why: str
    ) -> None:
        self._setting = setting
        self._limit = limit
        self.used = used
        """Bytes that are kept or on their way."""
        self._free = free
        self._why = why
        """What may be said of files that were not removed."""

    @property
    def room(self) -> Room:
        return Room(self.used, self._limit)

    @contextmanager
    def hold(self) -> Iterator["QuotaHold"]:
        """For a file that comes: what is not kept of it in the end counts no more."""
        hold = QuotaHold(self)
        try:
            yield hold
        finally:
            self.used -= hold.size

    async def make_room(self, size: int = 0) -> None:
        """For so many bytes more; ``FullError`` when there is none to be had."""

        def excess() -> int:
            return self.used + size - self._limit

        if excess() > 0:
            await self._free(excess)
        if excess() > 0:
            raise FullError(
                f"there is no room for it: {self._setting} is {format_bytes(self._limit)}, and {self._why}",
                field="body",
                hint=f"try again later, or have the daemon's operator raise {self._setting}",
            )


class QuotaHold:
    """What one file takes while it comes."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self.size = 0

    async def add(self, size: int) -> None:
        """So many bytes more; ``FullError`` when there is no room for them."""
        await self._quota.make_room(size)
        self._quota.used += size
        self.size += size

    def keep(self, instead_of: int = 0) -> None:
        """The file is there to stay, in place of others of so many bytes."""
        self._quota.used -= instead_of
        self.size = 0
