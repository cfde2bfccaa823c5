"""Statistics of node use and waiting times."""

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.limits import NodeUse
from koalapy.model.request import FlexibleRequest
from koalapy.store.opening import Stores
from koalapy.store.records import Batch, MeanTimes, Usage

LOW, HIGH = (JobSpec(FlexibleRequest(3), ("true",), priority=priority) for priority in (Priority.LOW, Priority.HIGH))
NOTHING = {Priority.HIGH: MeanTimes(), Priority.LOW: MeanTimes()}


def write_jobs(stores: Stores, *jobs: Job) -> None:
    stores.jobs.write(Batch(at=1.0, epoch=1, jobs={job.id: job for job in jobs}))


def with_attempt(job: Job, *components: Component, **times: float) -> Job:
    attempt = Attempt(job.generation + 1, components, **({"placed_at": 0.0} | times))  # type: ignore[arg-type]
    return replace(job, generation=attempt.generation, attempt=attempt)


def make_ended_job(ident: int, spec: JobSpec, submitted: float, placed: float, started: float, ended: float) -> Job:
    job = Job(ident, spec, submitted, JobState.SUCCEEDED, placed_at=placed, started_at=started, ended_at=ended)
    component = Component(0, "north", 2, ComponentState.ENDED, claimed_at=placed, ended_at=ended)
    times = {"start_estimate": placed + 5, "barrier_at": started, "launched_at": started + 1}
    job = with_attempt(job, component, placed_at=placed, **times)
    return replace(job, first_start_estimate=placed + 2, restarts=2)


def test_usage_of_empty_grid_is_zero(stores: Stores) -> None:
    assert stores.jobs.usage(0.0, 100.0) == Usage({}, NOTHING, {}, 0)


@pytest.mark.parametrize(
    ("claimed", "ended", "seconds"),
    [
        (20, 30, 10),
        (5, 30, 20),
        (20, 200, 80),
        (1, 300, 90),
        (20, None, 80),
        (1, None, 90),
        (1, 9, 0),
        (101, 120, 0),
        (None, 50, 0),
        (None, None, 0),
        (101, None, 0),
        (10, 100, 90),
    ],
)
def test_usage_counts_only_time_within_span(
    stores: Stores, claimed: float | None, ended: float | None, seconds: float
) -> None:
    component = Component(0, "north", 3, ComponentState.RUNNING, claimed_at=claimed, ended_at=ended)
    write_jobs(stores, with_attempt(Job(1, LOW, 0.0, JobState.RUNNING), component))
    assert stores.jobs.usage(10.0, 100.0).node_seconds.get("north", 0.0) == pytest.approx(3 * seconds)


def test_usage_counts_replaced_but_not_lost_components(stores: Stores) -> None:
    ended = Component(0, "north", 1, ComponentState.ENDED, claimed_at=10.0, ended_at=15.0)
    job = with_attempt(Job(1, LOW, 0.0, JobState.RUNNING), replace(ended, superseded=True), replace(ended, index=1))
    write_jobs(stores, job)
    lost_component = Component(0, "north", 1, ComponentState.RUNNING, claimed_at=20.0)
    write_jobs(stores, job := with_attempt(job, lost_component))
    write_jobs(stores, with_attempt(job, replace(ended, claimed_at=30.0, ended_at=None, cluster="south")))
    assert stores.jobs.usage(0.0, 100.0).node_seconds == pytest.approx({"north": 10.0, "south": 70.0})
    write_jobs(stores, replace(job, state=JobState.CANCELLED, ended_at=40.0))
    assert stores.jobs.usage(0.0, 100.0).node_seconds == pytest.approx({"north": 10.0})


def test_usage_means_are_by_priority(stores: Stores) -> None:
    write_jobs(
        stores,
        make_ended_job(1, LOW, 0.0, 10.0, 12.0, 50.0),
        make_ended_job(2, LOW, 0.0, 30.0, 36.0, 90.0),
        make_ended_job(3, HIGH, 40.0, 41.0, 44.0, 60.0),
        make_ended_job(4, LOW, 0.0, 1.0, 2.0, 3.0),
        replace(make_ended_job(5, LOW, 0.0, 1.0, 2.0, 70.0), state=JobState.CANCELLED),
        replace(
            make_ended_job(6, HIGH, 0.0, 1.0, 2.0, 70.0),
            state=JobState.FAILED,
            started_at=None,
            attempt=None,
            generation=0,
        ),
        Job(7, HIGH, 0.0),
    )
    usage = stores.jobs.usage(20.0, 100.0)
    assert usage.mean_times == {
        Priority.LOW: MeanTimes(2, 20.0, 24.0, 4.0, 70.0, 3.0),
        Priority.HIGH: MeanTimes(1, 1.0, 4.0, 3.0, 20.0, 3.0),
    }
    assert usage.ended == {JobState.SUCCEEDED: 3, JobState.FAILED: 1, JobState.CANCELLED: 1}
    assert usage.restarts == 10


NUMBERS = count(1)
times = st.none() | st.floats(0, 100)
component_spans = st.tuples(st.integers(1, 5), times, times)


@given(st.lists(component_spans, max_size=5), st.floats(1, 99))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_usage_of_adjacent_spans_adds_up(
    stores: Stores, spans: list[tuple[int, float | None, float | None]], cut: float
) -> None:
    job = Job(next(NUMBERS), LOW, 0.0, JobState.RUNNING)
    cluster = f"cluster {job.id}"
    components = [
        Component(n, cluster, size, ComponentState.RUNNING, claimed_at=claimed, ended_at=ended)
        for n, (size, claimed, ended) in enumerate(spans)
    ]
    write_jobs(stores, with_attempt(job, *components))

    def used(start: float, end: float) -> float:
        return stores.jobs.usage(start, end).node_seconds.get(cluster, 0.0)

    valid_spans = [(s, c, 100.0 if e is None else e) for s, c, e in spans if c is not None and (e is None or e >= c)]
    assert used(0.0, 100.0) == pytest.approx(sum(size * (end - start) for size, start, end in valid_spans))
    assert used(0.0, cut) + used(cut, 100.0) == pytest.approx(used(0.0, 100.0))


def test_node_use_counts_ended_attempts_by_owner(stores: Stores) -> None:
    """Running attempts are counted by their unfinished jobs, and internal jobs are not counted."""

    def part(index: int, claimed: float | None, ended: float | None) -> Component:
        return Component(index, "north", 2, ComponentState.ENDED, claimed_at=claimed, ended_at=ended)

    def job(ident: int, state: JobState, *parts: Component, owner: str = "alice", internal: bool = False) -> Job:
        return with_attempt(Job(ident, replace(LOW, owner=owner, internal=internal), 0.0, state), *parts)

    ended = job(1, JobState.SUCCEEDED, part(0, 10.0, 20.0), part(1, None, 20.0), part(2, 20.0, None), part(3, 5.0, 9.0))
    internal_job = job(2, JobState.SUCCEEDED, part(0, 10.0, 20.0), owner="koala", internal=True)
    restarted_job = job(3, JobState.RUNNING, part(0, 11.0, 21.0), owner="bob")
    write_jobs(stores, ended, internal_job, restarted_job)
    next_attempt = with_attempt(restarted_job, part(0, 30.0, 31.0))
    assert restarted_job.attempt is not None
    stores.jobs.write(Batch(at=1.0, epoch=1, jobs={3: next_attempt}, attempts=[(3, restarted_job.attempt)]))
    uses = sorted(stores.history.node_use(9.5), key=lambda use: use.owner)
    assert uses == [NodeUse("alice", 2, 10.0, 20.0), NodeUse("bob", 2, 11.0, 21.0)]
    assert len(stores.history.node_use(8.5)) == 3
    assert stores.history.node_use(100.0) == []
