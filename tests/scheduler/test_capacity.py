"""Capacity estimates compared with evaluating the policies for every size."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import GridView, Link
from koalapy.model.job import JobState
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.model.limits import Limits, LimitSettings, UserLimits
from koalapy.model.placement import Placement, Refusal
from koalapy.model.profile import ClusterProfile, Mpi, MpiSeries
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.scheduler.explain.capacity import (
    MAX_LOOKED_AT,
    ExpectedEnd,
    PolicyCapacity,
    SizeEstimate,
    estimate_capacities,
    expected_end_of,
    next_ends,
)
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

SIZES = {"east": 5, "north": 4, "south": 2}
BASE = JobSpec(FlexibleRequest(1), launcher=Launcher.OPENMPI)


def expected_ends(world: World) -> list[ExpectedEnd]:
    queries = world.queries
    ends = (expected_end_of(job, queries.experience, world.now) for job in queries.jobs())
    return next_ends(end for end in ends if end is not None)


def capacities(world: World, base_spec: JobSpec = BASE) -> dict[str, PolicyCapacity]:
    return {
        capacity.policy: capacity
        for capacity in estimate_capacities(world.queries, base_spec, expected_ends(world))
        if capacity is not None
    }


def component_capacity(world: World, base: JobSpec = BASE) -> SizeEstimate:
    """Return the estimate for one component by worst fit."""
    estimate = capacities(world, base)["worst-fit"].component
    assert estimate is not None
    return estimate


def number_splits(total: int, parts: int, max_part: int) -> Iterator[tuple[int, ...]]:
    """Yield all splits of a number into at most so many parts, the largest first."""
    if total == 0:
        yield ()
    elif parts:
        for part in range(min(total, max_part), 0, -1):
            for split in number_splits(total - part, parts - 1, part):
                yield (part, *split)


def possible_requests(world: World, policy: str, total: int, *, single_component: bool) -> Iterator[Request]:
    """Yield all requests of this size that the policy serves and that differ for it."""
    serves = world.queries.policies.get(policy).serves
    names = list(SIZES)
    if "flexible" in serves:
        yield FlexibleRequest(total, max_components=1 if single_component else None)
    if "nonfixed" in serves:
        for sizes in number_splits(total, 1 if single_component else len(names), total):
            yield NonFixedRequest(tuple(map(ComponentRequest, sizes)))
    if serves == {"fixed"}:
        for sizes in number_splits(total, 1 if single_component else len(names), total):
            for clusters in cluster_choices(names, len(sizes)):
                parts = (ComponentRequest(size, name) for size, name in zip(sizes, clusters, strict=True))
                yield FixedRequest(tuple(parts))


def cluster_choices(names: list[str], count: int) -> Iterator[tuple[str, ...]]:
    if count == 0:
        yield ()
        return
    for name in names:
        for choice in cluster_choices([candidate for candidate in names if candidate != name], count - 1):
            yield (name, *choice)


def largest_placeable(world: World, base: JobSpec, policy: str, view: GridView, *, single_component: bool) -> int:
    """Return the largest placeable size by evaluating each size."""

    def is_placeable(request: Request) -> bool:
        answer = world.queries.questions.ask(replace(base, policy=policy, request=request), view)
        return isinstance(answer, Placement)

    requests_by_size = (
        (count, possible_requests(world, policy, count, single_component=single_component))
        for count in range(sum(SIZES.values()), 0, -1)
    )
    return next((count for count, requests in requests_by_size if any(map(is_placeable, requests))), 0)


@given(
    local_nodes=st.fixed_dictionaries({name: st.integers(0, size) for name, size in SIZES.items()}),
    old_mpi_clusters=st.sets(st.sampled_from(sorted(SIZES)), max_size=2),
    links=st.booleans(),
    disconnected=st.sampled_from(["", *SIZES]),
    priority=st.sampled_from(Priority),
)
def test_capacity_equals_largest_placeable_size(
    local_nodes: dict[str, int], old_mpi_clusters: set[str], links: bool, disconnected: str, priority: Priority
) -> None:
    profiles = {name: ClusterProfile(mpi=Mpi(MpiSeries.FOUR)) for name in old_mpi_clusters}
    measured_links = {("east", "north"): Link(0.001, 1e8), ("north", "south"): Link(0.002, 1e7)} if links else {}
    world = World(SIZES, profiles=profiles, links=measured_links)
    for name, count in local_nodes.items():
        world.sites[name].add_local_user(count)
    if disconnected:
        world.disconnect(disconnected)
    world.settle()
    base = replace(BASE, priority=priority)
    view = world.queries.view(priority)
    for policy, capacity in capacities(world, base).items():
        assert capacity.component is not None
        assert capacity.component.nodes == largest_placeable(world, base, policy, view, single_component=True), policy
        assert sum(capacity.component.where.values()) == capacity.component.nodes
        assert len(capacity.component.where) == (capacity.component.nodes > 0)
        if capacity.total is not None:
            assert capacity.total.nodes == largest_placeable(world, base, policy, view, single_component=False), policy
            assert sum(capacity.total.where.values()) == capacity.total.nodes


@given(sizes=st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.integers(1, 3), st.integers(1, 9)), max_size=5))
def test_capacity_grows_at_predicted_end(sizes: list[tuple[str, int, int]]) -> None:
    """Jobs end one by one in an equal grid, and each policy is evaluated after each end."""

    def create_grid() -> World:
        world = World(SIZES)
        for name, count, minutes in sizes:
            job = world.submit(fixed(**{name: count}), run_time=60.0 * minutes, walltime=60.0 * minutes)
            if world.state(job) is JobState.QUEUED:
                world.cancel(job)
        world.advance(1)
        return world

    world = create_grid()
    estimates = {
        policy: capacity
        for policy, capacity in capacities(world).items()
        if policy in ("worst-fit", "cluster-minimization")
    }
    ends = expected_ends(world)
    assert [end.at for end in ends] == sorted(end.at for end in ends)
    for policy, capacity in estimates.items():
        for estimate, single_component in ((capacity.component, True), (capacity.total, False)):
            assert estimate is not None
            later_grid = create_grid()
            for end in ends:
                later_grid.advance(end.at - later_grid.now + 0.5)
                is_larger = (
                    largest_placeable(
                        later_grid,
                        BASE,
                        policy,
                        later_grid.queries.view(Priority.LOW),
                        single_component=single_component,
                    )
                    > estimate.nodes
                )
                if is_larger:
                    assert estimate.larger_after is not None
                    assert estimate.larger_after.at == end.at
                    break
            else:
                assert estimate.larger_after is None


def test_capacity_growth_is_unknown_without_walltime() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=3), run_time=1000)
    assert expected_ends(world) == []
    assert (component_capacity(world).nodes, component_capacity(world).larger_after) == (1, None)


def test_capacity_of_high_priority_includes_preemptible_nodes() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=3), run_time=1000, walltime=1000.0)
    assert component_capacity(world).nodes == 1
    assert component_capacity(world, replace(BASE, priority=Priority.HIGH)).nodes == 4
    without_preemption = World({"north": 4}, Rules(preemption="never"))
    without_preemption.submit(fixed(north=3), run_time=1000, walltime=1000.0)
    assert component_capacity(without_preemption, replace(BASE, priority=Priority.HIGH)).nodes == 1


def test_capacity_excludes_reserved_nodes() -> None:
    world = World({"north": 4}, Rules(aging_tries=1))
    running_job = world.submit(fixed(north=3), run_time=1000, walltime=1000.0)
    wide_job = world.submit(fixed(north=4))
    world.advance(100)
    assert world.queries.reservation == wide_job
    assert [end.job for end in expected_ends(world)] == [running_job]
    assert (component_capacity(world).nodes, component_capacity(world).larger_after) == (0, None)


def test_capacity_respects_owner_limits() -> None:
    world = World({"north": 4, "south": 4}, limits=Limits(LimitSettings(users={"alice": UserLimits(nodes=5)})))
    alice_spec = replace(BASE, owner="alice")
    capacity = capacities(world, alice_spec)["cluster-minimization"]
    assert [estimate and estimate.nodes for estimate in (capacity.component, capacity.total)] == [4, 5]


def test_capacity_of_single_cluster_policies_has_no_total() -> None:
    estimates = capacities(World(SIZES))
    assert {policy for policy, capacity in estimates.items() if capacity.total is None} == {
        "best-fit",
        "fastest-one",
    } & set(estimates)


@pytest.mark.parametrize("count", [1, 5])
def test_capacity_questions_are_bounded(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({f"c{n}": 1000 for n in range(count)})
    for number in range(20):
        world.submit(flexible(10), run_time=1000, walltime=1000.0 + number)
    questions, ask = 0, world.queries.questions.ask

    def count_question(*arguments: Any) -> Placement | Refusal:
        nonlocal questions
        questions += 1
        return ask(*arguments)

    monkeypatch.setattr(world.queries.questions, "ask", count_question)
    estimates = capacities(world)
    assert questions < 150 * len(estimates)


def test_capacity_skips_component_policies_for_many_components() -> None:
    world = World({"north": MAX_LOOKED_AT + 8})
    world.submit(nonfixed(*[1] * (MAX_LOOKED_AT + 1)), run_time=1000)
    assert {policy for policy, capacity in capacities(world).items() if capacity.component is None} == {"auto"}
