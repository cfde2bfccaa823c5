"""What goes over the wire about files: replicas, bundles, results."""

from pydantic import Field

from koalapy.api.fields import Cluster, FileName, Input, LogicalName, Output
from koalapy.model.replica import ReplicaState


class ReplicaOrder(Input):
    """A file or folder on a cluster that is to be a replica of a logical file."""

    name: LogicalName
    cluster: Cluster
    path: FileName = Field(min_length=1, json_schema_extra={"pattern": r"^/[^\x00]*$"})
    """Absolute, on that cluster."""


class ReplicaChoice(Input):
    """Which replicas: all, those of one logical file, those on one cluster, or the one that is both."""

    name: LogicalName | None = None
    cluster: Cluster | None = None


class ReplicaView(Output):
    """A replica; ``size`` in bytes, ``parts`` the number of entries of a folder, null for a file."""

    name: str
    cluster: str
    path: str
    size: int
    checksum: str
    """SHA-256."""
    parts: int | None
    state: ReplicaState
    reason: str
    """Why it is not good."""
    added_at: str
    verified_at: str


class ReplicaList(Output):
    replicas: list[ReplicaView]


class ReplicaPage(ReplicaList):
    next: str | None
    """Where the next page is; null on the last."""


class VerifiedView(ReplicaView):
    problem: str
    """Why it could not be looked at; its state is then what was known before."""


class VerifiedList(Output):
    replicas: list[VerifiedView]


class BundleView(Output):
    """An archive of a submitter's own files; ``size`` in bytes, ``id`` its SHA-256."""

    id: str
    size: int
    files: int
    """Regular files in it."""


class ResultView(Output):
    """What one component has brought."""

    job: int
    generation: int
    rank: int
    cluster: str
    size: int
    files: int
