"""The best matching there is, in polynomial time (semantics 7).

T has two terms, and each is a bottleneck: the slowest node, and the most loaded uplink. With a bound on both, what is
left is to find enough nodes. Of a cluster count the nodes that are no slower than the bound. What its uplink carries is
concave in its share of the job and symmetric about half of it: it may have few nodes, or all but as few. A cluster that
has all but a few has more than half, so that there is at most one; and the others' few may be any number up to a limit.

The slower the nodes may be, the less loaded need the uplinks be: the best pair of bounds is found by halving, and
ranges in which none can be better than the best one so far are left out.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import accumulate
from math import inf
from operator import attrgetter
from typing import NamedTuple

from koalapy.policies.matching.problem import Matching, Problem, Share, Site


class Mode(StrEnum):
    """What is looked for (lerida-2008 4): the least T, the least without a saturated link, or any without one."""

    OPTIMAL = "optimal"
    NON_SATURATED = "non-saturated"
    FIRST_NON_SATURATED = "first-non-saturated"


Split = list[tuple[Site, int]]


def match(problem: Problem, mode: Mode = Mode.OPTIMAL) -> Matching | None:
    """The matching that the mode asks for, on as few clusters as any within its bounds; None where there is none.

    Of several with the same T the one with the fastest nodes.
    """
    search = _Search(problem, mode)
    bounds = search.any_bounds() if mode is Mode.FIRST_NON_SATURATED else search.best_bounds()
    if bounds is None:
        return None
    split = search.split(*bounds)
    return problem.weigh(_shares(split, bounds[0]))


def fits(problem: Problem, mode: Mode = Mode.OPTIMAL) -> bool:
    """Whether there is any matching that the mode admits; found sooner than a matching."""
    if mode is Mode.OPTIMAL:
        # How much a link is overloaded makes no difference then, unless it carries nothing.
        open_to_all = (replace(s, capacity=None) if s.capacity is None or s.capacity > 0 else s for s in problem.sites)
        problem = replace(problem, sites=tuple(open_to_all))
    return _Search(problem, Mode.FIRST_NON_SATURATED).any_bounds() is not None


def most_admitted(problem: Problem, site: Site) -> int:
    """How many of the job's nodes, fewer than all, a site's uplink admits without being saturated."""
    most = min(site.idle, problem.nodes - 1)
    if problem.link_slowdown(site, most) <= 1.0:
        return most
    return _few_admitted(problem, site)


def _few_admitted(problem: Problem, site: Site) -> int:
    """The same, up to half of the job."""
    counts = range(1, min(site.idle, problem.nodes // 2) + 1)
    return bisect_right(counts, 1.0, key=lambda count: problem.link_slowdown(site, count))


class _Nodes:
    """One site's nodes, counted by how slow they are, and its uplink's load, by how many of the job they are."""

    def __init__(self, problem: Problem, site: Site, mode: Mode) -> None:
        self.site = site
        kinds = sorted(site.kinds, key=attrgetter("slowdown"))
        self.slowdowns = [kind.slowdown for kind in kinds]
        self._idle = [0, *accumulate(kind.idle for kind in kinds)]
        # From half of the job on the loads are the same again, backwards.
        half = min(site.idle, problem.nodes // 2)
        self.loads: list[float] = []
        if site.capacity is not None and mode is Mode.OPTIMAL:
            self.loads = [problem.link_slowdown(site, count) for count in range(1, half + 1)]
        elif site.capacity is not None and (admitted := _few_admitted(problem, site)) < half:
            self.loads = [*([1.0] * admitted), inf]

    def up_to(self, slowdown: float) -> int:
        """How many are no slower."""
        return self._idle[bisect_right(self.slowdowns, slowdown)]


class _Choice(NamedTuple):
    """Sites by their places: those that get few nodes, and the one that gets all but few, if there is one."""

    few: Sequence[int]
    main: int | None = None


class _Search:
    def __init__(self, problem: Problem, mode: Mode) -> None:
        self._problem = problem
        self._nodes = [_Nodes(problem, site, mode) for site in problem.sites]
        self._most = problem.nodes // problem.least
        if problem.most is not None:
            self._most = min(self._most, problem.most)
        self._is_bounded = problem.least > 1 or self._most < len(self._nodes)
        self._slowdowns = sorted({slowdown for nodes in self._nodes for slowdown in nodes.slowdowns})
        self._bounds = [1.0]
        """What the load of the most loaded uplink may be, in order."""
        if mode is Mode.OPTIMAL:
            self._bounds += sorted({load for nodes in self._nodes for load in nodes.loads if 1.0 < load < inf})

    # Bounds

    def any_bounds(self) -> tuple[float, float] | None:
        """No bound on the slowdown of nodes; None where no nodes suffice."""
        last = len(self._slowdowns) - 1
        return (self._slowdowns[last], 1.0) if last >= 0 and self._fits(self._counts(last), 1.0) else None

    def best_bounds(self) -> tuple[float, float] | None:
        """The slowdown of nodes and the load of uplinks that make the least T together; None where none suffice."""
        slowdowns, bounds = self._slowdowns, self._bounds
        places = range(len(slowdowns))
        first = bisect_left(places, True, key=lambda place: self._fits(self._counts(place), bounds[-1]))
        if first == len(places):
            return None
        if not self._problem.communicating:
            # A load costs nothing then: without a bound on it the fewest clusters serve.
            return slowdowns[first], bounds[-1]
        last = places[-1]
        at_first = self._least_load(first, 0, len(bounds) - 1)
        at_last = self._least_load(last, 0, at_first)
        best = min((self._time(place, load), place, load) for place, load in ((first, at_first), (last, at_last)))
        ranges = [(first, at_first, last, at_last)]
        while ranges:
            low, at_low, high, at_high = ranges.pop()
            # Between them the load is between theirs. Where it is one and the same, the fastest nodes are best.
            if high - low < 2 or at_low == at_high or (self._time(low + 1, at_high), low + 1) >= best[:2]:
                continue
            middle = (low + high) // 2
            at_middle = self._least_load(middle, at_high, at_low)
            best = min(best, (self._time(middle, at_middle), middle, at_middle))
            ranges += [(middle, at_middle, high, at_high), (low, at_low, middle, at_middle)]
        return slowdowns[best[1]], bounds[best[2]]

    def _time(self, place: int, load: int) -> float:
        return self._problem.time(self._slowdowns[place], self._bounds[load])

    def _least_load(self, place: int, low: int, high: int) -> int:
        """The place of the least load with which nodes of a slowdown suffice: from ``low`` to ``high``, which does."""
        counts = self._counts(place)
        return bisect_left(self._bounds, True, low, high, key=lambda load: self._fits(counts, load))

    # Whether there are enough nodes, and where

    def _counts(self, place: int) -> list[int]:
        """The nodes of each site that are no slower than a slowdown, by its place."""
        slowdown = self._slowdowns[place]
        return [nodes.up_to(slowdown) for nodes in self._nodes]

    def _few(self, counts: Sequence[int], load: float) -> list[int]:
        """How many nodes of the job each site may have, such that it may have any smaller number as well."""
        return [
            # The whole of its table, and it may have all of its nodes.
            count if (allowed := bisect_right(nodes.loads, load)) == len(nodes.loads) else min(allowed, count)
            for nodes, count in zip(self._nodes, counts, strict=True)
        ]

    def _fits(self, counts: Sequence[int], load: float) -> bool:
        total, few = self._problem.nodes, self._few(counts, load)
        if self._is_bounded:
            return self._choose(counts, few) is not None
        room = sum(few)
        if room >= total or max(counts) >= total:
            return True
        return any(
            total - count <= min(allowed, room - allowed)
            for count, allowed in zip(counts, few, strict=True)
            if allowed < count
        )

    def split(self, slowdown: float, load: float) -> Split:
        """How many nodes each site gives to the job, within bounds with which there are enough.

        On as few sites as possible; of ways with as few rather one in which a site has nearly all of the job.
        """
        total, least = self._problem.nodes, self._problem.least
        counts = [nodes.up_to(slowdown) for nodes in self._nodes]
        few = self._few(counts, load)
        choice = self._choose(counts, few)
        assert choice is not None, "there are enough nodes within the bounds"
        rest, sizes = total, {}
        if choice.main is not None:
            rest = max(total - counts[choice.main], len(choice.few) * least)
            sizes[choice.main] = total - rest
        sizes |= _filled({place: few[place] for place in choice.few}, rest, least)
        return [(self._nodes[place].site, size) for place, size in sizes.items()]

    def _choose(self, counts: Sequence[int], few: Sequence[int]) -> _Choice | None:
        """The fewest sites that can have the whole job, of ``counts`` nodes of which they may have ``few``, or all but
        as few; None where none can."""
        total, least = self._problem.nodes, self._problem.least
        if total < least or self._most < 1:
            return None
        best: tuple[float, int, int] = (inf, 0, -1)
        order = sorted((place for place, allowed in enumerate(few) if allowed >= least), key=lambda place: -few[place])
        room = [0, *accumulate(few[place] for place in order)]
        if total <= room[-1]:
            best = (bisect_left(room, total), 0, -1)
        for place, (count, allowed) in enumerate(zip(counts, few, strict=True)):
            if count >= total:
                return _Choice((), place)
            if allowed == count or total - count > min(allowed, total - least):
                continue
            others = bisect_left(room, total - count)
            if allowed >= least and order.index(place) < others:
                others = bisect_left(room, total - count + allowed) - 1
                there_are = len(order) - 1
            else:
                there_are = len(order)
            if others <= there_are and others * least <= min(allowed, total - least):
                best = min(best, (others + 1, -count, place))
        sites, _, main = best
        if sites > self._most:
            return None
        if main < 0:
            return _Choice(order[: int(sites)])
        return _Choice([place for place in order if place != main][: int(sites) - 1], main)


def _filled(room: dict[int, int], total: int, least: int) -> dict[int, int]:
    """So many nodes over sites, each in turn as many as it may have, but for the ``least`` of those after it."""
    sizes, left, after = {}, total, least * len(room)
    for place, most in room.items():
        after -= least
        sizes[place] = min(most, left - after)
        left -= sizes[place]
    return sizes


def _shares(split: Split, slowdown: float) -> list[Share]:
    """Which of a site's nodes that are no slower: of one kind where one suffices, the slowest that does.

    The fewer kinds, the fewer components; and nodes that are faster than the job's slowest would only wait for it.
    """
    shares = []
    for site, count in split:
        kinds = [kind for kind in site.kinds if kind.slowdown <= slowdown]
        alone = [kind for kind in kinds if kind.idle >= count]
        if alone:
            slowest = min(alone, key=lambda kind: (-kind.slowdown, kind.idle, kind.name))
            shares.append(Share(site.name, slowest.name, count))
            continue
        left = count
        for kind in sorted(kinds, key=lambda kind: (-kind.idle, -kind.slowdown, kind.name)):
            if left:
                shares.append(Share(site.name, kind.name, min(left, kind.idle)))
                left -= shares[-1].nodes
    return shares
