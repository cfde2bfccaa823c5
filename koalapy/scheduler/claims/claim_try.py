"""Find which components of a job can start in a claiming try, and on which nodes of their clusters."""

from collections import defaultdict
from dataclasses import replace

from koalapy.model.cluster import ClusterView, GridView, NodeClass
from koalapy.model.job import Component, Job
from koalapy.model.job_sizes import count_peak
from koalapy.model.node_assignment import NodeAssignment, count_admitted
from koalapy.model.node_requirement import ANY_NODE
from koalapy.model.request import ClusterName
from koalapy.scheduler.attempts.facts import filter_of, unclaimed
from koalapy.scheduler.claims.preemption import Preemption
from koalapy.scheduler.ledger import live
from koalapy.scheduler.state import SchedulerState


class ClaimTry:
    """The components of a job that can start now, and those that cannot start where they were placed."""

    def __init__(self, state: SchedulerState, preemption: Preemption | None, job: Job) -> None:
        """``preemption``: frees nodes for the job; None if it may not preempt."""
        self._grid, self.preemption = state.grid, preemption
        self._spec, self._state = job.spec, state
        self._taken: dict[ClusterName, int] = defaultdict(int)
        """Nodes of components by cluster; those in ``_assignments`` do not count."""
        self._assignments: dict[ClusterName, NodeAssignment] = {}
        """The idle nodes by cluster, if the components may not get any node of their clusters."""
        self._gang_size = len(live(job).gang)
        self.startable: list[Component] = []
        self.blocked: list[Component] = []
        self.preempting: list[Component] = []
        """The startable components that need preemption."""
        placed = unclaimed(job)
        self._closed = {c.cluster for c in placed if not (s := state.grid[c.cluster]).is_open or not s.nodes.reported}
        """Clusters that are closed when the try begins, or have not reported in this daemon run. A cluster on probation
        closes once a component of the try has started there."""
        self._filters = {
            c.rank: nodes
            for c in placed
            if (nodes := filter_of(self._spec, c)) is not ANY_NODE and not self._spec.reservation
        }
        """The nodes that components may get, if these are not all."""
        for component in sorted(placed, key=self._order):
            if component.cluster in self._closed:
                self.blocked.append(component)
            elif self._take_idle(component):
                self.startable.append(component)
            elif preemption is not None and self._may_preempt(component, preemption):
                self._taken[component.cluster] += component.size
                self.preempting.append(component)
                self.startable.append(component)
            else:
                self.blocked.append(component)

    def __str__(self) -> str:
        return f"{self._gang_size - len(self.blocked)} of {self._gang_size} components could start"

    @property
    def fraction(self) -> float:
        """Return the fraction of components that are started or can be."""
        return (self._gang_size - len(self.blocked)) / self._gang_size

    @property
    def is_refused(self) -> bool:
        """Return whether a usable cluster lacks nodes for a component."""
        return bool(self.refused)

    @property
    def refused(self) -> list[Component]:
        """Return the components for which a usable cluster lacks nodes."""
        return [component for component in self.blocked if component.cluster not in self._closed]

    def _order(self, component: Component) -> tuple[int, int, int]:
        """Return the sort key of a component: those that the fewest nodes serve come first, then the largest."""
        admitted = 0
        if self._filters:
            classes = self._grid[component.cluster].nodes.classes.reported
            admitted = count_admitted(classes, self._filters.get(component.rank, ANY_NODE))
        return admitted, -component.size, component.rank

    def free(self, cluster: ClusterName) -> int | None:
        """Return the nodes left for another component; None if there may be no other, as on a cluster on probation."""
        status = self._grid[cluster]
        if not status.is_open:
            return None
        if self._count_taken(cluster) and status.health.probation and not self._grid.has_no_trusted_cluster:
            return None
        return self._available(cluster) - self._count_taken(cluster)

    def _available(self, cluster: ClusterName) -> int:
        """Return the idle nodes of a cluster that the job may have."""
        if self._spec.reservation:
            if self._is_drained_soon(cluster):
                return 0
            return self._state.reservations.free_nodes(self._spec.reservation, cluster)
        nodes, now = self._grid[cluster].nodes, self._state.now
        reserved = 0
        if reservations := nodes.reservations:
            barring = (reservation for reservation in reservations if reservation.bars(self._spec.walltime, now))
            reserved = count_peak((reservation.begins, reservation.ends, reservation.idle) for reservation in barring)
        return max(0, nodes.available - reserved)

    def _count_taken(self, cluster: ClusterName) -> int:
        """Return the nodes of components that can start, without those that they share with other jobs."""
        assignment = self._assignments.get(cluster)
        if assignment is None:
            return self._taken[cluster]
        idle = sum(node_class.idle for node_class in assignment.remaining if not node_class.is_part)
        return self._taken[cluster] + self._available(cluster) - idle

    def _assignment(self, cluster: ClusterName) -> NodeAssignment:
        """Return the assignment of a cluster's idle nodes, by class, to the components."""
        if cluster not in self._assignments:
            view = self._grid[cluster].view(self._available(cluster))
            self._assignments[cluster] = NodeAssignment((*self._parts_of(cluster), *view.known_classes))
        return self._assignments[cluster]

    def _take_idle(self, component: Component) -> bool:
        """Take idle nodes for a component where it is placed; return False if there are too few."""
        name, size = component.cluster, component.size
        if self._taken[name] + size > self._available(name) and (self._taken[name] or not self._filters):
            return False
        if not self._filters:
            self._taken[name] += size
            return True
        return self._assignment(name).add(component.rank, self._filters.get(component.rank, ANY_NODE), size)

    def _may_preempt(self, component: Component, preemption: Preemption) -> bool:
        """Return whether preemption can free the nodes of a component: not if only some of the cluster serve."""
        status, nodes = self._grid[component.cluster], self._filters.get(component.rank, ANY_NODE)
        if self._is_drained_soon(component.cluster):
            return False
        if not status.nodes.classes.admits_all(nodes) or self._parts_of(component.cluster):
            return False
        return component.size + self._count_taken(component.cluster) <= preemption.available(status)

    def _parts_of(self, cluster: ClusterName) -> tuple[NodeClass, ...]:
        """Return the partly used nodes that the job may share on a cluster."""
        return self._grid[cluster].nodes.parts if self._spec.share and not self._is_drained_soon(cluster) else ()

    def _is_drained_soon(self, cluster: ClusterName) -> bool:
        """Return whether a planned drain would begin before the job ends."""
        drains = self._grid[cluster].nodes.drain_reservations
        return any(drain.bars(self._spec.walltime, self._state.now) for drain in drains)

    @property
    def view(self) -> GridView:
        """Return the grid with the nodes left for another component."""
        view = self._grid.view()
        names = {name for name, nodes in self._taken.items() if nodes} | self._assignments.keys()
        changed = [cluster for name in sorted(names) if (cluster := view.get(name)) is not None]
        return view.with_clusters([self._remaining_of(cluster) for cluster in changed])

    def _remaining_of(self, cluster: ClusterView) -> ClusterView:
        """Return a cluster with the nodes left for another component."""
        parts = self._parts_of(cluster.name)
        if (assignment := self._assignments.get(cluster.name)) is not None:
            remaining = assignment.remaining
            parts = tuple(entry for entry in remaining if entry.is_part)
            if cluster.node_classes:
                cluster = replace(cluster, node_classes=tuple(entry for entry in remaining if not entry.is_part))
        return replace(cluster, parts=parts).with_idle(max(0, self.free(cluster.name) or 0))

    def move(self, moved: Component, left_behind: ClusterName) -> None:
        """Move a component that can start on another cluster."""
        if any(component.rank == moved.rank for component in self.preempting):
            self._taken[left_behind] -= moved.size  # others do not preempt for it
        for components in (self.startable, self.preempting, self.blocked):
            components[:] = [component for component in components if component.rank != moved.rank]
        if moved.rank in self._filters:
            self._filters[moved.rank] = filter_of(self._spec, moved)
        (self.startable if self._take_idle(moved) else self.blocked).append(moved)

    def withdraw_preemption(self) -> None:
        """Let no other job end for this one: count the components that need it as blocked."""
        self.blocked += self.preempting
        withdrawn, self.preempting = self.preempting, []
        self.startable = [component for component in self.startable if component not in withdrawn]

    def preempted_nodes(self) -> dict[ClusterName, int]:
        """Return the nodes needed on each cluster where some must be freed by preemption."""
        names = sorted({component.cluster for component in self.preempting})
        return {name: sum(c.size for c in self.startable if c.cluster == name) for name in names}

    def class_of(self, component: Component) -> str:
        """Return the class of nodes that a component requests; empty: any that meets its requirement.

        A component that could take the nodes of another one of the job keeps to its own class.
        """
        assignment = self._assignments.get(component.cluster)
        if component.node_class or assignment is None or component in self.preempting:
            return component.node_class
        return assignment.exclusive_class(component.rank)
