"""The state of all clusters, the links between them, and the locations of files."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

from koalapy.model.cluster import (
    NO_RELAYS,
    ClusterPair,
    ClusterState,
    ClusterView,
    GridView,
    Link,
    Relays,
    Uplink,
    pair_of,
)
from koalapy.model.request import ClusterName
from koalapy.scheduler.clusters import ClusterStatus

Sites = tuple[ClusterName, ...]


class ReplicaSites(Mapping[str, Sites]):
    """An immutable map of each logical file to the clusters that have it; empty for a file without a replica.

    Changes are stored in a layer over the previous map. The map is copied only once the layer reaches its square root.
    """

    __slots__ = ("_before", "_lately")

    def __init__(self, base: Mapping[str, Sites] | None = None, changes: Mapping[str, Sites] | None = None) -> None:
        """Take both maps, which the caller must not change any more."""
        self._before = base or {}
        self._lately = changes or {}

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
        """Return a copy with the current clusters of these files."""
        lately = {**self._lately, **sites}
        if len(lately) ** 2 <= len(self._before):
            return ReplicaSites(self._before, lately)
        return ReplicaSites({**self._before, **lately})

    def without_missing(self, requested: Collection[str]) -> "ReplicaSites":
        """Return a copy without the files that have no replica, except those ``requested``."""
        return ReplicaSites({name: sites for name, sites in self.items() if sites or name in requested})


Links = Mapping[ClusterPair, Link]
IdleOf = Callable[[ClusterStatus], int]
"""Returns how many nodes of a cluster are offered as idle; a negative number means none."""
HidesParts = Callable[[ClusterStatus], bool]
"""Returns whether the partly used nodes of a cluster are not offered."""


def never_hide_parts(_: ClusterStatus) -> bool:
    return False


MAX_TOUCHES = 1000
"""Maximum number of stored changes of clusters. A reader that is farther behind rereads all clusters."""

NO_CLUSTER: ClusterName = ""
"""Touched for a change that belongs to no cluster."""


class GridStatus:
    """All clusters by name, and the links between them."""

    def __init__(
        self, clusters: Iterable[ClusterStatus], links: Links | None = None, relays: Relays = NO_RELAYS
    ) -> None:
        self._clusters = {cluster.name: cluster for cluster in sorted(clusters, key=lambda b: b.name)}
        self._known_links: Links = dict(links or {})
        """The links as measured or configured, whatever the state of the relays."""
        self._direct_links: dict[ClusterPair, Links] = {}
        """The former values of links that jobs have found to be relayed, by pair."""
        self._relays = relays
        self._reserved_streams = 0
        self._links = self._usable_links()
        self._replicas = ReplicaSites()
        self.missing_files = 0
        """Files reported to have no replica since such files were last removed."""
        self._link_learned = False
        """Whether a link was measured that may allow another placement."""
        self._files_learned: set[str] = set()
        """Files for which a replica became known."""
        self.version = 1
        """The number of changes of the grid so far."""
        self._touches: list[ClusterName] = []
        """The clusters of the latest changes, oldest first."""
        self._measured: Mapping[ClusterName, float] | None = None
        self._uplinks: Mapping[ClusterName, Uplink] | None = None
        """The cached uplinks; None after their capacity or use has changed."""
        for cluster in self._clusters.values():
            cluster.nodes.on_change = partial(self.touch, cluster.name)
            cluster.uplink.on_change = self._forget_uplinks
        self._news_taken = 0
        self._available = self.cached_view(lambda cluster: cluster.nodes.available)

    def __getitem__(self, name: ClusterName) -> ClusterStatus:
        return self._clusters[name]

    def __contains__(self, name: object) -> bool:
        return name in self._clusters

    def clusters(self) -> list[ClusterStatus]:
        return list(self._clusters.values())

    @property
    def has_no_trusted_cluster(self) -> bool:
        """Return whether no cluster is usable. Then a trial may have several components, so that wide jobs do not
        starve."""
        return not any(cluster.state is ClusterState.USABLE for cluster in self._clusters.values())

    # Changes

    def touch(self, name: ClusterName) -> None:
        """Record that a cluster, or the components on it, have changed."""
        if len(self._touches) >= MAX_TOUCHES:
            self._touches.clear()
        self._touches.append(name)
        self.version += 1

    def changed_since(self, moment: int) -> Collection[ClusterStatus]:
        """Return the clusters changed since a version; all clusters since version 0."""
        ago = self.version - moment
        if ago > len(self._touches) or not moment:
            return self._clusters.values()
        names = dict.fromkeys(self._touches[len(self._touches) - ago :])
        return [self._clusters[name] for name in names if name != NO_CLUSTER]

    def take_capacity_changes(self) -> tuple[list[ClusterName], list[ClusterName]]:
        """Return the clusters that gained capacity since the last call, and those that will gain some soon."""
        gains: list[ClusterName] = []
        departures: list[ClusterName] = []
        for cluster in self.changed_since(self._news_taken):
            if cluster.nodes.capacity_gained:
                cluster.nodes.capacity_gained = False
                gains.append(cluster.name)
            if cluster.nodes.capacity_expected:
                cluster.nodes.capacity_expected = False
                departures.append(cluster.name)
        self._news_taken = self.version
        return gains, departures

    def take_link_learned(self) -> bool:
        """Return whether a link was measured since the last call."""
        learned, self._link_learned = self._link_learned, False
        return learned

    def take_files_learned(self) -> set[str]:
        """Return the files for which a replica became known since the last call."""
        learned = self._files_learned
        if learned:
            self._files_learned = set()
        return learned

    # Views

    def view(self, idle_of: IdleOf | None = None) -> GridView:
        """Return the grid as policies see it, with ``idle_of`` idle nodes per cluster; default: the available nodes."""
        return self._available.view() if idle_of is None else self.cached_view(idle_of).view()

    def cached_view(
        self,
        idle_of: IdleOf,
        *,
        streams: Callable[[], int] | None = None,
        by_preemption: bool = False,
        hides_parts: HidesParts = never_hide_parts,
    ) -> "CachedView":
        """Return a cached view with ``idle_of`` idle nodes per cluster, and ``streams`` over the hub; default: those
        that live attempts leave. Their numbers may change only when a cluster is touched. ``by_preemption``: whether
        jobs must be ended for some of these nodes."""
        return CachedView(
            self, idle_of, streams or (lambda: self.free_streams), by_preemption=by_preemption, hides_parts=hides_parts
        )

    def with_current_links(self, view: GridView, streams: int) -> GridView:
        """Return a view with the current links, uplinks and file locations, and with free ``streams``."""
        uplinks = self.uplinks
        if (
            view.links is self._links
            and view.replicas is self._replicas
            and view.uplinks is uplinks
            and view.relays is self._relays
            and view.free_streams == streams
        ):
            return view
        return GridView(view.clusters, self._links, (), self._replicas, view.cut_off, uplinks, self._relays, streams)

    # Links, uplinks and replicas; earlier views keep the values that they were made of

    @property
    def uplinks(self) -> Mapping[ClusterName, Uplink]:
        """Return bandwidth and use of the uplinks of which either is known, by cluster. Return the same object until
        one changes."""
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

    def link(self, source: ClusterName, target: ClusterName) -> Link:
        """Return the link from one cluster to another, or within one; that of the other direction if only that is
        known."""
        return _link_of(self._links, source, target)

    def set_link(self, source: ClusterName, target: ClusterName, link: Link) -> None:
        """Store the measurement of one direction of a link. Missing values stay as they were; an unreachable link is
        stored for both directions.

        Ignore values of a relayed link that do not show a path: transfers run between head nodes.
        """
        shows_path = link.unreachable or link.relayed or link.direct
        previous, links = _link_of(self._known_links, source, target), dict(self._known_links)
        if previous.relayed and not shows_path:
            return
        if shows_path:
            self._direct_links.pop(pair_of(source, target), None)
        if link.unreachable:
            links[source, target] = links[target, source] = link
        else:
            if link.relayed == previous.relayed:
                latency = previous.latency if link.latency is None else link.latency
                bandwidth = previous.bandwidth if link.bandwidth is None else link.bandwidth
                is_direct = link.direct or (previous.direct and not shows_path)
                link = Link(latency, bandwidth, relayed=link.relayed, direct=is_direct)
            links[source, target] = link
            back = links.get((target, source))
            if back is not None and (back.unreachable or back.relayed != link.relayed):
                del links[target, source]
        self._replace_links(links)

    def _replace_links(self, links: Links) -> None:
        self._known_links = links
        self._links = self._usable_links()
        self._link_learned = True
        self._measured = self._uplinks = None
        self.touch(NO_CLUSTER)

    # Relays

    @property
    def relays(self) -> Relays:
        return self._relays

    @property
    def free_streams(self) -> int:
        """Return the streams over the hub that live attempts leave."""
        return max(0, self._relays.streams - self._reserved_streams)

    @property
    def reserved_streams(self) -> int:
        return self._reserved_streams

    def reserve_streams(self, change: int) -> None:
        """Add to the streams that live attempts have reserved; a negative number releases some."""
        self._reserved_streams += change
        self._link_learned |= change < 0
        self.touch(NO_CLUSTER)

    def set_relay(self, cluster: ClusterName, *, is_ready: bool, relayed_only: bool) -> None:
        """Store whether the relay of a cluster can be used, and must be."""
        relays = replace(
            self._relays,
            ready=self._relays.ready | {cluster} if is_ready else self._relays.ready - {cluster},
            relayed_only=self._relays.relayed_only | {cluster}
            if relayed_only
            else self._relays.relayed_only - {cluster},
        )
        if relays == self._relays:
            return
        self._relays = relays
        self._links = self._usable_links()
        self._link_learned = True
        self._measured = self._uplinks = None
        self.touch(NO_CLUSTER)

    # Paths between clusters, as started jobs show them

    def known_link(self, pair: ClusterPair) -> Link:
        """Return the link between two clusters as measured or learned, whatever the state of the relays."""
        return _link_of(self._known_links, *pair)

    def learn_relayed(self, pair: ClusterPair) -> None:
        """Store that the nodes of two clusters do not reach each other directly."""
        link = self.known_link(pair)
        if not (link.relayed or link.unreachable):
            ways = (pair, pair[::-1])
            self._direct_links[pair] = {key: self._known_links[key] for key in ways if key in self._known_links}
            link = Link(relayed=True)
        self._set_both_ways(pair, {pair: replace(link, is_retried=False)})

    def learn_direct(self, pair: ClusterPair) -> None:
        """Store that the nodes of two clusters reach each other directly, with the values of this link if known."""
        link = self.known_link(pair)
        if link.direct:
            return
        if link.relayed or link.unreachable:
            links = self._direct_links.pop(pair, None) or {pair: Link()}
        else:
            links = {key: self._known_links.get(key, link) for key in (pair, pair[::-1])}
        self._set_both_ways(pair, {key: replace(link, direct=True) for key, link in links.items()})

    def doubt_path(self, pair: ClusterPair, *, is_retried: bool) -> None:
        """Store that a direct link may not work any more; ``is_retried``: or that it may work again."""
        ways = [key for key in (pair, pair[::-1]) if key in self._known_links]
        links = {key: replace(self._known_links[key], direct=False, is_retried=is_retried) for key in ways}
        self._set_both_ways(pair, links)

    def _set_both_ways(self, pair: ClusterPair, links: Links) -> None:
        """Replace both directions of a link by those given."""
        other_links = {key: link for key, link in self._known_links.items() if pair_of(*key) != pair}
        self._replace_links({**other_links, **links})

    def indirect_pairs(self) -> list[ClusterPair]:
        """Return the pairs of clusters whose nodes last did not reach each other directly."""
        pairs = {pair_of(*key) for key, link in self._known_links.items() if link.relayed or link.unreachable}
        return sorted(pair for pair in pairs if pair[0] != pair[1])

    def with_all_relays(self, view: GridView) -> GridView:
        """Return a view in which the relays of all clusters are ready and no streams are reserved.

        Links that were found to be relayed are tried directly again in it.
        """
        if not self._relays:
            return view
        relays = replace(self._relays, ready=frozenset(self._clusters))
        links = self._known_links
        if relays.streams:
            links = {key: replace(link, is_retried=link.relayed or link.unreachable) for key, link in links.items()}
        return replace(view, links=usable_links(links, relays), relays=relays, free_streams=relays.streams)

    def _usable_links(self) -> Links:
        return usable_links(self._known_links, self._relays)

    def set_replicas(self, sites: Mapping[str, tuple[ClusterName, ...]]) -> None:
        """Store the current clusters of logical files; an empty tuple means that a file has no replica."""
        self._replicas = self._replicas.changed(sites)
        self.touch(NO_CLUSTER)
        self._files_learned |= {name for name, clusters in sites.items() if clusters}
        self.missing_files += sum(not clusters for clusters in sites.values())

    def forget_files(self, requested: Collection[str]) -> None:
        """Forget which files have no replica, except those ``requested`` by jobs."""
        self.missing_files = 0
        self._replicas = self._replicas.without_missing(requested)
        self.touch(NO_CLUSTER)


def _link_of(links: Links, source: ClusterName, target: ClusterName) -> Link:
    return links.get((source, target)) or links.get((target, source)) or Link()


def usable_links(known_links: Links, relays: Relays) -> Links:
    """Return the links that policies see. A link that needs relays is relayed if these are ready, else unreachable."""
    needing = [
        pair
        for pair, link in known_links.items()
        if pair[0] != pair[1] and (link.unreachable or link.relayed or relays.must_relay(*pair))
    ]
    if not needing:
        return known_links
    links = dict(known_links)
    for pair in needing:
        is_retried = known_links[pair].is_retried and not relays.must_relay(*pair)
        if not relays.may_relay(*pair):
            links[pair] = Link(unreachable=not is_retried)
        elif known_links[pair].unreachable:
            links[pair] = Link(relayed=True, is_retried=is_retried)
        else:
            links[pair] = replace(known_links[pair], relayed=True)
    return links


def _most_measured(links: Links) -> dict[ClusterName, float]:
    """Return the highest measured bandwidth between each cluster and another."""
    highest: dict[ClusterName, float] = {}
    for pair, link in links.items():
        if pair[0] != pair[1] and link.bandwidth is not None:
            for name in pair:
                highest[name] = max(highest.get(name, 0.0), link.bandwidth)
    return highest


class CachedView:
    """A view of the grid that is updated only for the clusters touched since it was last read."""

    def __init__(
        self,
        grid: GridStatus,
        idle_of: IdleOf,
        streams: Callable[[], int],
        *,
        by_preemption: bool = False,
        hides_parts: HidesParts = never_hide_parts,
    ) -> None:
        self._grid, self._idle_of, self._streams, self._by_preemption = grid, idle_of, streams, by_preemption
        self._hides_parts = hides_parts
        self._view = GridView(())
        self._version = 0

    def view(self) -> GridView:
        """Return the current view; the same object while nothing has changed."""
        grid = self._grid
        if self._version != grid.version:
            touched, self._version = grid.changed_since(self._version), grid.version
            if self._view.clusters:
                view = self._update_view(touched)
            else:
                cut_off = frozenset(cluster.name for cluster in touched if not cluster.moves_files)
                view = GridView(tuple(map(self._see, touched)), cut_off=cut_off)
            self._view = grid.with_current_links(view, self._streams())
        return self._view

    def _update_view(self, touched: Collection[ClusterStatus]) -> GridView:
        """Return the last view with the touched clusters replaced, and with the clusters that cannot transfer files."""
        last = self._view
        cut_off = last.cut_off
        for cluster in touched:
            if cluster.moves_files is (cluster.name in cut_off):
                cut_off = cut_off ^ {cluster.name}
        if cut_off != last.cut_off:
            last = replace(last, cut_off=cut_off)
        views = map(self._see, touched)
        return last.with_clusters([cluster for cluster in views if cluster != last.get(cluster.name)])

    def _see(self, cluster: ClusterStatus) -> ClusterView:
        return cluster.view(
            max(0, self._idle_of(cluster)),
            by_preemption=self._by_preemption,
            hides_parts=cluster.last_report.shares and self._hides_parts(cluster),
        )
