"""The replica catalogue: logical files, and where there are physical ones (semantics 10)."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from koalapy.model.request import ClusterName


class ReplicaState(StrEnum):
    """Whether a replica is what the catalogue says."""

    GOOD = "good"
    MISSING = "missing"
    CHANGED = "changed"
    """Its size or checksum is another now."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Part:
    """One entry of a folder, sorted by name: what a component gets of a partitioned input. Size in bytes."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One physical copy of a logical file (or folder); ``path`` is absolute on the cluster, ``size`` in bytes.

    ``checksum`` is the SHA-256 of a file; that of a folder is made of the names, kinds and checksums of all it holds.
    """

    name: str
    cluster: ClusterName
    path: str
    size: int
    checksum: str
    parts: tuple[Part, ...] | None = None
    """The entries of a folder; None for a file."""
    state: ReplicaState = ReplicaState.GOOD
    reason: str = ""
    """Why it is not good, in words."""
    added_at: float = 0.0
    verified_at: float = 0.0

    def part(self, name: str) -> Part | None:
        return next((part for part in self.parts or () if part.name == name), None)


class Catalogue:
    """Replicas by logical name and cluster, in memory; the store keeps the same."""

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        self._replicas: dict[str, dict[ClusterName, Replica]] = {}
        self._names: list[str] | None = None
        """In order, until a name comes or goes."""
        self._spoiled: dict[tuple[str, ClusterName], Replica] = {}
        for replica in replicas:
            self.put(replica)

    def put(self, replica: Replica) -> None:
        if replica.name not in self._replicas:
            self._names = None
        self._replicas.setdefault(replica.name, {})[replica.cluster] = replica
        if replica.state is ReplicaState.GOOD:
            self._spoiled.pop((replica.name, replica.cluster), None)
        else:
            self._spoiled[replica.name, replica.cluster] = replica

    def remove(self, name: str, cluster: ClusterName) -> None:
        """No error when there is none."""
        there = self._replicas.get(name, {})
        there.pop(cluster, None)
        self._spoiled.pop((name, cluster), None)
        if not there and self._replicas.pop(name, None) is not None:
            self._names = None

    def get(self, name: str, cluster: ClusterName) -> Replica | None:
        return self._replicas.get(name, {}).get(cluster)

    def replicas_of(self, name: str) -> list[Replica]:
        """All replicas of a logical file, good or not, in order of cluster."""
        return [replica for _, replica in sorted(self._replicas.get(name, {}).items())]

    def good_sites(self, name: str) -> tuple[ClusterName, ...]:
        """The clusters that have a good replica."""
        return tuple(replica.cluster for replica in self.replicas_of(name) if replica.state is ReplicaState.GOOD)

    def bad_replicas(self) -> list[Replica]:
        """All that are not good."""
        return list(self._spoiled.values())

    def names(self) -> Sequence[str]:
        """In order."""
        if self._names is None:
            self._names = sorted(self._replicas)
        return self._names

    def replicas_after(self, name: str, cluster: ClusterName) -> Iterator[Replica]:
        """All replicas that come after one of that name and cluster, which need not be there, in the same order."""
        names = self.names()
        for index in range(bisect_left(names, name), len(names)):
            yield from (
                replica
                for replica in self.replicas_of(names[index])
                if (replica.name, replica.cluster) > (name, cluster)
            )
