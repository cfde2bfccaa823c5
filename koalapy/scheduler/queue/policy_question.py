"""One job's question to its policy: where it may run on a view of the grid, or why nowhere.

Placement, dry runs and explanations ask the same object. Policies are unaware of permissions, folders, links, node
requirements and constraints: they get views of only the clusters and nodes that a job may use. Components with
different requirements are placed one group after another, each on the nodes that the groups before leave.
"""

from dataclasses import replace

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.job_spec import JobSpec
from koalapy.model.node_requirement import NodeRequirement
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal, RefusalKind
from koalapy.model.request import ClusterName, FixedRequest, Request
from koalapy.model.wording import format_list
from koalapy.policies.constraints import Constraints, grid_parts
from koalapy.policies.policy import Policy, not_usable
from koalapy.scheduler.queue.component_search import ComponentGroup, ComponentSearch, component_groups
from koalapy.scheduler.queue.component_sizes import Requirements, describe_excluded, exclude_by_size, place_within_sizes
from koalapy.scheduler.queue.eligibility import Demands, Eligibility, Exclusion, linked_sets, streams_refusal
from koalapy.scheduler.queue.policy_answers import call_explain, call_policy, explain_clusters


class PolicyQuestion:
    """The question of one job to its policy."""

    def __init__(self, policy: Policy, spec: JobSpec, eligibility: Eligibility) -> None:
        self._policy, self._spec, self._eligibility = policy, spec, eligibility

    def place(self, view: GridView) -> Placement | Refusal:
        """Return the policy's answer on a view. Raise ``BrokenPolicy`` if it is invalid."""
        spec, nodes = self._spec, self._requirements(view)
        if len(nodes) < 2:
            return self._place_group(ComponentGroup(spec, nodes[0] if nodes else None), view)
        answer = self._place_in_turn(nodes, view)
        if isinstance(answer, Placement) or answer.kind in (RefusalKind.ADVICE, RefusalKind.RELAYS):
            return answer
        search = ComponentSearch(
            component_groups(spec, nodes, view, single=True),
            view,
            lambda component, part: self._place_group(replace(component, requirement=None), part),
            lambda names: self._eligibility.may_run_on(spec, names, view),
        )
        placed = search.find_placement()
        if placed is None:
            return answer
        placement = _placement_of(placed, ["components with the fewest nodes first"])
        return streams_refusal(spec, placement, view) or placement

    def _requirements(self, view: GridView) -> Requirements:
        """Return what the nodes of each component must have, without the clusters that do not accept its size."""
        demands = self._eligibility.demands(self._spec)
        nodes = demands.nodes if demands else ()
        return exclude_by_size(nodes, self._spec, view) if view.limits_sizes else nodes

    def _place_in_turn(self, nodes: Requirements, view: GridView) -> Placement | Refusal:
        """Place the components of each requirement in turn, on the nodes that those before leave."""
        placed: list[PlacedComponent] = []
        reasons: list[str] = []
        remaining = view
        for group in component_groups(self._spec, nodes, view):
            answer = self._place_group(group, remaining)
            if isinstance(answer, Refusal):
                return answer
            placed += group.of_whole_request(answer)
            reasons.append(answer.reason)
            remaining = group.take_nodes(remaining, answer)
        names = frozenset(component.cluster for component in placed)
        if not self._eligibility.may_run_on(self._spec, names, view):
            text = f"its components fit on {format_list(sorted(names))}, which may not run it together"
            return Refusal(text, RefusalKind.ELIGIBILITY)
        placement = _placement_of(placed, reasons)
        return streams_refusal(self._spec, placement, view) or placement

    def _place_group(self, group: ComponentGroup, view: GridView) -> Placement | Refusal:
        """Return the policy's answer for components with one requirement, on the clusters that may run them together.

        A refusal also says which clusters were left out.
        """
        spec, requirement = group.spec, group.requirement
        demands = self._eligibility.demands_on(spec, view)
        if not demands and requirement is None and not (view.relays.streams or view.cut_off):
            return self._place_on_sets(spec, view, NO_DEMANDS)  # almost every job
        demands = demands or NO_DEMANDS
        able, exclusions = self._exclude(group, demands, view)
        if exclusions and (isinstance(spec.request, FixedRequest) or not able.clusters):
            summary = format_list([exclusion.summary for exclusion in exclusions], separator="; ")
            return Refusal(summary, exclusions[-1].kind or RefusalKind.ELIGIBILITY)
        answer = self._place_on_sets(spec, able, demands)
        if isinstance(answer, Refusal) and answer.kind is RefusalKind.RELAYS:
            sets = linked_sets(demands.sets, spec.links, able, without_relays=True)
            without_relays = self._place_on_sets(spec, able, demands._replace(sets=sets))
            answer = answer if isinstance(without_relays, Refusal) else without_relays
        if isinstance(answer, Placement):
            return answer
        texts, kind = [answer.summary], answer.kind
        if requirement is not None and requirement.of_nodes is not None and view.select_nodes(requirement) is not view:
            texts.append(f"only nodes with {requirement}{' left' if requirement.share else ''} count")
            exclusions = [exclusion for exclusion in exclusions if exclusion.kind is not None]
        for exclusion in exclusions:
            texts.append(exclusion.summary)
            kind = exclusion.kind or kind
        return Refusal("; ".join(texts), kind)

    def _exclude(self, group: ComponentGroup, demands: Demands, view: GridView) -> tuple[GridView, list[Exclusion]]:
        """Return the clusters and nodes that a group may use, and why it may not use the others."""
        spec, requirement = group.spec, group.requirement
        exclusions = [*self._eligibility.exclusions(spec, demands, view)]
        if requirement is not None:
            matching = view.select_nodes(requirement)
            lacking = {c.name: _lacking_text(c, requirement, spec) for c in view if matching.get(c.name) is None}
            if isinstance(spec.request, FixedRequest):
                requested = {component.cluster for component in spec.request.components}
                lacking = {name: text for name, text in lacking.items() if name in requested}
            if lacking:
                exclusions.append(Exclusion([*lacking], "; ".join(lacking.values()), lacking.__getitem__, None))
            view = matching
        excluded = frozenset(name for exclusion in exclusions for name in exclusion.clusters)
        if excluded.isdisjoint(cluster.name for cluster in view):
            return view, exclusions
        return view.select_clusters(frozenset(cluster.name for cluster in view) - excluded), exclusions

    def _place_on_sets(self, spec: JobSpec, view: GridView, demands: Demands) -> Placement | Refusal:
        """Call the policy with each set of clusters that may run one job together, most idle nodes first."""
        ask = place_within_sizes if view.limits_sizes else call_policy
        is_fixed, constraints = isinstance(spec.request, FixedRequest), demands.constraints
        parts = [view] if is_fixed else self._eligibility.sharing_groups(view, demands.sets)
        best: Refusal | None = None
        for part in parts:
            answer = ask(self._policy, spec.request, part)
            if constraints and isinstance(answer, Placement):
                answer = self._keep_constraints(answer, spec.request, part, constraints)
            refusal = answer if isinstance(answer, Refusal) else streams_refusal(spec, answer, view)
            if refusal is None:
                return answer
            best = refusal if best is None or refusal.kind is RefusalKind.RELAYS else best
        assert best is not None
        if len(parts) > 1 and isinstance(self._place_on_sets(spec, view, demands._replace(sets=())), Placement):
            apart = self._eligibility.conflict_text((cluster.name for cluster in view.by_idle), demands, view)
            return Refusal(f"{best.summary}; {apart}", RefusalKind.ELIGIBILITY)
        return best

    def _keep_constraints(
        self, answer: Placement, request: Request, view: GridView, constraints: Constraints
    ) -> Placement | Refusal:
        """Return a placement, or the policy's answer for a part of the view if it violates the constraints."""
        violations = constraints.describe_violations(answer, view)
        if not violations:
            return answer
        ask, refused = place_within_sizes if view.limits_sizes else call_policy, ""
        for part_request, part in grid_parts(request, answer, view, constraints):
            part_answer = ask(self._policy, part_request, part)
            if isinstance(part_answer, Refusal):
                refused = refused or f"{part_answer.summary}; "
            elif not constraints.describe_violations(part_answer, view):
                return part_answer
        return Refusal(f"{refused}{violations}", RefusalKind.ELIGIBILITY)

    def explain(self, view: GridView) -> tuple[ClusterReason, ...]:
        """Return why each cluster cannot serve the job now, by name; empty if the job can be placed.

        For a fixed request only the clusters that prevent its placement are returned. ``missing`` is the number of
        nodes that would suffice within the constraints. Raise ``BrokenPolicy`` for an invalid answer.
        """
        answer, nodes = self.place(view), self._requirements(view)
        if isinstance(answer, Placement):
            return ()
        if len(nodes) < 2:
            return self._explain_group(ComponentGroup(self._spec, nodes[0] if nodes else None), view, answer)
        for group in component_groups(self._spec, nodes, view):
            group_answer = self._place_group(group, view)
            if isinstance(group_answer, Refusal):
                return self._explain_group(group, view, group_answer)
            view = group.take_nodes(view, group_answer)
        return tuple(ClusterReason(cluster.name, answer.summary) for cluster in view)

    def _explain_group(self, group: ComponentGroup, view: GridView, refusal: Refusal) -> tuple[ClusterReason, ...]:
        """Return the reasons of clusters against components with one requirement, which were refused.

        The policy gives the reasons only of clusters that are usable and where the job may run.
        """
        spec, request = group.spec, group.spec.request
        demands = self._eligibility.demands_on(spec, view) or NO_DEMANDS
        able, exclusions = self._exclude(group, demands, view)
        reasons: dict[ClusterName, ClusterReason] = {}
        for exclusion in exclusions:
            for name in exclusion.clusters:
                reasons.setdefault(name, ClusterReason(name, exclusion.reason(name)))
        if isinstance(request, FixedRequest):
            requested = {component.cluster or "" for component in request.components}
            reasons = reasons or call_explain(self._policy, request, able)
            reasons = reasons or {name: ClusterReason(name, str(refusal)) for name in requested}
        else:
            for cluster in able:
                if text := not_usable(cluster):
                    reasons[cluster.name] = ClusterReason(cluster.name, text)
            parts = self._eligibility.sharing_groups(able, demands.sets)
            for part in parts:
                for name, reason in explain_clusters(self._policy, request, part, demands.constraints, refusal).items():
                    if name not in reasons and len(parts) > 1:
                        partners = self._eligibility.partners_text(name, demands, view)
                        reason = replace(reason, reason=f"{reason.reason}; {partners}")
                    reasons.setdefault(name, reason)
        if group.requirement is not None:
            reasons = {
                name: _with_requirement(reason, view.get(name), able.get(name), group.requirement)
                for name, reason in reasons.items()
            }
        return tuple(reasons[name] for name in sorted(reasons))


NO_DEMANDS = Demands()


def _lacking_text(cluster: ClusterView, requirement: NodeRequirement, spec: JobSpec) -> str:
    """Return why no node of a cluster meets a requirement."""
    if reason := not_usable(cluster):
        return reason
    if cluster.name in requirement.exclude:
        return describe_excluded(cluster, requirement, spec)
    return f"{cluster.name} has no node with {requirement}"


def _placement_of(placed: list[PlacedComponent], reasons: list[str]) -> Placement:
    """Return the placement of components, in the order of the request."""
    placed.sort(key=lambda component: component.request_index or 0)
    return Placement(tuple(placed), "; ".join(filter(None, reasons)))


def _with_requirement(
    reason: ClusterReason, cluster: ClusterView | None, part: ClusterView | None, requirement: NodeRequirement
) -> ClusterReason:
    """Return a reason that names the requirement, if only some nodes of the cluster meet it."""
    if cluster is None or part is None or part is cluster or not_usable(cluster):
        return reason
    return replace(reason, reason=f"{reason.reason}; {part.total} of its {cluster.total} nodes have {requirement}")
