"""The alternatives that the advisor compares for a job: one cluster now, several clusters now, one cluster later."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

from koalapy.model.advice import Option
from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.placement import PlacedComponent, Placement, Refusal
from koalapy.model.request import ClusterName, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.policies.close_to_files import CloseToFiles
from koalapy.policies.communication_aware import CommunicationAware
from koalapy.policies.flexible import ClusterMinimization
from koalapy.policies.knowledge import Capacity, Knowledge
from koalapy.policies.network import NONE, Transfer, Weighing, estimate_transfer, near_to_all, network_of
from koalapy.policies.policy import Policy
from koalapy.policies.splitting import place_options
from koalapy.policies.worst_fit import WorstFit

Choosing = FlexibleRequest | NonFixedRequest
"""Request types for which the advisor can choose clusters."""
Files = tuple[InputFile, ...]

ASSUMED_BANDWIDTH = 100e6
"""Bandwidth in bytes per second that is assumed for a link without a measurement."""
UNKNOWN_RUN_TIME = 1.0
"""Run time in seconds at speed 1 that is assumed in comparisons when the run time is unknown."""
MIN_SHARE_ON_ONE = 0.85
"""Share of a job in one cluster above which the other clusters slow it down little (Jones, in sonmez-2010 IX)."""
MAX_COUNTS_TRIED = 3
"""How many numbers of clusters are tried for given components, from the minimum upwards; then all clusters are."""

FCM, CA, WF, CTF = ClusterMinimization(), CommunicationAware(), WorstFit(), CloseToFiles()
BY_LATENCY = Weighing()
NOTHING = Knowledge()


@dataclass(frozen=True, slots=True)
class Alternative:
    """An option of the advisor, with its placement if it can start now."""

    option: Option
    speed: float
    """Speed of the slowest cluster."""
    placement: Placement | None = None
    blocked: float = 0.0
    """For an option of unknown wait: seconds for which the last job that blocks it has already run."""

    @property
    def cost(self) -> float:
        """Return the estimated seconds until the job ends, for comparisons."""
        option = self.option
        run = UNKNOWN_RUN_TIME * option.slowdown / self.speed if option.run is None else option.run
        return (option.wait or 0.0) + option.transfer + run


# On one cluster


def find_single_cluster_now(request: Choosing, grid: GridView, knowledge: Knowledge) -> Alternative | None:
    """Return the placement on the one cluster where the job ends first; None if no cluster has enough idle nodes.

    Ties go to the cluster with the lowest latency within it, then to the one with the fewest idle nodes.
    """
    total, file_lists, nominal = (
        request.total_size,
        _distinct_file_lists(request, knowledge),
        knowledge.run_time(()) or UNKNOWN_RUN_TIME,
    )
    best: tuple[ClusterView, float] | None = None
    for equals in _rank_by_end(file_lists, nominal, grid):
        for name, seconds in equals:
            cluster = grid.get(name)
            if cluster is None or cluster.idle < total or not _accepts_whole(request, cluster):
                continue
            if best is None or (cluster.idle, name) < (best[0].idle, best[0].name):
                best = cluster, seconds
        if best is not None:
            break
    if best is None:
        return None
    cluster, transfer = best
    placed = _components_on_one(request, grid, cluster)
    if placed is None:
        return None
    alternative = _single_cluster_alternative(cluster, 0.0, transfer, knowledge)
    return replace(
        alternative, placement=Placement(placed, f"{cluster.name} alone holds it ({total} of {cluster.idle})")
    )


Equals = list[tuple[ClusterName, float]]
"""Clusters that differ only in their idle nodes, with the seconds that transfers to them take."""


def _rank_by_end(file_lists: Sequence[Files], nominal: float, grid: GridView) -> list[Equals]:
    """Return the usable clusters that can get the inputs, by the time at which the job would end.

    Ties go to the lowest latency within the cluster. Clusters with the same time and latency are in one list.
    """
    internal_latencies = network_of(grid, BY_LATENCY).internal if grid.links else {}

    def ordered(grid: GridView) -> list[Equals]:
        """Return lists of clusters with the same end of the job and latency, the best list first."""
        ranks: dict[tuple[float, float], Equals] = {}
        for cluster in grid.by_idle:
            transfer = _longest_transfer(cluster.name, file_lists, grid)
            if transfer is not None:
                rank = transfer + nominal / cluster.speed, internal_latencies.get(cluster.name, inf)
                ranks.setdefault(rank, []).append((cluster.name, transfer))
        return [ranks[rank] for rank in sorted(ranks)]

    # Without transfers the order does not depend on the run time.
    return grid.compute_lasting(("soonest", *file_lists, nominal if file_lists else 0.0), ordered)


def _single_cluster_alternative(
    cluster: ClusterView, wait: float | None, transfer: float, knowledge: Knowledge, blocked: float = 0.0
) -> Alternative:
    """Return the option of one cluster with its estimated run time; seconds, None if unknown."""
    run = knowledge.run_time(())
    seconds = None if run is None else run / cluster.speed
    return Alternative(Option((cluster.name,), 1.0, wait, transfer, seconds), cluster.speed, None, blocked)


def _components_on_one(request: Choosing, grid: GridView, cluster: ClusterView) -> tuple[PlacedComponent, ...] | None:
    """Return all components placed on one cluster; None if the bounds of the request do not allow it."""
    if isinstance(request, NonFixedRequest):
        placed = []
        for index, component in enumerate(request.components):
            transfer = _estimate_inputs(cluster.name, component.inputs, grid) or NONE
            placed.append(PlacedComponent(component.size, cluster.name, index, transfer.sources, transfer.seconds))
        return tuple(placed)
    if request.split_options:
        answer = place_options(request, grid.select_clusters(frozenset([cluster.name])))
        return None if isinstance(answer, Refusal) else answer.components
    if request.total_size < request.min_component_size:
        return None
    return (PlacedComponent(request.total_size, cluster.name),)


def _accepts_whole(request: Choosing, cluster: ClusterView) -> bool:
    """Return whether a cluster accepts a flexible request as one component."""
    if isinstance(request, NonFixedRequest) or request.split_options:
        return True
    return cluster.accepts(request.total_size)


def find_single_cluster_later(request: Choosing, grid: GridView, knowledge: Knowledge) -> Alternative | None:
    """Return the one cluster where the job would end first, after a wait for jobs of this scheduler to end.

    Return None if no cluster would have enough idle nodes even then. If no wait is known, take the cluster whose last
    blocking job has run for the shortest time.
    """
    total, file_lists, nominal = (
        request.total_size,
        _distinct_file_lists(request, knowledge),
        knowledge.run_time(()) or UNKNOWN_RUN_TIME,
    )
    best: tuple[tuple[bool, float, float, ClusterName], ClusterView, float | None, float] | None = None
    for cluster in grid.by_idle:
        capacity = knowledge.capacities.get(cluster.name)
        if capacity is None or capacity.max_idle < total or not _accepts_whole(request, cluster):
            continue
        transfer = _longest_transfer(cluster.name, file_lists, grid)
        if transfer is None:
            continue
        wait, blocked = _estimate_wait(capacity, cluster.idle, total)
        cost = (wait or 0.0) + transfer + nominal / cluster.speed
        key = (wait is None, cost, blocked, cluster.name)
        if best is None or key < best[0]:
            best = key, cluster, wait, transfer
    if best is None:
        return None
    key, cluster, wait, transfer = best
    return _single_cluster_alternative(cluster, wait, transfer, knowledge, key[2])


def _estimate_wait(capacity: Capacity, idle: int, required: int) -> tuple[float | None, float]:
    """Return the seconds until ``required`` nodes are idle, and the age in seconds of the last job that blocks them.

    The former is None if unknown.
    """
    for release in capacity.releases:
        idle += release.nodes
        if idle >= required:
            return release.seconds, release.age
    return None, 0.0


# On several clusters


def find_multi_cluster_now(request: Choosing, grid: GridView, knowledge: Knowledge) -> list[Alternative] | Refusal:
    """Return placements over several clusters, the best first; or the refusal if there is none."""
    answers = _possible_splits(request, grid)
    if isinstance(answers, Refusal):
        return answers
    alternatives = [_multi_cluster_alternative(request, placement, grid, knowledge) for placement in answers]
    return sorted(
        alternatives,
        key=lambda alternative: (alternative.cost, len(alternative.option.clusters), not _mostly_on_one(alternative)),
    )


def _possible_splits(request: Choosing, grid: GridView) -> list[Placement] | Refusal:
    """Return placements over several clusters to compare, or the refusal if there is none.

    If clusters with measured links hold a flexible request, leave out placements over other links.
    """
    if isinstance(request, NonFixedRequest):
        return _assign_components(request, grid)
    answer = FCM.place(request, grid)
    if isinstance(answer, Refusal) or request.split_options:
        return answer if isinstance(answer, Refusal) else [answer]
    if _has_links(grid):
        near = CA.place(request, grid)
        if isinstance(near, Placement) and _are_linked(near, grid):
            return [near, answer] if _are_linked(answer, grid) else [near]
    return [answer]


def _are_linked(placement: Placement, grid: GridView) -> bool:
    """Return whether the latencies of all links between its clusters are measured.

    A link without a measurement may not work at all.
    """
    names = sorted({component.cluster for component in placement.components})
    return all(grid.link_between(first, second).latency is not None for first, second in combinations(names, 2))


def _assign_components(request: NonFixedRequest, grid: GridView) -> list[Placement] | Refusal:
    """Return placements of the given components: on a few near clusters, on a few with the most idle nodes, and on all.

    If near clusters suffice, leave out placements over links without a measurement.
    """
    policy = CTF if any(component.inputs for component in request.components) else WF
    near = next(filter(None, (_on_few(policy, request, grid, clusters) for clusters in _near_cluster_sets(grid))), None)
    few = _on_few(policy, request, grid, grid.by_idle)
    answer = policy.place(request, grid)
    if isinstance(answer, Refusal) and policy is CTF:
        file_lists = _distinct_file_lists(request, NOTHING)
        if all(_longest_transfer(cluster.name, file_lists, grid) is not None for cluster in grid.by_idle):
            answer = WF.place(request, grid)  # Only bandwidths are unknown; the transfers start all the same.
    placements = [placement for placement in (near, few, answer) if isinstance(placement, Placement)]
    if near is not None:
        placements = [placement for placement in placements if _are_linked(placement, grid)]
    different: dict[tuple[PlacedComponent, ...], Placement] = {}
    for placement in placements:
        different.setdefault(placement.components, placement)
    return list(different.values()) or (answer if isinstance(answer, Refusal) else [answer])


def _on_few(
    policy: Policy, request: NonFixedRequest, grid: GridView, clusters: Sequence[ClusterView]
) -> Placement | None:
    """Return the placement on as few of the first clusters as possible; None if none of the tried numbers suffices."""
    minimum = _min_cluster_count(request.total_size, clusters)
    for number in range(minimum, min(minimum + MAX_COUNTS_TRIED, len(clusters) + 1)):
        answer = policy.place(request, grid.select_clusters(frozenset(cluster.name for cluster in clusters[:number])))
        if isinstance(answer, Placement):
            return answer
    return None


def _near_cluster_sets(grid: GridView) -> list[list[ClusterView]]:
    """Return sets of clusters with measured links between all of them, lowest latencies first (sonmez-2010 IV-C)."""
    if not _has_links(grid):
        return []

    def sets(grid: GridView) -> list[list[ClusterName]]:
        """Return the names of the clusters in each set, in the order in which clusters are combined."""
        network = network_of(grid, BY_LATENCY)
        names = [cluster.name for cluster in network.order_for_combining(grid)]
        near_sets = dict.fromkeys(frozenset(near_to_all([name, *names], network.near)) for name in names)
        return [[name for name in names if name in inside] for inside in near_sets]

    def with_idle_nodes(grid: GridView) -> list[list[ClusterView]]:
        name_sets = grid.compute_lasting(("near ones",), sets)
        return [[cluster for name in names if (cluster := grid.get(name)) is not None] for names in name_sets]

    return grid.compute_once(("near ones",), with_idle_nodes)


def _has_links(grid: GridView) -> bool:
    """Return whether a latency between two clusters is known."""
    return grid.compute_lasting(
        ("has links",),
        lambda grid: any(first != second and link.latency is not None for (first, second), link in grid.links.items()),
    )


def _min_cluster_count(total: int, by_idle: Sequence[ClusterView]) -> int:
    """Return the minimum number of clusters, by decreasing idle nodes, that together have ``total`` idle nodes."""
    idle = 0
    for count, cluster in enumerate(by_idle, start=1):
        idle += cluster.idle
        if idle >= total:
            return count
    return len(by_idle)


def _multi_cluster_alternative(
    request: Choosing, placement: Placement, grid: GridView, knowledge: Knowledge
) -> Alternative:
    """Return the option of a placement, with its estimated slowdown, transfer and run time."""
    names = tuple(sorted({component.cluster for component in placement.components}))
    slowest = min(cluster.speed for name in names if (cluster := grid.get(name)) is not None)
    run = knowledge.run_time(names)
    transfer = max(component.transfer_time for component in placement.components)
    if isinstance(request, FlexibleRequest) and knowledge.inputs:
        transfer = max(_longest_transfer(name, [knowledge.inputs], grid) or 0.0 for name in names)
    slowdown = knowledge.slowdown(names)
    return Alternative(
        Option(names, slowdown, 0.0, transfer, None if run is None else run / slowest), slowest, placement
    )


def _mostly_on_one(alternative: Alternative) -> bool:
    """Return whether at least ``MIN_SHARE_ON_ONE`` of the job's nodes are on one cluster."""
    placement = alternative.placement
    if placement is None:
        return True
    return max(placement.nodes.values()) >= MIN_SHARE_ON_ONE * placement.total_size


# Inputs


def _distinct_file_lists(request: Choosing, knowledge: Knowledge) -> list[Files]:
    """Return the distinct lists of input files of the components, without empty lists."""
    if isinstance(request, FlexibleRequest):
        return [knowledge.inputs] if knowledge.inputs else []
    return [files for files in dict.fromkeys(component.inputs for component in request.components) if files]


def _longest_transfer(site: ClusterName, file_lists: Sequence[Files], grid: GridView) -> float | None:
    """Return the seconds of the longest transfer to a cluster; None if an input cannot be transferred there."""
    longest = 0.0
    for files in file_lists:
        transfer = _estimate_inputs(site, files, grid)
        if transfer is None:
            return None
        longest = max(longest, transfer.seconds)
    return longest


def _estimate_inputs(site: ClusterName, files: Files, grid: GridView) -> Transfer | None:
    return estimate_transfer(site, files, grid, ASSUMED_BANDWIDTH) if files else NONE
