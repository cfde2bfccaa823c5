"""What would start now, held against the policies themselves: every size is asked for, one after the other."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import GridView, Link
from koalapy.model.job import JobSpec, JobState, Launcher, Priority
from koalapy.model.limits import Limits, LimitSettings, UserLimits
from koalapy.model.placement import Placement
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


def ends_of(world: World) -> list[ExpectedEnd]:
    queries = world.queries
    ends = (expected_end_of(job, queries.experience, world.now) for job in queries.jobs())
    return next_ends(end for end in ends if end is not None)


def rooms(world: World, base: JobSpec = BASE) -> dict[str, PolicyCapacity]:
    return {
        found.policy: found for found in estimate_capacities(world.queries, base, ends_of(world)) if found is not None
    }


def component(world: World, base: JobSpec = BASE) -> SizeEstimate:
    """As one component by worst fit."""
    found = rooms(world, base)["worst-fit"].component
    assert found is not None
    return found


def splits(total: int, parts: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as at most so many parts, the largest first."""
    if total == 0:
        yield ()
    elif parts:
        for first in range(min(total, most), 0, -1):
            for rest in splits(total - first, parts - 1, first):
                yield (first, *rest)


def requests(world: World, policy: str, total: int, *, one: bool) -> Iterator[Request]:
    """Every request for so many nodes that the policy serves and that differs for it."""
    serves = world.queries.policies.get(policy).serves
    names = list(SIZES)
    if "flexible" in serves:
        yield FlexibleRequest(total, max_components=1 if one else None)
    if "nonfixed" in serves:
        for sizes in splits(total, 1 if one else len(names), total):
            yield NonFixedRequest(tuple(map(ComponentRequest, sizes)))
    if serves == {"fixed"}:
        for sizes in splits(total, 1 if one else len(names), total):
            for where in _choices(names, len(sizes)):
                parts = (ComponentRequest(size, name) for size, name in zip(sizes, where, strict=True))
                yield FixedRequest(tuple(parts))


def _choices(names: list[str], count: int) -> Iterator[tuple[str, ...]]:
    if count == 0:
        yield ()
        return
    for name in names:
        for rest in _choices([other for other in names if other != name], count - 1):
            yield (name, *rest)


def largest(world: World, base: JobSpec, policy: str, view: GridView, *, one: bool) -> int:
    """By asking for each size, from the largest on."""

    def starts(request: Request) -> bool:
        answer = world.queries.evaluate(replace(base, policy=policy, request=request), view)
        return isinstance(answer, Placement)

    asked = ((count, requests(world, policy, count, one=one)) for count in range(sum(SIZES.values()), 0, -1))
    return next((count for count, each in asked if any(map(starts, each))), 0)


@given(
    busy=st.fixed_dictionaries({name: st.integers(0, size) for name, size in SIZES.items()}),
    old=st.sets(st.sampled_from(sorted(SIZES)), max_size=2),
    links=st.booleans(),
    away=st.sampled_from(["", *SIZES]),
    priority=st.sampled_from(Priority),
)
def test_the_largest_is_the_largest_that_the_policy_places(
    busy: dict[str, int], old: set[str], links: bool, away: str, priority: Priority
) -> None:
    profiles = {name: ClusterProfile(mpi=Mpi(MpiSeries.FOUR)) for name in old}
    known = {("east", "north"): Link(0.001, 1e8), ("north", "south"): Link(0.002, 1e7)} if links else {}
    world = World(SIZES, profiles=profiles, links=known)
    for name, count in busy.items():
        world.sites[name].add_local_user(count)
    if away:
        world.disconnect(away)
    world.settle()
    base = replace(BASE, priority=priority)
    view = world.queries.view(priority)
    for policy, found in rooms(world, base).items():
        assert found.component is not None
        assert found.component.nodes == largest(world, base, policy, view, one=True), policy
        assert sum(found.component.where.values()) == found.component.nodes
        assert len(found.component.where) == (found.component.nodes > 0)
        if found.total is not None:
            assert found.total.nodes == largest(world, base, policy, view, one=False), policy
            assert sum(found.total.where.values()) == found.total.nodes


@given(sizes=st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.integers(1, 3), st.integers(1, 9)), max_size=5))
def test_more_starts_after_the_end_that_is_told_and_after_none_before_it(sizes: list[tuple[str, int, int]]) -> None:
    """The jobs end one by one in a grid that is the same, and each policy is asked again after each."""

    def grid() -> World:
        world = World(SIZES)
        for name, count, minutes in sizes:
            job = world.submit(fixed(**{name: count}), run_time=60.0 * minutes, walltime=60.0 * minutes)
            if world.state(job) is JobState.QUEUED:
                world.cancel(job)
        world.advance(1)
        return world

    world = grid()
    now = {policy: found for policy, found in rooms(world).items() if policy in ("worst-fit", "cluster-minimization")}
    ends = ends_of(world)
    assert [end.at for end in ends] == sorted(end.at for end in ends)
    for policy, found in now.items():
        for most, one in ((found.component, True), (found.total, False)):
            assert most is not None
            after = grid()
            for end in ends:
                after.advance(end.at - after.now + 0.5)
                grown = largest(after, BASE, policy, after.queries.view(Priority.LOW), one=one) > most.nodes
                if grown:
                    assert most.larger_after is not None
                    assert most.larger_after.at == end.at
                    break
            else:
                assert most.larger_after is None


def test_of_a_job_without_a_walltime_nobody_knows_when_it_ends() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=3), run_time=1000)
    assert ends_of(world) == []
    assert (component(world).nodes, component(world).larger_after) == (1, None)


def test_one_of_high_priority_may_take_what_it_may_preempt() -> None:
    world = World({"north": 4})
    world.submit(fixed(north=3), run_time=1000, walltime=1000.0)
    assert component(world).nodes == 1
    assert component(world, replace(BASE, priority=Priority.HIGH)).nodes == 4
    never = World({"north": 4}, Rules(preemption="never"))
    never.submit(fixed(north=3), run_time=1000, walltime=1000.0)
    assert component(never, replace(BASE, priority=Priority.HIGH)).nodes == 1


def test_nodes_that_are_kept_for_another_are_no_room_now_nor_when_they_come_free() -> None:
    world = World({"north": 4}, Rules(aging_tries=1))
    first = world.submit(fixed(north=3), run_time=1000, walltime=1000.0)
    wide = world.submit(fixed(north=4))
    world.advance(100)
    assert world.queries.reservation == wide
    assert [end.job for end in ends_of(world)] == [first]
    assert (component(world).nodes, component(world).larger_after) == (0, None)


def test_what_its_owner_may_not_have_does_not_start() -> None:
    world = World({"north": 4, "south": 4}, limits=Limits(LimitSettings(users={"alice": UserLimits(nodes=5)})))
    alices = replace(BASE, owner="alice")
    found = rooms(world, alices)["cluster-minimization"]
    assert [most and most.nodes for most in (found.component, found.total)] == [4, 5]


def test_policies_that_combine_no_clusters_have_no_total() -> None:
    found = rooms(World(SIZES))
    assert {policy for policy, each in found.items() if each.total is None} == {"best-fit", "fastest-one"} & set(found)


@pytest.mark.parametrize("count", [1, 5])
def test_a_policy_is_asked_a_few_hundred_times_at_most(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({f"c{n}": 1000 for n in range(count)})
    for number in range(20):
        world.submit(flexible(10), run_time=1000, walltime=1000.0 + number)
    asked = 0
    evaluate = type(world.queries).evaluate

    def counted(queries: object, *arguments: object) -> object:
        nonlocal asked
        asked += 1
        return evaluate(world.queries, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(type(world.queries), "evaluate", counted)
    found = rooms(world)
    assert asked < 150 * len(found)


def test_a_policy_that_looks_at_each_component_is_not_asked_where_there_are_very_many() -> None:
    world = World({"north": MAX_LOOKED_AT + 8})
    world.submit(nonfixed(*[1] * (MAX_LOOKED_AT + 1)), run_time=1000)
    assert {policy for policy, found in rooms(world).items() if found.component is None} == {"auto"}
