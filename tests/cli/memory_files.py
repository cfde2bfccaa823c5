"""A daemon's files in memory."""

import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

from koalapy.model.errors import NotFoundError
from koalapy.model.identity import Identity
from koalapy.model.request import ClusterName
from koalapy.store.records import StoredBundle, StoredResult


class MemoryBundles:
    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.uploads = 0

    async def add_bundle(
        self, content: AsyncIterator[bytes], announced: int = 0, owner: str = ""
    ) -> tuple[StoredBundle, bool]:
        data = b"".join([piece async for piece in content])
        ident = hashlib.sha256(data).hexdigest()
        self.uploads += 1
        self.contents[ident] = data
        return self.get_bundle(ident), True

    def get_bundle(self, bundle: str) -> StoredBundle:
        if bundle not in self.contents:
            raise NotFoundError(f"there is no bundle {bundle}", field="bundle")
        return StoredBundle(bundle, len(self.contents[bundle]), 1, 0.0)

    def touch_visible(self, caller: Identity, bundle: str) -> StoredBundle:
        return self.get_bundle(bundle)

    def path_of(self, bundle: str) -> Path:
        raise AssertionError("for agents only")


def _skip_bytes(pieces: Iterable[bytes], count: int) -> Iterator[bytes]:
    for piece in pieces:
        yield piece[count:]
        count = max(0, count - len(piece))


class MemoryResults:
    def __init__(self) -> None:
        self.archives: dict[int, Sequence[bytes]] = {}

    async def store_result(self, cluster: ClusterName, token: str, content: AsyncIterator[bytes]) -> StoredResult:
        raise AssertionError("for agents only")

    async def open_archive(self, job: int, offset: int = 0, version: str = "") -> tuple[str, Iterator[bytes]]:
        if job not in self.archives:
            raise NotFoundError(
                f"nothing is collected of job {job}", field="job", hint="koala submit --collect PATTERN"
            )
        assert version in ("", "v1")
        return "v1", _skip_bytes(self.archives[job], offset)
