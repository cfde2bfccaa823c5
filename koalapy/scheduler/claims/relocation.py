"""Another site for a component whose own has no room when it is claimed for (semantics 5, step 2 of a claiming try)."""

from koalapy.model.cluster import GridView
from koalapy.model.job import Component, Job, Priority
from koalapy.model.request import ClusterName, FixedRequest
from koalapy.model.transfer import Transfer
from koalapy.policies.close_to_files import closest_site
from koalapy.scheduler.ledger import live
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.reservation import Reservation
from koalapy.scheduler.state import SchedulerState


class Relocation:
    """Finds new pairs of execution site and file site by close-to-files, on clusters where the job may run."""

    def __init__(self, state: SchedulerState, eligibility: Eligibility, reservation: Reservation) -> None:
        self._state, self._eligibility, self._reservation = state, eligibility, reservation
        self._policies = state.policies
        self._assumed = state.rules.assumed_bandwidth

    def find(
        self, job: Job, component: Component, view: GridView, within: float
    ) -> tuple[ClusterName, Transfer] | None:
        """A site with enough idle nodes in the view, its transfer to take at most ``within`` seconds; None if none."""
        if isinstance(job.spec.request, FixedRequest) or self._policies.capabilities(job.spec.policy).keeps_together:
            return None
        view = self._offered(job, view)
        asked = job.spec.component(component.request_index)
        files = asked.inputs if asked else job.spec.inputs
        barred = job.barred_from(self._state.now)
        others = {other.cluster for other in live(job).gang if other.index != component.index}
        open_to_it = frozenset(
            cluster.name
            for cluster in view.by_idle
            if cluster.idle >= component.size
            and cluster.name != component.cluster
            and cluster.name not in barred
            and self._eligibility.allows(job.spec, frozenset({cluster.name, *others}), view)
        )
        if not open_to_it:
            return None
        return closest_site(component.size, files, view.only(open_to_it), within, self._assumed)

    def _offered(self, job: Job, view: GridView) -> GridView:
        """The view without the nodes that are kept from jobs of low priority, for such a one."""
        if job.spec.priority is Priority.HIGH:
            return view
        kept = {cluster: nodes for cluster in view.by_idle if (nodes := self._reservation.aged(cluster.name))}
        return view.changed([cluster.with_idle(max(0, cluster.idle - nodes)) for cluster, nodes in kept.items()])
