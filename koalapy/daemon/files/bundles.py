"""Store the files that users submit with jobs (``--stage``) as archives named by SHA-256, while jobs may need them."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from koalapy.daemon.engine.database import run_in_database
from koalapy.daemon.files.archives import (
    ARCHIVE_HINT,
    check_archive,
    check_size,
    converted_errors,
    incoming_file,
    receive_archive,
    remove_unregistered,
)
from koalapy.daemon.jobs.quota import Excess, Quota, StorageLimits, StorageUse
from koalapy.model.errors import FullError, NotFoundError, ProblemCode, UsageError
from koalapy.model.identity import Identity, Role
from koalapy.model.limits import Limits, Scope
from koalapy.model.wording import escape_surrogates, is_utf8
from koalapy.store.records import StoredBundle
from koalapy.store.service_tables import FileStore

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
        bundles = (replace(bundle, used_at=min(bundle.used_at, clock())) for bundle in store.bundles())
        self._bundles = {bundle.id: bundle for bundle in bundles}
        self._touched: set[str] = set()
        """Bundles with a time of use that is newer in memory than in the store."""
        self._top_names: dict[str, frozenset[str]] = {}
        self._changing = asyncio.Lock()
        """Held while a bundle is added or removed."""
        used = sum(bundle.size for bundle in self._bundles.values())
        rejection_reason = "all it has is needed by unfinished jobs, or was wanted within the last hour"
        self._quota = Quota("bundles_quota", limits.quota, used, self._free_space, rejection_reason)
        remove_unregistered(directory, self._bundles)

    async def add_bundle(
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
        with incoming_file(self._directory) as path, self._quota.hold_space() as hold:
            archive = await receive_archive(content, path, self._limit, hold)
            if not archive.files:
                raise UsageError("there is no file in the archive", field="body", hint=ARCHIVE_HINT)
            if invalid_name := next(
                (escape_surrogates(name[:100]) for name in archive.names if not is_utf8(name)), None
            ):
                problem = f"the name {invalid_name!r} in the archive is no UTF-8"
                raise UsageError(
                    problem, field="body", value=invalid_name, hint="rename that file, and send the archive again"
                )
            async with self._changing:
                if self._is_stored(archive.digest):
                    return await self._add_owner(owner, archive.digest)
                await self._free_owner_space(owner, archive.size)
                bundle = StoredBundle(archive.digest, archive.size, archive.files, self._clock(), (owner,))
                with converted_errors():
                    path.rename(self._directory / bundle.id)
                # Add the bundle to memory only once it is stored, so that a restart does not lose it.
                await run_in_database(self._store.save_bundles, [bundle])
                # A bundle with a lost file still counts, so its size is replaced and not added.
                hold.keep_bytes(replaced_size=self._bundles[bundle.id].size if bundle.id in self._bundles else 0)
                self._bundles[bundle.id] = bundle
                self._top_names[bundle.id] = frozenset(name.partition("/")[0] for name in archive.names)
        return bundle, True

    async def _add_owner(self, owner: str, bundle: str) -> tuple[StoredBundle, bool]:
        """Add an owner to a stored bundle; return the bundle and whether the owner is new."""
        stored = self.touch_bundle(bundle)
        if owner in stored.owners:
            return stored, False
        await self._free_owner_space(owner, stored.size)
        stored = replace(stored, owners=(*stored.owners, owner))
        await run_in_database(self._store.save_bundles, [stored])
        self._bundles[bundle] = stored
        return stored, True

    @property
    def storage_use(self) -> StorageUse:
        return self._quota.use

    def visible_to(self, caller: Identity) -> Sequence[StoredBundle]:
        """Return the bundles that a caller may see, the last used first; users see no other owners."""
        if caller.has_role(Role.OPERATOR):
            bundles = list(self._bundles.values())
        else:
            owned = (bundle for bundle in self._bundles.values() if caller.user in bundle.owners)
            bundles = [replace(bundle, owners=(caller.user,)) for bundle in owned]
        return sorted(bundles, key=lambda bundle: -bundle.used_at)

    def size_of(self, scope: Scope) -> int:
        """Return the bytes stored for a user, or for the members of a group."""
        return sum(bundle.size for bundle in self._bundles.values() if self._counts_for(scope, any, bundle))

    def _counts_for(self, scope: Scope, combine: Callable[[Iterable[bool]], bool], bundle: StoredBundle) -> bool:
        return combine(self._owners.applies_to(scope, owner) for owner in bundle.owners)

    async def _free_owner_space(self, owner: str, size: int) -> None:
        """Remove unneeded bundles of an owner until ``size`` more bytes are within the owner's limits.

        Bundles with owners outside of a limit's scope stay. Raise ``LimitReached`` or ``NeverAllowed`` if removing is
        not enough.
        """
        for scope in self._owners.scopes(owner):
            if scope.limits.bundle_bytes is None:
                continue
            used, horizon, needed = self.size_of(scope), self._clock() - MIN_RETENTION, self._needed()
            for bundle in sorted(self._bundles.values(), key=lambda bundle: bundle.used_at):
                if used + size <= scope.limits.bundle_bytes:
                    break
                is_removable = bool(bundle.owners) and self._counts_for(scope, all, bundle)
                if is_removable and bundle.id not in needed and self._is_old(bundle.id, horizon):
                    with suppress(OSError):
                        await self._remove_bundle(bundle.id)
                        used -= bundle.size
            if excess := self._owners.find_excess(scope, "bundle_bytes", used, size):
                excess.raise_error()

    def touch_visible(self, caller: Identity, bundle: str) -> StoredBundle:
        """Touch a bundle for a caller that is its owner or an operator, and return it.

        Raise ``NotFoundError`` for any other caller, since knowing the digest gives no access.
        """
        if not caller.has_role(Role.OPERATOR) and (
            bundle not in self._bundles or caller.user not in self._bundles[bundle].owners
        ):
            raise _no_bundle(bundle)
        return self.touch_bundle(bundle)

    def get_bundle(self, bundle: str) -> StoredBundle:
        """Return a stored bundle. Raise ``NotFoundError`` if it or its file is missing."""
        if not self._is_stored(bundle):
            raise _no_bundle(bundle)
        return self._bundles[bundle]

    def _is_stored(self, bundle: str) -> bool:
        return bundle in self._bundles and self.path_of(bundle).is_file()

    def touch_bundle(self, bundle: str) -> StoredBundle:
        """Set a bundle's time of use to now, so that it is kept for a while, and return it."""
        touched = replace(self.get_bundle(bundle), used_at=self._clock())
        self._bundles[bundle] = touched
        self._touched.add(bundle)
        return touched

    async def top_names(self, bundle: str) -> frozenset[str]:
        """Return the names at the top level of a stored bundle."""
        if bundle not in self._top_names:
            names = await asyncio.to_thread(check_archive, self.path_of(bundle))
            self._top_names[bundle] = frozenset(name.partition("/")[0] for name in names)
        return self._top_names[bundle]

    def path_of(self, bundle: str) -> Path:
        return self._directory / bundle

    async def remove_expired(self) -> list[str]:
        """Remove unneeded bundles that were not used for ``RETENTION``; return their ids.

        Raise ``OSError`` at the end if some files could not be removed.
        """
        for ident in self._needed():
            if self._is_stored(ident):
                self.touch_bundle(ident)
        horizon = self._clock() - RETENTION
        removed: list[str] = []
        failure: OSError | None = None
        for ident in [bundle.id for bundle in self._bundles.values() if bundle.used_at < horizon]:
            async with self._changing:
                if not self._is_old(ident, horizon):
                    continue
                try:
                    await self._remove_bundle(ident)
                except OSError as error:
                    failure = error
                    continue
                removed.append(ident)
        with suppress(FullError):
            await self._quota.free_space()
        touched = self._touched & self._bundles.keys()
        await run_in_database(self._store.save_bundles, [self._bundles[ident] for ident in touched])
        self._touched -= touched
        if failure is not None:
            raise failure
        return removed

    async def _free_space(self, excess: Excess) -> None:
        """Remove unneeded bundles, the least recently used first, until the quota is no longer exceeded."""
        async with self._changing:
            needed, horizon = self._needed(), self._clock() - MIN_RETENTION
            for bundle in sorted(self._bundles.values(), key=lambda bundle: bundle.used_at):
                if excess() <= 0:
                    return
                if bundle.id not in needed and self._is_old(bundle.id, horizon):
                    with suppress(OSError):  # a bundle that cannot be removed must not keep the others
                        await self._remove_bundle(bundle.id)

    def _is_old(self, bundle: str, horizon: float) -> bool:
        """Check whether a bundle still exists and was last used before a time; both may change between removals."""
        return bundle in self._bundles and self._bundles[bundle].used_at < horizon

    async def _remove_bundle(self, bundle: str) -> None:
        """Remove a bundle. Raise ``OSError`` if its file cannot be removed; the bundle then stays and still counts."""
        self.path_of(bundle).unlink(missing_ok=True)
        # Remove it from memory before the store, so that no request gets a bundle that is being removed.
        self._quota.used -= self._bundles.pop(bundle).size
        self._top_names.pop(bundle, None)
        await run_in_database(self._store.remove_bundle, bundle)


def _no_bundle(bundle: str) -> NotFoundError:
    name = bundle if re.fullmatch(r"[0-9a-f]{64}", bundle) else repr(bundle[:100])
    hint = "upload it with POST /api/v1/bundles, or let koala submit --stage do that"
    return NotFoundError(
        f"there is no bundle {name}", field="bundle", value=bundle, hint=hint, code=ProblemCode.BUNDLE_NOT_FOUND
    )
