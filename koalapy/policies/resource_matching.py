"""Resource matching (lerida-2008): the nodes and uplinks on which a flexible request has the shortest run time."""

from collections.abc import Mapping

from koalapy.model.cluster import ClusterState, ClusterView, GridView, Uplink
from koalapy.model.errors import UsageError
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.request import FlexibleRequest, Request, RequestType
from koalapy.model.wording import format_bytes, format_list, format_nodes, suggest_names
from koalapy.policies.flexible import needs_of, why_not
from koalapy.policies.knowledge import Knowledge
from koalapy.policies.matching.exact import Mode, fits, match, most_admitted
from koalapy.policies.matching.problem import Kind, Matching, Problem, Site
from koalapy.policies.policy import does_not_serve
from koalapy.policies.reasons import idle_that_suffices, reason_for, with_idle
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
    heeds_memory = True

    def __init__(self, mode: Mode = Mode.OPTIMAL, knowledge: Knowledge = NOTHING) -> None:
        self._mode, self._known = mode, knowledge

    def configured(self, options: Mapping[str, str]) -> "ResourceMatching":
        """Return the policy with option ``mode``: ``optimal``, ``non-saturated`` or ``first-non-saturated``.

        Raise ``UsageError`` for an unknown option or value.
        """
        for name, value in options.items():
            if name not in OPTIONS:
                raise _bad(name, value, f"policy {self.name} has no option {name}", suggest_names(name, OPTIONS))
        mode = options.get("mode", Mode.OPTIMAL)
        if mode not in list(Mode):
            raise _bad("mode", mode, f"mode is {mode}", suggest_names(mode, Mode))
        return ResourceMatching(Mode(mode), self._known)

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
            return Refusal(why_not(request, grid))
        problem = self.problem(request, grid)
        found = match(problem, self._mode)
        if found is None:
            return Refusal(self._why_not(request, grid, problem))
        placed = (PlacedComponent(share.nodes, share.site, node_class=share.kind) for share in found.shares)
        return Placement(tuple(placed), _why(problem, found))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        if not isinstance(request, FlexibleRequest):
            raise does_not_serve(self, request)
        problem = self.problem(request, grid)
        if fits(problem, self._mode):
            return ()
        return tuple(self._reason(request, c, grid, problem) for c in sorted(grid, key=lambda c: c.name))

    def problem(self, request: FlexibleRequest, grid: GridView) -> Problem:
        """Return the matching problem: the idle nodes of usable clusters that have enough memory."""
        usable = sorted((c for c in grid.clusters if c.state is ClusterState.USABLE), key=lambda c: c.name)
        sites = (_site(cluster, grid.uplinks.get(cluster.name, UNKNOWN), self._known.memory) for cluster in usable)
        share = self._known.share
        bounds = request.min_component_size, request.max_components
        return Problem(request.total_size, tuple(sites), 1.0 - share, share, self._known.bandwidth, *bounds)

    # Reasons

    def _why_not(self, request: FlexibleRequest, grid: GridView, problem: Problem) -> str:
        """Return the first binding limit: nodes within the request's bounds, nodes with enough memory, or links."""
        if fill_in_turn(request, grid.by_idle) is None:
            return why_not(request, grid)
        total = format_nodes(request.total_size)
        able = [(c, site.idle) for site in problem.sites if (c := grid.get(site.name)) is not None]
        roomy = sorted((c.with_idle(idle) for c, idle in able), key=lambda c: (-c.idle, c.name))
        if fill_in_turn(request, roomy) is None:
            within = " within the request's bounds" if sum(c.idle for c in roomy) >= request.total_size else ""
            have = format_list([f"{c.name} {idle} of {c.idle}" for c, idle in able])
            return f"needs {total} with {format_bytes(self._known.memory)} of memory{within}; idle with that are {have}"
        bound = sorted(_held_back(problem), key=lambda held: (-held[1], held[0].name))
        links = format_list([_link_text(problem, site) for site, _ in bound], separator="; ")
        return f"needs {total}, and every split saturates an uplink: {links}"

    def _reason(
        self, request: FlexibleRequest, cluster: ClusterView, grid: GridView, problem: Problem
    ) -> ClusterReason:
        def suffices(idle: int) -> bool:
            return fits(self.problem(request, with_idle(grid, cluster, idle)), self._mode)

        needs = needs_of(request, cluster)
        site = next((site for site in problem.sites if site.name == cluster.name), None)
        if site is not None and site.idle < cluster.idle:
            needs = f"{site.idle} of them with {format_bytes(self._known.memory)} of memory; {needs}"
        if site is not None and any(site is held for held, _ in _held_back(problem)):
            needs = f"{needs}; {_link_text(problem, site)}"
        return reason_for(cluster, needs, idle_that_suffices(cluster, suffices))


def _site(cluster: ClusterView, uplink: Uplink, memory: int) -> Site:
    classes = [each for each in cluster.node_classes if each.memory is None or each.memory >= memory]
    kinds = [Kind(each.name, 1.0 / each.power, each.idle) for each in classes if each.idle > 0 and each.power > 0]
    if not cluster.node_classes:
        kinds = [Kind("", 1.0 / cluster.speed, cluster.idle)]
    return Site(cluster.name, tuple(kinds), uplink.capacity, uplink.consumed)


def _held_back(problem: Problem) -> list[tuple[Site, int]]:
    """Return the sites with uplinks that admit fewer nodes of the job than are idle, and the excluded numbers."""
    each = ((site, min(site.idle, problem.nodes - 1) - most_admitted(problem, site)) for site in problem.sites)
    return [(site, kept) for site, kept in each if kept > 0]


# Texts for users


def _link_text(problem: Problem, site: Site) -> str:
    used = f"{format_bytes(site.consumed)}/s of {format_bytes(site.capacity or 0.0)}/s are used"
    admitted = most_admitted(problem, site)
    each = f"{format_bytes(problem.bandwidth)}/s each"
    return f"{site.name}'s uplink admits {admitted} of its {site.idle} nodes with {each} ({used})"


def _why(problem: Problem, found: Matching) -> str:
    """Return the reason, for example ``north 6 (4 fast, 2 slow), south 6: 1.2 × the run time on idle nodes …``."""
    sites = {site.name: site for site in problem.sites}
    counts = {name: sum(share.nodes for share in found.shares if share.site == name) for name in sites}
    given = []
    for name, count in counts.items():
        kinds = [f"{share.nodes} {share.kind}" for share in found.shares if share.site == name and share.kind]
        if count:
            given.append(f"{name} {count} ({format_list(kinds)})" if kinds else f"{name} {count}")
    slowest = _slowest(problem, found)
    parts = [f"computation {found.processing:.3g} × ({slowest})"]
    if len(given) == 1:
        parts.append("communication 1 × (one cluster)")
    elif found.communication <= 1.0:
        parts.append("communication 1 × (no uplink is saturated)")
    else:
        site = max((sites[n] for n in counts), key=lambda site: problem.link_slowdown(site, counts[site.name]))
        load = site.consumed + problem.demand(counts[site.name])
        link = f"{site.name}'s uplink with {format_bytes(load)}/s of {format_bytes(site.capacity or 0.0)}/s"
        parts.append(f"communication {found.communication:.3g} × ({link})")
    return f"{format_list(given)}: {found.time:.3g} × the run time on idle nodes of power 1; {', '.join(parts)}"


def _slowest(problem: Problem, found: Matching) -> str:
    slowdowns = {(site.name, kind.name): kind.slowdown for site in problem.sites for kind in site.kinds}
    share = max(found.shares, key=lambda share: slowdowns[share.site, share.kind])
    return f"{share.site}'s {share.kind}" if share.kind else share.site


def _bad(name: str, value: str, problem: str, hint: str) -> UsageError:
    return UsageError(problem, field=f"policy_options.{name}", value=value, hint=hint)
