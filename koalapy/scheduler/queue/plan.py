"""The nodes of each cluster over time: those that running jobs release, and those planned for waiting jobs.

A job may use the nodes that are free from now until the end of its walltime. So it delays no planned start.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import inf

from koalapy.model.cluster import GridView
from koalapy.model.job_sizes import NodeReservation
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import ClusterName


class Plan:
    """Free nodes by cluster as step functions of time, from ``now`` on."""

    def __init__(self, now: float, view: GridView, releases: Iterable[tuple[float, Mapping[ClusterName, int]]]) -> None:
        self.now, self._view = now, view
        self._times = [now]
        self._free = {cluster.name: [cluster.idle] for cluster in view}
        for at, nodes in sorted(releases, key=lambda release: release[0]):
            if at < inf:
                index = self._cut(max(at, now))
                for name, count in nodes.items():
                    self._add(name, count, index, len(self._times))

    def _cut(self, at: float) -> int:
        """Begin a step at a time; return its index."""
        index = bisect_left(self._times, at)
        if index == len(self._times) or self._times[index] != at:
            self._times.insert(index, at)
            for steps in self._free.values():
                steps.insert(index, steps[index - 1])
        return index

    def _add(self, name: ClusterName, count: int, first: int, end: int) -> None:
        steps = self._free.get(name)
        for index in range(first, end) if steps is not None else ():
            steps[index] += count

    def view(self, start: float, lasts: float) -> GridView:
        """Return the grid with the nodes that are free from ``start`` for ``lasts`` seconds."""
        first, end = bisect_right(self._times, start) - 1, bisect_left(self._times, start + lasts)
        free = {name: max(0, min(steps[first : max(end, first + 1)])) for name, steps in self._free.items()}
        return self._view.with_clusters([c.with_idle(free[c.name]) for c in self._view if free[c.name] != c.idle])

    def take(self, start: float, lasts: float, nodes: Mapping[ClusterName, int]) -> None:
        first = self._cut(start)
        end = self._cut(start + lasts) if lasts < inf else len(self._times)
        for name, count in nodes.items():
            self._add(name, -count, first, end)

    def find_start(self, lasts: float, place: Callable[[GridView], Placement | Refusal]) -> tuple[float, Placement] | None:
        """Return the first time at which a job would be placed, and its placement; None if there is none."""
        times = self._times[1:]
        if len(times) > 64:
            times = times[:: len(times) // 64 + 1] + times[-1:]
        for start in times:
            if isinstance(placement := place(self.view(start, lasts)), Placement):
                return start, placement
        return None


    def withheld(self) -> dict[ClusterName, tuple[NodeReservation, ...]]:
        """Return the idle nodes of each cluster that jobs which run beyond a time must leave free."""
        found = {}
        for name, steps in self._free.items():
            entries, most = [], 0
            for at, free in zip(self._times[1:], steps[1:], strict=True):
                if (count := steps[0] - max(0, free)) > most:
                    entries.append(NodeReservation("plan", count - most, count - most, at))
                    most = count
            if entries:
                found[name] = tuple(entries)
        return found


def nodes_of(placement: Placement) -> Counter[ClusterName]:
    nodes = Counter[ClusterName]()
    for component in placement.components:
        nodes[component.cluster] += component.size
    return nodes
