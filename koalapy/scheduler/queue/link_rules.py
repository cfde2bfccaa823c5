"""Decide between which clusters the MPI messages of a job may pass, and how many streams over relays it needs.

Relays carry messages between clusters with nodes that do not reach each other (docs/adr/0034-relayed-links.md). The
hub of the relays has a limited number of streams, which no job may exceed: a refused stream ends its program.
"""

from collections.abc import Iterable
from itertools import combinations, islice

from koalapy.model.cluster import GridView, LinkPath, LinkUse
from koalapy.model.job_spec import JobSpec
from koalapy.model.placement import Placement, Refusal, RefusalKind
from koalapy.model.profile import MAX_SETS, find_cliques
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list

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
        name: frozenset(other for other in near[name] - {name} if _may_pass(view, name, other, use, without_relays))
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


def are_linked(names: Iterable[ClusterName], use: LinkUse, view: GridView) -> bool:
    """Return whether messages of a job with this ``links`` may pass between all of these clusters."""
    return all(view.path_between(*pair, use) is not LinkPath.NONE for pair in combinations(sorted(names), 2))


def missing_links_text(names: Iterable[ClusterName], use: LinkUse, view: GridView) -> str:
    """Return why messages of a job may not pass between some of these clusters; empty if they may."""
    apart = [pair for pair in combinations(sorted(names), 2) if view.path_between(*pair, use) is LinkPath.NONE]
    if not apart:
        return ""
    pairs = format_list([f"{first} and {second}" for first, second in apart])
    if use is LinkUse.DIRECT:
        return f"links is direct, and no direct link connects {pairs}"
    if not view.relays.streams:
        return f"only a relayed link may connect {pairs}, and the daemon has no hub"
    absent = sorted({name for pair in apart for name in pair} - view.relays.ready)
    if absent:
        return f"only a relayed link may connect {pairs}, and the relay of {format_list(absent)} is not ready"
    return f"only a relayed link may connect {pairs}, and the configuration excludes it"


# Streams over the hub


def count_streams(spec: JobSpec, placement: Placement, view: GridView) -> int:
    """Return an upper bound of the streams over the hub that a job needs with a placement; 0 without a hub.

    Open MPI opens one TCP connection for each pair of ranks that exchange messages, with their first message. These
    pairs are not known in advance, so all pairs of ranks on different clusters count. ``mpirun`` keeps one connection
    to each node of other clusters. The cluster where it runs is not known either, so the nodes of both count. Links
    that may turn out to be relayed count as relayed.
    """
    nodes: dict[ClusterName, int] = {}
    for component in placement.components:
        nodes[component.cluster] = nodes.get(component.cluster, 0) + component.size
    if len(nodes) < 2 or not view.relays.streams:
        return 0
    streams = 0
    for first, second in combinations(sorted(nodes), 2):
        if view.path_between(first, second, spec.links) in (LinkPath.RELAYED, LinkPath.UNKNOWN):
            ranks = nodes[first] * _ranks(spec, first, view), nodes[second] * _ranks(spec, second, view)
            streams += ranks[0] * ranks[1] + nodes[first] + nodes[second]
    return streams


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
