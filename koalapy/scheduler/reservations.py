"""The advance reservations: their nodes are offered to the jobs that name them, and kept from others (ADR 38).

A component in a reservation takes none of the nodes that the cluster reports as idle.
"""

from dataclasses import replace

from koalapy.model.cluster import ClusterState, ClusterView, GridView, add_unclassified
from koalapy.model.job_sizes import NodeReservation
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ClusterName
from koalapy.model.reservation import Reservation, ReservationState
from koalapy.scheduler.grid import GridStatus


class Reservations:
    """The reservations that are in force, by name; no two have the same one at a time."""

    def __init__(self, grid: GridStatus) -> None:
        self._grid = grid
        self._by_name: dict[str, Reservation] = {}
        self._ends: dict[str, str] = {}
        """Why the last reservation of a name is no longer in force."""

    def all(self) -> tuple[Reservation, ...]:
        return tuple(self._by_name.values())

    def get(self, name: str) -> Reservation | None:
        return self._by_name.get(name)

    def why_ended(self, name: str) -> str:
        """Return why there is no reservation of a name any more."""
        return self._ends.get(name, "is not in force any more")

    def store(self, reservation: Reservation) -> None:
        """Add a reservation that was made, or remove one that is no longer in force. Leave others of its name alone."""
        is_made = reservation.state is ReservationState.MADE
        if self._by_name.get(reservation.name, reservation).id == reservation.id:
            if is_made:
                self._by_name[reservation.name] = reservation
            else:
                self._by_name.pop(reservation.name, None)
                if reservation.state not in (ReservationState.MAKING, ReservationState.FAILED):
                    self._ends[reservation.name] = reservation.reason
        for part in (part for part in reservation.parts if part.cluster in self._grid):
            nodes, name = self._grid[part.cluster].nodes, reservation.site_name
            nodes.kept_reservations.pop(name, None)
            if is_made:
                begins, ends = reservation.begins_at, reservation.ends_at
                nodes.kept_reservations[name] = NodeReservation(name, part.nodes, part.nodes, begins, ends)
            nodes.capacity_gained = True
            self._grid.touch(part.cluster)

    def site_name(self, spec: JobSpec) -> str:
        """Return the name of a job's reservation for resource managers; empty without one."""
        reservation = self._by_name.get(spec.reservation) if spec.reservation else None
        return spec.reservation if reservation is None else reservation.site_name

    def free_nodes(self, name: str, cluster: ClusterName) -> int:
        """Return the nodes of a reservation on a cluster that no component has."""
        reservation = self._by_name.get(name)
        if reservation is None:
            return 0
        return max(0, reservation.nodes_on(cluster) - self._grid[cluster].nodes.count_reserved(reservation.site_name))

    def view(self, name: str, *, whole: bool = False) -> GridView | None:
        """Return the grid as offered to the jobs of a reservation; ``whole``: as if it had no jobs. None if it is not
        in force."""
        reservation = self._by_name.get(name)
        if reservation is None:
            return None
        parts = {part.cluster: part.nodes for part in reservation.parts if part.cluster in self._grid}
        view = self._grid.view().select_clusters(frozenset(parts))
        clusters = []
        for cluster in view:
            idle = parts[cluster.name] if whole else self.free_nodes(name, cluster.name)
            drains = () if whole else tuple(reservation for reservation in cluster.reservations if reservation.is_drain)
            offered = replace(_with_any_nodes(cluster, idle), reservations=drains)
            clusters.append(replace(offered, state=ClusterState.USABLE) if whole else offered)
        return view.with_clusters(clusters)


def _with_any_nodes(cluster: ClusterView, idle: int) -> ClusterView:
    """Return a cluster with idle nodes that may be of any of its classes, since the reserved ones are not known."""
    classes = tuple(replace(node_class, idle=0) for node_class in cluster.node_classes)
    if classes:
        classes = add_unclassified(classes, idle)
    return replace(cluster, idle=idle, node_classes=classes, parts=(), reservations=())
