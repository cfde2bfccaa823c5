"""What jobs of a priority are offered: the nodes that they may have now."""

from collections.abc import Callable
from functools import partial

from koalapy.model.cluster import GridView
from koalapy.model.job import JobSpec, Priority
from koalapy.model.sharing import Sharing
from koalapy.scheduler.claims.preemption import Preemption
from koalapy.scheduler.claims.reclaiming import taken_back
from koalapy.scheduler.cluster_status import ClusterStatus
from koalapy.scheduler.queue.feasibility import IdleSummary, Needs
from koalapy.scheduler.queue.reservation import Reservation
from koalapy.scheduler.state import SchedulerState

See = Callable[[], GridView]


class Offer:
    """The grid as it is offered to jobs at the moment."""

    def __init__(self, see: See, see_with_preemption: See | None, see_taken_back: See, sharing: Sharing) -> None:
        self._see, self._see_with_preemption = see, see_with_preemption
        self._see_taken_back, self._sharing = see_taken_back, sharing
        self._idle = self._taken_back = IdleSummary(GridView(()))

    @property
    def view(self) -> GridView:
        return self._see()

    @property
    def with_preemption(self) -> GridView | None:
        """What it would be if low-priority jobs were preempted, where that is allowed."""
        return None if self._see_with_preemption is None else self._see_with_preemption()

    def at_home(self, spec: JobSpec) -> GridView | None:
        """A job's home site alone, as it would be if it took back its nodes, where it may."""
        home = self._sharing.takes_back(spec.home_site)
        return self._see_taken_back().only(frozenset({home})) if home else None

    def glance(self) -> Callable[[Needs], bool]:
        """Tells, as of now, whether there may be nodes enough, so that it is worth to ask the policy."""
        widest = (self._see_with_preemption or self._see)()
        if widest is not self._idle.view:
            self._idle = IdleSummary(widest)
        if not self._sharing.reclaims:
            return self._idle.may_fit
        taken_back = self._see_taken_back()
        if taken_back is not self._taken_back.view:
            self._taken_back = IdleSummary(taken_back)
        return self._may_fit_if_taken_back

    def _may_fit_if_taken_back(self, needs: Needs) -> bool:
        return self._idle.may_fit(needs) or self._taken_back.may_take_back(needs)


class Offers:
    """Makes the offer of each priority."""

    def __init__(self, state: SchedulerState, reservation: Reservation, preemption: Preemption) -> None:
        self._grid, self._reservation, self._sharing = state.grid, reservation, state.sharing
        self._preempts = state.rules.preemption == "placement"
        self._with_preemption = state.grid.lens(preemption.available)
        self._taken_back = {
            kept_too: state.grid.lens(partial(self._left_if_taken_back, kept_too)) for kept_too in (False, True)
        }

    def of(self, priority: Priority, *, everything: bool = False) -> Offer:
        """What jobs of a priority are offered; ``everything``: also the nodes that are kept for one of them."""
        see = self._reservation.own_view if everything else partial(self._reservation.view, priority)
        may_preempt = priority is Priority.HIGH and self._preempts
        # What is kept for who has aged is kept from jobs of low priority only.
        taken_back = self._taken_back[everything or priority is Priority.HIGH].view
        return Offer(see, self.view_with_preemption if may_preempt else None, taken_back, self._sharing)

    def _left_if_taken_back(self, kept_too: bool, cluster: ClusterStatus) -> int:
        """Nodes of a cluster that are there, about to be, or with jobs of other home sites; without those that are kept
        for others, ``kept_too`` with those for who has aged."""
        return taken_back(cluster) - (0 if kept_too else self._reservation.aged(cluster.name))

    def view_with_preemption(self) -> GridView:
        """The grid as it would be if low-priority jobs made room for one of high priority."""
        return self._with_preemption.view()
