"""Call policies on the nodes that have what a job requires. Policies are unaware of the requirements.

A policy gets a view in which each cluster has only the nodes that meet the requirement. Components with different
requirements are placed one group after another, each on the nodes that the groups before leave. If that fails, other
clusters are searched for each component.
"""

from dataclasses import replace

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.job_spec import JobSpec
from koalapy.model.node_requirement import NodeRequirement
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal, RefusalKind
from koalapy.model.request import FixedRequest
from koalapy.model.wording import format_list
from koalapy.policies.policy import Policy
from koalapy.policies.reasons import not_usable
from koalapy.scheduler.queue.component_group import component_groups, single_components
from koalapy.scheduler.queue.component_search import ComponentSearch
from koalapy.scheduler.queue.eligibility import Demands, Eligibility
from koalapy.scheduler.queue.link_rules import streams_refusal
from koalapy.scheduler.queue.policy_calls import PolicyCalls


def lacking_text(cluster: ClusterView, requirement: NodeRequirement) -> str:
    """Return why no node of a cluster meets a requirement."""
    if reason := not_usable(cluster):
        return reason
    if cluster.name in requirement.exclude:
        return f"{cluster.name} is excluded by the job"
    return f"{cluster.name} has no node with {requirement}"


def _find_lacking(view: GridView, matching: GridView, spec: JobSpec) -> tuple[list[ClusterView], bool]:
    """Return the clusters without a matching node, and whether one prevents any placement.

    For a fixed request, only the clusters that it names count.
    """
    lacking = [cluster for cluster in view if matching.get(cluster.name) is None]
    if isinstance(spec.request, FixedRequest):
        names = {component.cluster for component in spec.request.components}
        lacking = [cluster for cluster in lacking if cluster.name in names]
        return lacking, bool(lacking)
    return lacking, not matching.clusters


class NodeMatching:
    """The calls of policies on the nodes that have what the job requires."""

    def __init__(self, eligibility: Eligibility) -> None:
        self._eligibility, self._calls = eligibility, PolicyCalls(eligibility)

    def evaluate(self, policy: Policy, spec: JobSpec, view: GridView) -> Placement | Refusal:
        """Return the policy's answer. Raise ``BrokenPolicy`` if it is invalid."""
        demands = self._eligibility.demands(spec)
        if not demands or not demands.nodes:
            return self._calls.evaluate(policy, spec, view)
        if len(demands.nodes) == 1:
            return self._evaluate_group(policy, spec, view, demands.nodes[0])
        answer = self._place_groups(policy, spec, demands, view)
        if isinstance(answer, Placement) or answer.kind in (RefusalKind.ADVICE, RefusalKind.RELAYS):
            return answer
        search = ComponentSearch(
            single_components(spec, demands, view),
            view,
            lambda component, part: self._calls.evaluate(policy, component.spec, part),
            lambda names: self._eligibility.may_run_on(spec, names, view),
        )
        placed = search.find_placement()
        if placed is None:
            return answer
        placement = _placement_of(placed, ["components with the fewest nodes first"])
        return streams_refusal(spec, placement, view) or placement

    def _place_groups(self, policy: Policy, spec: JobSpec, demands: Demands, view: GridView) -> Placement | Refusal:
        """Place the components of each requirement in turn, on the nodes that those before leave."""
        placed: list[PlacedComponent] = []
        reasons: list[str] = []
        remaining = view
        for group in component_groups(spec, demands, view):
            answer = self._evaluate_group(policy, group.spec, remaining, group.requirement)
            if isinstance(answer, Refusal):
                return answer
            placed += group.of_whole_request(answer)
            reasons.append(answer.reason)
            remaining = group.take_nodes(remaining, answer)
        names = frozenset(component.cluster for component in placed)
        if not self._eligibility.may_run_on(spec, names, view):
            text = f"its components fit on {format_list(sorted(names))}, which may not run it together"
            return Refusal(text, RefusalKind.ELIGIBILITY)
        placement = _placement_of(placed, reasons)
        return streams_refusal(spec, placement, view) or placement

    def _evaluate_group(
        self, policy: Policy, spec: JobSpec, view: GridView, requirement: NodeRequirement | None
    ) -> Placement | Refusal:
        """Return the policy's answer for components with one requirement. A refusal names the requirement."""
        if requirement is None:
            return self._calls.evaluate(policy, spec, view)
        matching = view.matching(requirement)
        lacking, is_impossible = _find_lacking(view, matching, spec)
        if is_impossible:
            texts = [lacking_text(cluster, requirement) for cluster in lacking]
            return Refusal(format_list(texts, separator="; "), RefusalKind.ELIGIBILITY)
        answer = self._calls.evaluate(policy, spec, matching)
        if isinstance(answer, Placement) or matching is view:
            return answer
        if requirement.of_nodes is None:
            return Refusal("; ".join([answer.summary, *(lacking_text(c, requirement) for c in lacking)]), answer.kind)
        return Refusal(f"{answer.summary}; only nodes with {requirement} count", answer.kind)

    def explain(self, policy: Policy, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Return why each cluster cannot serve the job now, by name; empty if the job can be placed."""
        demands = self._eligibility.demands(spec)
        if not demands or not demands.nodes:
            return self._calls.explain(policy, spec, view)
        if len(demands.nodes) == 1:
            return self._explain_group(policy, spec, view, demands.nodes[0])
        answer = self.evaluate(policy, spec, view)
        if isinstance(answer, Placement):
            return ()
        for group in component_groups(spec, demands, view):
            group_answer = self._evaluate_group(policy, group.spec, view, group.requirement)
            if isinstance(group_answer, Refusal):
                return self._explain_group(policy, group.spec, view, group.requirement)
            view = group.take_nodes(view, group_answer)
        return tuple(ClusterReason(cluster.name, answer.summary) for cluster in view)

    def _explain_group(
        self, policy: Policy, spec: JobSpec, view: GridView, requirement: NodeRequirement | None
    ) -> tuple[ClusterReason, ...]:
        """Return the reasons for components with one requirement. They count only nodes that meet it."""
        if requirement is None:
            return self._calls.explain(policy, spec, view)
        matching = view.matching(requirement)
        lacking, is_impossible = _find_lacking(view, matching, spec)
        reasons = [ClusterReason(cluster.name, lacking_text(cluster, requirement)) for cluster in lacking]
        if not is_impossible:
            found = self._calls.explain(policy, spec, matching)
            if not found:
                return ()
            reasons += [_with_requirement(reason, view, matching, requirement) for reason in found]
        return tuple(sorted(reasons, key=lambda reason: reason.cluster))


def _placement_of(placed: list[PlacedComponent], reasons: list[str]) -> Placement:
    """Return the placement of components, in the order of the request."""
    placed.sort(key=lambda component: component.request_index or 0)
    return Placement(tuple(placed), "; ".join(filter(None, reasons)))


def _with_requirement(
    reason: ClusterReason, view: GridView, matching: GridView, requirement: NodeRequirement
) -> ClusterReason:
    """Return a reason that names the requirement, if only some nodes of the cluster meet it."""
    whole, part = view.get(reason.cluster), matching.get(reason.cluster)
    if whole is None or part is None or part is whole or not_usable(whole):
        return reason
    return replace(reason, reason=f"{reason.reason}; {part.total} of its {whole.total} nodes have {requirement}")
