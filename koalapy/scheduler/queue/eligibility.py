"""Decide on which clusters a job may run, and how often it may be tried (semantics 4 and 5).

A job may run on the clusters that allow its owner and its home site and have the required folders. The clusters of one
job must share jobs: each allows the others. With Open MPI, all must use the same series.

Relays carry MPI messages between clusters with nodes that do not reach each other
(docs/adr/0034-relayed-links.md). The hub of the relays has a limited number of streams, which no job may exceed: a
refused stream ends its program.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice
from typing import NamedTuple

from koalapy.model.cluster import ClusterPair, GridView, LinkPath, LinkUse
from koalapy.model.job import Job
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.node_requirement import NodeRequirement
from koalapy.model.placement import Placement, Refusal, RefusalKind
from koalapy.model.profile import (
    MAX_SETS,
    ClusterProfile,
    component_folders,
    describe_missing_folders,
    explain_conflict,
    find_cliques,
    find_sharing_sets,
    job_folders,
    partners,
)
from koalapy.model.request import ClusterName, Environment, FixedRequest
from koalapy.model.users import NOWHERE, Accounts, Sharing, owner_rejection_reason
from koalapy.model.wording import format_list
from koalapy.policies.constraints import Constraints
from koalapy.policies.network import immovable_reason
from koalapy.scheduler.rules import Rules

Sets = tuple[frozenset[ClusterName], ...]
"""The largest sets of clusters that may share a job; empty: all may."""


def restricts_links(spec: JobSpec, view: GridView) -> bool:
    """Return whether the links between clusters restrict the placement of a job; they rarely do.

    The daemon's own jobs measure links, whatever is known of these.
    """
    return (bool(view.relays) or spec.links is not LinkUse.ANY) and not spec.internal


def linked_sets(sets: Sets, use: LinkUse, view: GridView, *, without_relays: bool = False) -> Sets:
    """Return the largest of these sets of clusters between which messages of a job with this ``links`` may pass.

    ``without_relays``: only between clusters that surely need none.
    """
    return view.compute_lasting(
        ("linked sets", sets, use, without_relays), lambda view: _find_linked_sets(sets, use, view, without_relays)
    )


def _find_linked_sets(sets: Sets, use: LinkUse, view: GridView, without_relays: bool) -> Sets:
    names = frozenset(cluster.name for cluster in view)
    near = {name: frozenset().union(*(s for s in sets if name in s)) & names if sets else names for name in names}
    linked = {
        name: frozenset(peer for peer in near[name] - {name} if _may_pass(view, name, peer, use, without_relays))
        for name in names
    }
    if all(linked[name] == near[name] - {name} for name in names):
        return sets
    largest = tuple(islice(find_cliques(linked), MAX_SETS))
    missing = names.difference(*largest)
    return largest + tuple(frozenset([name]) for name in sorted(missing))


def _may_pass(view: GridView, first: ClusterName, second: ClusterName, use: LinkUse, without_relays: bool) -> bool:
    path = view.path_between(first, second, use)
    return path is LinkPath.DIRECT if without_relays else path is not LinkPath.NONE


def missing_links_text(names: Iterable[ClusterName], use: LinkUse, view: GridView) -> str:
    """Return why messages of a job may not pass between some of these clusters; empty if they may."""
    apart = [pair for pair in combinations(sorted(names), 2) if view.path_between(*pair, use) is LinkPath.NONE]
    if not apart:
        return ""
    pairs = format_list([f"{first} and {second}" for first, second in apart])
    if use is LinkUse.DIRECT:
        is_retried = view.relays.streams and not any(view.relays.must_relay(*pair) for pair in apart)
        again = "; koala network says when that is tried again" if is_retried else ""
        return f"links is direct, and no direct link connects {pairs}{again}"
    if not view.relays.streams:
        return f"only a relayed link may connect {pairs}, and the daemon has no hub"
    absent = sorted({name for pair in apart for name in pair} - view.relays.ready)
    if absent:
        return f"only a relayed link may connect {pairs}, and the relay of {format_list(absent)} is not ready"
    return f"only a relayed link may connect {pairs}, and the configuration excludes it"


# Streams over the hub


def count_streams(spec: JobSpec, placement: Placement, view: GridView, *, with_fallback: bool = False) -> int:
    """Return an upper bound of the streams over the hub that a job needs with a placement; 0 without a hub.

    Open MPI opens one TCP connection for each pair of ranks that exchange messages, with their first message. These
    pairs are not known in advance, so all pairs of ranks on different clusters count. ``mpirun`` keeps one connection
    to each node of other clusters. The cluster where it runs is not known either, so the nodes of both count. Links
    that may turn out to be relayed count as relayed; ``with_fallback``: also those that were last direct.
    """
    if not view.relays.streams:
        return 0
    nodes: dict[ClusterName, int] = {}
    for component in placement.components:
        nodes[component.cluster] = nodes.get(component.cluster, 0) + component.size
    streams = 0
    for first, second in combinations(sorted(nodes), 2):
        path = view.path_between(first, second, spec.links)
        falls_back = with_fallback and path is LinkPath.DIRECT and may_fall_back(view, (first, second), spec.links)
        if falls_back or path in (LinkPath.RELAYED, LinkPath.UNKNOWN):
            ranks = nodes[first] * _ranks(spec, first, view), nodes[second] * _ranks(spec, second, view)
            streams += ranks[0] * ranks[1] + nodes[first] + nodes[second]
    return streams


def may_fall_back(view: GridView, pair: ClusterPair, use: LinkUse) -> bool:
    """Return whether messages between two clusters may go over relays if the nodes do not reach each other."""
    return use is LinkUse.ANY and view.relays.may_relay(*pair)


def streams_to_reserve(spec: JobSpec, placement: Placement, view: GridView) -> int:
    """Return the streams over the hub that a job gets with a placement.

    Links that were last direct count too, as they may not be any more, unless that takes half of the free streams.
    """
    with_fallback = count_streams(spec, placement, view, with_fallback=True)
    return with_fallback if 2 * with_fallback <= view.free_streams else count_streams(spec, placement, view)


def _ranks(spec: JobSpec, name: ClusterName, view: GridView) -> int:
    """Return the maximum number of ranks on a node of a cluster: one per core, by default; 1 if that is not known."""
    if spec.processes_per_node is not None:
        return spec.processes_per_node
    cluster = view.get(name)
    classes = cluster.known_classes if cluster is not None else ()
    return spec.ranks_per_node(max((node_class.cores or 1 for node_class in classes), default=1))


def streams_refusal(spec: JobSpec, placement: Placement, view: GridView) -> Refusal | None:
    """Return the refusal of a placement that needs more streams than are free; None if these suffice."""
    needed = count_streams(spec, placement, view)
    if needed <= view.free_streams:
        return None
    names = format_list(sorted({component.cluster for component in placement.components}))
    has = f"the hub has {view.relays.streams} streams"
    text = has if needed > view.relays.streams else f"{view.free_streams} of the hub's {view.relays.streams} are free"
    return Refusal(f"needs up to {needed} streams over relays between {names}, and {text}", RefusalKind.RELAYS)


class Exclusion(NamedTuple):
    """Clusters where a job may not run, independently of idle nodes, and why."""

    clusters: Sequence[ClusterName]
    summary: str
    """The reason as a part of a refusal."""
    reason: Callable[[ClusterName], str]
    """Returns the reason of one of the clusters."""
    kind: RefusalKind | None = RefusalKind.ELIGIBILITY
    """The kind of a refusal by a policy that got only the other clusters; None: its own."""


class Demands(NamedTuple):
    """The properties of a job, other than request and policy, that decide where it may run."""

    one_series: bool = False
    folders: frozenset[str] = frozenset()
    at_most: int | None = None
    speed_ratio: float | None = None
    options: Environment = ()
    closed: frozenset[ClusterName] = NOWHERE
    """Clusters that its owner may not use."""
    away: frozenset[ClusterName] = NOWHERE
    """Clusters closed to jobs of its home site."""
    sets: Sets = ()
    """The largest sets of clusters that may share it; empty: all may."""
    links: LinkUse = LinkUse.ANY
    """The paths that its messages may take between clusters."""
    is_script: bool = False
    """Whether it has a script, which clusters must accept to share it."""
    nodes: tuple[NodeRequirement | None, ...] = ()
    """What the nodes of each component must have; one entry for all components, or none if any node serves."""

    @property
    def barred(self) -> frozenset[ClusterName]:
        """Return the clusters where the job may not run, independently of idle nodes."""
        return self.closed | self.away if self.away else self.closed

    @property
    def constraints(self) -> Constraints:
        return Constraints(self.at_most, self.speed_ratio)


class Eligibility:
    """The profiles and permitted users of the clusters, which stay fixed during a daemon run."""

    def __init__(
        self, profiles: Mapping[ClusterName, ClusterProfile], accounts: Accounts, sharing: Sharing | None = None
    ) -> None:
        self._profiles, self._accounts, self._sharing = profiles, accounts, sharing or Sharing()
        self._sets = {
            (one_series, is_script): find_sharing_sets(profiles, one_series=one_series, is_script=is_script)
            for one_series in (False, True)
            for is_script in (False, True)
        }
        self._mixed = len({profile.mpi.series for profile in profiles.values()}) > 1
        self._grouped: tuple[GridView, object, list[GridView]] | None = None
        """The last view and sets that were requested, and their groups; a scan of similar jobs repeats them."""
        self._demanded: tuple[JobSpec, Demands | tuple[()]] | None = None
        """The last job that was requested, and its demands."""

    def demands(self, spec: JobSpec) -> Demands | tuple[()]:
        """Return the properties that decide where a job may run; empty for almost every job."""
        if self._demanded is None or self._demanded[0] is not spec:
            self._demanded = spec, self._find_demands(spec)
        return self._demanded[1]

    def _find_demands(self, spec: JobSpec) -> Demands | tuple[()]:
        """Return the properties that restrict where a job may run; an empty tuple if there are none."""
        folders = job_folders(spec)
        one_series = self._mixed and spec.launcher is Launcher.OPENMPI
        at_most, ratio, options = spec.coallocation, spec.speed_ratio_min, spec.policy_options
        closed, away = self._accounts.closed_to(spec.owner), self._sharing.closed_to(spec.home_site)
        is_script, nodes, links = bool(spec.script), spec.node_requirements, spec.links
        sets = self._sets[one_series, is_script]
        has_demands = sets or folders or options or closed or away or nodes or links is not LinkUse.ANY
        if has_demands or at_most is not None or ratio is not None:
            return Demands(one_series, folders, at_most, ratio, options, closed, away, sets, links, is_script, nodes)
        return ()

    def exclusions(self, spec: JobSpec, demands: Demands, view: GridView) -> Iterator[Exclusion]:
        """Yield the clusters where a job may not run; of a fixed request, those that it names."""
        request = spec.request
        components: dict[ClusterName, list[int | None]] = {cluster.name: [None] for cluster in view}
        if isinstance(request, FixedRequest):
            components = {component.cluster or "": [] for component in request.components}
            for index, component in enumerate(request.components):
                components[component.cluster or ""].append(index)
        if closed := sorted(demands.closed & components.keys()):
            summary = owner_rejection_reason(closed)
            yield Exclusion(closed, summary, lambda name: self._accounts.rejection_reason(spec.owner, name))
        if away := sorted((demands.away & components.keys()) - demands.closed):
            summary = self._sharing.home_rejection_reason(away)
            yield Exclusion(away, summary, lambda name: self._sharing.rejection_reason(spec.home_site, name))
        if demands.folders:
            missing = {
                name: folders
                for name, indices in components.items()
                if name in self._profiles and (folders := _folders_for(spec, indices) - self._profiles[name].folders)
            }
            if missing:
                summary = describe_missing_folders(sorted(missing), frozenset().union(*missing.values()))
                yield Exclusion([*missing], summary, lambda name: describe_missing_folders([name], missing[name]))
        if isinstance(request, FixedRequest) and demands.sets:
            clusters = components.keys() & self._profiles.keys()
            if not any(clusters <= together for together in demands.sets):
                summary = self.conflict_text(clusters, demands, view)
                yield Exclusion(sorted(clusters), summary, lambda _: summary)
        if view.cut_off and spec.all_inputs:
            inputs = {i: spec.all_inputs if i is None else spec.inputs_of(i) for i in chain(*components.values())}
            reasons = {
                name: next(filter(None, (immovable_reason(name, inputs[i], view) for i in indices)), "")
                for name, indices in components.items()
            }
            if unmoved := {name: reason for name, reason in reasons.items() if reason}:
                summary = "; ".join(dict.fromkeys(unmoved.values()))
                yield Exclusion([*unmoved], summary, unmoved.__getitem__, RefusalKind.FILES)

    def may_run_on(self, spec: JobSpec, names: frozenset[ClusterName], view: GridView) -> bool:
        """Return whether the job may run on these clusters together, independently of idle nodes."""
        if restricts_links(spec, view) and missing_links_text(names, spec.links, view):
            return False
        demands = self.demands(spec)
        if not demands:
            return True
        if not demands.barred.isdisjoint(names):
            return False
        profiled = names & self._profiles.keys()
        # A component of a fixed request needs only its own folders, which ``exclusions`` checks.
        folders = frozenset[str]() if isinstance(spec.request, FixedRequest) else demands.folders
        if not all(folders <= self._profiles[name].folders for name in profiled):
            return False
        if demands.sets and not any(profiled <= together for together in demands.sets):
            return False
        if demands.at_most is not None and len(names) > demands.at_most:
            return False
        return demands.constraints.are_speeds_similar([cluster for cluster in view if cluster.name in names])

    def sharing_groups(self, view: GridView, sets: Sets) -> list[GridView]:
        """Return the usable clusters in groups, each of which may run one job together, the most idle nodes first.

        Return the whole view if there is only one group.
        """
        if not sets:
            return [view]
        if self._grouped is None or self._grouped[0] is not view or self._grouped[1] is not sets:
            usable = {cluster.name for cluster in view.by_idle}
            inside = {together & usable: together for together in sets}
            largest = [names for names in inside if names and not any(names < candidate for candidate in inside)]
            groups = [view.select_clusters(inside[names]) for names in largest]
            groups.sort(key=lambda group: (-group.usable_idle, sorted(cluster.name for cluster in group)))
            self._grouped = view, sets, groups if len(groups) > 1 else [view]
        return self._grouped[2]

    def demands_on(self, spec: JobSpec, view: GridView) -> Demands | tuple[()]:
        """Return the demands of a job with the sets of clusters that the links of a view allow."""
        demands = self.demands(spec)
        if not restricts_links(spec, view):
            return demands
        sets = linked_sets(demands.sets if demands else (), spec.links, view)
        return (demands or Demands())._replace(sets=sets)

    def conflict_text(self, clusters: Iterable[ClusterName], demands: Demands, view: GridView) -> str:
        """Return why clusters cannot run one job together, such as ``north has Open MPI 5, south 4``."""
        names = sorted(clusters)
        conflict = explain_conflict(names, self._profiles, one_series=demands.one_series, is_script=demands.is_script)
        return "; ".join(filter(None, (conflict, missing_links_text(names, demands.links, view))))

    def partners_text(self, name: ClusterName, demands: Demands, view: GridView) -> str:
        """Return which clusters may run a job together with one that has too few nodes for it."""
        if apart := missing_links_text((cluster.name for cluster in view.by_idle), demands.links, view):
            return apart
        if not self._sets[False, demands.is_script]:
            return f"only clusters with Open MPI {self._profiles[name].mpi.series} count beside it"
        allowed = sorted(partners(name, self._profiles, one_series=demands.one_series, is_script=demands.is_script))
        return (
            f"only {format_list(allowed)} may share a job with it" if allowed else "no cluster may share a job with it"
        )


def _folders_for(spec: JobSpec, indices: Iterable[int | None]) -> frozenset[str]:
    """Return the folders that a cluster needs for some components, or, for the index None, for any component."""
    return frozenset().union(*(job_folders(spec) if i is None else component_folders(spec, i) for i in indices))


def scan_tries_all(rules: Rules) -> bool:
    """Return whether a periodic scan counts as a failed try of all remaining jobs, not of the head only.

    A scan that ends at the first rejection tries no job behind it. With the narrowest first, wide jobs would then never
    count tries and never get a planned start.
    """
    return rules.queue == "scan" or rules.queue_order == "narrowest-first"


def placement_limit(job: Job, rules: Rules) -> int | None:
    """Return the maximum number of placement tries of a job; None: unlimited."""
    limit = job.spec.max_placement_tries
    return limit if limit is not None else rules.max_placement_tries


def claiming_limit(job: Job, rules: Rules) -> int | None:
    """Return the maximum number of claiming tries of a job; None: unlimited."""
    limit = job.spec.max_claiming_tries
    return limit if limit is not None else rules.max_claiming_tries


def may_not_be_claimed(job: Job, rules: Rules) -> bool:
    """Return whether a job has used up its claiming tries."""
    limit = claiming_limit(job, rules)
    return limit is not None and job.claiming_tries >= limit


def tries_used_up(job: Job, rules: Rules) -> str:
    """Return, after a failed claim, which tries of a job are used up; empty if it may be tried again."""
    if may_not_be_claimed(job, rules):
        return f"not claimed in {claiming_limit(job, rules)} tries"
    limit = placement_limit(job, rules)
    if limit is not None and job.placement_tries >= limit:
        return f"not placed in {limit} tries"
    return ""
