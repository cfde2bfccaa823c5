"""The submitters' own files (``--stage``): archives under their SHA-256, kept while a job may need them."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path

from koalapy.model.errors import NotFoundError, UsageError
from koalapy.ports import FileStore, StoredBundle
from koalapy.service.archives import WAY_OUT, check, discard, incoming, keeping, receive

KEPT = 86400.0
"""Seconds for which a bundle is kept after it was last wanted, when no unfinished job needs it."""


class Bundles:
    """Takes archives, hands them out, and throws away what nobody needs."""

    def __init__(self, store: FileStore, directory: Path, *, limit: int, clock: Callable[[], float]) -> None:
        self._store = store
        self._directory = directory
        self._limit = limit
        self._clock = clock
        self._known = {bundle.id: bundle for bundle in store.bundles()}
        self._touched: set[str] = set()
        """Those whose time of use is newer here than in the store."""
        self._tops: dict[str, frozenset[str]] = {}
        self._changing = asyncio.Lock()
        """Held while a bundle comes or goes."""
        discard(directory, self._known)

    async def put(self, content: AsyncIterator[bytes]) -> tuple[StoredBundle, bool]:
        """Keep an archive; False when it was there already."""
        with incoming(self._directory) as path:
            archive = await receive(content, path, self._limit)
            if not archive.files:
                raise UsageError("there is no file in the archive", field="body", hint=WAY_OUT)
            async with self._changing:
                if self._is_there(archive.digest):
                    return self.touch(archive.digest), False
                bundle = StoredBundle(archive.digest, archive.size, archive.files, self._clock())
                with keeping():
                    path.rename(self._directory / bundle.id)
                # Known only when that is written: after a restart nobody would know of it.
                await asyncio.to_thread(self._store.save_bundles, [bundle])
                self._known[bundle.id] = bundle
                self._tops[bundle.id] = _tops(archive.names)
        return bundle, True

    def get(self, bundle: str) -> StoredBundle:
        """A bundle that is whole and there; ``NotFoundError`` otherwise."""
        if not self._is_there(bundle):
            shown = bundle if re.fullmatch(r"[0-9a-f]{64}", bundle) else repr(bundle[:100])
            hint = "upload it with POST /api/v1/bundles, or let koala submit --stage do that"
            raise NotFoundError(f"there is no bundle {shown}", field="bundle", value=bundle, hint=hint)
        return self._known[bundle]

    def _is_there(self, bundle: str) -> bool:
        return bundle in self._known and self.path(bundle).is_file()

    def touch(self, bundle: str) -> StoredBundle:
        """A bundle that is wanted now, and so is kept for a while."""
        found = replace(self.get(bundle), used_at=self._clock())
        self._known[bundle] = found
        self._touched.add(bundle)
        return found

    def tops(self, bundle: str) -> frozenset[str]:
        """What lies directly in a component's folder of a bundle that is there."""
        if bundle not in self._tops:
            self._tops[bundle] = _tops(check(self.path(bundle)))
        return self._tops[bundle]

    def path(self, bundle: str) -> Path:
        return self._directory / bundle

    async def tidy(self, needed: set[str]) -> list[str]:
        """Remove those that are not needed and were not wanted for long; their names."""
        for ident in needed:
            if self._is_there(ident):
                self.touch(ident)
        before = self._clock() - KEPT
        old = [bundle.id for bundle in self._known.values() if bundle.used_at < before]
        gone = []
        for ident in old:
            async with self._changing:
                if self._known[ident].used_at >= before:
                    continue  # wanted again while others were removed
                # First out of the catalogue, then out of the store, so that nobody is promised what is on its way out.
                del self._known[ident]
                self._tops.pop(ident, None)
                self.path(ident).unlink(missing_ok=True)
                await asyncio.to_thread(self._store.remove_bundle, ident)
                gone.append(ident)
        touched = self._touched & self._known.keys()
        await asyncio.to_thread(self._store.save_bundles, [self._known[ident] for ident in touched])
        self._touched -= touched
        return gone


def _tops(names: Iterable[str]) -> frozenset[str]:
    return frozenset(name.partition("/")[0] for name in names)
