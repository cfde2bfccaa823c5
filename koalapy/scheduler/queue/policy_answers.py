"""Call policies and validate their answers, since a policy may be foreign code."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from koalapy.model.cluster import ClusterState, ClusterView, GridView
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.request import ClusterName, FlexibleRequest, Request
from koalapy.model.wording import format_list, format_nodes
from koalapy.policies.constraints import Constraints, cap_components, part_with
from koalapy.policies.knowledge import Knowledge
from koalapy.policies.policy import Policy, reason_for

Reasons = dict[ClusterName, ClusterReason]
"""The reasons why clusters cannot serve a job, by cluster name."""


class BrokenPolicy(Exception):
    """A policy returned an invalid answer; ``message`` names the policy and the problem."""

    def __init__(self, policy: str, problem: str) -> None:
        self.policy = policy
        self.message = f"policy {policy} is broken: {problem}"
        super().__init__(self.message)


def _call(policy: Policy, method: Callable[..., object], *arguments: object) -> object:
    """Return what a method of a policy returns. Raise ``BrokenPolicy`` if it raises an error."""
    try:
        return method(*arguments)
    except Exception as error:
        raise BrokenPolicy(policy.name, f"it raised {error!r:.200}") from error


def inform_policy(policy: Policy, knowledge: Knowledge) -> Policy:
    """Return a learning policy with the run-time statistics of a job."""
    answer = _call(policy, getattr(policy, "informed"), knowledge)  # noqa: B009
    if type(answer) is not type(policy) and not isinstance(answer, Policy):  # isinstance with a protocol is slow
        raise BrokenPolicy(policy.name, f"informed, it was {repr(answer)[:80]}, which is not a policy")
    return answer


def call_policy(policy: Policy, request: Request, view: GridView) -> Placement | Refusal:
    """Return the policy's answer after checking it against the request and the view. Raise ``BrokenPolicy``."""
    answer = _call(policy, policy.place, request, view)
    if isinstance(answer, Refusal):
        return answer
    if not isinstance(answer, Placement):
        raise BrokenPolicy(policy.name, f"it answered {repr(answer)[:80]}, neither a placement nor a refusal")
    problem = _shape_problem(answer) or _grid_problem(answer, view) or _request_problem(answer, request)
    if problem:
        raise BrokenPolicy(policy.name, problem)
    return answer


def _shape_problem(placement: Placement) -> str:
    """Return why an answer is not a placement at all; empty if it is one."""
    components: object = placement.components
    if not isinstance(components, tuple) or not components:
        return "it placed no components"
    for component in components:
        if not isinstance(component, PlacedComponent) or not isinstance(component.cluster, str):
            return f"it placed {repr(component)[:80]}"
        if type(component.size) is not int or component.size < 1:
            return f"it placed a component of the size {component.size!r}"
    return ""


def _grid_problem(placement: Placement, view: GridView) -> str:
    """Return why a placement does not fit on the offered clusters and the idle nodes of their classes; empty if it
    does."""
    placed: dict[tuple[ClusterName, str], int] = {}
    for component in placement.components:
        for node_class in ("", component.node_class) if component.node_class else ("",):
            key = component.cluster, node_class
            placed[key] = placed.get(key, 0) + component.size
    for (name, node_class), size in placed.items():
        cluster = view.get(name)
        if cluster is None:
            return f"it placed {format_nodes(size)} on {name}, which it was not offered"
        if cluster.state is not ClusterState.USABLE:
            return f"it placed {format_nodes(size)} on {name}, which is {cluster.state}"
        idle = cluster.idle if not node_class else {c.name: c.idle for c in cluster.node_classes}.get(node_class)
        if idle is None or size > idle:
            target = f"{name}'s class {node_class}" if node_class else name
            problem = f"where {idle} are idle" if idle is not None else "which it has none of"
            return f"it placed {format_nodes(size)} on {target}, {problem}"
    return ""


def _request_problem(placement: Placement, request: Request) -> str:
    """Return why a placement does not match the request; empty if it does."""
    placed = placement.components
    if isinstance(request, FlexibleRequest):
        return _flexible_problem(request, _flexible_sizes(placed))
    count = len(request.components)
    if len(placed) != count or {component.request_index for component in placed} != set(range(count)):
        return f"it placed {len(placed)} components that are not the request's {count}, each once"
    for component in placed:
        index = component.request_index or 0
        requested = request.components[index]
        if component.size != requested.size:
            return f"it placed component {index} with {format_nodes(component.size)} in place of {requested.size}"
        if requested.cluster is not None and requested.cluster != component.cluster:
            return f"it placed component {index} on {component.cluster} in place of {requested.cluster}"
    return ""


def _flexible_sizes(placed: Sequence[PlacedComponent]) -> list[int]:
    """Return the sizes that the request's bounds apply to: the classes of one cluster count as one component."""
    by_class: dict[ClusterName, int] = {component.cluster: 0 for component in placed if component.node_class}
    sizes = []
    for component in placed:
        if component.cluster in by_class:
            by_class[component.cluster] += component.size
        else:
            sizes.append(component.size)
    return sizes + list(by_class.values())


def _flexible_problem(request: FlexibleRequest, sizes: Sequence[int]) -> str:
    """Return why component sizes violate a flexible request; empty if they do not."""
    if sum(sizes) != request.total_size:
        return f"it placed {format_nodes(sum(sizes))} in place of {request.total_size}"
    if min(sizes) < request.min_component_size:
        return f"it placed a component of {min(sizes)}, below the min_component_size of {request.min_component_size}"
    if request.max_components is not None and len(sizes) > request.max_components:
        return f"it placed {len(sizes)} components, above the max_components of {request.max_components}"
    if request.split_options and sorted(sizes) not in [sorted(option) for option in request.split_options]:
        return f"it split into {sorted(sizes, reverse=True)}, which is none of the split_options"
    return ""


def explain_clusters(
    policy: Policy, request: Request, view: GridView, constraints: Constraints, refusal: Refusal
) -> Reasons:
    """Return why each cluster of the view cannot serve a request: the ``refusal`` where the policy gives no reason.

    Raise ``BrokenPolicy`` for invalid reasons.
    """
    if not constraints:
        return _complete_reasons(call_explain(policy, request, view), view, refusal)
    capped_request = request
    if constraints.at_most is not None and isinstance(request, FlexibleRequest) and not request.split_options:
        capped_request = cap_components(request, constraints.at_most)
    cached: dict[frozenset[ClusterName], Reasons] = {}
    reasons: Reasons = {}
    for cluster in view:
        part = part_with(cluster, request, view, constraints)
        names = frozenset(c.name for c in part)
        if names not in cached:
            cached[names] = call_explain(policy, capped_request, part)
        reason = cached[names].get(cluster.name)
        if reason is not None:
            beside = _combination_limits(cluster, view, constraints)
            reasons[cluster.name] = replace(reason, reason=f"{reason.reason}{beside}")
    return _complete_reasons(reasons, view, refusal)


def call_explain(policy: Policy, request: Request, view: GridView) -> Reasons:
    """Return the policy's reasons by cluster. Raise ``BrokenPolicy`` if it fails or returns anything else."""
    answer = _call(policy, policy.explain, request, view)
    if not isinstance(answer, tuple) or not all(isinstance(reason, ClusterReason) for reason in answer):
        raise BrokenPolicy(policy.name, f"it explained with {repr(answer)[:80]}, which are no reasons")
    return {reason.cluster: reason for reason in answer}


def _complete_reasons(reasons: Reasons, view: GridView, refusal: Refusal) -> Reasons:
    """Add the refusal for each cluster that the policy gave no reason for, such as if it is unaware of sizes."""
    return {c.name: reasons.get(c.name) or reason_for(c, refusal.summary, None) for c in view}


def _combination_limits(cluster: ClusterView, view: GridView, constraints: Constraints) -> str:
    """Return how the constraints limit combinations with a cluster, as text."""
    if constraints.at_most == 1:
        return "; coallocation allows one cluster only"
    texts = []
    if constraints.at_most is not None:
        texts.append(f"coallocation allows {constraints.at_most} clusters")
    unlike = sorted(c.name for c in view.by_idle if not constraints.are_speeds_similar([c, cluster]))
    if unlike:
        texts.append(f"speed_ratio_min of {constraints.speed_ratio:g} rules out {format_list(unlike)} beside it")
    return "".join(f"; {text}" for text in texts)
