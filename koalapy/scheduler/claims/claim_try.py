"""What one claiming try has to go by: which components could start now, on nodes of which clusters."""

from koalapy.model.cluster import GridView
from koalapy.model.job import Component, Job
from koalapy.model.request import ClusterName
from koalapy.scheduler.attempts.attempt_facts import unclaimed
from koalapy.scheduler.claims.preemption import Preemption
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import SchedulerState


class ClaimTry:
    """The components of a job that can start now, and those that cannot where they are."""

    def __init__(self, state: SchedulerState, preemption: Preemption | None, job: Job) -> None:
        """``preemption`` is None for a job for which nobody makes room."""
        self._grid, self._job = state.grid, job.id
        self.preemption = preemption
        self._taken: dict[ClusterName, int] = {}
        self._taken_of: dict[tuple[ClusterName, str], int] = {}
        """Those of which a class was asked for."""
        self._gang_size = len(live(job).gang)
        self.startable: list[Component] = []
        self.blocked: list[Component] = []
        self.preempting: list[Component] = []
        """Of those that can start: those that wait for others to be preempted."""
        self._closed = {c.cluster for c in unclaimed(job) if not state.grid[c.cluster].is_open}
        """As the try begins: one on probation takes nothing more once something of the try has started there."""
        for component in sorted(unclaimed(job), key=lambda c: (-c.size, c.rank)):
            free = self._free_for(component)
            if free is not None and component.size <= free:
                self._take(component)
            elif free is not None and preemption is not None and not component.node_class:
                cluster = state.grid[component.cluster]
                if component.size + self._taken.get(cluster.name, 0) <= preemption.available(cluster):
                    self.preempting.append(component)
                    self._take(component)
                else:
                    self.blocked.append(component)
            else:
                self.blocked.append(component)

    def __str__(self) -> str:
        return f"{self._gang_size - len(self.blocked)} of {self._gang_size} components could start"

    @property
    def fraction(self) -> float:
        """The components that are started or can be, of all."""
        return (self._gang_size - len(self.blocked)) / self._gang_size

    @property
    def is_refused(self) -> bool:
        """Whether a cluster has no room; of one that takes nothing at all just now, be it out of reach, drained or
        broken, nobody has taken nodes."""
        return any(component.cluster not in self._closed for component in self.blocked)

    def free(self, cluster: ClusterName) -> int | None:
        """Nodes that are left for another component; None where there may be none.

        On probation one component may be tried at a time, unless no cluster is trusted.
        """
        taken, probation = self._taken.get(cluster, 0), self._grid[cluster].health.probation
        if taken and probation and not self._grid.is_all_on_trial:
            return None
        return self._left(cluster)

    def _left(self, cluster: ClusterName) -> int | None:
        status = self._grid[cluster]
        if not status.is_open:
            return None
        return max(0, status.available - status.kept_from(self._job)) - self._taken.get(cluster, 0)

    def _free_for(self, component: Component) -> int | None:
        """The same for a component where it was placed, beside others of its job as one trial; it may want nodes of a
        class. Whom it could preempt for these nobody knows."""
        free, name = self._left(component.cluster), component.node_class
        if free is None or not name:
            return free
        taken = self._taken_of.get((component.cluster, name), 0)
        return min(free, self._grid[component.cluster].available_of(name) - taken)

    @property
    def view(self) -> GridView:
        """The grid as it is for another component."""
        view = self._grid.view()
        names = {name for name, nodes in self._taken.items() if nodes}
        names |= {cluster.name for cluster in self._grid.clusters() if cluster.kept_from(self._job)}
        taken = [cluster for name in sorted(names) if (cluster := view.get(name)) is not None]
        return view.changed([cluster.with_idle(max(0, self.free(cluster.name) or 0)) for cluster in taken])

    def move(self, moved: Component, left_behind: ClusterName) -> None:
        """A component that could not start on the cluster it has left, or only by preemption, can start elsewhere."""
        if _take_out(self.startable, moved.index):
            _take_out(self.preempting, moved.index)
            self._taken[left_behind] -= moved.size  # it was of no class: of those none preempts
        else:
            _take_out(self.blocked, moved.index)
        self._take(moved)

    def preempted_nodes(self) -> dict[ClusterName, int]:
        """The nodes that must be there, by cluster, where some of them are to come from others."""
        names = sorted({component.cluster for component in self.preempting})
        return {name: sum(c.size for c in self.startable if c.cluster == name) for name in names}

    def _take(self, component: Component) -> None:
        self._taken[component.cluster] = self._taken.get(component.cluster, 0) + component.size
        if component.node_class:
            key = component.cluster, component.node_class
            self._taken_of[key] = self._taken_of.get(key, 0) + component.size
        self.startable.append(component)


def _take_out(components: list[Component], index: int) -> bool:
    """Take a component out by its index; whether it was there."""
    at = next((at for at, component in enumerate(components) if component.index == index), None)
    if at is not None:
        del components[at]
    return at is not None
