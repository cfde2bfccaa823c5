"""Communication-Aware (sonmez-2010 IV-C): place a flexible request on clusters with fast links between them."""

from collections.abc import Mapping
from itertools import combinations
from math import isfinite

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.errors import UsageError
from koalapy.model.placement import ClusterReason, Placement, Refusal
from koalapy.model.request import FlexibleRequest, Request, RequestType
from koalapy.model.wording import MAX_LISTED, format_list, format_nodes, suggest_names
from koalapy.policies.flexible import needs_of, placement_of, whole_on_first, why_not
from koalapy.policies.network import Network, Weighing, combination, near_sets, network_of
from koalapy.policies.policy import does_not_serve
from koalapy.policies.reasons import idle_nodes, idle_that_suffices, reason_for, with_idle
from koalapy.policies.splitting import Filled, explain_options, fill_in_turn, most_components, place_options, suffice

OPTIONS = ("metric", "group_latency")
METRICS = ("latency", "bandwidth")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
BY_LATENCY = Weighing()


class CommunicationAware:
    """One cluster with a fast network of its own, or else those with the fastest links, filled in turn."""

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
                raise _bad(name, value, f"policy {self.name} has no option {name}", suggest_names(name, OPTIONS))
        metric = options.get("metric", METRICS[0])
        if metric not in METRICS:
            raise _bad("metric", metric, f"metric is {metric}", suggest_names(metric, METRICS))
        return CommunicationAware(Weighing(metric == "bandwidth", _bound(options.get("group_latency"))))

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        if request.split_options:
            return place_options(request, grid)
        if request.total_size > grid.usable_idle:
            return Refusal(why_not(request, grid))
        network = network_of(grid, self._weighing)
        filled = self._fill(request, grid, network)
        if filled is None:
            return Refusal(self._why_not(request, grid, network))
        return placement_of(filled, self._why(filled, network))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        if request.split_options:
            return explain_options(request, grid)
        network = network_of(grid, self._weighing)
        if self._fill(request, grid, network) is not None:
            return ()
        return tuple(self._reason(request, c, grid, network) for c in sorted(grid, key=lambda c: c.name))

    def _fill(self, request: FlexibleRequest, grid: GridView, network: Network) -> Filled | None:
        if request.total_size > grid.usable_idle:
            return None
        if request.total_size <= grid.by_idle[0].idle:
            return whole_on_first(request, network.alone(grid))
        for level in range(len(network.levels)):
            filled = self._fill_together(request, grid, network, level)
            if filled is not None:
                return filled
        return None

    def _fill_together(self, request: FlexibleRequest, grid: GridView, network: Network, level: int) -> Filled | None:
        """Return the request split over clusters that may be combined on one level of the network.

        Return None if it does not fit there.
        """
        least, total = request.min_component_size, request.total_size
        sets = self._sets(least, grid, network, level)
        for clusters in sets:
            if sum(cluster.idle for cluster in clusters) >= total:
                filled = fill_in_turn(request, clusters)
                if filled is not None:
                    return filled
        if network.groups or len(sets) < 2:
            return None
        ordered = network.together(grid, least)
        most = most_components(request)
        near = combination(ordered, network.levels[level], lambda clusters: suffice(clusters, most, total))
        return fill_in_turn(request, near) if near else None

    def _sets(self, least: int, grid: GridView, network: Network, level: int) -> list[list[ClusterView]]:
        return grid.compute_once(
            ("sets", self._weighing, least, level), lambda grid: self._sets_anew(least, grid, network, level)
        )

    def _sets_anew(self, least: int, grid: GridView, network: Network, level: int) -> list[list[ClusterView]]:
        """Return the sets of clusters to try, in order; each set is in the order in which it is filled.

        Groups are ordered by their number of usable clusters. Without groups, each set has only clusters that may be
        combined.
        """
        ordered = network.together(grid, least)
        if network.groups:
            groups = [[cluster for cluster in ordered if cluster.name in group] for group in network.groups]
            return sorted(filter(None, groups), key=len)
        names, near = tuple(cluster.name for cluster in ordered), network.levels[level]
        sets = grid.compute_lasting(("near sets", self._weighing, level, names), lambda _: near_sets(names, near))
        return [[cluster for cluster in ordered if cluster.name in inside] for inside in sets]

    def _why(self, filled: Filled, network: Network) -> str:
        what = "bandwidth" if self._weighing.bandwidth else "latency"
        best = "highest" if self._weighing.bandwidth else "lowest"
        first = filled[0][0]
        if len(filled) == 1:
            value = self._cost_text(network.own[first.name])
            return f"{first.name} alone holds the job, and has the {best} {what} within itself of those that do{value}"
        taken = [
            f"{c.name} ({size} of {c.idle}{self._cost_text(network.average[c.name])})"
            for c, size in filled[:MAX_LISTED]
        ]
        return f"by {best} average {what}: {format_list(taken, len(filled))}{_unmeasured(filled, network)}"

    def _cost_text(self, cost: float) -> str:
        if not isfinite(cost):
            return ", not measured"
        return f", {-cost / 1e6:.3g} MB/s" if self._weighing.bandwidth else f", {cost * 1e3:.3g} ms"

    def _why_not(self, request: FlexibleRequest, grid: GridView, network: Network) -> str:
        if fill_in_turn(request, grid.by_idle) is None:
            return why_not(request, grid)
        least = request.min_component_size
        sets = self._sets(least, grid, network, len(network.levels) - 1)
        most = max((sum(cluster.idle for cluster in clusters) for clusters in sets), default=0)
        fewer = "" if most < request.total_size else " within the request's bounds"
        needed = format_nodes(request.total_size)
        return f"needs {needed}; at most {most} are idle on {self._near()}{fewer} ({idle_nodes(grid)})"

    def _near(self) -> str:
        """Return a description of the clusters that may be combined."""
        if self._weighing.bound is not None:
            return f"clusters of one group, with latencies of at most {self._weighing.bound:g} s between them"
        return "clusters of which none was found unreachable from another"

    def _reason(
        self, request: FlexibleRequest, cluster: ClusterView, grid: GridView, network: Network
    ) -> ClusterReason:
        beside = network.levels[-1][cluster.name]
        near = sum(c.idle for c in grid.by_idle if c.name in beside)
        wanted = idle_that_suffices(
            cluster,
            lambda idle: self._fill(request, with_idle(grid, cluster, idle), network) is not None,
            max(request.min_component_size, request.total_size - near),
        )
        needs = needs_of(request, cluster)
        far = sum(1 for c in grid.by_idle if c.name not in beside and c.name != cluster.name)
        if far and cluster.idle >= request.min_component_size:
            needs = f"{needs}; {far} of the others cannot be combined with it: only {self._near()} are"
        return reason_for(cluster, needs, wanted)


def _unmeasured(filled: Filled, network: Network) -> str:
    """Return the clause that names unmeasured links between the chosen clusters; empty if all are measured."""
    pairs = [(one.name, other.name) for (one, _), (other, _) in combinations(filled, 2)]
    unmeasured = [f"{one} and {other}" for one, other in pairs if other not in network.near[one]]
    return (
        f"; not measured is the link between {format_list(unmeasured[:MAX_LISTED], len(unmeasured))}"
        if unmeasured
        else ""
    )


def _bound(text: str | None) -> float | None:
    """Return a latency in seconds, parsed from a text such as ``0.005``, ``5ms`` or ``200us``; None for None."""
    if text is None:
        return None
    unit = next((unit for unit in UNITS if text.endswith(unit)), "")
    try:
        bound = float(text.removesuffix(unit)) * UNITS.get(unit, 1.0)
    except ValueError:
        bound = -1.0
    if not (isfinite(bound) and bound > 0):
        raise _bad("group_latency", text, f"group_latency is {text}", "give a latency, such as 5ms or 0.005")
    return bound


def _bad(name: str, value: str, problem: str, hint: str) -> UsageError:
    return UsageError(problem, field=f"policy_options.{name}", value=value, hint=hint)
