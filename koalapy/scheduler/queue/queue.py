"""A placement queue. Its scans cost one test per distinct request shape, not per job (semantics 4)."""

import heapq
import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from typing import Literal, NamedTuple

from sortedcontainers import SortedList

from koalapy.model.cluster import GridView
from koalapy.model.job import JobId
from koalapy.model.job_spec import JobSpec
from koalapy.model.placement import RefusalKind
from koalapy.model.request import ClusterName, FixedRequest, FlexibleRequest, Request
from koalapy.scheduler.fair_share import FRONT, Standing
from koalapy.scheduler.owner_use import LimitedDemand
from koalapy.scheduler.rules import QueueMode, QueueOrder


class Duration(NamedTuple):
    """The expected run time of a job."""

    seconds: float = inf
    is_certain: bool = True
    """Whether the job is stopped then: it is the job's walltime."""


UNLIMITED = Duration()


@dataclass(frozen=True, slots=True)
class Needs:
    """The idle nodes that a request needs under every policy, and for how long."""

    total: int
    largest: int
    """Nodes needed on one cluster."""
    min_component_size: int = 1
    """Clusters with fewer idle nodes are not usable."""
    slots: tuple[tuple[int, int], ...] = ()
    """Pairs (size, count): at least ``count`` components of that size or larger."""
    cluster_sizes: tuple[tuple[ClusterName, int], ...] = ()
    """Nodes needed on each named cluster."""
    home: ClusterName = ""
    """The cluster that may reclaim nodes for the job, which then needs all of its nodes there."""
    shares: bool = False
    """Whether nodes that are not idle may serve too."""
    duration: Duration = UNLIMITED


def needs_of(
    request: Request, home: ClusterName = "", *, shares: bool = False, duration: Duration = UNLIMITED
) -> Needs:
    """Return the needs of a request; ``home`` may reclaim nodes for it. ``shares``: partly used nodes serve too."""
    return replace(_needs_of(request), home=home, shares=shares, duration=duration)


def _needs_of(request: Request) -> Needs:
    """Return the idle nodes without which no policy can place a request."""
    if isinstance(request, FlexibleRequest):
        minimum, largest = request.min_component_size, request.min_component_size
        if request.split_options:
            minimum, largest = 1, min(max(option, default=1) for option in request.split_options)
        elif request.max_components is not None:
            largest = max(largest, -(-request.total_size // request.max_components))
        return Needs(request.total_size, largest, minimum)
    sizes = [component.size for component in request.components]
    if isinstance(request, FixedRequest):
        by_cluster: Counter[ClusterName] = Counter()
        for component in request.components:
            by_cluster[component.cluster or ""] += component.size
        return Needs(sum(sizes), max(sizes, default=0), cluster_sizes=tuple(by_cluster.items()))
    counted = ((size, sum(1 for larger in sizes if larger >= size)) for size in sorted(set(sizes), reverse=True))
    return Needs(sum(sizes), max(sizes, default=0), slots=tuple(slot for slot in counted if slot[1] > 1))


class IdleSummary:
    """The idle nodes of a view, with cached sums."""

    def __init__(self, view: GridView) -> None:
        self.view = view
        self._slots: dict[int, int] = {}
        self._roomy: dict[int, int] = {}

    def may_fit(self, needs: Needs) -> bool:
        """Return whether a request may fit, judged by its needs only."""
        by_idle = self.view.by_idle
        if needs.shares and any(cluster.parts for cluster in by_idle):
            return True
        if not by_idle or needs.total > self.view.usable_idle or needs.largest > by_idle[0].idle:
            return False
        if needs.min_component_size > 1 and not self._has_nodes(needs.total, needs.min_component_size):
            return False
        if needs.cluster_sizes and not all(self._has_idle(name, size) for name, size in needs.cluster_sizes):
            return False
        return all(self._has_slots(count, size) for size, count in needs.slots)

    def may_take_back(self, needs: Needs) -> bool:
        """Return whether a request may fit on its home site, if this view shows the nodes that sites may reclaim."""
        return bool(needs.home) and self._has_idle(needs.home, needs.total)

    def _has_idle(self, name: ClusterName, size: int) -> bool:
        cluster = self.view.get(name)
        return cluster is not None and cluster.usable_idle >= size

    def _has_slots(self, required: int, size: int) -> bool:
        """Return whether ``required`` components of a size fit. Usually the first few clusters suffice."""
        slots = self._slots.get(size)
        if slots is None:
            slots = 0
            for cluster in self.view.by_idle:
                if cluster.idle < size:
                    break
                slots += cluster.idle // size
                if slots >= required:
                    return True
            self._slots[size] = slots
        return required <= slots

    def _has_nodes(self, required: int, minimum: int) -> bool:
        """Return whether clusters with at least ``minimum`` idle nodes have ``required`` nodes in total."""
        nodes = self._roomy.get(minimum)
        if nodes is None:
            nodes = 0
            for cluster in self.view.by_idle:
                if cluster.idle < minimum:
                    break
                nodes += cluster.idle
                if nodes >= required:
                    return True
            self._roomy[minimum] = nodes
        return required <= nodes


class Change(NamedTuple):
    """A change after which the jobs that wait for it may be placed."""

    kind: Literal["nodes", "home", "file", "limits"]
    """More nodes on a cluster, more nodes there for its own users, a new replica, or less use by a limited owner."""
    name: str = ""
    """The cluster or the file."""


NODES_ANYWHERE = Change("nodes")
"""Awaited by jobs that name no cluster."""
LIMITS = Change("limits")


@cache
def nodes_of(cluster: ClusterName) -> tuple[Change, Change]:
    """Return the changes of a cluster that gains available nodes."""
    return Change("nodes", cluster), NODES_ANYWHERE


@cache
def at_home(cluster: ClusterName) -> Change:
    """Return the change after which jobs with this home site may get more of its nodes."""
    return Change("home", cluster)


def awaited_by(spec: JobSpec, *, is_limited: bool, home: ClusterName = "") -> tuple[Change, ...]:
    """Return all changes after which such a job may be placed; ``home`` may reclaim nodes for it."""
    names = {c.cluster or "": None for c in spec.request.components} if isinstance(spec.request, FixedRequest) else {}
    nodes = [Change("nodes", name) for name in names] or [NODES_ANYWHERE]
    files = [Change("file", file.name) for file in spec.all_inputs]
    beside = [LIMITS] if is_limited else []
    return (*nodes, *dict.fromkeys(files), *beside, *([at_home(home)] if home else ()))


@dataclass(slots=True)
class Wakeup:
    """The jobs of one queue that are to be tried again."""

    all_jobs: bool = False
    changes: set[Change] = field(default_factory=set)
    jobs: set[JobId] = field(default_factory=set)
    """Jobs that returned to the queue."""

    def __bool__(self) -> bool:
        return self.all_jobs or bool(self.changes or self.jobs)

    def add(self, wakeup: "Wakeup") -> None:
        """Add the jobs of another wakeup."""
        self.all_jobs |= wakeup.all_jobs
        self.changes |= wakeup.changes
        self.jobs |= wakeup.jobs


Place = tuple[int, int, int, JobId]
"""The sort key of a job among those of its owner, or of all: section, nodes (if narrowest first), ``queue_seq``
(negative for a job moved to the front after its nodes were reclaimed), and the job."""
Key = tuple[int, Standing, Place]
"""The sort key of a job now: section, the standing of its owner (``FRONT`` without fair shares), and its place."""
Shape = tuple[object, ...]
"""All properties of a job on which a policy's answer depends."""
WAKE_ALL = Wakeup(all_jobs=True)
IdleTest = Callable[[], Callable[[Needs], bool]]
"""Returns a test, without a policy call, whether enough nodes may be idle for a job's needs."""
NeverFits = Callable[[JobId], bool]
"""Returns whether a job would not be placed on the empty grid."""


@dataclass(slots=True, eq=False)
class Group:
    """The waiting jobs of one shape, in order; never empty."""

    shape: Shape
    needs: Needs
    awaits: tuple[Change, ...]
    """The changes after which its jobs may be placed."""
    ask: LimitedDemand | None = None
    """The use that each job would add for its owner; None if the owner is not limited."""
    section: int = 0
    owner: str = ""
    """The owner of its jobs; empty without fair shares."""
    entries: "list[Entry]" = field(default_factory=list)
    refused_on: int = 0
    """The number of the grid on which its jobs were last found not to fit, for the plan."""
    checked_on: GridView | None = None
    """The empty grid for which ``never_fits`` was computed."""
    never_fits: bool = False
    """Whether its jobs do not fit on that grid."""

    def index(self, place: Place) -> int:
        """Return how many of its jobs are before a sort key."""
        if not self.entries or self.entries[-1].place < place:
            return len(self.entries)
        return bisect_left(self.entries, place, key=lambda entry: entry.place)


@dataclass(slots=True, eq=False)
class Entry:
    """A job in the queue."""

    place: Place
    group: Group
    waits_since: float = 0.0
    last_scan: int | None = None
    """The number of the scan that uses up its tries."""

    @property
    def job(self) -> JobId:
        return self.place[-1]


class PlacementQueue:
    """Waiting jobs by age, narrowest first or by fair share, grouped by shape. Jobs of one shape are rejected together.

    The queues of home sites are consecutive sections of it.
    """

    def __init__(
        self,
        order: QueueOrder = "fcfs",
        has_too_much: Callable[[LimitedDemand], bool] = lambda _: False,
        standing: Callable[[str], Standing] = lambda _: FRONT,
    ) -> None:
        """``has_too_much``: whether a demand exceeds its owner's limits now; such jobs do not block others.

        ``standing`` returns the sort key of an owner now, for the order ``fair-share``.
        """
        self._has_too_much, self._standing = has_too_much, standing
        self._by_owner = order == "fair-share"
        self._narrowest_first = order == "narrowest-first"
        self._entries: dict[JobId, Entry] = {}
        self._orders: defaultdict[str, SortedList[Place]] = defaultdict(SortedList)
        """The places of waiting jobs, by owner with fair shares."""
        self._groups: dict[Shape, Group] = {}
        self._awaiting: defaultdict[Change, set[Group]] = defaultdict(set)
        """The groups by the changes they wait for."""
        self._last_scans: dict[int, set[JobId]] = {}
        """Jobs by the number of the scan that uses up their tries."""
        self._arrived: set[JobId] | None = None
        """Jobs added since the scan in progress began; None without a scan."""
        self._refusals: Counter[RefusalKind] = Counter()
        """Groups that scans passed over because they cannot be placed, by reason."""
        self.empty_grid = GridView(())
        """The grid with all nodes idle, as last seen."""
        self.scans = 0
        """Periodic scans so far. Each is a failed try of every job that remains."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: JobId) -> bool:
        return job in self._entries

    def __iter__(self) -> Iterator[JobId]:
        """Yield jobs from head to tail. The queue must not change during the iteration."""
        return (key[-1][-1] for key in heapq.merge(*map(self._keys, self._orders)))

    def _keys(self, owner: str) -> Iterator[Key]:
        return (self._key_of(owner, place) for place in self._orders[owner])

    def _key_of(self, owner: str, place: Place) -> Key:
        return place[0], self._standing(owner) if self._by_owner and place[2] >= 0 else FRONT, place

    def _key(self, entry: "Entry") -> Key:
        return self._key_of(entry.group.owner, entry.place)

    # Adding and removing jobs

    def push(
        self,
        job: JobId,
        seq: int,
        shape: Shape,
        spec: JobSpec,
        ask: LimitedDemand | None = None,
        home: ClusterName = "",
        section: int = 0,
        waits_since: float = 0.0,
        duration: Duration = UNLIMITED,
    ) -> None:
        """Add a job to its section, ordered by ``seq``; ``ask``, ``home``, which may reclaim nodes, and ``duration``
        belong to its shape."""
        group = self._groups.get(shape)
        if group is None:
            awaits = awaited_by(spec, is_limited=ask is not None, home=home)
            needs = needs_of(spec.request, home, shares=spec.share, duration=duration)
            if spec.reservation:  # it needs no idle nodes
                needs = Needs(0, 0, duration=duration)
            owner = spec.owner if self._by_owner else ""
            group = self._groups[shape] = Group(shape, needs, awaits, ask, section, owner)
            for change in awaits:
                self._awaiting[change].add(group)
        if self._arrived is not None:
            self._arrived.add(job)
        place = self.place_of(section, group.needs.total, seq, job)
        entry = self._entries[job] = Entry(place, group, waits_since)
        self._orders[group.owner].add(place)
        group.entries.insert(group.index(place), entry)

    def remove(self, job: JobId) -> None:
        """Remove a job if it is in the queue."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return
        self._forget_limit(entry)
        group, order = entry.group, self._orders[entry.group.owner]
        order.remove(entry.place)
        if not order:
            del self._orders[group.owner]
        del group.entries[group.index(entry.place)]
        if not group.entries:
            del self._groups[group.shape]
            for change in group.awaits:
                self._awaiting[change].remove(group)
                if not self._awaiting[change]:
                    del self._awaiting[change]

    def renew(self, job: JobId, waits_since: float) -> None:
        """Replace a job's entry by an equal one without tries, so that a scan in progress tries the job again."""
        entry = self._entries[job]
        self._forget_limit(entry)
        group = entry.group
        index = group.index(entry.place)
        self._entries[job] = group.entries[index] = Entry(entry.place, group, waits_since)

    # Tries

    def set_tries(self, job: JobId, tries: int, limit: int | None) -> None:
        """Set the number of a job's tries, and the maximum before it is given up; None is unlimited."""
        entry = self._entries[job]
        self._forget_limit(entry)
        if limit is not None:
            entry.last_scan = self.scans + max(1, limit - tries)
            self._last_scans.setdefault(entry.last_scan, set()).add(job)

    def _forget_limit(self, entry: Entry) -> None:
        """Stop counting scans towards the limit of a job's placement tries."""
        if entry.last_scan is not None and (jobs := self._last_scans.get(entry.last_scan)) is not None:
            jobs.discard(entry.job)
            if not jobs:
                del self._last_scans[entry.last_scan]
        entry.last_scan = None

    def count_scan(self) -> list[JobId]:
        """Count a failed try of all jobs here, and return those that have used up their tries, in order."""
        self.scans += 1
        jobs = self._last_scans.pop(self.scans, set())
        return sorted(jobs, key=self.key)

    def first_of_each_shape(self, may_fit: Callable[[Needs], bool]) -> list[Entry]:
        """Return the first job of each shape that may fit, those that have waited longest first, or by fair share,
        without owners at their limit."""
        groups = (group for group in self._groups.values() if may_fit(group.needs) and not self._is_barred(group))
        entries = [group.entries[0] for group in groups]
        return sorted(entries, key=lambda entry: (self._key(entry)[1], entry.waits_since, entry.place[2]))

    def entry_of(self, job: JobId) -> Entry:
        return self._entries[job]

    def is_barred(self, job: JobId) -> bool:
        """Return whether the limits of its owner keep a job from being placed."""
        return self._is_barred(self._entries[job].group)

    # Places

    def key(self, job: JobId) -> Key:
        """Return the sort key that a job has now."""
        return self._key(self._entries[job])

    def group_of(self, job: JobId) -> Group:
        """Return the group of jobs that are rejected together with a job."""
        return self._entries[job].group

    def place_of(self, section: int, nodes: int, seq: int = sys.maxsize, job: JobId = 0) -> Place:
        """Return the place that a job of so many nodes would have in a section; by default, that of a new job."""
        return (section, nodes if self._narrowest_first and seq >= 0 else 0, seq, job)

    def key_of(self, owner: str, section: int, nodes: int, seq: int = sys.maxsize, job: JobId = 0) -> Key:
        """Return the sort key that a job of so many nodes would have in a section; by default, of a new job."""
        return self._key_of(owner, self.place_of(section, nodes, seq, job))

    def count_before(self, key: Key) -> int:
        """Return how many other jobs of its section would be before a job with this sort key."""
        section, standing, place = key
        count = 0
        for owner, order in self._orders.items():
            _, other, _ = self._key_of(owner, place)
            # Jobs at the front are before those that follow the standings of their owners.
            end = place if other == standing else _begin(section + 1) if other < standing else (section, 0, 0, 0)
            count += int(order.bisect_left(end) - order.bisect_left(_begin(section)))
        present = self._entries.get(place[-1])
        return count - (present is not None and self._key(present) < key)

    def position(self, job: JobId) -> int:
        """Return how many jobs are before this one in its section."""
        return self.count_before(self.key(job))

    def head(self, section: int = 0) -> JobId | None:
        """Return the first job of a section that its owner's limits allow to be placed; None if there is none."""
        entry = self._head(section, set())
        return None if entry is None else entry.job

    def head_before(self, key: Key) -> JobId | None:
        """Return the head of other jobs if it would be before a job with this sort key; else None."""
        entry = self._head(key[0], {key[-1][-1]})
        return entry.job if entry is not None and self._key(entry) < key else None

    def heads(self) -> list[JobId]:
        """Return the heads of all sections, and jobs before them that can never be placed."""
        jobs: list[JobId] = []
        for section in self._sections():
            first = self._head(section, (), self._is_barred)
            head = self._head(section, ())
            jobs += dict.fromkeys(entry.job for entry in (first, head) if entry is not None)
        return jobs

    def first_jobs(self, section: int | None, mode: QueueMode) -> list[JobId]:
        """Return the first job of each shape of a section, or of all, in order; only the head if scans end there."""
        if mode != "scan":
            heads = [self.head(candidate) for candidate in ([section] if section is not None else self._sections())]
            return [head for head in heads if head is not None]
        groups = [
            group for group in self._groups.values() if section in (None, group.section) and not self._is_barred(group)
        ]
        return [entry.job for entry in sorted((group.entries[0] for group in groups), key=self._key)]

    def _sections(self) -> Iterator[int]:
        """Yield the sections that have jobs, in order. They may change during the iteration."""
        following: int | None = -1
        while following is not None:
            indices = [(order, order.bisect_left(_begin(following + 1))) for order in self._orders.values()]
            following = min((order[index][0] for order, index in indices if index < len(order)), default=None)
            if following is not None:
                yield following

    def _first_of(self, section: int) -> Entry | None:
        """Return the first entry of a section; None if it has none."""
        firsts = []
        for owner, order in self._orders.items():
            index = order.bisect_left(_begin(section))
            if index < len(order) and order[index][0] == section:
                firsts.append(self._key_of(owner, order[index]))
        return self._entries[min(firsts)[-1][-1]] if firsts else None

    def _head(
        self, section: int, arrived: Collection[JobId], is_passed_over: Callable[[Group], bool] | None = None
    ) -> Entry | None:
        """Return the first entry of a section that is not passed over and has not ``arrived`` during the scan."""
        is_passed_over = is_passed_over or (lambda group: self.is_known_unplaceable(group) or self._is_barred(group))
        first = self._first_of(section)
        if first is None or (first.job not in arrived and not is_passed_over(first.group)):
            return first
        groups = [group for group in self._groups.values() if group.section == section and not is_passed_over(group)]
        firsts = [entry for group in groups if (entry := _first(group, arrived)) is not None]
        return min(firsts, key=self._key, default=None)

    def is_known_unplaceable(self, group: Group) -> bool:
        """Return whether jobs of a group were found not to fit on the empty grid."""
        return group.never_fits and group.checked_on is self.empty_grid

    def check_placeable(self, job: JobId, never_fits: NeverFits) -> bool:
        """Compute whether a rejected job fits on the empty grid; return True if it never fits."""
        group = self._entries[job].group
        if group.checked_on is not self.empty_grid:
            group.checked_on, group.never_fits = self.empty_grid, never_fits(job)
        return group.never_fits

    def _is_barred(self, group: Group) -> bool:
        return group.ask is not None and self._has_too_much(group.ask)

    # Awaited changes

    @property
    def awaited(self) -> frozenset[ClusterName]:
        """Return the clusters that jobs here name, and the empty name if a job names none."""
        return frozenset(change.name for change in self._awaiting if change.kind == NODES_ANYWHERE.kind)

    def take_refusals(self) -> Counter[RefusalKind]:
        """Return the groups that scans passed over since the last call, by reason."""
        refusals, self._refusals = self._refusals, Counter()
        return refusals

    def woken_groups(self, wakeup: Wakeup) -> Collection[Group]:
        """Return the groups that are to be tried again."""
        if wakeup.all_jobs:
            return self._groups.values()
        groups = {self._entries[job].group for job in wakeup.jobs if job in self._entries}
        return groups.union(*(self._awaiting[change] for change in wakeup.changes & self._awaiting.keys()))

    # Scans

    def scan(
        self, mode: QueueMode, idle_test: IdleTest, wakeup: Wakeup = WAKE_ALL, never_fits: NeverFits = lambda _: False
    ) -> Iterator[JobId]:
        """Yield jobs from head to tail. A job that is still here when the next is requested was rejected.

        A group rejected once is rejected for the rest of the scan. In the modes ``head`` and ``fcfs`` the first
        rejection ends the scan of its section, unless the job can never be placed. Jobs that arrive during the
        scan are not yielded.
        """
        arrived = self._arrived = set()
        try:
            if mode == "scan":
                yield from self._scan_all(self.woken_groups(wakeup), idle_test, arrived)
            else:
                # If the first rejection ends a scan, jobs without a change must also be tried.
                for section in self._sections():
                    yield from self._scan_heads(section, idle_test, never_fits, arrived)
        finally:
            if self._arrived is arrived:
                self._arrived = None

    def _scan_all(self, groups: Collection[Group], idle_test: IdleTest, arrived: set[JobId]) -> Iterator[JobId]:
        """Yield one job after another in queue order, as far as enough nodes may be idle for them.

        A job still queued when the next is requested was rejected. The rest of its group is then skipped, as are jobs
        that ``arrived`` during the scan.
        """
        may_fit = idle_test()
        heap = [(self._key(group.entries[0]), group) for group in groups if may_fit(group.needs)]
        self._refusals[RefusalKind.NODES] += len(groups) - len(heap)
        heapq.heapify(heap)
        while heap:
            key, group = heapq.heappop(heap)
            entry = _first(group, arrived)
            if entry is not None and self._key(entry) <= key:
                if self._is_barred(group):
                    self._refusals[RefusalKind.LIMIT] += 1
                    continue
                if idle_test()(group.needs):
                    yield entry.job
                else:
                    self._refusals[RefusalKind.NODES] += 1
                tried, entry = entry, _first(group, arrived)
                if entry is tried:
                    continue
            if entry is not None:
                heapq.heappush(heap, (self._key(entry), group))

    def _scan_heads(
        self, section: int, idle_test: IdleTest, never_fits: NeverFits, arrived: set[JobId]
    ) -> Iterator[JobId]:
        """Yield the first jobs of a section until one is rejected that could ever be placed."""
        entry = self._head(section, arrived)
        if entry is None or self._first_of(section) is not entry:  # limits of owners bar those before it
            barred = (g for g in self._groups.values() if g.section == section and self._is_barred(g))
            self._refusals[RefusalKind.LIMIT] += sum(
                entry is None or self._key(group.entries[0]) < self._key(entry) for group in barred
            )
        while entry is not None:
            if idle_test()(entry.group.needs):
                yield entry.job
            else:
                self._refusals[RefusalKind.NODES] += 1
            if self._entries.get(entry.job) is entry and not self.check_placeable(entry.job, never_fits):
                return
            entry = self._head(section, arrived)


def _begin(section: int) -> Place:
    """Return a sort key before all of a section."""
    return (section, -1, 0, 0)


def _first(group: Group, arrived: Collection[JobId]) -> Entry | None:
    """Return the first entry of a group that did not arrive during the scan; None if there is none."""
    if not arrived:
        return group.entries[0] if group.entries else None
    return next((entry for entry in group.entries if entry.job not in arrived), None)
