"""The grid's links as the communication-aware policy weighs them: which cluster is near to which (sonmez-2010 IV-C)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.request import ClusterName

Near = Mapping[ClusterName, frozenset[ClusterName]]


@dataclass(frozen=True, slots=True)
class Weighing:
    """By what links are compared; ``bound`` is the highest latency in seconds within a group, None without groups."""

    bandwidth: bool = False
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """All clusters of a grid, whatever they have idle; costs are in seconds, or in minus bytes per second."""

    own: Mapping[ClusterName, float]
    """What is measured within each cluster; infinite where nothing is."""
    average: Mapping[ClusterName, float]
    """Of all that is measured from each cluster to any, itself included; infinite where nothing is."""
    near: Near
    """The other clusters that each may be combined with."""
    groups: tuple[frozenset[ClusterName], ...]
    """Those with low latencies between all of them, in order of their first cluster; empty without a bound."""

    def alone(self, clusters: Sequence[ClusterView]) -> list[ClusterView]:
        """In the order in which the whole of a job is tried on one."""
        return sorted(clusters, key=lambda c: (self.own[c.name], c.name))

    def together(self, clusters: Sequence[ClusterView]) -> list[ClusterView]:
        """In the order in which clusters are combined."""
        return sorted(clusters, key=lambda c: (self.average[c.name], c.name))


def network_of(grid: GridView, weighing: Weighing) -> Network:
    return grid.once(("network", weighing), lambda grid: _network(grid, weighing))


def _network(grid: GridView, weighing: Weighing) -> Network:
    names = [cluster.name for cluster in grid]
    costs: dict[ClusterName, dict[ClusterName, float]] = {name: {} for name in names}
    near: dict[ClusterName, set[ClusterName]] = {name: set() for name in names}
    for (one, other), link in grid.links.items():
        measured = link.bandwidth if weighing.bandwidth else link.latency
        if measured is None or one not in costs or other not in costs:
            continue
        cost = -measured if weighing.bandwidth else measured
        costs[one][other] = cost
        costs[other].setdefault(one, cost)
        if one != other and _within(link.latency, weighing.bound):
            near[one].add(other)
            near[other].add(one)
    average = {name: sum(each.values()) / len(each) if each else inf for name, each in costs.items()}
    own = {name: costs[name].get(name, inf) for name in names}
    known = {name: frozenset(others) for name, others in near.items()}
    if weighing.bound is None:
        return Network(own, average, known, ())
    groups = _groups(sorted(names, key=lambda name: (average[name], name)), known)
    return Network(own, average, {name: group - {name} for group in groups for name in group}, groups)


def _within(latency: float | None, bound: float | None) -> bool:
    return bound is None or (latency is not None and latency <= bound)


def _groups(order: Sequence[ClusterName], near: Near) -> tuple[frozenset[ClusterName], ...]:
    """Each cluster in one group: the first that is in none yet, and each later one that is near to all of the group."""
    left, groups = list(order), []
    while left:
        group = near_to_all(left, near)
        groups.append(frozenset(group))
        left = [name for name in left if name not in groups[-1]]
    return tuple(groups)


def near_to_all(order: Sequence[ClusterName], near: Near) -> list[ClusterName]:
    """The first cluster, then in order each that is near to all taken before it."""
    taken = [order[0]]
    common = near[order[0]]
    for name in order:
        if name in common:
            taken.append(name)
            common = common & near[name]
    return taken
