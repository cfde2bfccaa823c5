"""What the advisor compares for a job: on one cluster now, on several now, on one cluster later."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf

from koalapy.model.advice import Option
from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.placement import PlacedComponent, Placement, Refusal
from koalapy.model.request import ClusterName, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.model.transfer import NONE, Transfer, estimate_transfer
from koalapy.policies.close_to_files import CloseToFiles
from koalapy.policies.communication_aware import CommunicationAware
from koalapy.policies.flexible import ClusterMinimization
from koalapy.policies.knowledge import Capacity, Knowledge
from koalapy.policies.network import Weighing, near_to_all, network_of
from koalapy.policies.policy import Policy
from koalapy.policies.splitting import place_options
from koalapy.policies.worst_fit import WorstFit

Choosing = FlexibleRequest | NonFixedRequest
"""The requests with something to choose."""
Files = tuple[InputFile, ...]

ASSUMED_BANDWIDTH = 100e6
"""Bytes per second of a link that was not measured."""
UNKNOWN_RUN_TIME = 1.0
"""Seconds at speed 1 for which an unknown run time counts in comparisons."""
MIN_SHARE_ON_ONE = 0.85
"""The share of a job in one cluster from which on the others slow it down little (Jones, in sonmez-2010 IX)."""
MAX_COUNTS_TRIED = 3
"""So many numbers of clusters are tried for given components, from the least on; then all clusters."""

FCM, CA, WF, CTF = ClusterMinimization(), CommunicationAware(), WorstFit(), CloseToFiles()
BY_LATENCY = Weighing()
NOTHING = Knowledge()


@dataclass(frozen=True, slots=True)
class Alternative:
    """An option, with where its components would go if it can be taken now."""

    option: Option
    speed: float
    """Of its slowest cluster."""
    placement: Placement | None = None
    blocked: float = 0.0
    """For an option of unknown wait: for how long the last job in its way has run already."""

    @property
    def cost(self) -> float:
        """Seconds to its end, for comparing."""
        option = self.option
        run = UNKNOWN_RUN_TIME * option.slowdown / self.speed if option.run is None else option.run
        return (option.wait or 0.0) + option.transfer + run


# On one cluster


def alone_now(request: Choosing, grid: GridView, knowledge: Knowledge) -> Alternative | None:
    """On the one cluster where it is over soonest; ties: the nearest nodes, then the fewest left idle."""
    total, wanted, nominal = request.total_size, _wanted(request, knowledge), knowledge.run_time(()) or UNKNOWN_RUN_TIME
    best: tuple[ClusterView, float] | None = None
    for equals in _soonest(wanted, nominal, grid):
        for name, seconds in equals:
            cluster = grid.get(name)
            if cluster is None or cluster.idle < total:
                continue
            if best is None or (cluster.idle, name) < (best[0].idle, best[0].name):
                best = cluster, seconds
        if best is not None:
            break
    if best is None:
        return None
    cluster, transfer = best
    placed = _components(request, grid, cluster)
    if placed is None:
        return None
    alternative = _alone(cluster, 0.0, transfer, knowledge)
    return replace(
        alternative, placement=Placement(placed, f"{cluster.name} alone holds it ({total} of {cluster.idle})")
    )


Equals = list[tuple[ClusterName, float]]
"""Clusters between which only their idle nodes decide, with the seconds of the transfers to them."""


def _soonest(wanted: Sequence[Files], nominal: float, grid: GridView) -> list[Equals]:
    """The usable clusters that inputs can be brought to, those where a job is over soonest first; ties: the nearest
    nodes."""
    own = network_of(grid, BY_LATENCY).own if grid.links else {}

    def ordered(grid: GridView) -> list[Equals]:
        ranks: dict[tuple[float, float], Equals] = {}
        for cluster in grid.by_idle:
            transfer = _longest(cluster.name, wanted, grid)
            if transfer is not None:
                rank = transfer + nominal / cluster.speed, own.get(cluster.name, inf)
                ranks.setdefault(rank, []).append((cluster.name, transfer))
        return [ranks[rank] for rank in sorted(ranks)]

    # Without transfers the order is the same for all run times.
    return grid.compute_lasting(("soonest", *wanted, nominal if wanted else 0.0), ordered)


def _alone(
    cluster: ClusterView, wait: float | None, transfer: float, knowledge: Knowledge, blocked: float = 0.0
) -> Alternative:
    run = knowledge.run_time(())
    seconds = None if run is None else run / cluster.speed
    return Alternative(Option((cluster.name,), 1.0, wait, transfer, seconds), cluster.speed, None, blocked)


def _components(request: Choosing, grid: GridView, cluster: ClusterView) -> tuple[PlacedComponent, ...] | None:
    """All components on one cluster that has the nodes."""
    if isinstance(request, NonFixedRequest):
        placed = []
        for index, component in enumerate(request.components):
            transfer = _brought(cluster.name, component.inputs, grid) or NONE
            placed.append(PlacedComponent(component.size, cluster.name, index, transfer.sources, transfer.seconds))
        return tuple(placed)
    if request.split_options:
        answer = place_options(request, grid.restrict_to(frozenset([cluster.name])))
        return None if isinstance(answer, Refusal) else answer.components
    if request.total_size < request.min_component_size:
        return None
    return (PlacedComponent(request.total_size, cluster.name),)


def alone_later(request: Choosing, grid: GridView, knowledge: Knowledge) -> Alternative | None:
    """On the one cluster where it would be over soonest after waiting for jobs of this scheduler to end.

    None where no cluster would have room even then. Where the wait is known nowhere, on the one whose last job to wait
    for has run for the shortest time.
    """
    total, wanted, nominal = request.total_size, _wanted(request, knowledge), knowledge.run_time(()) or UNKNOWN_RUN_TIME
    best: tuple[tuple[bool, float, float, ClusterName], ClusterView, float | None, float] | None = None
    for cluster in grid.by_idle:
        capacity = knowledge.capacities.get(cluster.name)
        if capacity is None or capacity.max_idle < total:
            continue
        transfer = _longest(cluster.name, wanted, grid)
        if transfer is None:
            continue
        wait, blocked = _wait(capacity, cluster.idle, total)
        cost = (wait or 0.0) + transfer + nominal / cluster.speed
        key = (wait is None, cost, blocked, cluster.name)
        if best is None or key < best[0]:
            best = key, cluster, wait, transfer
    if best is None:
        return None
    key, cluster, wait, transfer = best
    return _alone(cluster, wait, transfer, knowledge, key[2])


def _wait(capacity: Capacity, idle: int, wanted: int) -> tuple[float | None, float]:
    """Seconds until so many nodes are idle, if known; and how long the last job in the way has run."""
    for release in capacity.releases:
        idle += release.nodes
        if idle >= wanted:
            return release.seconds, release.age
    return None, 0.0


# On several


def together_now(request: Choosing, grid: GridView, knowledge: Knowledge) -> list[Alternative] | Refusal:
    """Splits over clusters, the best first; or why there is none."""
    answers = _splits(request, grid)
    if isinstance(answers, Refusal):
        return answers
    alternatives = [_together(request, placement, grid, knowledge) for placement in answers]
    return sorted(alternatives, key=lambda each: (each.cost, len(each.option.clusters), not _mostly_on_one(each)))


def _splits(request: Choosing, grid: GridView) -> list[Placement] | Refusal:
    if isinstance(request, NonFixedRequest):
        return _assigned(request, grid)
    answer = FCM.place(request, grid)
    if isinstance(answer, Refusal) or request.split_options:
        return answer if isinstance(answer, Refusal) else [answer]
    if _has_links(grid):
        near = CA.place(request, grid)
        if isinstance(near, Placement) and _are_linked(near, grid):
            return [near, answer] if _are_linked(answer, grid) else [near]
    return [answer]


def _are_linked(placement: Placement, grid: GridView) -> bool:
    """Whether the links between all of its clusters are measured: others may not even carry anything."""
    names = sorted({component.cluster for component in placement.components})
    return all(grid.link_between(one, other).latency is not None for one, other in combinations(names, 2))


def _assigned(request: NonFixedRequest, grid: GridView) -> list[Placement] | Refusal:
    """Given components on few clusters that are near to each other, on the few with most idle nodes, and on all.

    Where near ones do, no others are taken whose links are not measured.
    """
    policy = CTF if any(component.inputs for component in request.components) else WF
    near = next(filter(None, (_on_few(policy, request, grid, clusters) for clusters in _near(grid))), None)
    few = _on_few(policy, request, grid, grid.by_idle)
    answer = policy.place(request, grid)
    if isinstance(answer, Refusal) and policy is CTF:
        wanted = _wanted(request, NOTHING)
        if all(_longest(cluster.name, wanted, grid) is not None for cluster in grid.by_idle):
            answer = WF.place(request, grid)  # only bandwidths are not known: transfers are begun all the same
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
    """On the first of the clusters, as few as will do."""
    least = _least(request.total_size, clusters)
    for number in range(least, min(least + MAX_COUNTS_TRIED, len(clusters) + 1)):
        answer = policy.place(request, grid.restrict_to(frozenset(cluster.name for cluster in clusters[:number])))
        if isinstance(answer, Placement):
            return answer
    return None


def _near(grid: GridView) -> list[list[ClusterView]]:
    """Clusters with all links between them measured, set by set, the lowest latencies first (sonmez-2010 IV-C)."""
    if not _has_links(grid):
        return []

    def sets(grid: GridView) -> list[list[ClusterName]]:
        network = network_of(grid, BY_LATENCY)
        names = [cluster.name for cluster in network.together(grid)]
        near_sets = dict.fromkeys(frozenset(near_to_all([name, *names], network.near)) for name in names)
        return [[name for name in names if name in inside] for inside in near_sets]

    def with_idle_nodes(grid: GridView) -> list[list[ClusterView]]:
        found = grid.compute_lasting(("near ones",), sets)
        return [[cluster for name in names if (cluster := grid.get(name)) is not None] for names in found]

    return grid.compute_once(("near ones",), with_idle_nodes)


def _has_links(grid: GridView) -> bool:
    """Whether anything is known of the latencies between clusters."""
    return grid.compute_lasting(
        ("has links",),
        lambda grid: any(one != other and link.latency is not None for (one, other), link in grid.links.items()),
    )


def _least(total: int, by_idle: Sequence[ClusterView]) -> int:
    """How many of the clusters with most idle nodes have so many."""
    idle = 0
    for count, cluster in enumerate(by_idle, start=1):
        idle += cluster.idle
        if idle >= total:
            return count
    return len(by_idle)


def _together(request: Choosing, placement: Placement, grid: GridView, knowledge: Knowledge) -> Alternative:
    names = tuple(sorted({component.cluster for component in placement.components}))
    slowest = min(cluster.speed for name in names if (cluster := grid.get(name)) is not None)
    run = knowledge.run_time(names)
    transfer = max(component.transfer_time for component in placement.components)
    if isinstance(request, FlexibleRequest) and knowledge.inputs:
        transfer = max(_longest(name, [knowledge.inputs], grid) or 0.0 for name in names)
    slowdown = knowledge.slowdown(names)
    return Alternative(
        Option(names, slowdown, 0.0, transfer, None if run is None else run / slowest), slowest, placement
    )


def _mostly_on_one(alternative: Alternative) -> bool:
    placement = alternative.placement
    if placement is None:
        return True
    most = max(placement.nodes_on(name) for name in alternative.option.clusters)
    return most >= MIN_SHARE_ON_ONE * placement.total_size


# Inputs


def _wanted(request: Choosing, knowledge: Knowledge) -> list[Files]:
    """What components need, each list once; often nothing."""
    if isinstance(request, FlexibleRequest):
        return [knowledge.inputs] if knowledge.inputs else []
    return [files for files in dict.fromkeys(component.inputs for component in request.components) if files]


def _longest(site: ClusterName, wanted: Sequence[Files], grid: GridView) -> float | None:
    """Seconds of the longest transfer that a component needs there; None when one of them is impossible."""
    longest = 0.0
    for files in wanted:
        transfer = _brought(site, files, grid)
        if transfer is None:
            return None
        longest = max(longest, transfer.seconds)
    return longest


def _brought(site: ClusterName, files: Files, grid: GridView) -> Transfer | None:
    return estimate_transfer(site, files, grid, ASSUMED_BANDWIDTH) if files else NONE
