"""The submitters' own files (``--stage``): archives under their SHA-256, kept while a job may need them."""

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
"""Seconds for which a bundle is kept after it was last wanted, when no unfinished job needs it."""
MIN_RETENTION = 3600.0
"""The same when there is no room for others: time to submit the job that it was sent for."""


class Bundles:
    """Takes archives, hands them out, and throws away what nobody needs."""

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
        """The bundles of unfinished jobs."""
        # One that was wanted later than now was so before the clock was set back.
        found = (replace(bundle, used_at=min(bundle.used_at, clock())) for bundle in store.bundles())
        self._known = {bundle.id: bundle for bundle in found}
        self._touched: set[str] = set()
        """Those whose time of use is newer here than in the store."""
        self._tops: dict[str, frozenset[str]] = {}
        self._changing = asyncio.Lock()
        """Held while a bundle comes or goes."""
        used = sum(bundle.size for bundle in self._known.values())
        why = "all it has is needed by unfinished jobs, or was wanted within the last hour"
        self._quota = Quota("bundles_quota", limits.quota, used, self._free, why)
        discard(directory, self._known)

    async def put(
        self, content: AsyncIterator[bytes], announced: int = 0, owner: str = ""
    ) -> tuple[StoredBundle, bool]:
        """Keep a user's archive, of as many bytes as were announced if they were; False when he had sent it already.

        Of several users' archives of the same bytes one is kept, of which none is told that there are others.
        ``LimitReached`` and ``NeverAllowed`` when ``owner`` may not have so much.
        """
        # Nothing is to make way for what is refused in the end.
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
                # Known only when that is written: after a restart nobody would know of it.
                await run_in_database(self._store.save_bundles, [bundle])
                # One whose file was lost is counted, until it is back or thrown away.
                hold.keep(replaced_size=self._known[bundle.id].size if bundle.id in self._known else 0)
                self._known[bundle.id] = bundle
                self._tops[bundle.id] = _tops(archive.names)
        return bundle, True

    async def _give_to(self, owner: str, bundle: str) -> tuple[StoredBundle, bool]:
        """One that is there, and whether it is new to its sender."""
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
        """Those that somebody may have, those first that were wanted last; users are told of no other senders."""
        if by.has_role(Role.OPERATOR):
            found = list(self._known.values())
        else:
            theirs = (bundle for bundle in self._known.values() if by.user in bundle.owners)
            found = [replace(bundle, owners=(by.user,)) for bundle in theirs]
        return sorted(found, key=lambda bundle: -bundle.used_at)

    def size_of(self, scope: Scope) -> int:
        """Bytes that are kept of a user, or of a group's members."""
        return sum(bundle.size for bundle in self._known.values() if self._is_of(scope, any, bundle))

    def _is_of(self, scope: Scope, how: Callable[[Iterable[bool]], bool], bundle: StoredBundle) -> bool:
        return how(self._owners.applies_to(scope, owner) for owner in bundle.owners)

    async def _make_room_of(self, owner: str, size: int) -> None:
        """What an owner has too much of goes, as far as nobody else sent it and no job needs it; else no more comes."""
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
        """``touch`` for somebody who may have it: to know its digest is not enough. ``NotFoundError`` as for none."""
        if not by.has_role(Role.OPERATOR) and (bundle not in self._known or by.user not in self._known[bundle].owners):
            raise _no_bundle(bundle)
        return self.touch(bundle)

    def get(self, bundle: str) -> StoredBundle:
        """A bundle that is whole and there; ``NotFoundError`` otherwise."""
        if not self._is_there(bundle):
            raise _no_bundle(bundle)
        return self._known[bundle]

    def _is_there(self, bundle: str) -> bool:
        return bundle in self._known and self.path(bundle).is_file()

    def touch(self, bundle: str) -> StoredBundle:
        """A bundle that is wanted now, and so is kept for a while."""
        found = replace(self.get(bundle), used_at=self._clock())
        self._known[bundle] = found
        self._touched.add(bundle)
        return found

    async def tops(self, bundle: str) -> frozenset[str]:
        """What lies directly in a component's folder of a bundle that is there."""
        if bundle not in self._tops:
            self._tops[bundle] = _tops(await asyncio.to_thread(check, self.path(bundle)))
        return self._tops[bundle]

    def path(self, bundle: str) -> Path:
        return self._directory / bundle

    async def tidy(self) -> list[str]:
        """Remove those that are not needed and were not wanted for long; their names. ``OSError`` at the end when the
        files of some stay."""
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
        """Remove some that are not needed, those first that were wanted last the longest time ago."""
        async with self._changing:
            needed, before = self._needed(), self._clock() - MIN_RETENTION
            for bundle in sorted(self._known.values(), key=lambda bundle: bundle.used_at):
                if excess() <= 0:
                    return
                if bundle.id not in needed and self._is_old(bundle.id, before):
                    with suppress(OSError):  # one that cannot be removed keeps no other
                        await self._remove(bundle.id)

    def _is_old(self, bundle: str, before: float) -> bool:
        """Whether it was not wanted since, also not while others were removed."""
        return bundle in self._known and self._known[bundle].used_at < before

    async def _remove(self, bundle: str) -> None:
        """``OSError`` when its file stays: then it is known and counted as before, and tried again."""
        self.path(bundle).unlink(missing_ok=True)
        # First out of the catalogue, then out of the store, so that nobody is promised what is on its way out.
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
