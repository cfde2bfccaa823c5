"""The links of a grid as costs, for the communication-aware policy (sonmez-2010 IV-C)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from koalapy.model.cluster import ClusterState, ClusterView, GridView
from koalapy.model.request import ClusterName

Near = Mapping[ClusterName, frozenset[ClusterName]]
MAX_TRIED = 300


@dataclass(frozen=True, slots=True)
class Weighing:
    """How links are compared. ``bound``: maximum latency in seconds within a group; None: no groups."""

    bandwidth: bool = False
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """Costs between all clusters of a grid, whatever they have idle: seconds, or negative bytes per second."""

    own: Mapping[ClusterName, float]
    """Cost within each cluster; infinite if not measured."""
    average: Mapping[ClusterName, float]
    """Mean cost of the measured links from each cluster, including the one within it; infinite if there are none."""
    near: Near
    """Other clusters to which each has a measured link; with a bound, those of its group."""
    reachable: Near
    """Other clusters with which each may be combined if measured links do not suffice: all but those found unreachable.

    With a bound, those of its group.
    """
    by_own: tuple[ClusterName, ...]
    by_average: tuple[ClusterName, ...]
    """All clusters by ascending cost, ties by name."""
    groups: tuple[frozenset[ClusterName], ...]
    """Clusters with low latencies between all of them, by their first cluster; empty without a bound."""

    @property
    def levels(self) -> tuple[Near, ...]:
        """Return the combinable clusters for each level: measured links first, then all reachable clusters."""
        return (self.near,) if self.groups or self.near == self.reachable else (self.near, self.reachable)

    def alone(self, grid: GridView) -> Iterator[ClusterView]:
        """Yield the usable clusters in the order in which they are tried for a whole job."""
        return _usable(self.by_own, grid)

    def together(self, grid: GridView, least: int = 0) -> list[ClusterView]:
        """Return the usable clusters with at least ``least`` idle nodes, in the order in which they are combined."""
        return [cluster for cluster in _usable(self.by_average, grid) if cluster.idle >= least]


def _usable(names: Iterable[ClusterName], grid: GridView) -> Iterator[ClusterView]:
    clusters = (grid.get(name) for name in names)
    return (c for c in clusters if c is not None and c.state is ClusterState.USABLE)


def network_of(grid: GridView, weighing: Weighing) -> Network:
    return grid.compute_lasting(("network", weighing), lambda grid: _network(grid, weighing))


def _network(grid: GridView, weighing: Weighing) -> Network:
    names = [cluster.name for cluster in grid]
    costs: dict[ClusterName, dict[ClusterName, float]] = {name: {} for name in names}
    near: dict[ClusterName, set[ClusterName]] = {name: set() for name in names}
    reachable: dict[ClusterName, set[ClusterName]] = {name: set(names) - {name} for name in names}
    for (one, other), link in grid.links.items():
        if link.unreachable and one in costs and other in costs:
            reachable[one].discard(other)
            reachable[other].discard(one)
            continue
        measured = link.bandwidth if weighing.bandwidth else link.latency
        if measured is None or one not in costs or other not in costs:
            continue
        cost = -measured if weighing.bandwidth else measured
        costs[one][other] = cost
        costs[other].setdefault(one, cost)
        near_enough = weighing.bound is None or (link.latency is not None and link.latency <= weighing.bound)
        if one != other and near_enough:
            near[one].add(other)
            near[other].add(one)
    average = {name: sum(each.values()) / len(each) if each else inf for name, each in costs.items()}
    own = {name: costs[name].get(name, inf) for name in names}
    by_own = tuple(sorted(names, key=lambda name: (own[name], name)))
    by_average = tuple(sorted(names, key=lambda name: (average[name], name)))
    known = {name: frozenset(others) for name, others in near.items()}
    if weighing.bound is None:
        open_to = {name: frozenset(others) for name, others in reachable.items()}
        return Network(own, average, known, open_to, by_own, by_average, ())
    groups = _groups(by_average, known)
    inside = {name: group - {name} for group in groups for name in group}
    return Network(own, average, inside, inside, by_own, by_average, groups)


def _groups(order: Sequence[ClusterName], near: Near) -> tuple[frozenset[ClusterName], ...]:
    """Return disjoint groups of clusters that are near to each other.

    Each group starts with the first cluster without a group and adds those near to all of its members.
    """
    left, groups = list(order), []
    while left:
        group = near_to_all(left, near)
        groups.append(frozenset(group))
        left = [name for name in left if name not in groups[-1]]
    return tuple(groups)


def near_sets(names: tuple[ClusterName, ...], near: Near) -> list[frozenset[ClusterName]]:
    """Return sets of clusters that are near to each other.

    The first set starts with the first cluster in order, each later set with the first one that is in no set yet.
    """
    sets: list[frozenset[ClusterName]] = []
    left: Sequence[ClusterName] = names
    while left:
        sets.append(frozenset(near_to_all([left[0], *names], near)))
        left = [name for name in left if name not in sets[-1]]
    return sets


def combination(
    order: Sequence[ClusterView], near: Near, suffice: Callable[[Sequence[ClusterView]], bool]
) -> list[ClusterView] | None:
    """Return the first clusters in order that are near to each other and suffice together.

    Return None if there are none, or if none is found in ``MAX_TRIED`` steps: a complete search takes too long among
    many clusters.
    """
    looks = 0

    def grow(taken: list[ClusterView], others: Sequence[ClusterView]) -> list[ClusterView] | None:
        nonlocal looks
        for place, cluster in enumerate(others):
            looks += 1
            if looks > MAX_TRIED:
                return None
            chosen = [*taken, cluster]
            rest = [other for other in others[place + 1 :] if other.name in near[cluster.name]]
            if suffice([*chosen, *rest]):
                found = chosen if suffice(chosen) else grow(chosen, rest)
                if found is not None:
                    return found
        return None

    return grow([], order)


def near_to_all(order: Sequence[ClusterName], near: Near) -> list[ClusterName]:
    """Return the first cluster, followed in order by each that is near to all returned before it."""
    taken = [order[0]]
    common = near[order[0]]
    for name in order:
        if name in common:
            taken.append(name)
            common = common & near[name]
    return taken
