"""Clusters, the links between them, and the grid as a policy sees it."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TypeVar

from koalapy.model.errors import NotFoundError, ProblemCode, UsageError
from koalapy.model.request import ClusterName, InputFile, Request
from koalapy.model.wording import suggest_names

T = TypeVar("T")

MAX_LASTING = 256
"""So many results that do not depend on idle nodes are kept at most."""

ClusterPair = tuple[ClusterName, ClusterName]
"""Two clusters, or one and itself: in order of their names, unless it says from which to which."""


def pair_of(one: ClusterName, other: ClusterName) -> ClusterPair:
    """The pair in order of its names."""
    return (one, other) if one <= other else (other, one)


def check_cluster(name: ClusterName, known: Collection[ClusterName], field: str = "") -> None:
    """``NotFoundError`` for a cluster that there is not, with the nearest name.

    ``UsageError`` where the name is a ``field`` of what was sent.
    """
    if name in known:
        return
    hint = suggest_names(name, known)
    if not field:
        raise NotFoundError(
            f"there is no cluster {name}", field="cluster", value=name, hint=hint, code=ProblemCode.CLUSTER_NOT_FOUND
        )
    raise UsageError(f"{field} is {name}, and there is no such cluster", field=field, value=name, hint=hint)


class ClusterState(StrEnum):
    """Whether components may be placed on a cluster, and if not, why (semantics 6)."""

    USABLE = "usable"
    UNUSABLE = "unusable"
    UNREACHABLE = "unreachable"
    DRAINED = "drained"
    PROBATION = "probation"
    """It was unusable and is tried again, one component at a time; for operators: policies see one of the others."""


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator wants nothing more placed on a cluster; ``at`` in seconds since the epoch."""

    at: float
    by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeClass:
    """Nodes of a cluster that are alike, and idle now."""

    name: str
    idle: int
    power: float = 1.0
    """Effective power: what their processors can do, as far as nobody else uses them, relative to 1 (semantics 7)."""
    memory: int | None = None
    """Bytes of a node; None: not known, and never too small."""
    total: int = 0
    """How many of them there are, idle or not; fewer than ``idle``: not known."""


@dataclass(frozen=True, slots=True)
class Uplink:
    """The link from a cluster to all others, in bytes per second."""

    capacity: float | None = None
    """None: not known, and never saturated."""
    consumed: float = 0.0
    """By what runs."""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One cluster as a policy sees it: sizes in nodes, ``speed`` relative to 1."""

    name: ClusterName
    total: int
    idle: int
    state: ClusterState = ClusterState.USABLE
    speed: float = 1.0
    note: str = ""
    node_classes: tuple[NodeClass, ...] = ()
    """The idle nodes by what they are; empty: all alike, of the cluster's speed as their power, and of no
    known memory."""

    @property
    def usable_idle(self) -> int:
        """Nodes that may be promised now: none where the cluster is not usable."""
        return self.idle if self.state is ClusterState.USABLE else 0

    def with_idle(self, idle: int) -> "ClusterView":
        """The same cluster, if so many nodes were idle."""
        return replace(self, idle=idle, node_classes=resize_classes(self.node_classes, idle))


def resize_classes(classes: tuple[NodeClass, ...], idle: int) -> tuple[NodeClass, ...]:
    """The classes, if ``idle`` nodes were idle in all.

    Fewer: those are gone that resource managers give first to who asks for no class, which are those of the first
    classes. More: of which class they are is known only as far as all others have not so many nodes; the rest are of no
    named class, and as good as the worst.
    """
    more = idle - sum(each.idle for each in classes)
    if not classes or not more:
        return classes
    fitted = []
    if more < 0:
        for each in classes:
            gone = min(each.idle, -more)
            more += gone
            fitted.append(replace(each, idle=each.idle - gone) if gone else each)
        return tuple(fitted)
    totals = [max(each.total, each.idle) for each in classes]
    for each, total in zip(classes, totals, strict=True):
        fitted.append(replace(each, idle=min(total, max(each.idle, idle - sum(totals) + total))))
    if (rest := idle - sum(each.idle for each in fitted)) > 0:
        power = min(each.power for each in classes)
        known = [each.memory for each in classes if each.memory is not None]
        fitted.append(NodeClass("", rest, power, min(known, default=None)))
    return tuple(fitted)


@dataclass(frozen=True, slots=True)
class Link:
    """What is known of the network from one cluster to another (or within one): seconds and bytes per second."""

    latency: float | None = None
    bandwidth: float | None = None
    unreachable: bool = False
    """Whether their nodes were found not to reach each other: nothing else is known of it then."""


@dataclass(frozen=True)
class GridView:
    """All clusters at one moment, in order of name, and the measured links between them."""

    clusters: tuple[ClusterView, ...]
    links: Mapping[ClusterPair, Link] = field(default_factory=dict)
    waiting: tuple[Request, ...] = ()
    """The requests of other waiting jobs, in the order of their queue: only for policies that look ahead."""
    replicas: Mapping[str, tuple[ClusterName, ...]] = field(default_factory=dict)
    """The clusters that have a good replica of a logical file now; of others counts what was known at submission."""
    cut_off: frozenset[ClusterName] = frozenset()
    """The clusters to which and from which no inputs can be brought, whether they are in the view or not."""
    uplinks: Mapping[ClusterName, Uplink] = field(default_factory=dict)
    """Of the clusters of which any is known."""

    def __iter__(self) -> Iterator[ClusterView]:
        return iter(self.clusters)

    @cached_property
    def by_idle(self) -> tuple[ClusterView, ...]:
        """The usable clusters by decreasing idle nodes, ties by name; worked out once for all requests of a scan."""
        return tuple(sorted((c for c in self.clusters if c.state is ClusterState.USABLE), key=_fullest_last))

    @cached_property
    def by_speed(self) -> tuple[ClusterView, ...]:
        """The usable clusters by decreasing speed, ties by name."""
        return tuple(sorted(self.by_idle, key=_slowest_last))

    @cached_property
    def usable_idle(self) -> int:
        """All nodes that may be promised now."""
        return sum(cluster.idle for cluster in self.by_idle)

    @cached_property
    def _results(self) -> dict[Hashable, object]:
        return {}

    def compute_once(self, key: Hashable, work: "Callable[[GridView], T]") -> T:
        """What ``work`` makes of the grid, done once for all requests of a scan; nobody else uses the same key."""
        try:
            return self._results[key]  # type: ignore[return-value]
        except KeyError:
            result = self._results[key] = work(self)
            return result

    @cached_property
    def _lasting_results(self) -> dict[Hashable, object]:
        return {}

    def compute_lasting(self, key: Hashable, work: "Callable[[GridView], T]") -> T:
        """The same of what depends on no cluster's nodes, idle or not, but on their names, states and speeds, the links
        and the files: it outlasts this view, while none of these changes. Those asked for last are kept."""
        results = self._lasting_results
        result = results.pop(key, None)
        if result is None:
            result = work(self)
            if len(results) >= MAX_LASTING:
                del results[next(iter(results))]
        results[key] = result
        return result  # type: ignore[return-value]

    def restrict_to(self, names: frozenset[ClusterName]) -> "GridView":
        """The part of the grid that these clusters are; made once for all requests of a scan."""
        return self.compute_once(("only", names), lambda grid: grid._part(names))

    def _part(self, names: frozenset[ClusterName]) -> "GridView":
        part = replace(self, clusters=tuple(cluster for cluster in self.clusters if cluster.name in names))
        part.__dict__["_lasting_results"] = self.compute_lasting(("only", names), lambda _: dict[Hashable, object]())
        return part

    def with_clusters(self, clusters: Sequence[ClusterView]) -> "GridView":
        """The grid with these clusters in the place of those of their names.

        What was worked out of this one is carried over as far as it can be: the orders, in which only they are moved,
        and what lasts.
        """
        if not clusters:
            return self
        places, whole = self._places, list(self.clusters)
        moves, lasts, gained = [], True, 0
        for after in clusters:
            place = places[after.name]
            before, whole[place] = whole[place], after
            moves.append((before, after))
            lasts = lasts and after.state is before.state and after.speed == before.speed
            gained += after.usable_idle - before.usable_idle
        view = GridView(tuple(whole), self.links, self.waiting, self.replicas, self.cut_off, self.uplinks)
        known, carried = self.__dict__, view.__dict__
        carried["_places"] = places
        if lasts:
            carried["_lasting_results"] = self._lasting_results
        if "by_idle" in known:
            carried["by_idle"] = _reordered(self.by_idle, moves, _fullest_last)
        if "by_speed" in known:
            carried["by_speed"] = _reordered(self.by_speed, moves, _slowest_last)
        if "usable_idle" in known:
            carried["usable_idle"] = self.usable_idle + gained
        return view

    def with_waiting(self, waiting: tuple[Request, ...]) -> "GridView":
        """The grid with these requests of others who wait."""
        view = GridView(self.clusters, self.links, waiting, self.replicas, self.cut_off, self.uplinks)
        view.__dict__.update(by_idle=self.by_idle, by_speed=self.by_speed, usable_idle=self.usable_idle)
        view.__dict__.update(_places=self._places, _lasting_results=self._lasting_results)
        return view

    @cached_property
    def _places(self) -> dict[ClusterName, int]:
        return {cluster.name: place for place, cluster in enumerate(self.clusters)}

    def sites_of(self, file: InputFile) -> tuple[ClusterName, ...]:
        """The clusters that have a file (file sites)."""
        return self.replicas.get(file.name, file.sites)

    def get(self, name: ClusterName) -> ClusterView | None:
        place = self._places.get(name)
        return None if place is None else self.clusters[place]

    def link_between(self, one: ClusterName, other: ClusterName) -> Link:
        """The link from one cluster to another; the way back where only that was measured; empty when unmeasured."""
        return self.links.get((one, other)) or self.links.get((other, one)) or Link()


Moves = Sequence[tuple[ClusterView, ClusterView]]
"""What clusters were, and what they have become."""


def _fullest_last(cluster: ClusterView) -> tuple[float, ClusterName]:
    return -cluster.idle, cluster.name


def _slowest_last(cluster: ClusterView) -> tuple[float, ClusterName]:
    return -cluster.speed, cluster.name


def _reordered(
    order: tuple[ClusterView, ...], moves: Moves, key: Callable[[ClusterView], tuple[float, ClusterName]]
) -> tuple[ClusterView, ...]:
    """An order of the usable clusters once some have changed."""
    clusters = list(order)
    for before, after in moves:
        if before.state is ClusterState.USABLE:
            del clusters[bisect_left(clusters, key(before), key=key)]
        if after.state is ClusterState.USABLE:
            clusters.insert(bisect_left(clusters, key(after), key=key), after)
    return tuple(clusters)
