"""What jobs of a priority are offered: the nodes that they may have now."""

from collections.abc import Callable
from functools import partial

from koalapy.model.cluster import GridView
from koalapy.model.job import Priority
from koalapy.scheduling.claiming.preemption import Preemption
from koalapy.scheduling.cluster_status import ClusterStatus
from koalapy.scheduling.grid import GridStatus
from koalapy.scheduling.queueing.feasibility import IdleSummary, Needs
from koalapy.scheduling.queueing.reservation import Reservation
from koalapy.scheduling.state import SchedulerState


class Offer:
    """The grid as it is offered to jobs; worked out when asked for, and again after something was taken."""

    def __init__(
        self, grid: GridStatus, view: Callable[[], GridView], preemptible: Callable[[ClusterStatus], int] | None
    ) -> None:
        """``preemptible`` says how many nodes of a cluster there are with preemption, where that is allowed."""
        self._grid, self._make_view, self._preemptible = grid, view, preemptible
        self.renew()

    def renew(self) -> None:
        """Something was taken."""
        self._view: GridView | None = None
        self._preempting: GridView | None = None
        self._idle: IdleSummary | None = None

    @property
    def view(self) -> GridView:
        if self._view is None:
            self._view = self._make_view()
        return self._view

    @property
    def with_preemption(self) -> GridView | None:
        """What it would be if low-priority jobs were preempted, where that is allowed."""
        if self._preempting is None and self._preemptible is not None:
            self._preempting = self._grid.view(self._preemptible)
        return self._preempting

    def may_fit(self, needs: Needs) -> bool:
        """Whether there may be nodes enough, so that it is worth to ask the policy."""
        if self._idle is None:
            count, clusters = self._preemptible, [cluster for cluster in self._grid.clusters() if cluster.is_open]
            self._idle = IdleSummary({c.name: c.available if count is None else max(0, count(c)) for c in clusters})
        return self._idle.may_fit(needs)


class Offers:
    """Makes the offer of each priority."""

    def __init__(self, state: SchedulerState, reservation: Reservation, preemption: Preemption) -> None:
        self._rules, self._grid, self._reservation, self._preemption = state.rules, state.grid, reservation, preemption

    def of(self, priority: Priority, *, everything: bool = False) -> Offer:
        """What jobs of a priority are offered; ``everything``: also the nodes that are kept for one of them."""
        view = self._grid.view if everything else partial(self._reservation.view, priority)
        preempts = priority is Priority.HIGH and self._rules.preemption == "placement"
        return Offer(self._grid, view, self._preemption.available if preempts else None)

    def view_with_preemption(self) -> GridView:
        """The grid as it would be if low-priority jobs made room for one of high priority."""
        return self._grid.view(self._preemption.available)
