"""The smallest change that ``explain`` offers can be placed, also while other jobs wait."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobId, JobState
from koalapy.model.job_spec import Priority
from koalapy.model.request import Request
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World


def submit_change(world: World, job: JobId) -> JobId | None:
    """Cancel a job and submit its smallest change; return the new job, or None without a change."""
    change = explain(world.queries, world.job(job), [], world.now).smallest_change
    if change is None:
        return None
    world.cancel(job)
    return world.submit_together([change.spec])[0]


def test_change_ignores_reservation_of_job_itself() -> None:
    world = World({"c0": 12, "c1": 12})
    world.submit(fixed(c0=7), run_time=1e5)
    world.submit(fixed(c1=12), run_time=2400.0)
    wide_job = world.submit(flexible(17, min_size=6))
    later_job = world.submit(nonfixed(12), run_time=1e4)
    world.advance(2600)
    assert world.queries.reservation == wide_job
    change = explain(world.queries, world.job(wide_job), [], world.now).smallest_change
    assert change is not None
    assert change.text == "ask for 5 nodes", "the 12 nodes of c1 go to the later job"
    changed = submit_change(world, wide_job)
    assert changed is not None
    assert world.state(changed).is_active
    assert world.state(later_job).is_active


drawn_requests = st.one_of(
    st.builds(flexible, st.integers(1, 14), st.integers(1, 1), st.none() | st.integers(1, 2)),
    st.builds(lambda sizes: nonfixed(*sizes), st.lists(st.integers(1, 6), min_size=1, max_size=3)),
    st.builds(lambda north, south: fixed(north=north, south=south), st.integers(1, 7), st.integers(1, 7)),
)


@given(
    jobs=st.lists(
        st.tuples(drawn_requests, st.sampled_from(Priority), st.sampled_from([200.0, 1e5])), min_size=2, max_size=8
    ),
    queue=st.sampled_from(["scan", "head", "fcfs"]),
    patience=st.sampled_from([None, 100.0]),
    seconds=st.sampled_from([1.0, 60.0, 300.0]),
    data=st.data(),
)
def test_change_is_placed_while_others_wait(
    jobs: Sequence[tuple[Request, Priority, float]],
    queue: str,
    patience: float | None,
    seconds: float,
    data: st.DataObject,
) -> None:
    world = World({"north": 7, "south": 7}, Rules(queue=queue, aging_tries=2, low_patience=patience))
    submitted = [
        world.submit(request, priority=priority, run_time=run_time)
        for request, priority, run_time in jobs
        if request.total_size <= 14
    ]
    world.advance(seconds)
    queued = [job for job in submitted if world.state(job) is JobState.QUEUED]
    if queued:
        changed = submit_change(world, data.draw(st.sampled_from(queued)))
        assert changed is None or world.state(changed).is_active, world.queries.waiting_reason(world.job(changed))
