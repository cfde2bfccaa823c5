"""Policies' answers, held against the request, the grid and the constraints: a policy may be anybody's code."""

from collections.abc import Sequence

from koalapy.model.cluster import ClusterState, GridView
from koalapy.model.placement import PlacedComponent, Placement, Refusal, RefusalKind
from koalapy.model.request import ClusterName, FlexibleRequest, Request
from koalapy.model.wording import nodes
from koalapy.policies.constraints import Constraints, parts
from koalapy.policies.knowledge import Knowledge
from koalapy.policies.policy import Policy


class BrokenPolicy(Exception):
    """A policy answered what cannot be; ``message`` says which and what."""

    def __init__(self, policy: str, problem: str) -> None:
        self.policy = policy
        self.message = f"policy {policy} is broken: {problem}"
        super().__init__(self.message)


def informed(policy: Policy, knowledge: Knowledge) -> Policy:
    """A policy that learns, with what is known of a job."""
    try:
        answer: object = policy.informed(knowledge)  # type: ignore[attr-defined]
    except Exception as error:
        raise BrokenPolicy(policy.name, f"it raised {error!r:.200}") from error
    if type(answer) is not type(policy) and not isinstance(answer, Policy):  # a look at a protocol takes long
        raise BrokenPolicy(policy.name, f"informed, it was {repr(answer)[:80]}, which is no policy")
    return answer


def constrained(policy: Policy, request: Request, view: GridView, constraints: Constraints) -> Placement | Refusal:
    """The policy's answer within the constraints; a refusal says if they are what is in the way."""
    answer = checked(policy, request, view)
    if not constraints or isinstance(answer, Refusal):
        return answer
    broken = constraints.broken(answer, view)
    if not broken:
        return answer
    refused = ""
    for asked, part in parts(request, answer, view, constraints):
        other = checked(policy, asked, part)
        if isinstance(other, Refusal):
            refused = refused or f"{other.summary}; "
        elif not constraints.broken(other, view):
            return other
    return Refusal(f"{refused}{broken}", RefusalKind.ELIGIBILITY)


def checked(policy: Policy, request: Request, view: GridView) -> Placement | Refusal:
    """The policy's answer, held against the request and the grid."""
    try:
        answer: object = policy.place(request, view)
    except Exception as error:
        raise BrokenPolicy(policy.name, f"it raised {error!r:.200}") from error
    if isinstance(answer, Refusal):
        return answer
    if not isinstance(answer, Placement):
        raise BrokenPolicy(policy.name, f"it answered {repr(answer)[:80]}, neither a placement nor a refusal")
    problem = _shape_problem(answer) or _grid_problem(answer, view) or _request_problem(answer, request)
    if problem:
        raise BrokenPolicy(policy.name, problem)
    return answer


def _shape_problem(placement: Placement) -> str:
    """What keeps an answer of another's code from being a placement at all."""
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
    given: dict[ClusterName, int] = {}
    for component in placement.components:
        given[component.cluster] = given.get(component.cluster, 0) + component.size
    for name, size in given.items():
        cluster = view.get(name)
        if cluster is None:
            return f"it placed {nodes(size)} on {name}, which it was not offered"
        if cluster.state is not ClusterState.USABLE:
            return f"it placed {nodes(size)} on {name}, which is {cluster.state}"
        if size > cluster.idle:
            return f"it placed {nodes(size)} on {name}, where {cluster.idle} are idle"
    return _class_problem(placement, view)


def _class_problem(placement: Placement, view: GridView) -> str:
    """Of an answer that keeps to the idle nodes of each cluster in all."""
    given: dict[tuple[ClusterName, str], int] = {}
    for component in placement.components:
        if component.node_class:
            key = component.cluster, component.node_class
            given[key] = given.get(key, 0) + component.size
    for (name, node_class), size in given.items():
        cluster = view.get(name)
        idle = {each.name: each.idle for each in cluster.node_classes} if cluster else {}
        if size > idle.get(node_class, 0):
            where = f"where {idle[node_class]} are idle" if node_class in idle else "which it has none of"
            return f"it placed {nodes(size)} on {name}'s class {node_class}, {where}"
    return ""


def _request_problem(placement: Placement, request: Request) -> str:
    placed = placement.components
    if isinstance(request, FlexibleRequest):
        return _flexible_problem(request, _flexible_sizes(placed))
    count = len(request.components)
    if len(placed) != count or {component.request_index for component in placed} != set(range(count)):
        return f"it placed {len(placed)} components that are not the request's {count}, each once"
    for component in placed:
        index = component.request_index or 0
        asked = request.components[index]
        if component.size != asked.size:
            return f"it placed component {index} with {nodes(component.size)} in place of {asked.size}"
        if asked.cluster is not None and asked.cluster != component.cluster:
            return f"it placed component {index} on {component.cluster} in place of {asked.cluster}"
    return ""


def _flexible_sizes(placed: Sequence[PlacedComponent]) -> list[int]:
    """What the request's bounds are held against: those of one cluster's classes count as one component."""
    by_class: dict[ClusterName, int] = {}
    for component in placed:
        if component.node_class:
            by_class[component.cluster] = by_class.get(component.cluster, 0) + component.size
    return [component.size for component in placed if not component.node_class] + list(by_class.values())


def _flexible_problem(request: FlexibleRequest, sizes: Sequence[int]) -> str:
    if sum(sizes) != request.total_size:
        return f"it placed {nodes(sum(sizes))} in place of {request.total_size}"
    if min(sizes) < request.min_component_size:
        return f"it placed a component of {min(sizes)}, below the min_component_size of {request.min_component_size}"
    if request.max_components is not None and len(sizes) > request.max_components:
        return f"it placed {len(sizes)} components, above the max_components of {request.max_components}"
    if request.split_options and sorted(sizes) not in [sorted(option) for option in request.split_options]:
        return f"it split into {sorted(sizes, reverse=True)}, which is none of the split_options"
    return ""
