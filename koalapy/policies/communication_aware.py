"""Communication-Aware (sonmez-2010 IV-C): place a flexible request on clusters with fast links between them."""

from collections.abc import Mapping
from itertools import combinations, islice
from math import isfinite

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.errors import UsageError
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import FlexibleRequest, Request, RequestType
from koalapy.model.wording import MAX_LISTED, format_list, format_nodes, suggest_names
from koalapy.policies.flexible import placement_of, refusal_reason, unmet_need, whole_on_first
from koalapy.policies.network import Network, Weighing, find_combination, near_sets, network_of
from koalapy.policies.policy import does_not_serve, idle_nodes, idle_that_suffices, reason_for, with_idle
from koalapy.policies.splitting import Filled, can_hold, explain_options, fill_in_turn, most_components, place_options

OPTIONS = ("metric", "group_latency")
METRICS = ("latency", "bandwidth")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
BY_LATENCY = Weighing()


class CommunicationAware:
    """One cluster with a fast internal network, or else those with the fastest links, filled in turn."""

    name = "communication-aware"
    serves: frozenset[RequestType] = frozenset({"flexible"})
    keeps_together = True
    """A component is not placed again separately while nodes are claimed for it: the clusters were chosen together."""

    def __init__(self, weighing: Weighing = BY_LATENCY) -> None:
        self._weighing = weighing

    def configured(self, options: Mapping[str, str]) -> "CommunicationAware":
        """Return the policy with options ``metric`` and ``group_latency``.

        ``metric`` is ``latency`` or ``bandwidth``; ``group_latency`` is the maximum latency within a group. Raise
        ``UsageError`` for an unknown option or value.
        """
        for name, value in options.items():
            if name not in OPTIONS:
                raise _option_error(
                    name, value, f"policy {self.name} has no option {name}", suggest_names(name, OPTIONS)
                )
        metric = options.get("metric", METRICS[0])
        if metric not in METRICS:
            raise _option_error("metric", metric, f"metric is {metric}", suggest_names(metric, METRICS))
        return CommunicationAware(Weighing(metric == "bandwidth", _parse_latency(options.get("group_latency"))))

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        if request.split_options:
            return place_options(request, grid)
        if request.total_size > grid.usable_idle:
            return Refusal(refusal_reason(request, grid))
        network = network_of(grid, self._weighing)
        filled = self._fill_clusters(request, grid, network)
        if filled is None:
            return Refusal(self._refusal_reason(request, grid, network))
        return placement_of(filled, self._explain_choice(filled, network))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        if request.split_options:
            return explain_options(request, grid)
        network = network_of(grid, self._weighing)
        if self._fill_clusters(request, grid, network) is not None:
            return ()
        return tuple(self._explain_cluster(request, c, grid, network) for c in sorted(grid, key=lambda c: c.name))

    def _fill_clusters(self, request: FlexibleRequest, grid: GridView, network: Network) -> Filled | None:
        """Return the request whole on one cluster, or else split; None if it does not fit.

        Clusters with measured links between them are tried before those with unmeasured links.
        """
        if request.total_size > grid.usable_idle:
            return None
        if request.total_size <= grid.by_idle[0].idle:
            filled = whole_on_first(request, network.alone(grid))
            if filled is not None or not grid.limits_sizes:
                return filled
        for level in range(len(network.levels)):
            filled = self._fill_together(request, grid, network, level)
            if filled is not None:
                return filled
        return None

    def _fill_together(self, request: FlexibleRequest, grid: GridView, network: Network, level: int) -> Filled | None:
        """Return the request split over clusters that may be combined on one level of the network.

        Return None if it does not fit there.
        """
        min_size, total = request.min_component_size, request.total_size
        sets = self._cluster_sets(min_size, grid, network, level)
        for clusters in sets:
            if sum(cluster.idle for cluster in clusters) >= total:
                filled = fill_in_turn(request, clusters)
                if filled is not None:
                    return filled
        if network.groups or len(sets) < 2:
            return None
        ordered = network.order_for_combining(grid, min_size)
        max_count = most_components(request)
        near = find_combination(ordered, network.levels[level], lambda clusters: can_hold(clusters, max_count, total))
        return fill_in_turn(request, near) if near else None

    def _cluster_sets(self, min_size: int, grid: GridView, network: Network, level: int) -> list[list[ClusterView]]:
        """Return the sets of clusters to try, in order, cached for all requests of a scan; each set is in the order in
        which it is filled.

        Groups are ordered by their number of usable clusters. Without groups, each set has only clusters that may be
        combined.
        """

        def compute_sets(grid: GridView) -> list[list[ClusterView]]:
            ordered = network.order_for_combining(grid, min_size)
            if network.groups:
                groups = [[cluster for cluster in ordered if cluster.name in group] for group in network.groups]
                return sorted(filter(None, groups), key=len)
            names, near = tuple(cluster.name for cluster in ordered), network.levels[level]
            sets = grid.compute_lasting(("near sets", self._weighing, level, names), lambda _: near_sets(names, near))
            places = {name: place for place, name in enumerate(names)}
            return [[ordered[place] for place in sorted(map(places.__getitem__, inside))] for inside in sets]

        return grid.compute_once(("sets", self._weighing, min_size, level), compute_sets)

    def _explain_choice(self, filled: Filled, network: Network) -> str:
        """Return the reason for the chosen clusters, with their latency or bandwidth, for users."""
        metric = "bandwidth" if self._weighing.bandwidth else "latency"
        best = "highest" if self._weighing.bandwidth else "lowest"
        first = filled[0][0]
        if len(filled) == 1:
            value = self._cost_text(network.internal[first.name])
            return (
                f"{first.name} alone holds the job, and has the {best} {metric} within itself of those that do{value}"
            )
        shares = [
            f"{c.name} ({size} of {c.idle}{self._cost_text(network.average[c.name])})"
            for c, size in filled[:MAX_LISTED]
        ]
        return f"by {best} average {metric}: {format_list(shares, len(filled))}{_describe_unmeasured(filled, network)}"

    def _cost_text(self, cost: float) -> str:
        """Return a cost as text: a bandwidth in MB/s, or a latency in ms."""
        if not isfinite(cost):
            return ", not measured"
        return f", {-cost / 1e6:.3g} MB/s" if self._weighing.bandwidth else f", {cost * 1e3:.3g} ms"

    def _refusal_reason(self, request: FlexibleRequest, grid: GridView, network: Network) -> str:
        """Return why the request fits nowhere: too few idle nodes in all, or on clusters that may be combined."""
        if fill_in_turn(request, grid.by_idle) is None:
            return refusal_reason(request, grid)
        min_size = request.min_component_size
        sets = self._cluster_sets(min_size, grid, network, len(network.levels) - 1)
        max_idle = max((sum(cluster.idle for cluster in clusters) for clusters in sets), default=0)
        fewer = "" if max_idle < request.total_size else " within the request's bounds"
        needed = format_nodes(request.total_size)
        return (
            f"needs {needed}; at most {max_idle} are idle on {self._describe_combinable()}{fewer} ({idle_nodes(grid)})"
        )

    def _describe_combinable(self) -> str:
        """Return a description of the clusters that may be combined."""
        if self._weighing.bound is not None:
            return f"clusters of one group, with latencies of at most {self._weighing.bound:g} s between them"
        return "clusters of which none was found unreachable from another"

    def _explain_cluster(
        self, request: FlexibleRequest, cluster: ClusterView, grid: GridView, network: Network
    ) -> ClusterReason:
        """Return why the request does not fit with the cluster's idle nodes, and how many more it needs."""
        beside = network.levels[-1][cluster.name]
        near = sum(c.idle for c in grid.by_idle if c.name in beside)
        sufficient = idle_that_suffices(
            cluster,
            lambda idle: self._fill_clusters(request, with_idle(grid, cluster, idle), network) is not None,
            max(request.min_component_size, request.total_size - near),
        )
        needs = unmet_need(request, cluster)
        far = sum(1 for c in grid.by_idle if c.name not in beside and c.name != cluster.name)
        if far and cluster.idle >= request.min_component_size:
            needs = f"{needs}; {far} of the others cannot be combined with it: only {self._describe_combinable()} are"
        return reason_for(cluster, needs, sufficient)


def _describe_unmeasured(filled: Filled, network: Network) -> str:
    """Return the clause that names unmeasured links between the chosen clusters; empty if all are measured."""
    names = [cluster.name for cluster, _ in filled]
    measured = sum(len(network.near[name].intersection(names)) for name in names)  # each link twice
    if not (count := (len(names) * (len(names) - 1) - measured) // 2):
        return ""
    pairs = (f"{first} and {second}" for first, second in combinations(names, 2) if second not in network.near[first])
    return f"; not measured is the link between {format_list([*islice(pairs, MAX_LISTED)], count)}"


def _parse_latency(text: str | None) -> float | None:
    """Return a latency in seconds, parsed from a text such as ``0.005``, ``5ms`` or ``200us``; None for None."""
    if text is None:
        return None
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        bound = float(text.removesuffix(unit)) * UNITS.get(unit, 1.0)
    except ValueError:
        bound = -1.0
    if not (isfinite(bound) and bound > 0):
        raise _option_error("group_latency", text, f"group_latency is {text}", "give a latency, such as 5ms or 0.005")
    return bound


def _option_error(name: str, value: str, problem: str, hint: str) -> UsageError:
    return UsageError(problem, field=f"policy_options.{name}", value=value, hint=hint)
