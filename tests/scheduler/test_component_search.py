"""Components with different requirements, compared with all possible assignments of components to clusters."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterState, ClusterView, GridView, NodeClass
from koalapy.model.errors import UsageError
from koalapy.model.job import JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.placement import Placement, Refusal
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import ComponentRequest, FixedRequest, NonFixedRequest
from koalapy.model.users import Accounts
from koalapy.policies.registry import builtin_policies
from koalapy.policies.worst_fit import WorstFit
from koalapy.scheduler.queue.component_search import ComponentSearch, component_groups
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.policy_question import PolicyQuestion
from koalapy.validation.submission import check_submission
from tests.scheduler.requests import nonfixed
from tests.scheduler.test_node_requirements import NodesWorld

CORES = (1, 8, 64)
"""Cores of the nodes of each class; a component that requires some may also get nodes with more."""
NAMES = ("east", "north", "south")
SIZES_BY_CLASS = st.tuples(*[st.integers(0, 3)] * len(CORES))
COMPONENTS = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([None, *CORES[1:]])), min_size=2, max_size=4)


def make_view(idle: Any) -> GridView:
    """Return a view of clusters with these idle nodes of each class."""
    clusters = []
    for name, counts in zip(NAMES, idle, strict=True):
        classes = tuple(
            NodeClass(f"c{cores}", count, total=count, cores=cores) for cores, count in zip(CORES, counts, strict=True)
        )
        clusters.append(ClusterView(name, sum(counts), sum(counts), node_classes=classes))
    return GridView(tuple(clusters))


def fits_on(counts: tuple[int, ...], components: list[tuple[int, int | None]]) -> bool:
    """Return whether components fit on a cluster: those with at least so many cores find enough such nodes."""
    return all(
        sum(size for size, required in components if (required or 0) >= cores)
        <= sum(count for count, has in zip(counts, CORES, strict=True) if has >= cores)
        for cores in (0, *CORES)
    )


def find_assignments(idle: Any, components: Any, at_most: int | None = None) -> set[tuple[str, ...]]:
    """Return all assignments of the components to clusters on which they fit."""
    return {
        names
        for names in product(NAMES, repeat=len(components))
        if (at_most is None or len(set(names)) <= at_most)
        and all(
            fits_on(counts, [component for component, at in zip(components, names, strict=True) if at == name])
            for name, counts in zip(NAMES, idle, strict=True)
        )
    }


def place(view: GridView, spec: JobSpec) -> Placement | Refusal:
    eligibility = Eligibility({cluster.name: ClusterProfile() for cluster in view}, Accounts())
    policy = builtin_policies().resolve(spec.policy, spec.request, spec.policy_options)
    return PolicyQuestion(policy, spec, eligibility).place(view)


@pytest.mark.parametrize("policy", ["worst-fit", "close-to-files"])
@given(
    idle=st.tuples(*[SIZES_BY_CLASS] * len(NAMES)), components=COMPONENTS, at_most=st.sampled_from([None, None, 1, 2])
)
def test_components_with_different_requirements_are_placed_if_any_assignment_fits(
    policy: str, idle: Any, components: Any, at_most: int | None
) -> None:
    if len({cores for _, cores in components}) == 1:
        components = [*components[:-1], (components[-1][0], 64 if components[0][1] is None else None)]
    request = NonFixedRequest(tuple(ComponentRequest(size, cores=cores) for size, cores in components))
    answer = place(make_view(idle), JobSpec(request, ("true",), policy=policy, coallocation=at_most))
    possible = find_assignments(idle, components, at_most)
    if isinstance(answer, Refusal):
        assert not possible
    else:
        assert [component.request_index for component in answer.components] == list(range(len(components)))
        assert [component.size for component in answer.components] == [size for size, _ in components]
        assert tuple(component.cluster for component in answer.components) in possible


@given(idle=st.tuples(*[SIZES_BY_CLASS] * len(NAMES)), components=COMPONENTS, data=st.data())
def test_fixed_components_with_different_requirements_are_placed_if_they_fit(
    idle: Any, components: Any, data: st.DataObject
) -> None:
    names = tuple(data.draw(st.sampled_from(NAMES)) for _ in components)
    parts = zip(components, names, strict=True)
    request = FixedRequest(tuple(ComponentRequest(size, name, cores=cores) for (size, cores), name in parts))
    answer = place(make_view(idle), JobSpec(request, ("true",)))
    if len({cores for _, cores in components}) > 1:
        assert isinstance(answer, Placement) == (names in find_assignments(idle, components))


def test_search_avoids_unusable_cluster_and_cluster_that_a_component_excludes() -> None:
    idle = ((0, 0, 3), (0, 0, 3), (3, 0, 0))
    components = (ComponentRequest(3, cores=64, exclude=("east",)), ComponentRequest(3, cores=8), ComponentRequest(3))
    spec = JobSpec(NonFixedRequest(components), ("true",))
    view = make_view(idle)
    answer = place(view, spec)
    assert isinstance(answer, Placement)
    assert [component.cluster for component in answer.components] == ["north", "east", "south"]
    away = ClusterView("east", 3, 3, ClusterState.DRAINED, node_classes=view.clusters[0].node_classes)
    assert isinstance(place(view.with_clusters([away]), spec), Refusal)


@pytest.mark.parametrize("policy", ["worst-fit", "close-to-files"])
def test_job_of_many_unlike_components_is_answered(policy: str) -> None:
    """The search goes one level deeper for each component, and is left out for so many."""
    unlike = tuple(ComponentRequest(1, exclude=("east",) if number % 2 else ()) for number in range(1000))
    view = make_view(((100, 0, 0), (300, 0, 0), (300, 0, 0)))
    assert isinstance(place(view, JobSpec(NonFixedRequest(unlike), ("true",), policy=policy)), Refusal)


@pytest.mark.parametrize(("max_states", "is_found"), [(3, True), (2, False)])
def test_search_ends_after_its_maximum_of_states(max_states: int, is_found: bool) -> None:
    view = make_view(((0, 0, 2), (0, 2, 2), (3, 3, 0)))
    components = (ComponentRequest(2, cores=64), ComponentRequest(2, cores=8), ComponentRequest(2))
    spec = JobSpec(NonFixedRequest(components), ("true",))
    parts = component_groups(spec, spec.node_requirements, view, single=True)
    search = ComponentSearch(
        parts, view, lambda part, matching: WorstFit().place(part.spec.request, matching), bool, max_states=max_states
    )
    assert (search.find_placement() is not None) == is_found


def test_job_that_fits_only_by_another_choice_of_clusters_is_accepted_and_runs() -> None:
    """Worst-fit alone would place the component of 2 nodes on north, where 5 nodes remain for the other one."""
    world = NodesWorld()
    world.advance(1)
    request = NonFixedRequest((ComponentRequest(6, exclude=("south",)), ComponentRequest(2, cores=32)))
    check_submission(JobSpec(request, ("true",)), world.queries.limits())
    job = world.submit(request)
    world.advance(2)
    assert world.state(job) is JobState.RUNNING
    assert world.nodes_of(job)["south.gpu"] == 2


def test_components_that_worst_fit_could_not_place_together_are_accepted() -> None:
    """By size alone, worst-fit would place 5 nodes on north and 4 on south, and then have no room for 3."""
    world = NodesWorld()
    world.advance(1)
    components = (ComponentRequest(5), ComponentRequest(4), ComponentRequest(3, features=("big",)))
    spec = JobSpec(NonFixedRequest(components), ("true",))
    check_submission(spec, world.queries.limits())
    with pytest.raises(UsageError, match="never fit together by worst-fit"):
        check_submission(replace(spec, request=nonfixed(5, 4, 3)), world.queries.limits())
    job = world.submit(spec.request)
    world.advance(2)
    assert world.state(job) is JobState.RUNNING
