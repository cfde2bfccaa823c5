"""The optimal matching, in polynomial time (semantics 7).

T has two terms, and each is a bottleneck: the slowest node, and the most loaded uplink. With a bound on both, the
problem is to find enough nodes. In each cluster the nodes that are no slower than the bound count. The load of an
uplink is concave in the cluster's share of the job and symmetric about one half: the cluster may have few nodes, or all
but as few. A cluster that has all but a few has more than half of the job, so there is at most one such cluster. The
other clusters may have any number up to a limit.

The slower the nodes may be, the lower the load of the uplinks can be. The best pair of bounds is found by bisection;
ranges that cannot contain a better pair than the best one so far are skipped.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import NamedTuple

from koalapy.model.request import ClusterName


class Kind(NamedTuple):
    """Idle nodes of a cluster with the same properties."""

    name: str
    slowdown: float
    """Computation time relative to a node of power 1."""
    idle: int


@dataclass(frozen=True)
class Site:
    """A cluster with its usable kinds of nodes. ``capacity`` and ``consumed`` of its uplink are in bytes per second."""

    name: ClusterName
    kinds: tuple[Kind, ...]
    capacity: float | None = None
    """None: the uplink is never saturated."""
    consumed: float = 0.0

    @cached_property
    def idle(self) -> int:
        return sum(kind.idle for kind in self.kinds)


class Share(NamedTuple):
    """Nodes of one kind that are assigned to the job."""

    site: ClusterName
    kind: str
    nodes: int


@dataclass(frozen=True, slots=True)
class Matching:
    """The nodes assigned to a job, its slowdowns SP (``processing``) and SC (``communication``), and T (``time``)."""

    shares: tuple[Share, ...]
    processing: float
    communication: float
    time: float


@dataclass(frozen=True, slots=True)
class Problem:
    """A job and the clusters with which it may be matched."""

    nodes: int
    sites: tuple[Site, ...]
    computing: float = 1.0
    """Tp: share of computation in the run time on dedicated nodes of power 1."""
    communicating: float = 0.0
    """Tc: share of communication in that run time."""
    bandwidth: float = 0.0
    """PNBW: bytes per second that each node exchanges with all others."""
    min_nodes_per_site: int = 1
    """Minimum number of nodes on a cluster that is used."""
    max_sites: int | None = None
    """Maximum number of clusters; None: unlimited."""

    def uplink_demand(self, count: int) -> float:
        """Return the bytes per second that ``count`` nodes on one cluster exchange with the other nodes of the job.

        The function is concave, with its maximum at half of the job.
        """
        return self.bandwidth * (count * (self.nodes - count)) / (self.nodes - 1) if self.nodes > 1 else 0.0

    def link_slowdown(self, site: Site, count: int) -> float:
        """Return the slowdown by a site's uplink with ``count`` nodes of the job there; below 1 if not saturated."""
        if site.capacity is None or count in (0, self.nodes):
            return 0.0
        load = site.consumed + self.uplink_demand(count)
        return load / site.capacity if site.capacity > 0 else (inf if load > 0 else 0.0)

    def relative_time(self, processing: float, communication: float) -> float:
        """Return T for the slowdowns SP and SC."""
        # A share of zero contributes nothing, even with an infinite slowdown.
        computed = self.computing * processing if self.computing else 0.0
        return computed + (self.communicating * communication if self.communicating else 0.0)

    def evaluate_shares(self, shares: Iterable[Share]) -> Matching:
        """Return the matching with the slowdowns and T of an assignment of nodes."""
        shares = tuple(shares)
        sites = {site.name: site for site in self.sites}
        counts: dict[ClusterName, int] = {}
        for share in shares:
            counts[share.site] = counts.get(share.site, 0) + share.nodes
        slowdowns = {(site.name, kind.name): kind.slowdown for site in self.sites for kind in site.kinds}
        processing = max(slowdowns[share.site, share.kind] for share in shares)
        links = (self.link_slowdown(sites[name], count) for name, count in counts.items())
        communication = max(1.0, *links)
        return Matching(shares, processing, communication, self.relative_time(processing, communication))


class Mode(StrEnum):
    """Objective (lerida-2008 4): the minimum T, the minimum T without a saturated link, or any matching without one."""

    OPTIMAL = "optimal"
    NON_SATURATED = "non-saturated"
    FIRST_NON_SATURATED = "first-non-saturated"


Split = list[tuple[Site, int]]


def find_matching(problem: Problem, mode: Mode = Mode.OPTIMAL) -> Matching | None:
    """Return the matching that the mode asks for, on the fewest clusters within its bounds; None if there is none.

    Of several matchings with the same T return the one with the fastest nodes.
    """
    search = _Search(problem, mode)
    bounds = search.any_bounds() if mode is Mode.FIRST_NON_SATURATED else search.best_bounds()
    if bounds is None:
        return None
    split = search.split_nodes(*bounds)
    return problem.evaluate_shares(_choose_kinds(split, bounds[0]))


def has_matching(problem: Problem, mode: Mode = Mode.OPTIMAL) -> bool:
    """Return whether a matching exists that the mode admits; faster than ``find_matching``."""
    if mode is Mode.OPTIMAL:
        # In this mode an overloaded link is allowed, unless its capacity is zero.
        open_to_all = (replace(s, capacity=None) if s.capacity is None or s.capacity > 0 else s for s in problem.sites)
        problem = replace(problem, sites=tuple(open_to_all))
    return _Search(problem, Mode.FIRST_NON_SATURATED).any_bounds() is not None


def most_admitted(problem: Problem, site: Site) -> int:
    """Return how many nodes of the job, but not all, a site can have without saturating its uplink."""
    maximum = min(site.idle, problem.nodes - 1)
    if problem.link_slowdown(site, maximum) <= 1.0:
        return maximum
    return _few_admitted(problem, site)


def _few_admitted(problem: Problem, site: Site) -> int:
    """Return how many nodes, up to half of the job, a site can have without saturating its uplink."""
    counts = range(1, min(site.idle, problem.nodes // 2) + 1)
    return bisect_right(counts, 1.0, key=lambda count: problem.link_slowdown(site, count))


class _Nodes:
    """One site's number of nodes by slowdown, and the load of its uplink by number of nodes of the job."""

    def __init__(self, problem: Problem, site: Site, mode: Mode) -> None:
        self.site = site
        kinds = sorted(site.kinds, key=attrgetter("slowdown"))
        self.slowdowns = [kind.slowdown for kind in kinds]
        self._idle = [0, *accumulate(kind.idle for kind in kinds)]
        # Above half of the job the loads repeat in reverse order.
        half = min(site.idle, problem.nodes // 2)
        self.loads: list[float] = []
        if site.capacity is not None and mode is Mode.OPTIMAL:
            self.loads = [problem.link_slowdown(site, count) for count in range(1, half + 1)]
        elif site.capacity is not None and (admitted := _few_admitted(problem, site)) < half:
            self.loads = [*([1.0] * admitted), inf]

    def up_to(self, slowdown: float) -> int:
        """Return the number of nodes with at most this slowdown."""
        return self._idle[bisect_right(self.slowdowns, slowdown)]


class _Choice(NamedTuple):
    """Indices of the sites that get few nodes, and of the site that gets the others, if there is one."""

    few: Sequence[int]
    main: int | None = None


class _Search:
    """A search for the best bounds on node slowdown and uplink load, and for a split within them."""

    def __init__(self, problem: Problem, mode: Mode) -> None:
        self._problem = problem
        self._nodes = [_Nodes(problem, site, mode) for site in problem.sites]
        self._max_sites = problem.nodes // problem.min_nodes_per_site
        if problem.max_sites is not None:
            self._max_sites = min(self._max_sites, problem.max_sites)
        self._is_bounded = problem.min_nodes_per_site > 1 or self._max_sites < len(self._nodes)
        self._slowdowns = sorted({slowdown for nodes in self._nodes for slowdown in nodes.slowdowns})
        self._bounds = [1.0]
        """Candidate bounds on the load of the most loaded uplink, ascending."""
        if mode is Mode.OPTIMAL:
            self._bounds += sorted({load for nodes in self._nodes for load in nodes.loads if 1.0 < load < inf})

    # Bounds

    def any_bounds(self) -> tuple[float, float] | None:
        """Return the largest slowdown and a load of 1, which saturates no uplink; None if the nodes do not suffice."""
        last = len(self._slowdowns) - 1
        return (self._slowdowns[last], 1.0) if last >= 0 and self._can_hold(self._counts_within(last), 1.0) else None

    def best_bounds(self) -> tuple[float, float] | None:
        """Return the bounds on node slowdown and uplink load with the minimum T; None if no nodes suffice."""
        slowdowns, bounds = self._slowdowns, self._bounds
        places = range(len(slowdowns))
        first = bisect_left(places, True, key=lambda place: self._can_hold(self._counts_within(place), bounds[-1]))
        if first == len(places):
            return None
        if not self._problem.communicating:
            # Load costs nothing without communication. The loosest bound on it allows the fewest clusters.
            return slowdowns[first], bounds[-1]
        last = places[-1]
        at_first = self._least_load(first, 0, len(bounds) - 1)
        at_last = self._least_load(last, 0, at_first)
        best = min(
            (self._time_within(place, load), place, load) for place, load in ((first, at_first), (last, at_last))
        )
        ranges = [(first, at_first, last, at_last)]
        while ranges:
            low, at_low, high, at_high = ranges.pop()
            # Between two slowdowns the load is between theirs. If both loads are the same, the fastest nodes are
            # best.
            if high - low < 2 or at_low == at_high or (self._time_within(low + 1, at_high), low + 1) >= best[:2]:
                continue
            middle = (low + high) // 2
            at_middle = self._least_load(middle, at_high, at_low)
            best = min(best, (self._time_within(middle, at_middle), middle, at_middle))
            ranges += [(middle, at_middle, high, at_high), (low, at_low, middle, at_middle)]
        return slowdowns[best[1]], bounds[best[2]]

    def _time_within(self, place: int, load: int) -> float:
        """Return T for the slowdown bound at index ``place`` and the load bound at index ``load``."""
        return self._problem.relative_time(self._slowdowns[place], self._bounds[load])

    def _least_load(self, place: int, low: int, high: int) -> int:
        """Return the index of the minimum load bound, from ``low`` to ``high``, with which the nodes suffice.

        ``place`` is the index of the slowdown bound. The nodes must suffice with the load bound ``high``.
        """
        counts = self._counts_within(place)
        return bisect_left(self._bounds, True, low, high, key=lambda load: self._can_hold(counts, load))

    # Nodes within bounds

    def _counts_within(self, place: int) -> list[int]:
        """Return each site's number of nodes within the slowdown bound at index ``place``."""
        slowdown = self._slowdowns[place]
        return [nodes.up_to(slowdown) for nodes in self._nodes]

    def _small_shares(self, counts: Sequence[int], load: float) -> list[int]:
        """Return each site's maximum number of nodes such that any smaller number also keeps the load bound."""
        return [
            # If all loads in its table keep the bound, the site may use all of its nodes.
            count if (allowed := bisect_right(nodes.loads, load)) == len(nodes.loads) else min(allowed, count)
            for nodes, count in zip(self._nodes, counts, strict=True)
        ]

    def _can_hold(self, counts: Sequence[int], load: float) -> bool:
        """Return whether the sites can hold the whole job with at most this load on each uplink.

        ``counts``: the nodes of each site within the slowdown bound.
        """
        total, few = self._problem.nodes, self._small_shares(counts, load)
        if self._is_bounded:
            return self._choose_sites(counts, few) is not None
        room = sum(few)
        if room >= total or max(counts) >= total:
            return True
        return any(
            total - count <= min(allowed, room - allowed)
            for count, allowed in zip(counts, few, strict=True)
            if allowed < count
        )

    def split_nodes(self, slowdown: float, load: float) -> Split:
        """Return the nodes that each site gives to the job within bounds that allow a matching.

        Use the fewest sites; of equally good splits prefer one in which a single site has nearly all nodes.
        """
        total, min_per_site = self._problem.nodes, self._problem.min_nodes_per_site
        counts = [nodes.up_to(slowdown) for nodes in self._nodes]
        few = self._small_shares(counts, load)
        choice = self._choose_sites(counts, few)
        assert choice is not None, "there are enough nodes within the bounds"
        spread, sizes = total, {}
        if choice.main is not None:
            spread = max(total - counts[choice.main], len(choice.few) * min_per_site)
            sizes[choice.main] = total - spread
        sizes |= _distribute_nodes({place: few[place] for place in choice.few}, spread, min_per_site)
        return [(self._nodes[place].site, size) for place, size in sizes.items()]

    def _choose_sites(self, counts: Sequence[int], few: Sequence[int]) -> _Choice | None:
        """Return the fewest sites that can hold the whole job; None if no sites can.

        ``counts``: the nodes of each site within the bounds. Each site may have up to ``few`` nodes of the job, or all
        but up to ``few``.
        """
        total, min_per_site = self._problem.nodes, self._problem.min_nodes_per_site
        if total < min_per_site or self._max_sites < 1:
            return None
        best: tuple[float, int, int] = (inf, 0, -1)
        order = sorted(
            (place for place, allowed in enumerate(few) if allowed >= min_per_site), key=lambda place: -few[place]
        )
        cumulative = [0, *accumulate(few[place] for place in order)]
        if total <= cumulative[-1]:
            best = (bisect_left(cumulative, total), 0, -1)
        for place, (count, allowed) in enumerate(zip(counts, few, strict=True)):
            if count >= total:
                return _Choice((), place)
            if allowed == count or total - count > min(allowed, total - min_per_site):
                continue
            further_sites = bisect_left(cumulative, total - count)
            if allowed >= min_per_site and order.index(place) < further_sites:
                further_sites = bisect_left(cumulative, total - count + allowed) - 1
                available = len(order) - 1
            else:
                available = len(order)
            if further_sites <= available and further_sites * min_per_site <= min(allowed, total - min_per_site):
                best = min(best, (further_sites + 1, -count, place))
        sites, _, main = best
        if sites > self._max_sites:
            return None
        if main < 0:
            return _Choice(order[: int(sites)])
        return _Choice([place for place in order if place != main][: int(sites) - 1], main)


def _distribute_nodes(capacities: dict[int, int], total: int, min_per_site: int) -> dict[int, int]:
    """Distribute ``total`` nodes over sites in turn, each up to its maximum.

    Leave ``min_per_site`` nodes for each later site.
    """
    sizes, remaining, reserved = {}, total, min_per_site * len(capacities)
    for place, maximum in capacities.items():
        reserved -= min_per_site
        sizes[place] = min(maximum, remaining - reserved)
        remaining -= sizes[place]
    return sizes


def _choose_kinds(split: Split, slowdown: float) -> list[Share]:
    """Return the kinds of nodes to use on each site: the slowest kind that suffices, or else several kinds.

    Fewer kinds make fewer components. Nodes faster than the slowest node of the job would only wait for it.
    """
    shares = []
    for site, count in split:
        kinds = [kind for kind in site.kinds if kind.slowdown <= slowdown]
        alone = [kind for kind in kinds if kind.idle >= count]
        if alone:
            slowest = min(alone, key=lambda kind: (-kind.slowdown, kind.idle, kind.name))
            shares.append(Share(site.name, slowest.name, count))
            continue
        remaining = count
        for kind in sorted(kinds, key=lambda kind: (-kind.idle, -kind.slowdown, kind.name)):
            if remaining:
                shares.append(Share(site.name, kind.name, min(remaining, kind.idle)))
                remaining -= shares[-1].nodes
    return shares
