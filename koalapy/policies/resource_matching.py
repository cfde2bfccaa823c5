"""Resource matching (lerida-2008): the nodes and uplinks on which a flexible request has the shortest run time."""

from collections import defaultdict
from collections.abc import Mapping

from koalapy.model.cluster import ClusterState, ClusterView, GridView, Uplink
from koalapy.model.errors import UsageError
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.request import FlexibleRequest, Request, RequestType
from koalapy.model.wording import MAX_LISTED, format_bytes, format_list, format_nodes, suggest_names
from koalapy.policies.flexible import refusal_reason, unmet_need
from koalapy.policies.knowledge import Knowledge
from koalapy.policies.matching import Kind, Matching, Mode, Problem, Site, find_matching, has_matching, most_admitted
from koalapy.policies.policy import does_not_serve, idle_that_suffices, reason_for, with_idle
from koalapy.policies.splitting import fill_in_turn

OPTIONS = ("mode",)
NOTHING = Knowledge()
UNKNOWN = Uplink()


class ResourceMatching:
    """The nodes and links on which the job runs the shortest, by its shares of computation and communication."""

    name = "resource-matching"
    serves: frozenset[RequestType] = frozenset({"flexible"})
    learns = True
    expects_releases = False
    keeps_together = True
    """A component is not placed again separately while nodes are claimed for it: the nodes were chosen together."""

    def __init__(self, mode: Mode = Mode.OPTIMAL, knowledge: Knowledge = NOTHING) -> None:
        self._mode, self._knowledge = mode, knowledge

    def configured(self, options: Mapping[str, str]) -> "ResourceMatching":
        """Return the policy with option ``mode``: ``optimal``, ``non-saturated`` or ``first-non-saturated``.

        Raise ``UsageError`` for an unknown option or value.
        """
        for name, value in options.items():
            if name not in OPTIONS:
                raise _option_error(
                    name, value, f"policy {self.name} has no option {name}", suggest_names(name, OPTIONS)
                )
        mode = options.get("mode", Mode.OPTIMAL)
        if mode not in list(Mode):
            raise _option_error("mode", mode, f"mode is {mode}", suggest_names(mode, Mode))
        return ResourceMatching(Mode(mode), self._knowledge)

    def informed(self, knowledge: Knowledge) -> "ResourceMatching":
        return ResourceMatching(self._mode, knowledge)

    def check(self, request: Request) -> None:
        if isinstance(request, FlexibleRequest) and request.split_options:
            raise UsageError(
                f"policy {self.name} splits a request itself",
                field="request.split_options",
                hint="leave them out, or use another policy",
            )

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        if request.total_size > grid.usable_idle:
            return Refusal(refusal_reason(request, grid))
        problem = self.matching_problem(request, grid)
        matching = find_matching(problem, self._mode)
        if matching is None:
            return Refusal(self._refusal_reason(request, grid, problem))
        placed = (PlacedComponent(share.nodes, share.site, node_class=share.kind) for share in matching.shares)
        return Placement(tuple(placed), _explain_matching(problem, matching))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        problem = self.matching_problem(request, grid)
        if has_matching(problem, self._mode):
            return ()
        return tuple(self._explain_cluster(request, c, grid, problem) for c in sorted(grid, key=lambda c: c.name))

    def matching_problem(self, request: FlexibleRequest, grid: GridView) -> Problem:
        """Return the matching problem: the idle nodes of usable clusters that have enough memory."""
        usable = sorted((c for c in grid.clusters if c.state is ClusterState.USABLE), key=lambda c: c.name)
        sites = (
            _create_site(cluster, grid.uplinks.get(cluster.name, UNKNOWN), self._knowledge.memory) for cluster in usable
        )
        share = self._knowledge.share
        bounds = request.min_component_size, request.max_components
        return Problem(request.total_size, tuple(sites), 1.0 - share, share, self._knowledge.bandwidth, *bounds)

    # Reasons

    def _refusal_reason(self, request: FlexibleRequest, grid: GridView, problem: Problem) -> str:
        """Return the first binding limit: nodes within the request's bounds, nodes with enough memory, or links."""
        if fill_in_turn(request, grid.by_idle) is None:
            return refusal_reason(request, grid)
        total = format_nodes(request.total_size)
        able = [(c, site.idle) for site in problem.sites if (c := grid.get(site.name)) is not None]
        roomy = sorted((c.with_idle(idle) for c, idle in able), key=lambda c: (-c.idle, c.name))
        if fill_in_turn(request, roomy) is None:
            within = " within the request's bounds" if sum(c.idle for c in roomy) >= request.total_size else ""
            have = format_list([f"{c.name} {idle} of {c.idle}" for c, idle in able])
            memory = f"{format_bytes(self._knowledge.memory)} of memory"
            return f"needs {total} with {memory}{within}; idle with that are {have}"
        bound = sorted(_link_limited_sites(problem), key=lambda entry: (-entry[1], entry[0].name))
        links = format_list([_link_text(problem, site) for site, _ in bound], separator="; ")
        return f"needs {total}, and every split saturates an uplink: {links}"

    def _explain_cluster(
        self, request: FlexibleRequest, cluster: ClusterView, grid: GridView, problem: Problem
    ) -> ClusterReason:
        """Return why the request does not fit with the cluster's idle nodes, and how many more it needs."""

        def suffices(idle: int) -> bool:
            return has_matching(self.matching_problem(request, with_idle(grid, cluster, idle)), self._mode)

        needs = unmet_need(request, cluster)
        site = next((site for site in problem.sites if site.name == cluster.name), None)
        if site is not None and site.idle < cluster.idle:
            needs = f"{site.idle} of them with {format_bytes(self._knowledge.memory)} of memory; {needs}"
        if site is not None and any(site is limited for limited, _ in _link_limited_sites(problem)):
            needs = f"{needs}; {_link_text(problem, site)}"
        return reason_for(cluster, needs, idle_that_suffices(cluster, suffices))


def _create_site(cluster: ClusterView, uplink: Uplink, memory: int) -> Site:
    """Return the idle nodes of a cluster that have ``memory`` bytes or more, and its uplink."""
    classes = [
        node_class for node_class in cluster.node_classes if node_class.memory is None or node_class.memory >= memory
    ]
    kinds = [
        Kind(node_class.name, 1.0 / node_class.power, node_class.idle)
        for node_class in classes
        if node_class.idle > 0 and node_class.power > 0
    ]
    if not cluster.node_classes:
        kinds = [Kind("", 1.0 / cluster.speed, cluster.idle)]
    return Site(cluster.name, tuple(kinds), uplink.capacity, uplink.consumed)


def _link_limited_sites(problem: Problem) -> list[tuple[Site, int]]:
    """Return the sites with uplinks that admit fewer nodes of the job than are idle, and the excluded numbers."""
    exclusions = ((site, min(site.idle, problem.nodes - 1) - most_admitted(problem, site)) for site in problem.sites)
    return [(site, excluded) for site, excluded in exclusions if excluded > 0]


# Texts for users


def _link_text(problem: Problem, site: Site) -> str:
    """Return how many nodes a site's uplink admits, and how much of its capacity is used, as text."""
    used = f"{format_bytes(site.consumed)}/s of {format_bytes(site.capacity or 0.0)}/s are used"
    admitted = most_admitted(problem, site)
    per_node = f"{format_bytes(problem.bandwidth)}/s each"
    return f"{site.name}'s uplink admits {admitted} of its {site.idle} nodes with {per_node} ({used})"


def _explain_matching(problem: Problem, matching: Matching) -> str:
    """Return the reason, for example ``north 6 (4 fast, 2 slow), south 6: 1.2 × the run time on idle nodes …``."""
    sites = {site.name: site for site in problem.sites}
    counts, kinds = dict.fromkeys(sites, 0), defaultdict[str, list[str]](list)
    for share in matching.shares:
        counts[share.site] += share.nodes
        kinds[share.site] += [f"{share.nodes} {share.kind}"] if share.kind else []
    used = [name for name, count in counts.items() if count]
    texts = [
        f"{name} {counts[name]}" + (f" ({format_list(kinds[name])})" if kinds[name] else "")
        for name in used[:MAX_LISTED]
    ]
    slowest = _slowest_nodes(problem, matching)
    parts = [f"computation {matching.processing:.3g} × ({slowest})"]
    if len(used) == 1:
        parts.append("communication 1 × (one cluster)")
    elif matching.communication <= 1.0:
        parts.append("communication 1 × (no uplink is saturated)")
    else:
        site = max((sites[n] for n in counts), key=lambda site: problem.link_slowdown(site, counts[site.name]))
        load = site.consumed + problem.uplink_demand(counts[site.name])
        link = f"{site.name}'s uplink with {format_bytes(load)}/s of {format_bytes(site.capacity or 0.0)}/s"
        parts.append(f"communication {matching.communication:.3g} × ({link})")
    nodes = format_list(texts, len(used))
    return f"{nodes}: {matching.time:.3g} × the run time on idle nodes of power 1; {', '.join(parts)}"


def _slowest_nodes(problem: Problem, matching: Matching) -> str:
    """Return the cluster and the class of the slowest nodes as text."""
    slowdowns = {(site.name, kind.name): kind.slowdown for site in problem.sites for kind in site.kinds}
    share = max(matching.shares, key=lambda share: slowdowns[share.site, share.kind])
    return f"{share.site}'s {share.kind}" if share.kind else share.site


def _option_error(name: str, value: str, problem: str, hint: str) -> UsageError:
    return UsageError(problem, field=f"policy_options.{name}", value=value, hint=hint)
