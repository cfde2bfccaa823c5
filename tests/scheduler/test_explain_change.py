"""The smallest change that ``explain`` offers starts a waiting job in its place, also while other jobs wait."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.dependency import Dependency, EndCondition
from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.placement import Change
from koalapy.model.request import Request
from koalapy.scheduler.events import JobChanged
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.test_shared_nodes import SharingWorld
from tests.scheduler.world import World


def offered_change(world: World, job: JobId) -> Change | None:
    return explain(world.queries, world.job(job), [], world.now).smallest_change


def follow_change(world: World, job: JobId, change: Change) -> None:
    """Make the offered change of a waiting job."""
    world.step([JobChanged(job, change.spec)])


def test_change_of_job_with_reservation_uses_its_reserved_nodes() -> None:
    world = World({"c0": 12, "c1": 12}, Rules(plan_after=0))
    world.submit(fixed(c0=7), run_time=1e5)
    world.submit(fixed(c1=12), run_time=2400.0)
    wide_job = world.submit(flexible(17, min_size=6))
    later_job = world.submit(nonfixed(12), run_time=1e4)
    world.advance(2600)
    assert world.queries.planned_job == wide_job
    change = offered_change(world, wide_job)
    assert change is not None
    assert change.text == "allow components of 5 nodes", "its place keeps the nodes from the later job"
    follow_change(world, wide_job, change)
    assert world.state(wide_job).is_active
    assert world.state(later_job) is JobState.QUEUED


@pytest.mark.parametrize("condition", EndCondition)
def test_change_of_job_keeps_its_dependents_waiting(condition: EndCondition) -> None:
    world = World({"c0": 4, "c1": 3})
    world.submit(flexible(4), run_time=1e5, priority=Priority.HIGH)
    world.advance(1)
    job = world.submit(flexible(5))
    dependent = world.submit(flexible(3), run_time=1e4, after=((Dependency(job, condition),),))
    explanation = explain(world.queries, world.job(job), [], world.now)
    assert f"job {dependent} waits for it, and keeps waiting for it if it is changed" in explanation.notes
    change = explanation.smallest_change
    assert change is not None
    assert (change.text, change.job) == ("ask for 3 nodes", world.job(job))
    follow_change(world, job, change)
    assert world.state(job).is_active
    assert world.state(dependent) is JobState.QUEUED
    assert world.job(dependent).is_deferred
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.state(dependent) is (JobState.FAILED if condition is EndCondition.FAILED else JobState.RUNNING)


def test_change_of_job_that_shares_nodes_counts_partly_used_nodes() -> None:
    world = SharingWorld({"north": 6, "south": 2})
    world.sites["south"].add_local_user(2)
    for _ in range(5):
        world.submit(flexible(1), share=True, cores=3, run_time=1e5)
    world.advance(5)
    job = world.submit(flexible(7), share=True, cores=1)
    change = offered_change(world, job)
    assert change is not None
    assert change.text == "ask for 6 nodes"
    follow_change(world, job, change)
    assert world.state(job).is_active


def test_change_of_fixed_job_that_shares_nodes_counts_partly_used_nodes() -> None:
    world = SharingWorld({"north": 6, "south": 2})
    world.submit(fixed(south=2), share=True, cores=3, run_time=1e5)
    for _ in range(5):
        world.submit(fixed(north=1), share=True, cores=3, run_time=1e5)
    world.advance(5)
    job = world.submit(fixed(north=7), share=True, cores=1)
    change = offered_change(world, job)
    assert change is not None
    follow_change(world, job, change)
    assert world.state(job).is_active
    assert world.job(job).spec.request.total_size >= 6


def test_change_to_fewer_nodes_counts_run_time_that_is_known_of_them() -> None:
    """A job of 1 node ran for 200 s, so one of 3 nodes is expected to end before the planned start, unlike one of 4."""
    world = World({"north": 7, "south": 7}, Rules(plan_after=0.0))
    world.submit(flexible(7), run_time=1e5)
    job = world.submit(flexible(8))
    world.submit(flexible(1), run_time=200.0, priority=Priority.HIGH)
    world.submit(flexible(7), run_time=1e5, priority=Priority.HIGH)
    planned_job = world.submit(fixed(north=1, south=5), priority=Priority.HIGH)
    world.advance(300)
    assert world.queries.planned_job == planned_job
    change = offered_change(world, job)
    assert change is not None
    assert change.text.startswith("ask for 3 nodes with high priority")
    follow_change(world, job, change)
    assert world.state(job).is_active


drawn_requests = st.one_of(
    st.builds(flexible, st.integers(1, 14), st.integers(1, 1), st.none() | st.integers(1, 2)),
    st.builds(lambda sizes: nonfixed(*sizes), st.lists(st.integers(1, 6), min_size=1, max_size=3)),
    st.builds(lambda north, south: fixed(north=north, south=south), st.integers(1, 7), st.integers(1, 7)),
)


drawn_jobs = st.lists(
    st.tuples(drawn_requests, st.sampled_from(Priority), st.sampled_from([200.0, 1e5])), min_size=2, max_size=8
)
drawn_rules = st.builds(
    Rules,
    queue=st.sampled_from(["scan", "head", "fcfs"]),
    queue_order=st.sampled_from(["fcfs", "narrowest-first"]),
    event_driven=st.sampled_from([True, True, False]),
    plan_after=st.sampled_from([None, 0.0, 100.0]),
)


def fill_grid(jobs: Sequence[tuple[Request, Priority, float]], rules: Rules, seconds: float) -> World:
    """Return a grid of 14 nodes some time after the submission of the jobs that it can place."""
    world = World({"north": 7, "south": 7}, rules)
    for request, priority, run_time in jobs:
        if request.total_size <= 14:
            world.submit(request, priority=priority, run_time=run_time)
    world.advance(seconds)
    return world


@given(jobs=drawn_jobs, rules=drawn_rules, seconds=st.sampled_from([1.0, 60.0, 300.0]), data=st.data())
def test_offered_change_of_waiting_job_starts_it_before_its_dependents(
    jobs: Sequence[tuple[Request, Priority, float]], rules: Rules, seconds: float, data: st.DataObject
) -> None:
    world = fill_grid(jobs, rules, seconds)
    queued = [job for job in world.jobs if world.state(job) is JobState.QUEUED]
    if not queued:
        return
    job = data.draw(st.sampled_from(queued))
    dependent = world.submit(flexible(1), after=((Dependency(job),),))
    if change := offered_change(world, job):
        before = world.job(job)
        follow_change(world, job, change)
        assert world.state(job).is_active, world.queries.waiting_reason(world.job(job))
        assert world.job(job).submitted_at == before.submitted_at
        assert world.state(dependent) is JobState.QUEUED
        assert world.job(dependent).is_deferred


@given(jobs=drawn_jobs, rules=drawn_rules, seconds=st.sampled_from([1.0, 300.0]), data=st.data())
def test_fewest_nodes_less_are_offered_to_waiting_job(
    jobs: Sequence[tuple[Request, Priority, float]], rules: Rules, seconds: float, data: st.DataObject
) -> None:
    """A job with one node more than is offered would wait."""
    world = fill_grid(jobs, rules, seconds)
    queued = [job for job in world.jobs if world.state(job) is JobState.QUEUED]
    if not queued:
        return
    job = data.draw(st.sampled_from(queued))
    change = offered_change(world, job)
    if change is not None and change.field == "request.total_size":
        request = change.spec.request
        larger = replace(change.spec, request=flexible(request.total_size + 1))
        if larger.request.total_size < world.job(job).spec.request.total_size:
            world.step([JobChanged(job, larger)])
            assert not world.state(job).is_active


@given(
    jobs=drawn_jobs,
    rules=drawn_rules,
    seconds=st.sampled_from([1.0, 300.0]),
    request=drawn_requests.filter(lambda request: request.total_size <= 14),
    priority=st.sampled_from(Priority),
)
def test_offered_change_of_submission_starts_it(
    jobs: Sequence[tuple[Request, Priority, float]], rules: Rules, seconds: float, request: Request, priority: Priority
) -> None:
    world = fill_grid(jobs, rules, seconds)
    spec = JobSpec(request, ("program",), priority=priority)
    explanation = explain_submission(world.queries, spec, world.now)
    if explanation.state is JobState.PLACED:
        assert world.state(world.submit_together([spec])[0]).is_active
    elif change := explanation.smallest_change:
        assert change.job is None
        assert world.state(world.submit_together([change.spec])[0]).is_active
