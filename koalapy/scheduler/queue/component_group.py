"""Components of one job with equal requirements, as a job of its own."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from koalapy.model.cluster import GridView
from koalapy.model.job_spec import JobSpec
from koalapy.model.node_requirement import NodeFilter, NodeRequirement
from koalapy.model.placement import PlacedComponent, Placement
from koalapy.model.request import ComponentRequest, FlexibleRequest
from koalapy.scheduler.queue.eligibility import Demands


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
        matching = view.matching(group.requirement) if group.requirement is not None else view
        return sum(cluster.total for cluster in matching), -max(component.size for component in group.components)

    return sorted(groups, key=rank)
