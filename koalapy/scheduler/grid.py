"""What is known of all clusters, of the links between them, and of where files are."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from koalapy.model.cluster import ClusterPair, ClusterState, ClusterView, GridView, Link, Uplink
from koalapy.model.request import ClusterName
from koalapy.scheduler.clusters import ClusterStatus

Sites = tuple[ClusterName, ...]


class ReplicaSites(Mapping[str, Sites]):
    """The clusters that have each logical file; empty for one that is nowhere.

    Changes lie over what was known before, which is copied only when they are as many as its square root.
    """

    __slots__ = ("_before", "_lately")

    def __init__(self, before: Mapping[str, Sites] | None = None, lately: Mapping[str, Sites] | None = None) -> None:
        """Neither is changed by anybody from now on."""
        self._before = before or {}
        self._lately = lately or {}

    def __getitem__(self, name: str) -> Sites:
        sites = self._lately.get(name)
        return self._before[name] if sites is None else sites

    def __contains__(self, name: object) -> bool:
        return name in self._lately or name in self._before

    def __iter__(self) -> Iterator[str]:
        return chain(self._before, (name for name in self._lately if name not in self._before))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def changed(self, sites: Mapping[str, Sites]) -> "ReplicaSites":
        """The same with these files where they are now."""
        lately = {**self._lately, **sites}
        if len(lately) ** 2 <= len(self._before):
            return ReplicaSites(self._before, lately)
        return ReplicaSites({**self._before, **lately})

    def without_missing(self, wanted: Collection[str]) -> "ReplicaSites":
        """The same without files that are nowhere, but for those that somebody wants."""
        return ReplicaSites({name: sites for name, sites in self.items() if sites or name in wanted})


Links = Mapping[ClusterPair, Link]
IdleOf = Callable[[ClusterStatus], int]
"""How many nodes of a cluster count as idle for somebody; below 0 is none."""

MAX_TOUCHES = 1000
"""So many entries of clusters that were touched are kept: who looks more seldom looks at all clusters."""

NO_CLUSTER: ClusterName = ""
"""Is touched where something changes that is of no cluster."""


class GridStatus:
    """All clusters by name, and the links between them."""

    def __init__(self, clusters: Iterable[ClusterStatus], links: Links | None = None) -> None:
        self._clusters = {cluster.name: cluster for cluster in sorted(clusters, key=lambda b: b.name)}
        self._links = dict(links or {})
        self._replicas = ReplicaSites()
        self.missing_files = 0
        """How many files were said to be nowhere since such files were last forgotten."""
        self._link_learned = False
        """Whether a link became known that may open a way for a job."""
        self._files_learned: set[str] = set()
        """Files of which a replica became known."""
        self.version = 1
        """Another one with each change of what is known."""
        self._touches: list[ClusterName] = []
        """The clusters that were changed in the last moments before this one."""
        self._measured: Mapping[ClusterName, float] | None = None
        self._uplinks: Mapping[ClusterName, Uplink] | None = None
        """None: to be worked out again, as their capacities or what they carry may have changed."""
        for cluster in self._clusters.values():
            cluster.on_change, cluster.uplink.on_change = self.touch, self._forget_uplinks
        self._news_taken = 0
        self._available = self.cached_view(lambda cluster: cluster.available)

    def __getitem__(self, name: ClusterName) -> ClusterStatus:
        return self._clusters[name]

    def __contains__(self, name: object) -> bool:
        return name in self._clusters

    def clusters(self) -> list[ClusterStatus]:
        return list(self._clusters.values())

    @property
    def has_no_trusted_cluster(self) -> bool:
        """Whether no cluster is trusted: then trials may have more than one component, lest wide jobs wait for ever."""
        return not any(cluster.state is ClusterState.USABLE for cluster in self._clusters.values())

    # What has changed

    def touch(self, name: ClusterName) -> None:
        """Something of a cluster has changed, or of what those have who are there."""
        if len(self._touches) >= MAX_TOUCHES:
            self._touches.clear()
        self._touches.append(name)
        self.version += 1

    def changed_since(self, moment: int) -> Collection[ClusterStatus]:
        """The clusters that were touched since a moment; since 0 they all were."""
        ago = self.version - moment
        if ago > len(self._touches) or not moment:
            return self._clusters.values()
        names = dict.fromkeys(self._touches[len(self._touches) - ago :])
        return [self._clusters[name] for name in names if name != NO_CLUSTER]

    def take_capacity_changes(self) -> tuple[list[ClusterName], list[ClusterName]]:
        """Return the clusters with more room than when this was last called, and those that will have more soon."""
        gains: list[ClusterName] = []
        departures: list[ClusterName] = []
        for cluster in self.changed_since(self._news_taken):
            if cluster.capacity_gained:
                cluster.capacity_gained = False
                gains.append(cluster.name)
            if cluster.capacity_expected:
                cluster.capacity_expected = False
                departures.append(cluster.name)
        self._news_taken = self.version
        return gains, departures

    def take_link_learned(self) -> bool:
        """Whether there may be a way between clusters that was not known when this was last asked."""
        learned, self._link_learned = self._link_learned, False
        return learned

    def take_files_learned(self) -> set[str]:
        """The files of which there may be replicas that were not known when this was last asked."""
        learned = self._files_learned
        if learned:
            self._files_learned = set()
        return learned

    # How it is seen

    def view(self, idle_of: IdleOf | None = None) -> GridView:
        """Return the grid as policies see it; ``idle_of`` says how many nodes of a cluster count."""
        return self._available.view() if idle_of is None else self.cached_view(idle_of).view()

    def cached_view(self, idle_of: IdleOf) -> "CachedView":
        """Sees the grid with so many idle nodes of each cluster, which may change only where a cluster is touched."""
        return CachedView(self, idle_of)

    def with_current_links(self, view: GridView) -> GridView:
        """A view with the links, and where files are, as they are known now."""
        uplinks = self.uplinks
        if view.links is self._links and view.replicas is self._replicas and view.uplinks is uplinks:
            return view
        return GridView(view.clusters, self._links, (), self._replicas, view.cut_off, uplinks)

    # What is known beside the clusters; views of before keep what they were made of

    @property
    def uplinks(self) -> Mapping[ClusterName, Uplink]:
        """Return bandwidth and use of the uplinks of which either is known; the same object until one changes."""
        if self._uplinks is None:
            if self._measured is None:
                self._measured = _most_measured(self._links)
            uplinks = {}
            for cluster in self._clusters.values():
                capacity = cluster.uplink.bandwidth or self._measured.get(cluster.name)
                uplink = Uplink(capacity, cluster.uplink.consumed)
                if uplink != Uplink():
                    uplinks[cluster.name] = uplink
            self._uplinks = uplinks
        return self._uplinks

    def _forget_uplinks(self) -> None:
        self._uplinks = None

    def link(self, one: ClusterName, other: ClusterName) -> Link:
        """What is known of the network from one cluster to another, or within one; the way back where that is all."""
        return self._links.get((one, other)) or self._links.get((other, one)) or Link()

    def set_link(self, one: ClusterName, other: ClusterName, link: Link) -> None:
        """Apply a measurement of one way; what it does not say stays, but an unreachable link is so both ways."""
        self._link_learned = True
        self._measured = self._uplinks = None
        self.touch(NO_CLUSTER)
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
        self.touch(NO_CLUSTER)
        self._files_learned |= {name for name, where in sites.items() if where}
        self.missing_files += sum(not each for each in sites.values())

    def forget_files(self, wanted: Collection[str]) -> None:
        """Files that are nowhere, but those that somebody wants, who is to know that."""
        self.missing_files = 0
        self._replicas = self._replicas.without_missing(wanted)
        self.touch(NO_CLUSTER)


def _most_measured(links: Links) -> dict[ClusterName, float]:
    """The highest bandwidth between each cluster and another."""
    most: dict[ClusterName, float] = {}
    for pair, link in links.items():
        if pair[0] != pair[1] and link.bandwidth is not None:
            for name in pair:
                most[name] = max(most.get(name, 0.0), link.bandwidth)
    return most


class CachedView:
    """The grid as somebody sees it. Each view is made of the last one, with those clusters that were touched since."""

    def __init__(self, grid: GridStatus, idle_of: IdleOf) -> None:
        self._grid, self._idle_of = grid, idle_of
        self._view = GridView(())
        self._version = 0

    def view(self) -> GridView:
        """The same object as before while nothing has changed."""
        grid = self._grid
        if self._version != grid.version:
            touched, self._version = grid.changed_since(self._version), grid.version
            view = self._with(touched) if self._view.clusters else self._anew(touched)
            self._view = grid.with_current_links(view)
        return self._view

    def _anew(self, clusters: Collection[ClusterStatus]) -> GridView:
        cut_off = frozenset(cluster.name for cluster in clusters if not cluster.moves_files)
        return GridView(tuple(map(self._see, clusters)), cut_off=cut_off)

    def _with(self, touched: Collection[ClusterStatus]) -> GridView:
        last = self._view
        cut_off = last.cut_off
        for cluster in touched:
            if cluster.moves_files is (cluster.name in cut_off):
                cut_off = cut_off ^ {cluster.name}
        if cut_off != last.cut_off:
            last = replace(last, cut_off=cut_off)
        seen = map(self._see, touched)
        return last.with_clusters([cluster for cluster in seen if cluster != last.get(cluster.name)])

    def _see(self, cluster: ClusterStatus) -> ClusterView:
        return cluster.view(max(0, self._idle_of(cluster)))
