"""Keep archives of one kind in a folder: within a quota, and within the limits of users and groups."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Container
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from koalapy.daemon.files.archives import Archive, incoming_file, receive_archive, remove_unregistered
from koalapy.daemon.jobs.quota import Quota, QuotaHold, StorageLimits, StorageUse
from koalapy.model.errors import FullError
from koalapy.model.limits import Excess, Limits, Scope

Key = TypeVar("Key")


Removal = tuple[dict[Key, int], OSError | None]
"""The bytes of removed archives by key, and the error of a file that could not be removed."""


class StoredArchives(ABC, Generic[Key]):
    """The archives of one kind. The oldest ones that no job needs make way for new ones."""

    QUOTA: ClassVar[str]
    """The setting of the quota, and the name of the limit of users and groups."""
    LIMIT: ClassVar[str]
    MIN_RETENTION: ClassVar[float]
    """Seconds for which an archive is kept although the quota or a limit is exceeded."""
    REJECTION: ClassVar[str]
    """Why archives remain although the quota is exceeded."""

    def __init__(
        self,
        directory: Path,
        storage: StorageLimits,
        used: int,
        clock: Callable[[], float],
        owners: Limits | None,
        registered: Container[str] = (),
    ) -> None:
        """``used``: the bytes of the stored archives; ``registered``: the files in the folder that are kept."""
        self._directory, self._limit, self._clock, self._owners = directory, storage.archive, clock, owners or Limits()
        self._changing = asyncio.Lock()
        """Held while an archive is added or removed."""
        self._quota = Quota(self.QUOTA, storage.quota, used, self._free_space, self.REJECTION)
        remove_unregistered(directory, registered)

    @property
    def storage_use(self) -> StorageUse:
        return self._quota.use

    @abstractmethod
    async def size_of(self, scope: Scope) -> int:
        """Return the bytes stored for a user, or for the members of a group."""

    @abstractmethod
    async def _remove_until(
        self, horizon: float, enough: int | None = None, scope: Scope | None = None
    ) -> Removal[Key]:
        """Remove unneeded archives from before ``horizon``, the oldest first, until ``enough`` bytes are removed.

        ``enough`` None: all. ``scope``: only those of owners in it. Called with ``_changing`` held.
        """

    @asynccontextmanager
    async def _receive(self, content: AsyncIterator[bytes]) -> AsyncIterator[tuple[Archive, Path, QuotaHold]]:
        """Yield a received and checked archive with its file, which is removed at the end unless it was moved."""
        with incoming_file(self._directory) as path, self._quota.hold_space() as hold:
            yield await receive_archive(content, path, self._limit, hold), path, hold

    async def _free_space(self, count_excess: Callable[[], int]) -> None:
        """Remove archives until the quota is no longer exceeded."""
        async with self._changing:
            if (enough := count_excess()) > 0:
                await self._remove_until(self._clock() - self.MIN_RETENTION, enough)

    async def _free_owner_space(self, owner: str, size: int) -> Excess | None:
        """Remove an owner's archives until ``size`` more bytes are within the limits. Return a limit still exceeded."""
        for scope in self._owners.scopes(owner):
            limit = getattr(scope.limits, self.LIMIT)
            if limit is None:
                continue
            used = await self.size_of(scope)
            if (enough := used + size - limit) > 0:
                removed, _ = await self._remove_until(self._clock() - self.MIN_RETENTION, enough, scope)
                used -= sum(removed.values())
            if excess := self._owners.find_excess(scope, self.LIMIT, used, size):
                return excess
        return None

    async def remove_expired(self, horizon: float | None) -> list[Key]:
        """Remove archives from before ``horizon``, if given, and those in excess of the quota.

        Return those removed because of ``horizon``. Raise ``OSError`` at the end if files could not be removed.
        """
        removed: dict[Key, int] = {}
        failure: OSError | None = None
        if horizon is not None:
            async with self._changing:
                removed, failure = await self._remove_until(horizon)
        with suppress(FullError):
            await self._quota.free_space()
        if failure is not None:
            raise failure
        return list(removed)
