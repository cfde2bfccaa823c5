"""What the jobs of one priority are offered in one scan."""

from typing import Protocol

from koalapy.model.cluster import GridView
from koalapy.model.job import Priority
from koalapy.model.request import ClusterName
from koalapy.scheduling.grid import ClusterStatus, GridStatus
from koalapy.scheduling.queueing.needs import Needs, Room
from koalapy.scheduling.rules import Rules


class Grids(Protocol):
    """Where the views come from; made anew each time."""

    rules: Rules
    grid: GridStatus

    def view(self, priority: Priority) -> GridView: ...

    def view_with_preemption(self) -> GridView: ...

    def room_with_preemption(self, cluster: ClusterStatus) -> int: ...


class Offers:
    """The grid as it is offered; worked out when asked for, and again after something was taken.

    ``everything``: also the nodes that are kept for the job that has waited longest, since it is for that job.
    """

    def __init__(self, grids: Grids, priority: Priority, *, everything: bool = False) -> None:
        self._grids = grids
        self._priority = priority
        self._everything = everything
        self._view: GridView | None = None
        self._preempting: GridView | None = None
        self._room: Room | None = None

    def renew(self) -> None:
        """Something was taken."""
        self._view = self._preempting = self._room = None

    @property
    def view(self) -> GridView:
        if self._view is None:
            self._view = self._grids.grid.view() if self._everything else self._grids.view(self._priority)
        return self._view

    @property
    def _may_preempt(self) -> bool:
        return self._priority is Priority.HIGH and self._grids.rules.preemption == "placement"

    @property
    def with_preemption(self) -> GridView | None:
        """What it would be if low-priority jobs were preempted, where that is allowed."""
        if not self._may_preempt:
            return None
        if self._preempting is None:
            self._preempting = self._grids.view_with_preemption()
        return self._preempting

    def may_fit(self, needs: Needs) -> bool:
        """Whether there may be nodes enough, so that it is worth to ask the policy."""
        if self._room is None:
            self._room = Room(self._idle())
        return self._room.may_fit(needs)

    def _idle(self) -> dict[ClusterName, int]:
        clusters, preemption = self._grids.grid.clusters(), self._may_preempt
        if preemption:
            return {
                cluster.name: max(0, self._grids.room_with_preemption(cluster))
                for cluster in clusters
                if cluster.is_open
            }
        return {cluster.name: cluster.available for cluster in clusters if cluster.is_open}
