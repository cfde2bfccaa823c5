"""Clusters, the links between them, and the grid as a policy sees it."""

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import inf
from typing import TypeVar

from koalapy.model.bounds import MAX_NODES
from koalapy.model.construction import fast_constructor
from koalapy.model.errors import NotFoundError, ProblemCode, UsageError, reject
from koalapy.model.job_sizes import NodeReservation, SizeRanges, accepts_size, select_partition
from koalapy.model.node_requirement import ANY_NODE, Gpus, NodeFilter, NodeRequirement, divide_memory
from koalapy.model.request import ClusterName, InputFile, Request
from koalapy.model.request import LinkUse as LinkUse
from koalapy.model.reservation import MAX_LATE_S, MAX_SPAN_S
from koalapy.model.wording import format_list, suggest_names

T = TypeVar("T")

MAX_LASTING = 256
"""Maximum number of cached results that do not depend on idle nodes."""

ClusterPair = tuple[ClusterName, ClusterName]
"""Two clusters, or a cluster and itself: sorted by name, or source and destination where stated."""


class LinkPath(StrEnum):
    """How the nodes of two clusters exchange the MPI messages of a job."""

    DIRECT = "direct"
    UNKNOWN = "any"
    """Direct if they reach each other, else over relays."""
    RELAYED = "relayed"
    NONE = "none"
    """Not at all."""


def pair_of(first: ClusterName, second: ClusterName) -> ClusterPair:
    """Return two cluster names as a pair sorted by name."""
    return (first, second) if first <= second else (second, first)


def relayed_text(pairs: Iterable[ClusterPair]) -> str:
    """Return a text such as ``MPI messages between north and south go over relays``."""
    return f"MPI messages between {format_list([f'{first} and {second}' for first, second in pairs])} go over relays"


def check_cluster(name: ClusterName, clusters: Collection[ClusterName], field: str = "") -> None:
    """Raise ``NotFoundError`` for an unknown cluster, with a hint to the most similar name.

    Raise ``UsageError`` instead if the name is the value of a ``field`` of the request.
    """
    if name in clusters:
        return
    hint = suggest_names(name, clusters)
    if not field:
        raise NotFoundError(
            f"there is no cluster {name}", field="cluster", value=name, hint=hint, code=ProblemCode.CLUSTER_NOT_FOUND
        )
    raise UsageError(f"{field} is {name}, and there is no such cluster", field=field, value=name, hint=hint)


class ClusterState(StrEnum):
    """Whether components may be placed on a cluster, and the reason if not (semantics 6)."""

    USABLE = "usable"
    UNUSABLE = "unusable"
    UNREACHABLE = "unreachable"
    DRAINED = "drained"
    PROBATION = "probation"
    """An unusable cluster is tried with one component at a time. Only operators see this state."""


@dataclass(frozen=True, slots=True)
class Drain:
    """An operator's order to place nothing more on a cluster; times in seconds since the epoch."""

    at: float
    """When the order was given."""
    by: str = ""
    reason: str = ""
    begins_at: float | None = None
    """None: at once."""
    ends_at: float | None = None
    """When the cluster is used again; None: when an operator resumes it."""
    requeue: bool = False
    """Whether jobs that are there at the begin are stopped and queued again."""

    @property
    def since(self) -> float:
        """Return when it begins."""
        return self.at if self.begins_at is None else self.begins_at

    @property
    def until(self) -> float:
        """Return when it ends; infinity if an operator ends it."""
        return inf if self.ends_at is None else self.ends_at

    @property
    def author(self) -> str:
        """Return who ordered it and why: ``by ada: new switches``."""
        author = f"by {self.by}" if self.by else "by an operator"
        return f"{author}: {self.reason}" if self.reason else author


def check_drain_times(begin: float | None, end: float | None, now: float) -> None:
    """Raise ``UsageError`` for impossible times of a drain, in seconds since the epoch."""
    if begin is not None and begin < now - MAX_LATE_S:
        reject("begin", begin, "has passed", "give a time to come, or leave it out to drain at once")
    if begin is not None and begin > now + MAX_SPAN_S:
        reject("begin", begin, "is more than 366 days ahead", "plan it later")
    if end is not None and end <= max(now, begin or now):
        reject("end", end, "is not after the begin of the drain", "give a later one")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStanding:
    """What the next daemon run must know of a cluster: whether it may be used, and why not."""

    name: ClusterName = field(kw_only=False)
    unusable: bool = False
    """Whether consecutive errors made it unusable, regardless of its state."""
    note: str = ""
    """Reason why it is unusable."""
    trials: int = 0
    """Number of failed probations since."""
    drained: Drain | None = None
    """The drain order in force."""
    planned_drains: tuple[Drain, ...] = ()
    """Drain orders that begin later."""


@dataclass(frozen=True, slots=True)
class NodeClass:
    """The idle nodes of a cluster that have the same properties."""

    name: str
    idle: int
    power: float = 1.0
    """Effective power: the unused processing power of a node relative to 1 (semantics 7)."""
    memory: int | None = None
    """Bytes of memory of each node; None: not known, and enough for any job."""
    total: int = 0
    """Number of nodes of the class, idle or not; a number below ``idle`` means not known."""
    cores: int | None = None
    """Cores of each node; None: not known, and enough for any job."""
    gpus: tuple[Gpus, ...] = ()
    """GPUs of each node by type."""
    features: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    """Partitions of Slurm, or queues of Grid Engine, that have these nodes."""

    @property
    def is_part(self) -> bool:
        """Return whether other jobs use these nodes too."""
        return False

    @property
    def memory_per_core(self) -> int | None:
        return divide_memory(self.memory, self.cores)


@dataclass(frozen=True, slots=True)
class NodeClassPart(NodeClass):
    """Nodes of a class of which other jobs use a part; ``memory``, ``cores`` and ``gpus`` are the unused part."""

    memory_per_core: int | None = None
    """Bytes of memory that belong to each core of the whole node; None: memory is not limited."""

    @property
    def is_part(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Uplink:
    """The link from a cluster to all other clusters, in bytes per second."""

    capacity: float | None = None
    """None: not known, and never saturated."""
    consumed: float = 0.0
    """Bandwidth used by running jobs."""


@fast_constructor
@dataclass(frozen=True, slots=True)
class ClusterView:
    """A cluster as policies see it: sizes in nodes, ``speed`` relative to 1."""

    name: ClusterName
    total: int
    idle: int
    state: ClusterState = ClusterState.USABLE
    speed: float = 1.0
    note: str = ""
    node_classes: tuple[NodeClass, ...] = ()
    """The idle nodes by class. Empty: all nodes have the speed of the cluster and unknown memory."""
    parts: tuple[NodeClass, ...] = ()
    """The partly used nodes that other jobs may share. They are not among the idle nodes."""
    selected_for: NodeRequirement | None = None
    """The requirement by which partly used nodes were counted as idle ones; None: none are."""
    job_sizes: SizeRanges = ()
    """The sizes that each component there may have; empty: any."""
    reservations: tuple[NodeReservation, ...] = ()
    """Present and coming reservations of its nodes."""

    def accepts(self, size: int) -> bool:
        """Return whether a component there may have this size, whatever is idle."""
        return accepts_size(self.job_sizes, size)

    def emptied(self) -> "ClusterView":
        """Return the cluster as it would be if usable and idle."""
        total = self.total or MAX_NODES
        classes = tuple(replace(entry, idle=max(entry.total, entry.idle)) for entry in self.node_classes)
        classes = resize_classes(classes, total)
        return ClusterView(self.name, total, total, speed=self.speed, node_classes=classes, job_sizes=self.job_sizes)

    @property
    def usable_idle(self) -> int:
        """Return the number of nodes that can be allocated now: 0 if the cluster is not usable."""
        return self.idle if self.state is ClusterState.USABLE else 0

    def with_idle(self, idle: int) -> "ClusterView":
        """Return the cluster with another number of idle nodes."""
        # Not by ``replace``, which takes four times as long; forecasts call this thousands of times.
        classes = resize_classes(self.node_classes, idle)
        parts, limits = self.parts, (self.selected_for, self.job_sizes, self.reservations)
        return ClusterView(self.name, self.total, idle, self.state, self.speed, self.note, classes, parts, *limits)

    def admits_all(self, requirement: NodeRequirement) -> bool:
        """Return whether all of its nodes meet a requirement."""
        return self.name not in requirement.exclude and all(map(requirement.is_met_by, self.known_classes))

    def select_nodes(self, requirement: NodeRequirement) -> "ClusterView | None":
        """Return the cluster with only the nodes that meet a requirement; None if it has none.

        For a job that shares nodes, partly used nodes with enough left count as idle nodes of their class. Raise
        ``ValueError`` if some were counted so for another requirement: their unused part is not known any more.
        """
        if self.selected_for is not None:
            if requirement == self.selected_for:
                return self
            raise ValueError(f"the nodes of {self.name} were selected for another requirement; select from all nodes")
        job_sizes = select_partition(self.job_sizes, requirement.partition)
        if job_sizes != self.job_sizes:
            return replace(self, job_sizes=job_sizes).select_nodes(requirement)
        parts: dict[str, int] = {}
        if self.parts and requirement.share:
            for part in filter(requirement.is_met_by, self.parts):
                parts[part.name] = parts.get(part.name, 0) + part.idle
        if not parts and self.admits_all(requirement):
            return self
        if self.name in requirement.exclude:
            return None
        classes = tuple(filter(requirement.is_met_by, self.known_classes))
        if not classes:
            return None
        total = min(self.total, sum(max(node_class.total, node_class.idle) for node_class in classes))
        if has_parts := bool(parts):
            classes = tuple(replace(entry, idle=entry.idle + parts.pop(entry.name, 0)) for entry in classes)
        idle = sum(node_class.idle for node_class in classes)
        return replace(
            self,
            total=total,
            idle=idle,
            node_classes=classes if self.node_classes else (),
            parts=(),
            selected_for=requirement if has_parts else None,
        )

    def without(self, requirement: NodeRequirement | None, size: int) -> "ClusterView":
        """Return the cluster without ``size`` idle nodes, which meet a requirement."""
        nodes = NodeFilter(requirement=requirement)
        parts = take_nodes(self.parts, nodes, size)
        size -= count_nodes(self.parts) - count_nodes(parts)
        classes = take_nodes(self.node_classes, nodes, size)
        idle = max(0, self.idle - size)
        return replace(self, idle=idle, node_classes=resize_classes(classes, idle), parts=parts)

    @property
    def known_classes(self) -> tuple[NodeClass, ...]:
        """Return its classes, or one of unknown properties for all nodes."""
        return self.node_classes or (NodeClass("", self.idle, self.speed, total=self.total),)


def take_nodes(classes: tuple[NodeClass, ...], nodes: NodeFilter, size: int) -> tuple[NodeClass, ...]:
    """Return the classes without ``size`` idle nodes that a filter admits, from the first of them.

    Resource managers give these first.
    """
    reduced = []
    for node_class in classes:
        removed = min(node_class.idle, size) if size > 0 and nodes.admits(node_class) else 0
        size -= removed
        reduced.append(replace(node_class, idle=node_class.idle - removed) if removed else node_class)
    return tuple(reduced)


def count_idle(classes: tuple[NodeClass, ...], nodes: NodeFilter = ANY_NODE) -> int:
    """Return the number of idle nodes that a filter admits."""
    return sum(node_class.idle for node_class in classes if nodes.admits(node_class))


def count_nodes(classes: Iterable[NodeClass]) -> int:
    """Return the number of nodes of these classes that are idle, or partly so."""
    return sum(node_class.idle for node_class in classes)


def resize_classes(classes: tuple[NodeClass, ...], idle: int) -> tuple[NodeClass, ...]:
    """Return the node classes with ``idle`` idle nodes in all.

    Removed nodes come from the first classes, since resource managers give these first to jobs that ask for no class.
    Added nodes belong to a class only if the other classes do not have that many nodes. The remaining added nodes form
    an unnamed class as weak as the weakest.
    """
    change = idle - sum(node_class.idle for node_class in classes)
    if not classes or not change:
        return classes
    resized = []
    if change < 0:
        for node_class in classes:
            removed = min(node_class.idle, -change)
            change += removed
            resized.append(replace(node_class, idle=node_class.idle - removed) if removed else node_class)
        return tuple(resized)
    totals = [max(node_class.total, node_class.idle) for node_class in classes]
    for node_class, total in zip(classes, totals, strict=True):
        certain = idle - sum(totals) + total
        resized.append(replace(node_class, idle=min(total, max(node_class.idle, certain))))
    if (unclassified := idle - sum(node_class.idle for node_class in resized)) > 0:
        return add_unclassified(tuple(resized), unclassified)
    return tuple(resized)


def add_unclassified(classes: tuple[NodeClass, ...], idle: int) -> tuple[NodeClass, ...]:
    """Return the classes with idle nodes that may be of any of them, as an unnamed class as weak as the weakest.

    There is one unnamed class at most, since components name their classes.
    """
    unnamed = sum(node_class.idle for node_class in classes if not node_class.name)
    named_classes = tuple(node_class for node_class in classes if node_class.name)
    memory = min((node_class.memory for node_class in classes if node_class.memory is not None), default=None)
    cores = min((node_class.cores for node_class in classes if node_class.cores is not None), default=None)
    features, partitions = (
        tuple(sorted(set.intersection(*map(set, names))))
        for names in ([c.features for c in classes], [c.partitions for c in classes])
    )
    power = min(node_class.power for node_class in classes)
    gpus = classes[0].gpus if all(node_class.gpus == classes[0].gpus for node_class in classes) else ()
    return (*named_classes, NodeClass("", unnamed + idle, power, memory, 0, cores, gpus, features, partitions))


@dataclass(frozen=True, slots=True)
class Link:
    """The measured network from one cluster to another, or within one. Seconds and bytes per second; None: unknown."""

    latency: float | None = None
    bandwidth: float | None = None
    unreachable: bool = False
    """Whether nodes of the clusters cannot reach each other; latency and bandwidth are None then."""
    relayed: bool = False
    """Whether MPI messages go over relays, as the nodes cannot reach each other directly."""
    direct: bool = field(default=False, compare=False)
    """Whether a measurement or a started job has shown that the nodes reach each other directly."""
    is_retried: bool = field(default=False, compare=False)
    """Whether direct connections are tried first again, as they last failed long ago."""


@dataclass(frozen=True, slots=True)
class RelayedSince:
    """Why messages between two clusters go over relays; times in seconds since the epoch."""

    since: float | None
    """None: as long as the configuration demands it."""
    reason: str
    retry_at: float | None = None
    """When direct connections are tried first again; None: not while the reason holds."""


@dataclass(frozen=True, slots=True)
class Relays:
    """The relays, which carry MPI messages between clusters with nodes that do not reach each other (ADR 34)."""

    streams: int = 0
    """Maximum number of streams over the hub for all jobs together; 0: there is no hub."""
    uses: Mapping[ClusterPair, LinkUse] = field(default_factory=dict)
    """The configured paths, by pair of clusters sorted by name."""
    ready: frozenset[ClusterName] = frozenset()
    """The clusters with a relay that is connected to the hub."""
    relayed_only: frozenset[ClusterName] = frozenset()
    """The clusters that accept MPI messages of other sites only over relays."""

    def __bool__(self) -> bool:
        """Return whether relays affect placement."""
        return bool(self.streams or self.uses or self.relayed_only)

    def may_relay(self, first: ClusterName, second: ClusterName) -> bool:
        """Return whether relays can carry messages between two clusters now."""
        is_ready = self.streams > 0 and first in self.ready and second in self.ready
        return is_ready and self.uses.get(pair_of(first, second)) is not LinkUse.DIRECT

    def must_relay(self, first: ClusterName, second: ClusterName) -> bool:
        """Return whether messages between two clusters may not go directly."""
        if first in self.relayed_only or second in self.relayed_only:
            return True
        return self.uses.get(pair_of(first, second)) is LinkUse.RELAYED


NO_RELAYS = Relays()


@dataclass(frozen=True)
class GridView:
    """A snapshot of all clusters, sorted by name, and of the measured links between them."""

    clusters: tuple[ClusterView, ...]
    links: Mapping[ClusterPair, Link] = field(default_factory=dict)
    waiting: tuple[Request, ...] = ()
    """The requests of other waiting jobs in queue order; only for policies that look ahead."""
    replicas: Mapping[str, tuple[ClusterName, ...]] = field(default_factory=dict)
    """The clusters with a good replica, by logical file. For a missing file, the sites recorded at submission count."""
    cut_off: frozenset[ClusterName] = frozenset()
    """The clusters that cannot send or receive input files, whether they are in the view or not."""
    uplinks: Mapping[ClusterName, Uplink] = field(default_factory=dict)
    """The uplinks, by cluster; clusters without a known uplink are missing."""
    relays: Relays = NO_RELAYS
    free_streams: int = 0
    """Streams over the hub of the relays that live attempts leave."""

    def __iter__(self) -> Iterator[ClusterView]:
        return iter(self.clusters)

    @cached_property
    def by_idle(self) -> tuple[ClusterView, ...]:
        """Return the usable clusters by decreasing idle nodes, ties by name."""
        return tuple(sorted((c for c in self.clusters if c.state is ClusterState.USABLE), key=_fullest_last))

    @cached_property
    def by_speed(self) -> tuple[ClusterView, ...]:
        """Return the usable clusters by decreasing speed, ties by name."""
        return tuple(sorted(self.by_idle, key=_slowest_last))

    @cached_property
    def usable_idle(self) -> int:
        """Return the number of nodes that can be allocated now."""
        return sum(cluster.idle for cluster in self.by_idle)

    @cached_property
    def limits_sizes(self) -> bool:
        """Return whether some cluster does not accept components of each size."""
        return any(cluster.job_sizes for cluster in self.clusters)

    @cached_property
    def has_reservations(self) -> bool:
        """Return whether nodes of some cluster are or will be reserved by its resource manager."""
        return any(cluster.reservations for cluster in self.clusters)

    @cached_property
    def _results(self) -> dict[Hashable, object]:
        return {}

    def compute_once(self, key: Hashable, work: "Callable[[GridView], T]") -> T:
        """Return ``work(self)``, cached by ``key`` for all requests of a scan of the waiting jobs.

        Different callers must use different keys.
        """
        try:
            return self._results[key]  # type: ignore[return-value]
        except KeyError:
            result = self._results[key] = work(self)
            return result

    @cached_property
    def _lasting_results(self) -> dict[Hashable, object]:
        return {}

    def compute_lasting(self, key: Hashable, work: "Callable[[GridView], T]") -> T:
        """Return ``work(self)``, cached by ``key`` beyond this view, for results that do not depend on node counts.

        They may depend on names, states and speeds of clusters, on links and on files; a change of these clears the
        cache. The ``MAX_LASTING`` results used last are kept.
        """
        results = self._lasting_results
        result = results.pop(key, None)
        if result is None:
            result = work(self)
            if len(results) >= MAX_LASTING:
                del results[next(iter(results))]
        results[key] = result
        return result  # type: ignore[return-value]

    def select_clusters(self, names: frozenset[ClusterName]) -> "GridView":
        """Return the view with only these clusters, cached for all requests of a scan."""
        return self.compute_once(
            ("only", names), lambda grid: grid._with_part(tuple(c for c in grid.clusters if c.name in names))
        )

    def select_nodes(self, requirement: NodeRequirement) -> "GridView":
        """Return the view with only the nodes that meet a requirement, cached for all requests of a scan.

        See ``ClusterView.select_nodes``: of the result, nodes can be selected for the same requirement only.
        """
        return self.compute_once(("nodes", requirement), lambda grid: grid._select_matching(requirement))

    def _select_matching(self, requirement: NodeRequirement) -> "GridView":
        clusters = tuple(cluster for view in self.clusters if (cluster := view.select_nodes(requirement)) is not None)
        return self if clusters == self.clusters else self._with_part(clusters)

    def _with_part(self, clusters: tuple[ClusterView, ...]) -> "GridView":
        """Return the view with only these clusters; all views of the same clusters share their lasting results."""
        names = frozenset(cluster.name for cluster in clusters)
        part = replace(self, clusters=clusters)
        part.__dict__["_lasting_results"] = self.compute_lasting(("only", names), lambda _: dict[Hashable, object]())
        return part

    def with_clusters(self, clusters: Sequence[ClusterView]) -> "GridView":
        """Return the view with these clusters replaced by name.

        Carry over the cached orders, in which only these clusters move, and the lasting results if they stay valid.
        """
        if not clusters:
            return self
        positions, all_clusters = self._positions, list(self.clusters)
        moves, results_last, added_nodes = [], True, 0
        for new in clusters:
            position = positions[new.name]
            old, all_clusters[position] = all_clusters[position], new
            moves.append((old, new))
            results_last = results_last and new.state is old.state and new.speed == old.speed
            added_nodes += new.usable_idle - old.usable_idle
        view = self._replace_clusters(tuple(all_clusters), self.waiting)
        cached, carried = self.__dict__, view.__dict__
        carried["_positions"] = positions
        if results_last:
            carried["_lasting_results"] = self._lasting_results
        if "by_idle" in cached:
            carried["by_idle"] = _reorder(self.by_idle, moves, _fullest_last)
        if "by_speed" in cached:
            carried["by_speed"] = _reorder(self.by_speed, moves, _slowest_last)
        if "usable_idle" in cached:
            carried["usable_idle"] = self.usable_idle + added_nodes
        if "limits_sizes" in cached and not any(old.job_sizes != new.job_sizes for old, new in moves):
            carried["limits_sizes"] = self.limits_sizes
        if "has_reservations" in cached and not any(old.reservations != new.reservations for old, new in moves):
            carried["has_reservations"] = self.has_reservations
        return view

    def with_waiting(self, waiting: tuple[Request, ...]) -> "GridView":
        """Return the view with these requests of other waiting jobs."""
        view = self._replace_clusters(self.clusters, waiting)
        view.__dict__.update(by_idle=self.by_idle, by_speed=self.by_speed, usable_idle=self.usable_idle)
        view.__dict__.update(_positions=self._positions, _lasting_results=self._lasting_results)
        return view

    def _replace_clusters(self, clusters: tuple[ClusterView, ...], waiting: tuple[Request, ...]) -> "GridView":
        """Return the view with other clusters and waiting requests, and nothing cached.

        Each placement makes several views, and a frozen dataclass is slow to construct.
        """
        view = object.__new__(GridView)
        view.__dict__.update(
            clusters=clusters,
            links=self.links,
            waiting=waiting,
            replicas=self.replicas,
            cut_off=self.cut_off,
            uplinks=self.uplinks,
            relays=self.relays,
            free_streams=self.free_streams,
        )
        return view

    @cached_property
    def _positions(self) -> dict[ClusterName, int]:
        return {cluster.name: index for index, cluster in enumerate(self.clusters)}

    def sites_of(self, file: InputFile) -> tuple[ClusterName, ...]:
        """Return the clusters that have a file (file sites)."""
        return self.replicas.get(file.name, file.sites)

    def get(self, name: ClusterName) -> ClusterView | None:
        position = self._positions.get(name)
        return None if position is None else self.clusters[position]

    def link_between(self, first: ClusterName, second: ClusterName) -> Link:
        """Return the link from one cluster to another, or the reverse link if only that was measured.

        Return a link without values if neither was measured.
        """
        return self.links.get((first, second)) or self.links.get((second, first)) or Link()

    def path_between(self, first: ClusterName, second: ClusterName, use: LinkUse = LinkUse.ANY) -> LinkPath:
        """Return how messages of a job with this ``links`` pass between the nodes of two clusters."""
        if first == second:
            return LinkPath.DIRECT
        link, may_relay = self.link_between(first, second), self.relays.may_relay(first, second)
        is_relayed = link.relayed and not link.is_retried
        if use is LinkUse.RELAYED or is_relayed or self.relays.must_relay(first, second):
            return LinkPath.RELAYED if may_relay and use is not LinkUse.DIRECT else LinkPath.NONE
        if link.unreachable and (use is LinkUse.DIRECT or self.relays.streams):
            return LinkPath.NONE
        return LinkPath.UNKNOWN if may_relay and use is LinkUse.ANY and not link.direct else LinkPath.DIRECT


Moves = Sequence[tuple[ClusterView, ClusterView]]
"""Clusters before and after a change."""


def _fullest_last(cluster: ClusterView) -> tuple[float, ClusterName]:
    return -cluster.idle, cluster.name


def _slowest_last(cluster: ClusterView) -> tuple[float, ClusterName]:
    return -cluster.speed, cluster.name


def _reorder(
    order: tuple[ClusterView, ...], moves: Moves, key: Callable[[ClusterView], tuple[float, ClusterName]]
) -> tuple[ClusterView, ...]:
    """Return a sorted list of usable clusters after some of them have changed."""
    clusters = list(order)
    for old, new in moves:
        if old.state is ClusterState.USABLE:
            del clusters[bisect_left(clusters, key(old), key=key)]
        if new.state is ClusterState.USABLE:
            clusters.insert(bisect_left(clusters, key(new), key=key), new)
    return tuple(clusters)
