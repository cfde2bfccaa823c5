"""A placement queue whose scan costs distinct request shapes, not jobs (semantics 4)."""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from koalapy.model.job import JobId
from koalapy.model.request import ClusterName, Request
from koalapy.scheduling.needs import Needs, needs_of
from koalapy.scheduling.rules import QueueMode, QueueOrder

Key = tuple[int, int]
ANY_CLUSTER: ClusterName = ""
"""Stands for them all where a request names none."""


@dataclass(slots=True, eq=False)
class Group:
    """The waiting jobs of one shape, in order; those that left the queue meanwhile are dropped when they come first."""

    shape: Hashable
    needs: Needs
    number: int
    jobs: "deque[Entry]" = field(default_factory=deque)

    @property
    def clusters(self) -> tuple[ClusterName, ...]:
        """Where its jobs may be placed, as far as their request says."""
        return tuple(name for name, _ in self.needs.wanted) or (ANY_CLUSTER,)


@dataclass(slots=True, eq=False)
class Entry:
    """A job's place in the queue; it is gone when the queue knows another one for the job, or none."""

    key: Key
    job: JobId
    group: Group
    scans: int
    """How many scans there had been when the job came."""


class PlacementQueue:
    """Jobs in order of arrival (or narrowest first), grouped by shape: jobs of one shape are refused alike."""

    def __init__(self, order: QueueOrder = "fcfs") -> None:
        self._narrowest_first = order == "narrowest-first"
        self._groups: dict[Hashable, Group] = {}
        self._entries: dict[JobId, Entry] = {}
        self._numbers = 0
        self._last_seq = 0
        self._awaited: Counter[ClusterName] = Counter()
        self.scans = 0
        """Periodic scans so far: each is a failed try of every job that is still there."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: JobId) -> bool:
        return job in self._entries

    def __iter__(self) -> Iterator[JobId]:
        """Jobs from head to tail."""
        return iter(sorted(self._entries, key=lambda job: self._entries[job].key))

    def push(self, job: JobId, seq: int, shape: Hashable, request: Request) -> None:
        """Append a job; ``seq`` must be above that of every job pushed before."""
        group = self._groups.get(shape)
        if group is None:
            self._numbers += 1
            group = self._groups[shape] = Group(shape, needs_of(request), self._numbers)
        key = (group.needs.total if self._narrowest_first else 0, seq)
        entry = self._entries[job] = Entry(key, job, group, self.scans)
        self._last_seq = max(self._last_seq, seq)
        self._awaited.update(group.clusters)
        group.jobs.append(entry)

    def remove(self, job: JobId) -> int:
        """Take a job out; returns how many scans it went through."""
        entry = self._entries.pop(job, None)
        if entry is None:
            return 0
        for cluster in entry.group.clusters:
            self._awaited[cluster] -= 1
            if not self._awaited[cluster]:
                del self._awaited[cluster]
        return self.scans - entry.scans

    @property
    def awaited(self) -> frozenset[ClusterName]:
        """The clusters that jobs here name, and ``ANY_CLUSTER`` where one names none."""
        return frozenset(self._awaited)

    def scans_of(self, job: JobId) -> int:
        """How many scans passed a job over since it came."""
        return self.scans - self._entries[job].scans

    def position(self, job: JobId) -> int:
        """How many jobs stand before this one."""
        key = self._entries[job].key
        return sum(1 for other in self._entries.values() if other.key < key)

    def head(self) -> JobId | None:
        """The first job."""
        first = min(self._heads(), key=lambda entry: entry.key, default=None)
        return first.job if first else None

    def in_order(self) -> Iterator[JobId]:
        """Jobs from head to tail, for those who look at the first few only."""
        merged = heapq.merge(*(head.group.jobs for head in self._heads()), key=lambda entry: entry.key)
        return (entry.job for entry in merged if self._entries.get(entry.job) is entry)

    def _heads(self) -> list[Entry]:
        return [head for group in list(self._groups.values()) if (head := self._head(group))]

    def oldest(self) -> JobId | None:
        """The job that has been here longest."""
        first = min(self._heads(), key=lambda entry: entry.key[1], default=None)
        return first.job if first else None

    def scan(self, place: Callable[[JobId], bool], mode: QueueMode, fits: Callable[[Needs], bool]) -> None:
        """Offer jobs from head to tail to ``place``, which takes those it can out of the queue, and says so.

        ``fits`` tells without asking anybody that nothing of a shape can be placed. A shape refused once is refused
        for the rest of the scan; in the modes ``head`` and ``fcfs`` the first refusal ends it. Who comes to the queue
        meanwhile is not offered.
        """
        last = self._last_seq
        groups = [group for group in self._groups.values() if mode != "scan" or fits(group.needs)]
        heap = [(head.key, group.number, group) for group in groups if (head := self._head(group))]
        heapq.heapify(heap)
        while heap:
            key, _, group = heapq.heappop(heap)
            head = self._head(group)
            if head is None or key[1] > last:
                continue
            if head.key != key:
                heapq.heappush(heap, (head.key, group.number, group))
                continue
            if not (fits(group.needs) and place(head.job)):
                if mode != "scan":
                    return
                continue
            if (head := self._head(group)) is not None:
                heapq.heappush(heap, (head.key, group.number, group))

    def _head(self, group: Group) -> Entry | None:
        """A shape's first job, without those before it that left the queue."""
        jobs = group.jobs
        while jobs and self._entries.get(jobs[0].job) is not jobs[0]:
            jobs.popleft()
        if jobs:
            return jobs[0]
        if self._groups.get(group.shape) is group:
            del self._groups[group.shape]
        return None
