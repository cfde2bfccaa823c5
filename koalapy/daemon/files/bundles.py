"""Store the files that users submit with jobs (``--stage``) as archives named by SHA-256, while jobs may need them."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from koalapy.daemon.engine.database import run_in_database
from koalapy.daemon.files.archives import WAY_OUT, check, check_size, discard, incoming, keeping, receive
from koalapy.daemon.jobs.quota import Excess, Quota, StorageLimits, StorageUse
from koalapy.model.errors import FullError, NotFoundError, ProblemCode, UsageError
from koalapy.model.identity import Identity, Role
from koalapy.model.limits import Limits, Scope
from koalapy.model.wording import escape_surrogates, is_utf8
from koalapy.ports import FileStore, StoredBundle

RETENTION = 86400.0
"""Seconds for which a bundle is kept after its last use, if no unfinished job needs it."""
MIN_RETENTION = 3600.0
"""The same when the quota is exceeded; it leaves time to submit the job that the bundle was uploaded for."""


class Bundles:
    """The stored bundles, with their owners and quotas; unneeded ones are removed."""

    def __init__(
        self,
        store: FileStore,
        directory: Path,
        limits: StorageLimits,
        clock: Callable[[], float],
        needed: Callable[[], Collection[str]],
        owners: Limits | None = None,
    ) -> None:
        self._owners = owners or Limits()
        self._store = store
        self._directory = directory
        self._limit = limits.archive
        self._clock = clock
        self._needed = needed
        """Returns the bundles of unfinished jobs."""
        # A time of use in the future means that the clock was set back.
        found = (replace(bundle, used_at=min(bundle.used_at, clock())) for bundle in store.bundles())
        self._known = {bundle.id: bundle for bundle in found}
        self._touched: set[str] = set()
        """Bundles with a time of use that is newer in memory than in the store."""
        self._tops: dict[str, frozenset[str]] = {}
        self._changing = asyncio.Lock()
        """Held while a bundle is added or removed."""
        used = sum(bundle.size for bundle in self._known.values())
        why = "all it has is needed by unfinished jobs, or was wanted within the last hour"
        self._quota = Quota("bundles_quota", limits.quota, used, self._free, why)
        discard(directory, self._known)

    async def put(
        self, content: AsyncIterator[bytes], announced: int = 0, owner: str = ""
    ) -> tuple[StoredBundle, bool]:
        """Store an archive of a user; return its bundle, and False if the user had uploaded it already.

        ``announced`` is its size in bytes, 0 if unknown. Equal archives of several users are stored once; no user
        learns of the other owners. Raise ``UsageError`` for an invalid or empty archive, and ``LimitReached`` or
        ``NeverAllowed`` if ``owner`` exceeds a limit.
        """
        # Check limits first, so that no bundle is removed for an archive that is rejected in the end.
        check_size(announced, self._limit)
        self._owners.check(owner, "bundle_bytes", announced)
        with incoming(self._directory) as path, self._quota.hold() as hold:
            archive = await receive(content, path, self._limit, hold)
            if not archive.files:
                raise UsageError("there is no file in the archive", field="body", hint=WAY_OUT)
            if odd := next((escape_surrogates(name[:100]) for name in archive.names if not is_utf8(name)), None):
                said = f"the name {odd!r} in the archive is no UTF-8"
                raise UsageError(said, field="body", value=odd, hint="rename that file, and send the archive again")
            async with self._changing:
                if self._is_there(archive.digest):
                    return await self._give_to(owner, archive.digest)
                await self._make_room_of(owner, archive.size)
                bundle = StoredBundle(archive.digest, archive.size, archive.files, self._clock(), (owner,))
                with keeping():
                    path.rename(self._directory / bundle.id)
                # Add the bundle to memory only once it is stored, so that a restart does not lose it.
                await run_in_database(self._store.save_bundles, [bundle])
                # A bundle with a lost file still counts, so its size is replaced and not added.
                hold.keep(replaced_size=self._known[bundle.id].size if bundle.id in self._known else 0)
                self._known[bundle.id] = bundle
                self._tops[bundle.id] = _tops(archive.names)
        return bundle, True

    async def _give_to(self, owner: str, bundle: str) -> tuple[StoredBundle, bool]:
        """Add an owner to a stored bundle; return the bundle and whether the owner is new."""
        found = self.touch(bundle)
        if owner in found.owners:
            return found, False
        await self._make_room_of(owner, found.size)
        found = replace(found, owners=(*found.owners, owner))
        await run_in_database(self._store.save_bundles, [found])
        self._known[bundle] = found
        return found, True

    @property
    def storage_use(self) -> StorageUse:
        return self._quota.use

    def seen_by(self, by: Identity) -> Sequence[StoredBundle]:
        """Return the bundles that a caller may see, the last used first; users see no other owners."""
        if by.has_role(Role.OPERATOR):
            found = list(self._known.values())
        else:
            theirs = (bundle for bundle in self._known.values() if by.user in bundle.owners)
            found = [replace(bundle, owners=(by.user,)) for bundle in theirs]
        return sorted(found, key=lambda bundle: -bundle.used_at)

    def size_of(self, scope: Scope) -> int:
        """Return the bytes stored for a user, or for the members of a group."""
        return sum(bundle.size for bundle in self._known.values() if self._is_of(scope, any, bundle))

    def _is_of(self, scope: Scope, how: Callable[[Iterable[bool]], bool], bundle: StoredBundle) -> bool:
        return how(self._owners.applies_to(scope, owner) for owner in bundle.owners)

    async def _make_room_of(self, owner: str, size: int) -> None:
        """Remove unneeded bundles of an owner until ``size`` more bytes are within the owner's limits.

        Bundles with owners outside of a limit's scope stay. Raise ``LimitReached`` or ``NeverAllowed`` if removing is
        not enough.
        """
        for scope in self._owners.scopes(owner):
            if scope.limits.bundle_bytes is None:
                continue
            used, before, needed = self.size_of(scope), self._clock() - MIN_RETENTION, self._needed()
            for bundle in sorted(self._known.values(), key=lambda bundle: bundle.used_at):
                if used + size <= scope.limits.bundle_bytes:
                    break
                is_theirs = bool(bundle.owners) and self._is_of(scope, all, bundle)
                if is_theirs and bundle.id not in needed and self._is_old(bundle.id, before):
                    with suppress(OSError):
                        await self._remove(bundle.id)
                        used -= bundle.size
            if excess := self._owners.find_excess(scope, "bundle_bytes", used, size):
                excess.raise_error()

    def wanted_by(self, by: Identity, bundle: str) -> StoredBundle:
        """Touch a bundle for a caller that is its owner or an operator, and return it.

        Raise ``NotFoundError`` for any other caller, since knowing the digest gives no access.
        """
        if not by.has_role(Role.OPERATOR) and (bundle not in self._known or by.user not in self._known[bundle].owners):
            raise _no_bundle(bundle)
        return self.touch(bundle)

    def get(self, bundle: str) -> StoredBundle:
        """Return a stored bundle. Raise ``NotFoundError`` if it or its file is missing."""
        if not self._is_there(bundle):
            raise _no_bundle(bundle)
        return self._known[bundle]

    def _is_there(self, bundle: str) -> bool:
        return bundle in self._known and self.path(bundle).is_file()

    def touch(self, bundle: str) -> StoredBundle:
        """Set a bundle's time of use to now, so that it is kept for a while, and return it."""
        found = replace(self.get(bundle), used_at=self._clock())
        self._known[bundle] = found
        self._touched.add(bundle)
        return found

    async def tops(self, bundle: str) -> frozenset[str]:
        """Return the names at the top level of a stored bundle."""
        if bundle not in self._tops:
            self._tops[bundle] = _tops(await asyncio.to_thread(check, self.path(bundle)))
        return self._tops[bundle]

    def path(self, bundle: str) -> Path:
        return self._directory / bundle

    async def tidy(self) -> list[str]:
        """Remove unneeded bundles that were not used for ``RETENTION``; return their ids.

        Raise ``OSError`` at the end if some files could not be removed.
        """
        for ident in self._needed():
            if self._is_there(ident):
                self.touch(ident)
        before = self._clock() - RETENTION
        gone: list[str] = []
        stuck: OSError | None = None
        for ident in [bundle.id for bundle in self._known.values() if bundle.used_at < before]:
            async with self._changing:
                if not self._is_old(ident, before):
                    continue
                try:
                    await self._remove(ident)
                except OSError as error:
                    stuck = error
                    continue
                gone.append(ident)
        with suppress(FullError):
            await self._quota.free_space()
        touched = self._touched & self._known.keys()
        await run_in_database(self._store.save_bundles, [self._known[ident] for ident in touched])
        self._touched -= touched
        if stuck is not None:
            raise stuck
        return gone

    async def _free(self, excess: Excess) -> None:
        """Remove unneeded bundles, the least recently used first, until the quota is no longer exceeded."""
        async with self._changing:
            needed, before = self._needed(), self._clock() - MIN_RETENTION
            for bundle in sorted(self._known.values(), key=lambda bundle: bundle.used_at):
                if excess() <= 0:
                    return
                if bundle.id not in needed and self._is_old(bundle.id, before):
                    with suppress(OSError):  # a bundle that cannot be removed must not keep the others
                        await self._remove(bundle.id)

    def _is_old(self, bundle: str, before: float) -> bool:
        """Check whether a bundle still exists and was last used before a time; both may change between removals."""
        return bundle in self._known and self._known[bundle].used_at < before

    async def _remove(self, bundle: str) -> None:
        """Remove a bundle. Raise ``OSError`` if its file cannot be removed; the bundle then stays and still counts."""
        self.path(bundle).unlink(missing_ok=True)
        # Remove it from memory before the store, so that no request gets a bundle that is being removed.
        self._quota.used -= self._known.pop(bundle).size
        self._tops.pop(bundle, None)
        await run_in_database(self._store.remove_bundle, bundle)


def _no_bundle(bundle: str) -> NotFoundError:
    shown = bundle if re.fullmatch(r"[0-9a-f]{64}", bundle) else repr(bundle[:100])
    hint = "upload it with POST /api/v1/bundles, or let koala submit --stage do that"
    return NotFoundError(
        f"there is no bundle {shown}", field="bundle", value=bundle, hint=hint, code=ProblemCode.BUNDLE_NOT_FOUND
    )


def _tops(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.partition("/")[0] for name in names)
