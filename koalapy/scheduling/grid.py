"""What is known of all clusters, of the links between them, and of where files are."""

from collections.abc import Callable, Collection, Iterable, Mapping

from koalapy.model.cluster import ClusterPair, ClusterState, GridView, Link
from koalapy.model.request import ClusterName
from koalapy.scheduling.cluster_status import ClusterStatus
from koalapy.scheduling.replica_sites import ReplicaSites

Links = Mapping[ClusterPair, Link]


class GridStatus:
    """All clusters by name, and the links between them."""

    def __init__(self, clusters: Iterable[ClusterStatus], links: Links | None = None) -> None:
        self._clusters = {cluster.name: cluster for cluster in sorted(clusters, key=lambda b: b.name)}
        self._links = dict(links or {})
        self._replicas = ReplicaSites()
        self.files_gone = 0
        """How many files were said to be nowhere since such files were last forgotten."""
        self.capacity_gained = False
        """Whether a link or a replica became known that may open a way for a job."""

    def __getitem__(self, name: ClusterName) -> ClusterStatus:
        return self._clusters[name]

    def __contains__(self, name: object) -> bool:
        return name in self._clusters

    def clusters(self) -> list[ClusterStatus]:
        return list(self._clusters.values())

    @property
    def is_all_on_trial(self) -> bool:
        """Whether no cluster is trusted: then trials may have more than one component, lest wide jobs wait for ever."""
        return not any(cluster.state is ClusterState.USABLE for cluster in self._clusters.values())

    def take_capacity_gained(self) -> bool:
        """Whether there may be more room anywhere than when this was last asked."""
        grown = [cluster for cluster in self._clusters.values() if cluster.capacity_gained]
        for cluster in grown:
            cluster.capacity_gained = False
        learned, self.capacity_gained = self.capacity_gained, False
        return bool(grown) or learned

    def take_departures(self) -> bool:
        """Whether there may be more room soon than was expected when this was last asked."""
        departing = [cluster for cluster in self._clusters.values() if cluster.departs]
        for cluster in departing:
            cluster.departs = False
        return bool(departing)

    def view(self, idle: Callable[[ClusterStatus], int] | None = None) -> GridView:
        """The grid as policies see it; ``idle`` says how many nodes of a cluster count, by default the available."""
        if idle is None:
            clusters = tuple(cluster.view(cluster.available) for cluster in self._clusters.values())
        else:
            clusters = tuple(cluster.view(max(0, idle(cluster))) for cluster in self._clusters.values())
        cut_off = frozenset(cluster.name for cluster in self._clusters.values() if not cluster.moves_files)
        return GridView(clusters, self._links, replicas=self._replicas, cut_off=cut_off)

    # What is known beside the clusters; views of before keep what they were made of

    def link(self, one: ClusterName, other: ClusterName) -> Link:
        """What is known of the network from one cluster to another, or within one; the way back where that is all."""
        return self._links.get((one, other)) or self._links.get((other, one)) or Link()

    def set_link(self, one: ClusterName, other: ClusterName, link: Link) -> None:
        """Take in a measurement of one way; what it does not say stays as it was, but of an unreachable link nothing
        does, either way."""
        self.capacity_gained = True
        if link.unreachable:
            self._links = self._links | {(one, other): link, (other, one): link}
            return
        before, links = self.link(one, other), dict(self._links)
        latency = before.latency if link.latency is None else link.latency
        bandwidth = before.bandwidth if link.bandwidth is None else link.bandwidth
        links[one, other] = Link(latency, bandwidth)
        if (back := links.get((other, one))) is not None and back.unreachable:
            del links[other, one]
        self._links = links

    def set_replicas(self, sites: Mapping[str, tuple[ClusterName, ...]]) -> None:
        """Take in where logical files are from now on; nowhere is also an answer."""
        self._replicas = self._replicas.changed(sites)
        self.capacity_gained |= any(sites.values())
        self.files_gone += sum(not each for each in sites.values())

    def forget_files(self, wanted: Collection[str]) -> None:
        """Files that are nowhere, but those that somebody wants, who is to know that."""
        self.files_gone = 0
        self._replicas = self._replicas.without_gone(wanted)
