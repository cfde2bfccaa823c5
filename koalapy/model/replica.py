"""The replica catalogue: logical files, and where there are physical ones (semantics 10)."""

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
