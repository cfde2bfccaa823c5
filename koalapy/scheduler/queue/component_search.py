"""Search clusters for components with different requirements, if placing one group after another has failed.

The policy chooses the cluster of each component in turn. If the remaining components then fit nowhere, it chooses again
among the other clusters. So a placement is found if there is one, up to ``MAX_STATES`` partial placements.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from koalapy.model.cluster import ClusterState, ClusterView, GridView, NodeClass, count_idle, take_nodes
from koalapy.model.node_requirement import NodeFilter
from koalapy.model.placement import PlacedComponent, Placement, Refusal
from koalapy.model.request import ClusterName
from koalapy.scheduler.queue.component_group import ComponentGroup

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
    """The search for a placement of one job on one view."""

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
            left = replace(cluster, idle=count_idle(classes), node_classes=classes if cluster.node_classes else ())
            matching = left if component.requirement is None else left.restrict_to(component.requirement)
            if matching is not None:
                # All fit together, as checked above: a component placed before can move to other nodes of the cluster.
                yield cluster.name, replace(matching, idle=max(matching.idle, request.size))


def _with_component(partial: Partial, cluster: ClusterName, component: ComponentGroup) -> Partial:
    entry = component.nodes, component.components[0].size
    return {**partial, cluster: (*partial.get(cluster, ()), entry)}


def _take_all(cluster: ClusterView, promised: Promised) -> tuple[NodeClass, ...] | None:
    """Return the classes of a cluster without the nodes of these components; None if it has too few.

    As in the counts of promised nodes, components with the smallest choice come first.
    """
    classes = tuple(cluster.known_classes)

    def count_admitted(entry: tuple[NodeFilter, int]) -> int:
        return sum(max(each.total, each.idle) for each in classes if entry[0].admits(each))

    remaining = classes
    for nodes, size in sorted(promised, key=count_admitted):
        is_excluded = nodes.requirement is not None and cluster.name in nodes.requirement.exclude
        if is_excluded or count_idle(remaining, nodes) < size:
            return None
        remaining = take_nodes(remaining, nodes, size)
    return remaining
