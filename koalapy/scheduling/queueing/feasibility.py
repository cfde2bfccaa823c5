"""Whether a request may fit into the idle nodes at all: a quick reason to refuse it, before its policy is asked."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

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


def needs_of(request: Request) -> Needs:
    """The needs of a request."""
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
    """The idle nodes of one moment; sums over them are worked out once for all who ask."""

    def __init__(self, idle: Mapping[ClusterName, int]) -> None:
        self._idle = idle
        self._total = sum(idle.values())
        self._largest = max(idle.values(), default=0)
        self._slots: dict[int, int] = {}
        self._roomy: dict[int, int] = {}

    def may_fit(self, needs: Needs) -> bool:
        """Whether nothing speaks against it yet."""
        if needs.total > self._total or needs.largest > self._largest:
            return False
        if needs.least > 1 and needs.total > self._nodes_on_clusters_with(needs.least):
            return False
        if needs.wanted and any(self._idle.get(name, 0) < size for name, size in needs.wanted):
            return False
        return all(count <= self._slots_of(size) for size, count in needs.slots)

    def _slots_of(self, size: int) -> int:
        slots = self._slots.get(size)
        if slots is None:
            slots = self._slots[size] = sum(idle // size for idle in self._idle.values())
        return slots

    def _nodes_on_clusters_with(self, least: int) -> int:
        nodes = self._roomy.get(least)
        if nodes is None:
            nodes = self._roomy[least] = sum(idle for idle in self._idle.values() if idle >= least)
        return nodes
