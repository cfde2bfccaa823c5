"""The change that ``explain`` offers is placed, also where others wait for the nodes that the job gives up."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobId, JobState, Priority
from koalapy.model.request import Request
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World


def follow(world: World, job: JobId) -> JobId | None:
    """Cancel a job and submit the change that is offered for it; return the new job."""
    change = explain(world.queries, world.job(job), [], world.now).smallest_change
    if change is None:
        return None
    world.cancel(job)
    return world.submit_together([change.spec])[0]


def test_a_change_does_not_need_the_jobs_own_reservation() -> None:
    world = World({"c0": 12, "c1": 12})
    world.submit(fixed(c0=7), run_time=1e5)
    world.submit(fixed(c1=12), run_time=2400.0)
    wide = world.submit(flexible(17, min_size=6))
    other = world.submit(nonfixed(12), run_time=1e4)
    world.advance(2600)
    assert world.queries.reservation == wide
    change = explain(world.queries, world.job(wide), [], world.now).smallest_change
    assert change is not None
    assert change.text == "ask for 5 nodes", "the 12 nodes of c1 go to the job behind it"
    changed = follow(world, wide)
    assert changed is not None
    assert world.state(changed).is_active
    assert world.state(other).is_active


requests = st.one_of(
    st.builds(flexible, st.integers(1, 14), st.integers(1, 1), st.none() | st.integers(1, 2)),
    st.builds(lambda sizes: nonfixed(*sizes), st.lists(st.integers(1, 6), min_size=1, max_size=3)),
    st.builds(lambda north, south: fixed(north=north, south=south), st.integers(1, 7), st.integers(1, 7)),
)


@given(
    jobs=st.lists(
        st.tuples(requests, st.sampled_from(Priority), st.sampled_from([200.0, 1e5])), min_size=2, max_size=8
    ),
    queue=st.sampled_from(["scan", "head", "fcfs"]),
    patience=st.sampled_from([None, 100.0]),
    seconds=st.sampled_from([1.0, 60.0, 300.0]),
    data=st.data(),
)
def test_the_smallest_change_is_placed_though_others_wait(
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
        changed = follow(world, data.draw(st.sampled_from(queued)))
        assert changed is None or world.state(changed).is_active, world.queries.waiting_reason(world.job(changed))
