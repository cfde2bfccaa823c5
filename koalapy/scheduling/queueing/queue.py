"""A placement queue whose scan costs distinct request shapes, not jobs (semantics 4)."""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from koalapy.model.job import JobId
from koalapy.model.request import ClusterName, Request
from koalapy.scheduling.owner_use import Ask
from koalapy.scheduling.queueing.feasibility import Needs, needs_of
from koalapy.scheduling.rules import QueueMode, QueueOrder

Key = tuple[int, int]
Shape = tuple[object, ...]
"""What a policy's answer to a job depends on, beside the grid."""
ANY_CLUSTER: ClusterName = ""
"""Stands for them all where a request names none."""


@dataclass(slots=True, eq=False)
class Group:
    """The waiting jobs of one shape, in order; there is no group without jobs."""

    shape: Shape
    needs: Needs
    number: int
    ask: Ask | None = None
    """What each of its jobs would add to its owner's use; None where that is not limited."""
    entries: "list[Entry]" = field(default_factory=list)
    refused_on: int = 0
    """The number of the grid on which its jobs were refused last when nodes were to be kept for one of them."""

    @property
    def clusters(self) -> tuple[ClusterName, ...]:
        """Where its jobs may be placed, as far as their request says."""
        return tuple(name for name, _ in self.needs.wanted) or (ANY_CLUSTER,)


@dataclass(slots=True, eq=False)
class Entry:
    """A job's place in the queue."""

    key: Key
    job: JobId
    group: Group
    tried_since: int = 0
    """The number of the scan that would have been the last before its first try, had all its tries been scans."""
    last_scan: int | None = None
    """The number of the scan with which its tries are used up."""


class PlacementQueue:
    """Jobs in the order of ``seq`` (or narrowest first), grouped by shape: jobs of one shape are refused alike.

    It keeps nothing of jobs that have left it.
    """

    def __init__(self, order: QueueOrder = "fcfs", has_too_much: Callable[[Ask], bool] = lambda _: False) -> None:
        """``has_too_much``: whether an owner may not have what a job asks for just now; it is in nobody's way then."""
        self._has_too_much = has_too_much
        self._narrowest_first = order == "narrowest-first"
        self._groups: dict[Shape, Group] = {}
        self._entries: dict[JobId, Entry] = {}
        self._last_scans: dict[int, set[JobId]] = {}
        """Jobs by the number of the scan with which their tries are used up."""
        self._groups_made = 0
        self._awaited: Counter[ClusterName] = Counter()
        """How many shapes name each cluster."""
        self._came: set[JobId] | None = None
        """Jobs that were put in since the scan began, while there is one."""
        self.barred = 0
        """How many shapes scans have passed over, for what the owners have already."""
        self.scans = 0
        """Periodic scans so far: each is a failed try of every job that is still there."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: JobId) -> bool:
        return job in self._entries

    def __iter__(self) -> Iterator[JobId]:
        """Jobs from head to tail."""
        return iter(sorted(self._entries, key=lambda job: self._entries[job].key))

    def push(self, job: JobId, seq: int, shape: Shape, request: Request, ask: Ask | None = None) -> None:
        """Put a job to the place that its ``seq`` gives it, the smaller the nearer to the head; ``ask`` is one of the
        shape."""
        group = self._groups.get(shape)
        if group is None:
            self._groups_made += 1
            group = self._groups[shape] = Group(shape, needs_of(request), self._groups_made, ask)
            self._awaited.update(group.clusters)
        if self._came is not None:
            self._came.add(job)
        key = (group.needs.total if self._narrowest_first else 0, seq)
        entry = self._entries[job] = Entry(key, job, group)
        if not group.entries or group.entries[-1].key < key:
            group.entries.append(entry)
        else:
            group.entries.insert(_place(group, key), entry)

    def tried(self, job: JobId, tries: int, limit: int | None) -> None:
        """Say how often a job was tried, and after how many scans it is given up, if at all."""
        entry = self._entries[job]
        entry.tried_since = self.scans - tries
        self._forget_limit(entry)
        if limit is not None:
            entry.last_scan = self.scans + max(1, limit - tries)
            self._last_scans.setdefault(entry.last_scan, set()).add(job)

    def _forget_limit(self, entry: Entry) -> None:
        if entry.last_scan is not None and (jobs := self._last_scans.get(entry.last_scan)) is not None:
            jobs.discard(entry.job)
            if not jobs:
                del self._last_scans[entry.last_scan]
        entry.last_scan = None

    def remove(self, job: JobId) -> None:
        """Take a job out, if it is there."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return
        self._forget_limit(entry)
        group = entry.group
        del group.entries[_place(group, entry.key)]
        if not group.entries:
            del self._groups[group.shape]
            self._awaited -= Counter(group.clusters)

    @property
    def awaited(self) -> frozenset[ClusterName]:
        """The clusters that jobs here name, and ``ANY_CLUSTER`` where one names none."""
        return frozenset(self._awaited)

    def count_scan(self) -> list[JobId]:
        """All that are here have failed once more; the answer is whose tries are used up, in order."""
        self.scans += 1
        jobs = self._last_scans.pop(self.scans, set())
        return sorted(jobs, key=lambda job: self._entries[job].key)

    def key(self, job: JobId) -> Key:
        """What jobs are ordered by."""
        return self._entries[job].key

    def position(self, job: JobId) -> int:
        """How many jobs stand before this one."""
        key = self._entries[job].key
        return sum(_place(group, key) for group in self._groups.values())

    def positions(self, jobs: Iterable[JobId]) -> dict[JobId, int]:
        """The places of those that are here, counted from 1: many cost little more than one."""
        wanted = [self._entries[job] for job in jobs if job in self._entries]
        keys = sorted(entry.key for entry in self._entries.values()) if wanted else []
        return {entry.job: bisect_left(keys, entry.key) + 1 for entry in wanted}

    def head(self) -> JobId | None:
        """The first job that may be placed as far as its owner's limits go."""
        groups = (group for group in self._groups.values() if not self._is_barred(group))
        first = min(groups, key=lambda group: group.entries[0].key, default=None)
        return first.entries[0].job if first else None

    def _is_barred(self, group: Group) -> bool:
        return group.ask is not None and self._has_too_much(group.ask)

    def in_order(self) -> Iterator[JobId]:
        """Jobs from head to tail, for those who look at the first few only."""
        groups = [group.entries for group in self._groups.values()]
        return (entry.job for entry in heapq.merge(*groups, key=lambda entry: entry.key))

    def oldest_of_each_shape(self, tries: int) -> list[Entry]:
        """The job of each shape that has been here longest, if it was tried that often; the oldest first.

        None of an owner who may not have it just now: nodes that are kept for it would be of no use.
        """
        latest = self.scans - tries
        first = [group.entries[0] for group in self._groups.values() if group.entries[0].tried_since <= latest]
        return sorted((entry for entry in first if not self._is_barred(entry.group)), key=lambda entry: entry.key[1])

    def scan(self, place: Callable[[JobId], bool], mode: QueueMode, fits: Callable[[Needs], bool]) -> None:
        """Offer jobs from head to tail to ``place``, which takes those it can out of the queue, and says so.

        ``fits`` tells without asking anybody that nothing of a shape can be placed. A shape refused once is refused
        for the rest of the scan; in the modes ``head`` and ``fcfs`` the first refusal ends it. Who comes to the queue
        meanwhile, to whatever place, is not offered.
        """
        self._came = set()
        try:
            self._offer(place, mode, fits)
        finally:
            self._came = None

    def _offer(self, place: Callable[[JobId], bool], mode: QueueMode, fits: Callable[[Needs], bool]) -> None:
        groups = [group for group in self._groups.values() if mode != "scan" or fits(group.needs)]
        heap = [(group.entries[0].key, group.number, group) for group in groups]
        heapq.heapify(heap)
        while heap:
            key, _, group = heapq.heappop(heap)
            entry = self._first(group)
            if entry is not None and entry.key == key:
                if self._is_barred(group):
                    self.barred += 1
                    continue
                if not (fits(group.needs) and place(entry.job)):
                    if mode != "scan":
                        return
                    continue
                entry = self._first(group)
            if entry is not None:
                heapq.heappush(heap, (entry.key, group.number, group))

    def _first(self, group: Group) -> Entry | None:
        """The first job of a shape that was there when the scan began."""
        if not self._came:
            return group.entries[0] if group.entries else None
        return next((entry for entry in group.entries if entry.job not in self._came), None)


def _place(group: Group, key: Key) -> int:
    return bisect_left(group.entries, key, key=lambda entry: entry.key)
