"""What gives waiting jobs a chance: wake-ups carry it, and queues know which shapes of request wait for it."""

from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

from koalapy.model.job import JobId, JobSpec
from koalapy.model.request import ClusterName, FixedRequest


class Change(NamedTuple):
    """Something that those who wait for it may be placed by."""

    kind: Literal["nodes", "home", "file", "limits"]
    """Nodes of a cluster are, or will be, available, or will be for those whose home site it is; a replica is known; an
    owner has less than before."""
    name: str = ""
    """Of the cluster or the file."""


NODES_ANYWHERE = Change("nodes")
"""What those wait for who name no cluster."""
LIMITS = Change("limits")


@cache
def nodes_of(cluster: ClusterName) -> tuple[Change, Change]:
    """The changes when a cluster has more nodes for us."""
    return Change("nodes", cluster), NODES_ANYWHERE


@cache
def at_home(cluster: ClusterName) -> Change:
    """The change when a cluster will have more nodes for those whose home site it is."""
    return Change("home", cluster)


def awaited_by(spec: JobSpec, *, is_limited: bool, home: ClusterName = "") -> tuple[Change, ...]:
    """All changes that a job like this one may be placed by; ``home`` may take back nodes for it."""
    names = {c.cluster or "": None for c in spec.request.components} if isinstance(spec.request, FixedRequest) else {}
    nodes = [Change("nodes", name) for name in names] or [NODES_ANYWHERE]
    files = [Change("file", file.name) for file in spec.all_inputs]
    beside = [LIMITS] if is_limited else []
    return (*nodes, *dict.fromkeys(files), *beside, *([at_home(home)] if home else ()))


@dataclass(slots=True)
class Wakeup:
    """Whom there is reason to ask again, of one queue."""

    everybody: bool = False
    changes: set[Change] = field(default_factory=set)
    jobs: set[JobId] = field(default_factory=set)
    """Those that have come back to their places."""

    def __bool__(self) -> bool:
        return self.everybody or bool(self.changes or self.jobs)

    def add(self, other: "Wakeup") -> None:
        """There is reason to ask those of another, too."""
        self.everybody |= other.everybody
        self.changes |= other.changes
        self.jobs |= other.jobs
