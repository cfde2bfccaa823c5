"""Call policies on the nodes that have what a job requires. Policies are unaware of the requirements.

A policy gets a view in which each cluster has only the nodes that meet the requirement. Components with different
requirements are placed one group after another, each on the nodes that the groups before leave. If that fails, other
clusters are searched for each component.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from koalapy.model.cluster import ClusterState, ClusterView, GridView, NodeClass, count_idle
from koalapy.model.job_spec import JobSpec
from koalapy.model.node_assignment import NodeAssignment, count_admitted
from koalapy.model.node_requirement import NodeFilter, NodeRequirement
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal, RefusalKind
from koalapy.model.request import ClusterName, ComponentRequest, FixedRequest, FlexibleRequest
from koalapy.model.wording import format_list
from koalapy.policies.policy import Capabilities, Policy, not_usable
from koalapy.scheduler.queue.component_sizes import Requirements, describe_excluded, exclude_by_size
from koalapy.scheduler.queue.eligibility import Demands, Eligibility, streams_refusal
from koalapy.scheduler.queue.policy_calls import PolicyCalls


@dataclass(frozen=True, slots=True)
class ComponentGroup:
    """The components of a job with equal requirements, or one of them, as a job of its own."""

    spec: JobSpec
    indices: tuple[int, ...]
    """Their indices in the whole request."""
    requirement: NodeRequirement | None

    @property
    def components(self) -> tuple[ComponentRequest, ...]:
        assert not isinstance(self.spec.request, FlexibleRequest)
        return self.spec.request.components

    @property
    def nodes(self) -> NodeFilter:
        """Return the nodes that each component may get."""
        return NodeFilter(requirement=self.requirement)

    def of_whole_request(self, placement: Placement) -> list[PlacedComponent]:
        """Return the placed components with their indices in the whole request."""
        return [replace(c, request_index=self.indices[c.request_index or 0]) for c in placement.components]

    def take_nodes(self, view: GridView, placement: Placement) -> GridView:
        """Return the view without the nodes of the placed components."""
        used = [c for c in view if placement.nodes_on(c.name)]
        return view.with_clusters([c.without(self.requirement, placement.nodes_on(c.name)) for c in used])


def component_groups(spec: JobSpec, demands: Demands, view: GridView) -> list[ComponentGroup]:
    """Return the components by requirement, first those that the fewest nodes meet."""
    indices = [
        [index for index, other in enumerate(demands.nodes) if other == requirement]
        for requirement in dict.fromkeys(demands.nodes)
    ]
    return _create_groups(spec, demands, view, indices)


def single_components(spec: JobSpec, demands: Demands, view: GridView) -> list[ComponentGroup]:
    """Return each component by itself, first those that the fewest nodes meet, then the largest."""
    return _create_groups(spec, demands, view, [[index] for index in range(len(demands.nodes))])


def _create_groups(
    spec: JobSpec, demands: Demands, view: GridView, indices: Iterable[list[int]]
) -> list[ComponentGroup]:
    """Return a group for each list of component indices."""
    request = spec.request
    assert not isinstance(request, FlexibleRequest)
    groups = []
    for group in indices:
        part = replace(request, components=tuple(request.components[index] for index in group))
        groups.append(ComponentGroup(replace(spec, request=part), tuple(group), demands.nodes[group[0]]))

    def rank(group: ComponentGroup) -> tuple[int, int]:
        matching = view.select_nodes(group.requirement) if group.requirement is not None else view
        return sum(cluster.total for cluster in matching), -max(component.size for component in group.components)

    return sorted(groups, key=rank)


MAX_STATES = 1000
"""Partial placements that one search examines at most, and policy calls."""
MAX_COMPONENTS = 100
"""Maximum components of a job that is searched, since each is one level of recursion."""
MAX_CHECKS = 100_000
"""Checks of a component on a cluster in one search, so that it does not block the scheduler."""

Promised = tuple[tuple[NodeFilter, int], ...]
"""The components on one cluster: the nodes that each may get, and its size."""
Partial = Mapping[ClusterName, Promised]
"""The components placed so far, by cluster."""
PlaceComponent = Callable[[ComponentGroup, GridView], Placement | Refusal]
"""Calls the policy for a component, with the nodes that it may get."""
MayShare = Callable[[frozenset[ClusterName]], bool]
"""Returns whether the job may run on these clusters together."""


class ComponentSearch:
    """The search for a placement of one job on one view, if placing one group after another has failed.

    The policy chooses the cluster of each component in turn. If the remaining components then fit nowhere, it chooses
    again among the other clusters. So a placement is found if there is one, up to ``MAX_STATES`` partial placements.
    """

    def __init__(
        self,
        components: Sequence[ComponentGroup],
        view: GridView,
        place: PlaceComponent,
        may_share: MayShare,
        *,
        max_states: int = MAX_STATES,
    ) -> None:
        """``components``: those with the fewest nodes to choose from first. ``max_states``: see ``MAX_STATES``."""
        self._components, self._view, self._place, self._may_share = components, view, place, may_share
        self._states_left = self._calls_left = max_states
        self._checks_left = MAX_CHECKS
        self._fits: dict[tuple[int, frozenset[tuple[ClusterName, Promised]]], bool] = {}

    def find_placement(self) -> list[PlacedComponent] | None:
        """Return the placed components of the whole request; None if none was found."""
        if len(self._components) > MAX_COMPONENTS:
            return None
        return self._place_from(0, {}) if self._may_fit(0, {}) else None

    def _place_from(self, position: int, partial: Partial) -> list[PlacedComponent] | None:
        """Return the components from a position on, placed beside those of a partial placement; None if impossible."""
        if position == len(self._components):
            return []
        component = self._components[position]
        clusters = dict(self._clusters_for(component, partial))
        while clusters and self._calls_left:
            self._calls_left -= 1
            answer = self._place(component, replace(self._view, clusters=tuple(clusters.values())))
            if isinstance(answer, Refusal):
                return None
            (placed,) = component.of_whole_request(answer)
            del clusters[placed.cluster]
            together = _with_component(partial, placed.cluster, component)
            if self._may_fit(position + 1, together):
                others = self._place_from(position + 1, together)
                if others is not None:
                    return [placed, *others]
        return None

    def _may_fit(self, position: int, partial: Partial) -> bool:
        """Return whether the components from a position on fit beside a partial placement, whatever the policy is."""
        if position == len(self._components):
            return True
        key = position, frozenset(partial.items())
        if key not in self._fits:
            self._states_left -= 1
            component = self._components[position]
            self._fits[key] = self._states_left >= 0 and any(
                self._may_fit(position + 1, _with_component(partial, name, component))
                for name, _ in self._clusters_for(component, partial)
            )
        return self._fits[key]

    def _clusters_for(self, component: ComponentGroup, partial: Partial) -> Iterator[tuple[ClusterName, ClusterView]]:
        """Yield name and view of each cluster that can run a component in addition to those of a partial placement.

        A view has only the free nodes that meet the component's requirement. After ``MAX_CHECKS`` none is yielded.
        """
        (request,) = component.components
        for cluster in self._view:
            promised = partial.get(cluster.name, ())
            if cluster.state is not ClusterState.USABLE or request.cluster not in (None, cluster.name):
                continue
            self._checks_left -= (len(promised) + 1) * len(cluster.known_classes)
            if self._checks_left < 0:
                return
            if _take_all(cluster, (*promised, (component.nodes, request.size))) is None:
                continue
            if not self._may_share(frozenset([*partial, cluster.name])):
                continue
            classes = _take_all(cluster, promised) or ()
            idle, parts = [c for c in classes if not c.is_part], tuple(c for c in classes if c.is_part)
            left = replace(
                cluster, idle=count_idle(classes), node_classes=tuple(idle) if cluster.node_classes else (), parts=parts
            )
            matching = left if component.requirement is None else left.select_nodes(component.requirement)
            if matching is not None:
                # All fit together, as checked above: a component placed before can move to other nodes of the cluster.
                yield cluster.name, replace(matching, idle=max(matching.idle, request.size))


def _with_component(partial: Partial, cluster: ClusterName, component: ComponentGroup) -> Partial:
    entry = component.nodes, component.components[0].size
    return {**partial, cluster: (*partial.get(cluster, ()), entry)}


def _take_all(cluster: ClusterView, promised: Promised) -> tuple[NodeClass, ...] | None:
    """Return the classes of a cluster without the nodes of these components; None if it has too few."""
    classes = (*cluster.parts, *cluster.known_classes)
    assignment = NodeAssignment(classes)
    for key, (nodes, size) in enumerate(sorted(promised, key=lambda entry: count_admitted(classes, entry[0]))):
        is_excluded = nodes.requirement is not None and cluster.name in nodes.requirement.exclude
        if is_excluded or not assignment.add(key, nodes, size):
            return None
    return assignment.remaining


def lacking_text(cluster: ClusterView, requirement: NodeRequirement, spec: JobSpec) -> str:
    """Return why no node of a cluster meets a requirement."""
    if reason := not_usable(cluster):
        return reason
    if cluster.name in requirement.exclude:
        return describe_excluded(cluster, requirement, spec)
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
        nodes = self._requirements(policy, spec, view)
        if len(nodes) < 2:
            return self._evaluate_group(policy, spec, view, nodes[0] if nodes else None)
        demands = (self._eligibility.demands(spec) or Demands())._replace(nodes=nodes)
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

    def _requirements(self, policy: Policy, spec: JobSpec, view: GridView) -> Requirements:
        """Return what the nodes of each component must have, without the clusters that do not accept its size."""
        demands = self._eligibility.demands(spec)
        nodes = demands.nodes if demands else ()
        if not view.limits_sizes:
            return nodes
        return exclude_by_size(nodes, spec, view, combines=Capabilities.from_policy(policy).combines_clusters)

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
        matching = view.select_nodes(requirement)
        lacking, is_impossible = _find_lacking(view, matching, spec)
        if is_impossible:
            texts = [lacking_text(cluster, requirement, spec) for cluster in lacking]
            return Refusal(format_list(texts, separator="; "), RefusalKind.ELIGIBILITY)
        answer = self._calls.evaluate(policy, spec, matching)
        if isinstance(answer, Placement) or matching is view:
            return answer
        if requirement.of_nodes is None:
            texts = [lacking_text(cluster, requirement, spec) for cluster in lacking]
            return Refusal("; ".join([answer.summary, *texts]), answer.kind)
        left = " left" if requirement.share else ""
        return Refusal(f"{answer.summary}; only nodes with {requirement}{left} count", answer.kind)

    def explain(self, policy: Policy, spec: JobSpec, view: GridView) -> tuple[ClusterReason, ...]:
        """Return why each cluster cannot serve the job now, by name; empty if the job can be placed."""
        nodes = self._requirements(policy, spec, view)
        if len(nodes) < 2:
            return self._explain_group(policy, spec, view, nodes[0] if nodes else None)
        demands = (self._eligibility.demands(spec) or Demands())._replace(nodes=nodes)
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
        matching = view.select_nodes(requirement)
        lacking, is_impossible = _find_lacking(view, matching, spec)
        reasons = [ClusterReason(cluster.name, lacking_text(cluster, requirement, spec)) for cluster in lacking]
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
