"""A placement queue whose scan costs distinct request shapes, not jobs (semantics 4)."""

import heapq
from collections import deque
from collections.abc import Callable, Hashable, Iterator

from koalapy.model.job import JobId
from koalapy.scheduling.rules import QueueMode, QueueOrder

Key = tuple[int, int]


class PlacementQueue:
    """Jobs in order of arrival (or narrowest first), grouped by shape: jobs of one shape are refused alike."""

    def __init__(self, order: QueueOrder = "fcfs") -> None:
        self._narrowest_first = order == "narrowest-first"
        self._shapes: dict[Hashable, deque[tuple[Key, JobId]]] = {}
        self._entries: dict[JobId, tuple[Key, Hashable]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job: JobId) -> bool:
        return job in self._entries

    def __iter__(self) -> Iterator[JobId]:
        """Jobs from head to tail."""
        return iter(sorted(self._entries, key=lambda job: self._entries[job][0]))

    def push(self, job: JobId, seq: int, shape: Hashable, size: int) -> None:
        """Append a job; ``seq`` must be above that of every job pushed before."""
        key = (size if self._narrowest_first else 0, seq)
        self._entries[job] = (key, shape)
        self._shapes.setdefault(shape, deque()).append((key, job))

    def remove(self, job: JobId) -> None:
        self._entries.pop(job, None)

    def position(self, job: JobId) -> int:
        """How many jobs stand before this one."""
        key = self._entries[job][0]
        return sum(1 for other, _ in self._entries.values() if other < key)

    def scan(self, place: Callable[[JobId], bool], mode: QueueMode) -> None:
        """Offer jobs from head to tail to ``place``, which says whether it took them.

        A shape refused once is refused for the rest of the scan; in the modes ``head`` and ``fcfs`` the first
        refusal ends it.
        """
        heads = [(queue[0][0], shape) for shape in list(self._shapes) if (queue := self._live(shape))]
        order = {shape: index for index, (_, shape) in enumerate(heads)}
        heap = [(key, order[shape], shape) for key, shape in heads]
        heapq.heapify(heap)
        while heap:
            _, _, shape = heapq.heappop(heap)
            queue = self._live(shape)
            if queue is None:
                continue
            job = queue[0][1]
            if not place(job):
                if mode != "scan":
                    return
                continue
            self.remove(job)
            if (queue := self._live(shape)) is not None:
                heapq.heappush(heap, (queue[0][0], order[shape], shape))

    def _live(self, shape: Hashable) -> deque[tuple[Key, JobId]] | None:
        """The shape's queue without the jobs that left it at its head; None when nothing is left."""
        queue = self._shapes.get(shape)
        while queue and self._entries.get(queue[0][1]) != (queue[0][0], shape):
            queue.popleft()
        if not queue:
            self._shapes.pop(shape, None)
            return None
        return queue
