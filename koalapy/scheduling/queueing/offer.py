"""What jobs of a priority are offered: the nodes that they may have now."""

from collections.abc import Callable
from functools import partial

from koalapy.model.cluster import GridView
from koalapy.model.job import Priority
from koalapy.scheduling.claiming.preemption import Preemption
from koalapy.scheduling.queueing.feasibility import IdleSummary, Needs
from koalapy.scheduling.queueing.reservation import Reservation
from koalapy.scheduling.state import SchedulerState

See = Callable[[], GridView]


class Offer:
    """The grid as it is offered to jobs at the moment."""

    def __init__(self, see: See, see_with_preemption: See | None) -> None:
        self._see, self._see_with_preemption = see, see_with_preemption
        self._idle = IdleSummary(GridView(()))

    @property
    def view(self) -> GridView:
        return self._see()

    @property
    def with_preemption(self) -> GridView | None:
        """What it would be if low-priority jobs were preempted, where that is allowed."""
        return None if self._see_with_preemption is None else self._see_with_preemption()

    @property
    def may_fit(self) -> Callable[[Needs], bool]:
        """Tells, as of now, whether there may be nodes enough, so that it is worth to ask the policy."""
        widest = (self._see_with_preemption or self._see)()
        if widest is not self._idle.view:
            self._idle = IdleSummary(widest)
        return self._idle.may_fit


class Offers:
    """Makes the offer of each priority."""

    def __init__(self, state: SchedulerState, reservation: Reservation, preemption: Preemption) -> None:
        self._grid, self._reservation = state.grid, reservation
        self._preempts = state.rules.preemption == "placement"
        self._with_preemption = state.grid.lens(preemption.available)

    def of(self, priority: Priority, *, everything: bool = False) -> Offer:
        """What jobs of a priority are offered; ``everything``: also the nodes that are kept for one of them."""
        see = self._reservation.own_view if everything else partial(self._reservation.view, priority)
        may_preempt = priority is Priority.HIGH and self._preempts
        return Offer(see, self.view_with_preemption if may_preempt else None)

    def view_with_preemption(self) -> GridView:
        """The grid as it would be if low-priority jobs made room for one of high priority."""
        return self._with_preemption.view()
