"""A daemon's files in memory."""

import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from koalapy.model.errors import ConflictError, NotFoundError
from koalapy.model.identity import Identity
from koalapy.model.replica import Replica, ReplicaState
from koalapy.model.request import ClusterName
from koalapy.ports import StoredBundle, StoredResult
from koalapy.service.files import Verified

MESH = Replica("climate/mesh.nc", "north", "/data/mesh.nc", 200_000_000, "c0ffee" * 10 + "c0ff", added_at=1000.0)


class MemoryFiles:
    """What is at ``/other…`` is another file, at ``/folder…`` a folder."""

    def __init__(self) -> None:
        self.replicas: list[Replica] = []
        self.now: dict[ClusterName, tuple[ReplicaState, str, str]] = {}
        """What is found out about the replicas of a cluster: state, reason, problem."""

    def list(
        self, name: str | None = None, after: tuple[str, ClusterName] = ("", ""), limit: int | None = None
    ) -> Sequence[Replica]:
        found = [replica for replica in self.replicas if name in (None, replica.name)]
        if name is not None and not found:
            raise NotFoundError(f"the replica catalogue has no {name}", field="name", hint="add it with koala")
        return sorted((r for r in found if (r.name, r.cluster) > after), key=lambda r: (r.name, r.cluster))[:limit]

    async def add(self, name: str, cluster: ClusterName, path: str) -> Replica:
        if path.startswith("/other"):
            raise ConflictError(f"{cluster}:{path} is another file", field="path", hint="give it another name")
        parts = () if path.startswith("/folder") else None
        self.replicas.append(replace(MESH, name=name, cluster=cluster, path=path, parts=parts))
        return self.replicas[-1]

    async def verify(self, name: str | None = None, cluster: ClusterName | None = None) -> Sequence[Verified]:
        found = []
        for replica in self.list(name):
            state, reason, problem = self.now.get(replica.cluster, (replica.state, "", ""))
            if cluster in (None, replica.cluster):
                found.append(Verified(replace(replica, state=state, reason=reason), problem))
        return found

    async def remove(self, name: str, cluster: ClusterName | None = None) -> Sequence[Replica]:
        gone = [replica for replica in self.list(name) if cluster in (None, replica.cluster)]
        self.replicas = [replica for replica in self.replicas if replica not in gone]
        return gone


class MemoryBundles:
    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.uploads = 0

    async def put(
        self, content: AsyncIterator[bytes], announced: int = 0, owner: str = ""
    ) -> tuple[StoredBundle, bool]:
        data = b"".join([piece async for piece in content])
        ident = hashlib.sha256(data).hexdigest()
        self.uploads += 1
        self.kept[ident] = data
        return self.get(ident), True

    def get(self, bundle: str) -> StoredBundle:
        if bundle not in self.kept:
            raise NotFoundError(f"there is no bundle {bundle}", field="bundle")
        return StoredBundle(bundle, len(self.kept[bundle]), 1, 0.0)

    def wanted_by(self, by: Identity, bundle: str) -> StoredBundle:
        return self.get(bundle)

    def path(self, bundle: str) -> Path:
        raise AssertionError("for agents only")


class MemoryResults:
    def __init__(self) -> None:
        self.archives: dict[int, Sequence[bytes]] = {}

    async def put(self, cluster: ClusterName, token: str, content: AsyncIterator[bytes]) -> StoredResult:
        raise AssertionError("for agents only")

    async def archive(self, job: int) -> Iterator[bytes]:
        if job not in self.archives:
            raise NotFoundError(
                f"nothing is collected of job {job}", field="job", hint="koala submit --collect PATTERN"
            )
        return iter(self.archives[job])
