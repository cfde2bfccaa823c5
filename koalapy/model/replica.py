"""The replica catalogue: logical files and their physical copies (semantics 10)."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from koalapy.model.bounds import Bytes, Name, Path
from koalapy.model.request import ClusterName


class ReplicaState(StrEnum):
    """Whether a replica matches the catalogue."""

    GOOD = "good"
    MISSING = "missing"
    CHANGED = "changed"
    """Its size or checksum has changed."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Part:
    """An entry of a folder, which one component of a partitioned input gets; size in bytes."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Replica:
    """A physical copy of a logical file or folder; ``path`` is absolute on the cluster, ``size`` in bytes.

    ``checksum`` is the SHA-256 of a file, or of the names, kinds and checksums of the entries of a folder.
    """

    name: str
    cluster: ClusterName
    path: str
    size: int
    checksum: str
    parts: tuple[Part, ...] | None = None
    """The entries of a folder, sorted by name; None for a file."""
    state: ReplicaState = ReplicaState.GOOD
    reason: str = ""
    """Why the replica is not good."""
    added_at: float = 0.0
    verified_at: float = 0.0

    def part(self, name: str) -> Part | None:
        return next((part for part in self.parts or () if part.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFile:
    """One input of a component: a replica on a file site, and its name ``target`` in the stage's folder.

    ``path`` is the absolute path of the file or folder on the file site, and ``part`` the entry of it to copy.
    ``size`` in bytes and ``checksum`` describe what is copied. If ``source`` is the agent's own cluster, the folder
    gets a symbolic link instead.
    """

    name: Path
    source: Name
    path: Path
    part: Path | None = None
    target: Path
    size: Bytes
    checksum: Name


class Catalogue:
    """The replicas by logical name and cluster, in memory."""

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        self._replicas: dict[str, dict[ClusterName, Replica]] = {}
        self._names: list[str] | None = None
        """The sorted names; None after a name was added or removed."""
        self._spoiled: dict[tuple[str, ClusterName], Replica] = {}
        for replica in replicas:
            self.put(replica)

    def put(self, replica: Replica) -> None:
        """Add a replica, or replace the one of the same file on the same cluster."""
        if replica.name not in self._replicas:
            self._names = None
        self._replicas.setdefault(replica.name, {})[replica.cluster] = replica
        if replica.state is ReplicaState.GOOD:
            self._spoiled.pop((replica.name, replica.cluster), None)
        else:
            self._spoiled[replica.name, replica.cluster] = replica

    def remove(self, name: str, cluster: ClusterName) -> None:
        """Remove a replica, if it exists."""
        replicas = self._replicas.get(name, {})
        replicas.pop(cluster, None)
        self._spoiled.pop((name, cluster), None)
        if not replicas and self._replicas.pop(name, None) is not None:
            self._names = None

    def get(self, name: str, cluster: ClusterName) -> Replica | None:
        return self._replicas.get(name, {}).get(cluster)

    def replicas_of(self, name: str) -> list[Replica]:
        """Return all replicas of a logical file, good or not, sorted by cluster."""
        return [replica for _, replica in sorted(self._replicas.get(name, {}).items())]

    def good_sites(self, name: str) -> tuple[ClusterName, ...]:
        """Return the clusters that have a good replica of a logical file."""
        return tuple(replica.cluster for replica in self.replicas_of(name) if replica.state is ReplicaState.GOOD)

    def bad_replicas(self) -> list[Replica]:
        """Return all replicas that are not good."""
        return list(self._spoiled.values())

    def names(self) -> Sequence[str]:
        """Return the logical names, sorted."""
        if self._names is None:
            self._names = sorted(self._replicas)
        return self._names

    def replicas_after(self, name: str, cluster: ClusterName) -> Iterator[Replica]:
        """Yield the replicas after a name and cluster in sorted order; a replica of these need not exist."""
        names = self.names()
        for index in range(bisect_left(names, name), len(names)):
            yield from (
                replica
                for replica in self.replicas_of(names[index])
                if (replica.name, replica.cluster) > (name, cluster)
            )
