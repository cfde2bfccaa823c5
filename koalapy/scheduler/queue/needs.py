"""What a waiting job needs: nodes enough for its request, and a change that may bring them."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, NamedTuple

from koalapy.model.cluster import GridView
from koalapy.model.job import JobId, JobSpec
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, Request


@dataclass(frozen=True, slots=True)
class Needs:
    """In idle nodes; whatever the policy, each must be there."""

    total: int
    largest: int
    """On one cluster."""
    least: int = 1
    """Clusters with fewer are of no use."""
    slots: tuple[tuple[int, int], ...] = ()
    """So many components of at least that size: (size, how many), larger ones counted with the smaller."""
    wanted: tuple[tuple[ClusterName, int], ...] = ()
    """On clusters that the request names."""
    home: ClusterName = ""
    """The cluster that may take back nodes for it; there all of them would be."""


def needs_of(request: Request, home: ClusterName = "") -> Needs:
    """The needs of a request; ``home`` may take back nodes for it."""
    needs = _needs_of(request)
    return replace(needs, home=home) if home else needs


def _needs_of(request: Request) -> Needs:
    if isinstance(request, FlexibleRequest):
        least, largest = request.min_component_size, request.min_component_size
        if request.split_options:
            least, largest = 1, min(max(option, default=1) for option in request.split_options)
        elif request.max_components is not None:
            largest = max(largest, -(-request.total_size // request.max_components))
        return Needs(request.total_size, largest, least)
    sizes = [component.size for component in request.components]
    if isinstance(request, FixedRequest):
        wanted: Counter[ClusterName] = Counter()
        for component in request.components:
            wanted[component.cluster or ""] += component.size
        return Needs(sum(sizes), max(sizes, default=0), wanted=tuple(wanted.items()))
    counted = ((size, sum(1 for other in sizes if other >= size)) for size in sorted(set(sizes), reverse=True))
    return Needs(sum(sizes), max(sizes, default=0), slots=tuple(each for each in counted if each[1] > 1))


class IdleSummary:
    """The idle nodes of one view; sums over them are worked out once for all who ask."""

    def __init__(self, view: GridView) -> None:
        self.view = view
        self._slots: dict[int, int] = {}
        self._roomy: dict[int, int] = {}

    def may_fit(self, needs: Needs) -> bool:
        """Whether nothing speaks against it yet."""
        by_idle = self.view.by_idle
        if not by_idle or needs.total > self.view.usable_idle or needs.largest > by_idle[0].idle:
            return False
        if needs.least > 1 and not self._has_nodes(needs.total, needs.least):
            return False
        if needs.wanted and not all(self._has_idle(name, size) for name, size in needs.wanted):
            return False
        return all(self._has_slots(count, size) for size, count in needs.slots)

    def may_take_back(self, needs: Needs) -> bool:
        """The same where this is what sites may take back for their own."""
        return bool(needs.home) and self._has_idle(needs.home, needs.total)

    def _has_idle(self, name: ClusterName, size: int) -> bool:
        cluster = self.view.get(name)
        return cluster is not None and cluster.usable_idle >= size

    def _has_slots(self, wanted: int, size: int) -> bool:
        """Whether there is room for so many components of a size; as a rule the first few clusters suffice."""
        slots = self._slots.get(size)
        if slots is None:
            slots = 0
            for cluster in self.view.by_idle:
                if cluster.idle < size:
                    break
                slots += cluster.idle // size
                if slots >= wanted:
                    return True
            self._slots[size] = slots
        return wanted <= slots

    def _has_nodes(self, wanted: int, least: int) -> bool:
        """The same for nodes on clusters with at least so many."""
        nodes = self._roomy.get(least)
        if nodes is None:
            nodes = 0
            for cluster in self.view.by_idle:
                if cluster.idle < least:
                    break
                nodes += cluster.idle
                if nodes >= wanted:
                    return True
            self._roomy[least] = nodes
        return wanted <= nodes


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
