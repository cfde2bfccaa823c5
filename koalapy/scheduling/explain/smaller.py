"""The same job on fewer nodes, the largest first."""

from collections.abc import Iterator
from dataclasses import replace

from koalapy.model.cluster import GridView
from koalapy.model.job import JobSpec
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest
from koalapy.model.wording import listed, nodes
from koalapy.scheduling.explain.steps import Candidate, Steps, one


def smaller(spec: JobSpec, view: GridView, also: str = "") -> Iterator[Steps]:
    """Ways to ask for less; ``view`` says how much there is, and ``also`` what else is changed."""
    request = spec.request
    if isinstance(request, FlexibleRequest):
        yield _smaller_total(spec, request, view, also)
    elif isinstance(request, NonFixedRequest):
        yield _smaller_components(spec, request, also)
    else:
        yield from _what_is_idle(spec, request, view, also)


def _smaller_total(spec: JobSpec, request: FlexibleRequest, view: GridView, also: str) -> Steps:
    most = min(request.total_size - 1, view.usable_idle)

    def candidate(total: int) -> Candidate:
        least = min(request.min_component_size, total)
        changed = replace(request, total_size=total, min_component_size=least, split_options=())
        text = f"ask for {nodes(total)}{also}"
        return Candidate("request.total_size", total, text, replace(spec, request=changed))

    return Steps(range(most, 0, -1), candidate)


def _smaller_components(spec: JobSpec, request: NonFixedRequest, also: str) -> Steps:
    """The larger components cut down to one size, which is lowered step by step."""

    def candidate(size: int) -> Candidate:
        components = tuple(replace(c, size=min(c.size, size)) for c in request.components)
        return _resized(spec, NonFixedRequest(components), also)

    return Steps(range(max(c.size for c in request.components) - 1, 0, -1), candidate)


def _resized(spec: JobSpec, request: NonFixedRequest | FixedRequest, also: str) -> Candidate:
    def told(component: ComponentRequest) -> str:
        return f"{component.size} on {component.cluster}" if component.cluster else str(component.size)

    named = isinstance(request, FixedRequest)
    shown = listed([told(c) for c in request.components], separator=" and " if named else "+")
    value: list[object] = [
        {"size": c.size, "cluster": c.cluster} if named else {"size": c.size} for c in request.components
    ]
    return Candidate("request.components", value, f"ask for {shown} nodes{also}", replace(spec, request=request))


def _what_is_idle(spec: JobSpec, request: FixedRequest, view: GridView, also: str) -> Iterator[Steps]:
    """Each component as large as its cluster allows now; one for which nothing is left is left out."""
    left = {cluster.name: cluster.idle for cluster in view.by_idle}
    components = []
    for component in request.components:
        size = min(component.size, left.get(component.cluster or "", 0))
        if size > 0:
            left[component.cluster or ""] -= size
            components.append(replace(component, size=size))
        elif component.command or component.environment:
            return  # it is a part of its own: without it the job would be another
    if components and tuple(components) != request.components:
        found = _resized(spec, FixedRequest(tuple(components)), also)
        yield one(found.field, found.value, found.text, found.spec)
