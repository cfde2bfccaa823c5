"""Divide a job by what its components require of their nodes, and search a placement of such components.

The search is for components that cannot be placed one group after another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from koalapy.model.cluster import ClusterState, ClusterView, GridView, NodeClass, count_idle
from koalapy.model.job_spec import JobSpec
from koalapy.model.node_assignment import NodeAssignment, count_admitted
from koalapy.model.node_requirement import NodeFilter, NodeRequirement
from koalapy.model.placement import PlacedComponent, Placement, Refusal
from koalapy.model.request import ClusterName, ComponentRequest, FlexibleRequest
from koalapy.scheduler.queue.component_sizes import Requirements


@dataclass(frozen=True, slots=True)
class ComponentGroup:
    """The components of a job with equal requirements, or one of them, as a separate job."""

    spec: JobSpec
    requirement: NodeRequirement | None = None
    indices: tuple[int, ...] = ()
    """Their indices in the whole request; empty if it is the whole job."""

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


def component_groups(
    spec: JobSpec, nodes: Requirements, view: GridView, *, single: bool = False
) -> list[ComponentGroup]:
    """Return the components by requirement, or each by itself if ``single``.

    Those that the fewest nodes meet come first, then the largest.
    """
    request = spec.request
    assert not isinstance(request, FlexibleRequest)
    positions: dict[object, list[int]] = {}
    for index, requirement in enumerate(nodes):
        positions.setdefault(index if single else requirement, []).append(index)
    groups = []
    for indices in positions.values():
        part = replace(request, components=tuple(request.components[index] for index in indices))
        groups.append(ComponentGroup(replace(spec, request=part), nodes[indices[0]], tuple(indices)))

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
        """Return the components from a position on, placed in addition to a partial placement; None if impossible."""
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
                following = self._place_from(position + 1, together)
                if following is not None:
                    return [placed, *following]
        return None

    def _may_fit(self, position: int, partial: Partial) -> bool:
        """Return whether the components from a position on fit in addition to a partial placement, for any policy."""
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
            remaining = replace(
                cluster, idle=count_idle(classes), node_classes=tuple(idle) if cluster.node_classes else (), parts=parts
            )
            matching = remaining if component.requirement is None else remaining.select_nodes(component.requirement)
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
