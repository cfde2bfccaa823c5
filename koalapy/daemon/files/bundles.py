"""Store the files that users submit with jobs (``--stage``) as archives named by SHA-256, while jobs may need them."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from koalapy.daemon.engine.database import run_in_database
from koalapy.daemon.files.archives import ARCHIVE_HINT, check_archive, check_size, move_archive
from koalapy.daemon.files.stored_archives import Removal, StoredArchives
from koalapy.daemon.jobs.quota import StorageLimits
from koalapy.model.errors import NotFoundError, ProblemCode, UsageError
from koalapy.model.identity import Identity, Role
from koalapy.model.limits import Limits, Scope
from koalapy.model.wording import escape_surrogates, is_utf8
from koalapy.store.records import StoredBundle
from koalapy.store.service_tables import FileStore

RETENTION = 86400.0
"""Seconds for which a bundle is kept after its last use, if no unfinished job needs it."""
MIN_RETENTION = 3600.0
"""The same when the quota is exceeded; it leaves time to submit the job that the bundle was uploaded for."""


class Bundles(StoredArchives[str]):
    """The stored bundles with their owners, by SHA-256."""

    QUOTA, LIMIT, MIN_RETENTION = "bundles_quota", "bundle_bytes", MIN_RETENTION
    REJECTION = "all it has is needed by unfinished jobs, or was wanted within the last hour"

    def __init__(
        self,
        store: FileStore,
        directory: Path,
        storage: StorageLimits,
        clock: Callable[[], float],
        needed: Callable[[], Collection[str]],
        owners: Limits | None = None,
    ) -> None:
        """``needed`` returns the bundles of unfinished jobs; ``owners``: the limits of users and groups."""
        self._store, self._needed = store, needed
        # A time of use in the future means that the clock was set back.
        bundles = (replace(bundle, used_at=min(bundle.used_at, clock())) for bundle in store.bundles())
        self._bundles = {bundle.id: bundle for bundle in bundles}
        self._touched: set[str] = set()
        """Bundles with a time of use that is newer in memory than in the store."""
        self._top_names: dict[str, frozenset[str]] = {}
        used = sum(bundle.size for bundle in self._bundles.values())
        super().__init__(directory, storage, used, clock, owners, self._bundles)

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
        async with self._receive(content) as (archive, path, hold):
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
                await self._require_owner_space(owner, archive.size)
                bundle = StoredBundle(archive.digest, archive.size, archive.files, self._clock(), (owner,))
                await asyncio.to_thread(move_archive, path, self._directory / bundle.id)
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
        await self._require_owner_space(owner, stored.size)
        stored = replace(stored, owners=(*stored.owners, owner))
        await run_in_database(self._store.save_bundles, [stored])
        self._bundles[bundle] = stored
        return stored, True

    async def _require_owner_space(self, owner: str, size: int) -> None:
        """Raise ``LimitReached`` or ``NeverAllowed`` if the owner's bundles leave less than ``size`` bytes."""
        if excess := await self._free_owner_space(owner, size):
            excess.raise_error()

    def visible_to(self, caller: Identity) -> Sequence[StoredBundle]:
        """Return the bundles that a caller may see, the last used first; users see no other owners."""
        if caller.has_role(Role.OPERATOR):
            bundles = list(self._bundles.values())
        else:
            owned = (bundle for bundle in self._bundles.values() if caller.user in bundle.owners)
            bundles = [replace(bundle, owners=(caller.user,)) for bundle in owned]
        return sorted(bundles, key=lambda bundle: -bundle.used_at)

    async def size_of(self, scope: Scope) -> int:
        return sum(bundle.size for bundle in self._bundles.values() if self._belongs_to(scope, any, bundle))

    def _belongs_to(self, scope: Scope, combine: Callable[[Iterable[bool]], bool], bundle: StoredBundle) -> bool:
        return combine(self._owners.applies_to(scope, owner) for owner in bundle.owners)

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

    async def remove_unused(self) -> list[str]:
        """Remove unneeded bundles that were not used for ``RETENTION``; return their ids.

        Raise ``OSError`` at the end if some files could not be removed.
        """
        for ident in self._needed():
            if self._is_stored(ident):
                self.touch_bundle(ident)
        try:
            return await self.remove_expired(self._clock() - RETENTION)
        finally:
            touched = self._touched & self._bundles.keys()
            await run_in_database(self._store.save_bundles, [self._bundles[ident] for ident in touched])
            self._touched -= touched

    async def _remove_until(
        self, horizon: float, enough: int | None = None, scope: Scope | None = None
    ) -> Removal[str]:
        needed = self._needed()
        removed: dict[str, int] = {}
        failure: OSError | None = None
        for bundle in sorted(self._bundles.values(), key=lambda bundle: bundle.used_at):
            if enough is not None and sum(removed.values()) >= enough:
                break
            is_own = scope is None or (bool(bundle.owners) and self._belongs_to(scope, all, bundle))
            current = self._bundles.get(bundle.id)  # it may be used or removed between two removals
            if current is None or current.used_at >= horizon or bundle.id in needed or not is_own:
                continue
            try:
                await self._remove_bundle(bundle.id)
            except OSError as error:
                failure = error  # it must not keep the others
            else:
                removed[bundle.id] = bundle.size
        return removed, failure

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
