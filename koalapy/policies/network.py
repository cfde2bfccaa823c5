"""The links of a grid as costs, for the communication-aware policy (sonmez-2010 IV-C), and times of file transfers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from koalapy.model.cluster import ClusterState, ClusterView, GridView
from koalapy.model.request import ClusterName, InputFile
from koalapy.model.wording import format_list

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

    internal: Mapping[ClusterName, float]
    """Cost within each cluster; infinite if not measured."""
    average: Mapping[ClusterName, float]
    """Mean cost of the measured links from each cluster, including the one within it; infinite if there are none."""
    near: Near
    """Other clusters to which each has a measured link; with a bound, those of its group."""
    reachable: Near
    """Other clusters with which each may be combined if measured links do not suffice: all but those found unreachable.

    With a bound, those of its group.
    """
    by_internal: tuple[ClusterName, ...]
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
        return _usable_in_order(self.by_internal, grid)

    def order_for_combining(self, grid: GridView, min_idle: int = 0) -> list[ClusterView]:
        """Return the usable clusters with at least ``min_idle`` idle nodes, in the order in which they are combined."""
        return [cluster for cluster in _usable_in_order(self.by_average, grid) if cluster.idle >= min_idle]


def _usable_in_order(names: Iterable[ClusterName], grid: GridView) -> Iterator[ClusterView]:
    clusters = (grid.get(name) for name in names)
    return (c for c in clusters if c is not None and c.state is ClusterState.USABLE)


def network_of(grid: GridView, weighing: Weighing) -> Network:
    """Return the costs of a grid's links, cached by the grid."""
    return grid.compute_lasting(("network", weighing), lambda grid: _compute_network(grid, weighing))


def _compute_network(grid: GridView, weighing: Weighing) -> Network:
    """Return the costs of a grid's links, and the clusters that may be combined."""
    names = [cluster.name for cluster in grid]
    costs: dict[ClusterName, dict[ClusterName, float]] = {name: {} for name in names}
    near: dict[ClusterName, set[ClusterName]] = {name: set() for name in names}
    reachable: dict[ClusterName, set[ClusterName]] = {name: set(names) - {name} for name in names}
    for (first, second), link in grid.links.items():
        if link.unreachable and first in costs and second in costs:
            reachable[first].discard(second)
            reachable[second].discard(first)
            continue
        measured = link.bandwidth if weighing.bandwidth else link.latency
        if measured is None or first not in costs or second not in costs:
            continue
        cost = -measured if weighing.bandwidth else measured
        costs[first][second] = cost
        costs[second].setdefault(first, cost)
        near_enough = weighing.bound is None or (link.latency is not None and link.latency <= weighing.bound)
        if first != second and near_enough:
            near[first].add(second)
            near[second].add(first)
    average = {
        name: sum(link_costs.values()) / len(link_costs) if link_costs else inf for name, link_costs in costs.items()
    }
    internal = {name: costs[name].get(name, inf) for name in names}
    by_own = tuple(sorted(names, key=lambda name: (internal[name], name)))
    by_average = tuple(sorted(names, key=lambda name: (average[name], name)))
    neighbours = {name: frozenset(near_names) for name, near_names in near.items()}
    if weighing.bound is None:
        open_to = {name: frozenset(near_names) for name, near_names in reachable.items()}
        return Network(internal, average, neighbours, open_to, by_own, by_average, ())
    groups = _form_groups(by_average, neighbours)
    inside = {name: group - {name} for group in groups for name in group}
    return Network(internal, average, inside, inside, by_own, by_average, groups)


def _form_groups(order: Sequence[ClusterName], near: Near) -> tuple[frozenset[ClusterName], ...]:
    """Return disjoint groups of clusters that are near to each other.

    Each group starts with the first cluster without a group and adds those near to all of its members.
    """
    ungrouped, groups = list(order), []
    while ungrouped:
        group = near_to_all(ungrouped, near)
        groups.append(frozenset(group))
        ungrouped = [name for name in ungrouped if name not in groups[-1]]
    return tuple(groups)


def near_sets(names: tuple[ClusterName, ...], near: Near) -> list[frozenset[ClusterName]]:
    """Return sets of clusters that are near to each other.

    The first set starts with the first cluster in order, each later set with the first one that is in no set yet.
    """
    if names and all(len(near[name]) == len(near) - 1 for name in names):
        return [frozenset(names)]  # all are near to each other
    sets: list[frozenset[ClusterName]] = []
    uncovered: Sequence[ClusterName] = names
    while uncovered:
        sets.append(frozenset(near_to_all([uncovered[0], *names], near)))
        uncovered = [name for name in uncovered if name not in sets[-1]]
    return sets


def find_combination(
    order: Sequence[ClusterView], near: Near, suffice: Callable[[Sequence[ClusterView]], bool]
) -> list[ClusterView] | None:
    """Return the first clusters in order that are near to each other and suffice together.

    Return None if there are none, or if none is found in ``MAX_TRIED`` steps: a complete search takes too long among
    many clusters.
    """
    looks = 0

    def grow(members: list[ClusterView], candidates: Sequence[ClusterView]) -> list[ClusterView] | None:
        """Return ``members`` with the first candidates that make them suffice; None if none do."""
        nonlocal looks
        for place, cluster in enumerate(candidates):
            looks += 1
            if looks > MAX_TRIED:
                return None
            chosen, beside = [*members, cluster], near[cluster.name]
            combinable = [cluster for cluster in candidates[place + 1 :] if cluster.name in beside] if beside else []
            if suffice([*chosen, *combinable]):
                result = chosen if suffice(chosen) else grow(chosen, combinable)
                if result is not None:
                    return result
        return None

    return grow([], order)


def near_to_all(order: Sequence[ClusterName], near: Near) -> list[ClusterName]:
    """Return the first cluster, followed in order by each that is near to all returned before it."""
    members = [order[0]]
    common = near[order[0]]
    for name in order if common else ():
        if name in common:
            members.append(name)
            common = common & near[name]
    return members


@dataclass(frozen=True, slots=True)
class Transfer:
    """The estimated seconds to transfer all inputs, and the file site of each input, in order."""

    seconds: float = 0.0
    sources: tuple[ClusterName, ...] = ()


NONE = Transfer()


def estimate_transfer(
    site: ClusterName, files: Sequence[InputFile], grid: GridView, assumed: float | None = None
) -> Transfer | None:
    """Choose the fastest file site of each input and return the sum of size / bandwidth; None if an input has no site.

    A file that the cluster has takes 0 seconds. A link of unknown bandwidth counts as ``assumed`` bytes per second, or
    is not used if that is None. Ties go to the first name.
    """
    if not files:
        return NONE
    seconds, sources = 0.0, []
    for file in files:
        best = _best(site, file, grid, assumed)
        if best is None:
            return None
        seconds += best[0]
        sources.append(best[1])
    return Transfer(seconds, tuple(sources))


def immovable_reason(site: ClusterName, files: Sequence[InputFile], grid: GridView) -> str:
    """Return why an input with replicas cannot be transferred to a cluster; empty if all can."""
    for file in files:
        sites = grid.sites_of(file)
        if site in sites:
            continue
        if site in grid.cut_off:
            return f"{site} has no rsync, by which {file.name} would come"
        if sites and grid.cut_off.issuperset(sites):
            return f"{format_list(sorted(sites), separator=' and ')}, which has {file.name}, has no rsync to send it"
    return ""


def _best(
    site: ClusterName, file: InputFile, grid: GridView, assumed: float | None
) -> tuple[float, ClusterName] | None:
    """Return the seconds and the file site of the fastest transfer of a file; None if it has no usable site."""
    sites = grid.sites_of(file)
    if site in sites:
        return 0.0, site
    best: tuple[float, ClusterName] | None = None
    if site in grid.cut_off:
        return None
    for source in sorted(sites):
        cluster = grid.get(source)
        if source in grid.cut_off or (cluster is not None and cluster.state is ClusterState.UNREACHABLE):
            continue
        bandwidth = grid.link_between(source, site).bandwidth or assumed
        seconds = file.size / bandwidth if bandwidth else inf
        if seconds < (best[0] if best else inf):
            best = seconds, source
    return best
