"""The plan: the job that has waited longest gets a planned start, and others use its nodes only until then."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import GridView, Link
from koalapy.model.job import JobState
from koalapy.model.job_spec import ClaimingMode, JobSpec, Priority
from koalapy.model.request import ComponentRequest, InputFile, NonFixedRequest
from koalapy.scheduler.events import PeriodicScan
from koalapy.scheduler.queue import plan
from koalapy.scheduler.queue.component_sizes import transfer_times
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

PLANNED = Rules(plan_after=0, scan_interval=10, high_scans_per_low=1)


def submit_narrow_jobs(world: World, count: int) -> None:
    """Submit one-node jobs that always find a node before a wide job finds all."""
    for number in range(count):
        world.submit(flexible(1), run_time=30, name=f"narrow-{number}")
        world.advance(5)


def test_without_plan_wide_job_starves() -> None:
    world = World({"north": 4}, Rules(plan_after=None, scan_interval=10, high_scans_per_low=1))
    submit_narrow_jobs(world, 6)
    wide_job = world.submit(fixed(north=4))
    submit_narrow_jobs(world, 60)
    assert world.state(wide_job) is JobState.QUEUED


def test_planned_wide_job_starts_after_running_jobs() -> None:
    world = World({"north": 4}, PLANNED)
    submit_narrow_jobs(world, 6)
    wide_job = world.submit(fixed(north=4), run_time=20)
    submit_narrow_jobs(world, 6)
    assert world.queries.planned_job == wide_job
    assert world.state(wide_job) is JobState.QUEUED
    narrow = world.submit(flexible(1))
    assert world.queries.waiting_reason(world.job(narrow)) in (
        f"nodes are kept for job {wide_job}, which is planned for 00:01 UTC",
        "needs 1 node; 0 are idle (north 0)",
    )
    world.advance(25)
    assert world.state(wide_job) is JobState.RUNNING
    assert world.queries.planned_job != wide_job
    world.advance(60)
    assert world.state(narrow) is JobState.SUCCEEDED


@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
@pytest.mark.parametrize("is_restarted", [False, True])
@given(width=st.integers(2, 4), run_time=st.integers(11, 40), order=st.sampled_from(["narrowest-first", "fcfs"]))
def test_planned_wide_job_starts_in_each_queue_order(
    queue: str, is_restarted: bool, width: int, run_time: int, order: str
) -> None:
    """Narrow jobs arrive all the time, one for each node, and run until the next ones wait."""
    plan_after = 0 if order == "fcfs" else 5
    rules = Rules(
        queue=queue,  # type: ignore[arg-type]
        queue_order=order,  # type: ignore[arg-type]
        plan_after=plan_after,
        scan_interval=10,
        high_scans_per_low=1,
    )
    world = World({"north": 4}, rules, strict=False)
    for _ in range(5):
        world.submit(flexible(1), run_time=run_time)
    wide_job = world.submit(fixed(north=width), run_time=20)
    for _ in range(12):
        for _ in range(5):
            world.submit(flexible(1), run_time=run_time)
        world.advance(10)
        if is_restarted and world.state(wide_job) is JobState.QUEUED:
            old_values = world.queries.tries(wide_job), world.queries.planned_job
            world.restart()
            world.connect("north")
            assert (world.queries.tries(wide_job), world.queries.planned_job) == old_values
    assert world.state(wide_job) in (JobState.RUNNING, JobState.SUCCEEDED)


@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
def test_tries_are_counted_behind_narrower_jobs(queue: str) -> None:
    rules = Rules(queue=queue, queue_order="narrowest-first", scan_interval=10, high_scans_per_low=1)  # type: ignore[arg-type]
    world = World({"north": 4}, rules)
    world.submit(fixed(north=4), run_time=1000)
    jobs = [world.submit(fixed(north=size), max_placement_tries=5) for size in (1, 2)]
    world.advance(39)
    assert [world.state(job) for job in jobs] == [JobState.QUEUED] * 2
    world.advance(12)
    assert [world.job(job).placement_tries for job in jobs] == [5, 5]
    assert [world.state(job) for job in jobs] == [JobState.FAILED] * 2


def test_job_that_ends_before_the_planned_start_uses_its_nodes() -> None:
    world = World({"north": 4}, PLANNED)
    world.submit(fixed(north=3), run_time=1000, walltime=1000)
    wide_job = world.submit(fixed(north=4), walltime=100)
    world.advance(10)
    short_job, long_job = (world.submit(flexible(1), run_time=100, walltime=walltime) for walltime in (600, 1000))
    world.advance(5)
    assert [world.state(job) for job in (short_job, long_job)] == [JobState.RUNNING, JobState.QUEUED]
    start = world.queries.planned_start(wide_job)
    assert start is not None
    assert start - world.now == pytest.approx(985, abs=15)
    assert "starts by" in world.queries.waiting_reason(world.job(wide_job))
    world.advance(1000)
    assert world.state(wide_job) is JobState.SUCCEEDED


def test_jobs_that_end_after_the_planned_start_share_the_nodes_beside_it() -> None:
    world = World({"north": 8}, PLANNED)
    world.submit(fixed(north=4), run_time=1000, walltime=1000)
    wide_job = world.submit(fixed(north=6), walltime=100)
    world.advance(10)
    long_jobs = [world.submit(flexible(2), run_time=5000, walltime=5000) for _ in range(2)]
    world.advance(5)
    assert [world.state(job) for job in long_jobs] == [JobState.RUNNING, JobState.QUEUED]
    world.advance(1000)
    assert world.state(wide_job) is JobState.SUCCEEDED


@pytest.mark.parametrize("is_restarted", [False, True])
def test_nodes_of_planned_job_are_kept_while_it_awaits_its_files(is_restarted: bool) -> None:
    from tests.scheduler.test_incremental import GRID, LINKS, with_input

    world = World(GRID, replace(PLANNED, claiming=ClaimingMode.INCREMENTAL), links=LINKS)
    world.submit(fixed(north=4), run_time=50, walltime=60)
    planned_job = world.submit(with_input(fixed(north=4)), walltime=100)
    world.advance(51)
    assert world.state(planned_job) is JobState.PLACED
    if is_restarted:
        world.restart()
        for name in GRID:
            world.connect(name)
    other_job = world.submit(fixed(north=4), walltime=1000)
    world.advance(20)
    assert [world.state(job) for job in (planned_job, other_job)] == [JobState.RUNNING, JobState.QUEUED]


@pytest.mark.parametrize(("transfer_s", "state"), [(300, JobState.PLACED), (600, JobState.QUEUED)])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_time_until_the_planned_start_includes_the_transfer_of_files(
    transfer_s: int, state: JobState, is_restarted: bool
) -> None:
    from tests.scheduler.test_incremental import GRID, LINKS, with_input

    world = World(GRID, PLANNED, links=LINKS)
    world.submit(fixed(north=3), run_time=1000, walltime=1000)
    world.submit(fixed(north=1), run_time=30, walltime=60)
    wide_job = world.submit(fixed(north=4), walltime=100)
    short_job = world.submit(with_input(fixed(north=1), size=100 * transfer_s), walltime=500)
    assert world.state(short_job) is JobState.QUEUED
    if is_restarted:
        world.restart()
        for name in GRID:
            world.connect(name)
    world.advance(40)
    assert (world.queries.planned_job, world.state(short_job)) == (wide_job, state)


def test_jobs_with_different_inputs_are_restored_with_one_view_of_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clusters are out of reach then, and the estimates count them as if they were not."""
    from tests.scheduler.test_incremental import GRID, LINKS, with_input

    world = World(GRID, PLANNED, links=LINKS)
    for size in (100, 200, 300):
        world.submit(with_input(nonfixed(5), size=size))
    views = []

    def record_view(spec: JobSpec, view: GridView, assumed: float | None) -> dict[str, set[float]]:
        views.append(view)
        return transfer_times(spec, view, assumed)

    monkeypatch.setattr(plan, "transfer_times", record_view)
    world.restart()
    assert len(views) >= 3
    assert all(view is views[0] for view in views)


def test_only_jobs_with_a_walltime_use_nodes_of_a_start_that_is_late() -> None:
    """The running job was expected to end after 100 seconds, then after 200, then after 400."""
    world = World({"north": 4}, replace(PLANNED, default_walltime=100.0))
    world.submit(fixed(north=3), run_time=1000)
    wide_job = world.submit(fixed(north=4), walltime=100)
    world.advance(215)
    assert world.queries.planned_start(wide_job) == pytest.approx(400, abs=1)
    unlimited_job, short_job = world.submit(flexible(1)), world.submit(flexible(1), walltime=60)
    world.advance(1)
    assert [world.state(job) for job in (unlimited_job, short_job)] == [JobState.QUEUED, JobState.RUNNING]


def test_plan_leaves_other_nodes_available() -> None:
    world = World({"north": 4, "south": 4}, PLANNED)
    world.submit(fixed(north=4), run_time=100)
    wide_job = world.submit(fixed(north=3))
    world.advance(40)
    assert world.queries.planned_job == wide_job
    other_job = world.submit(flexible(4))
    assert world.state(other_job) is JobState.CLAIMING
    assert world.job(other_job).attempt.gang[0].cluster == "south"  # type: ignore[union-attr]


def test_plan_of_low_job_does_not_delay_high_job() -> None:
    world = World({"north": 4}, Rules(plan_after=0, scan_interval=10, high_scans_per_low=1, preemption="never"))
    world.submit(fixed(north=2), run_time=200)
    wide_job = world.submit(fixed(north=4))
    world.advance(40)
    assert world.queries.planned_job == wide_job
    low_job = world.submit(flexible(1))
    high_job = world.submit(flexible(1), priority=Priority.HIGH)
    assert (world.state(low_job), world.state(high_job)) == (JobState.QUEUED, JobState.CLAIMING)


def test_plan_ends_when_job_is_cancelled() -> None:
    world = World({"north": 4}, PLANNED)
    world.submit(fixed(north=2), run_time=1000)
    wide_job = world.submit(fixed(north=4))
    world.advance(40)
    low_job = world.submit(flexible(1))
    assert world.state(low_job) is JobState.QUEUED
    world.cancel(wide_job)
    assert world.queries.planned_job is None
    world.advance(11)
    assert world.state(low_job) in (JobState.RUNNING, JobState.SUCCEEDED)


def test_plan_is_not_made_for_impossible_job() -> None:
    world = World({"north": 4}, PLANNED)
    world.sites["north"].add_local_user(2)
    world.settle()
    wide_job = world.submit(fixed(north=4))
    world.advance(100)
    assert world.state(wide_job) is JobState.QUEUED
    assert world.queries.planned_job is None
    low_job = world.submit(flexible(2))
    assert world.state(low_job) is JobState.CLAIMING


@given(
    widths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    narrow_jobs=st.lists(st.tuples(st.integers(1, 2), st.integers(5, 40)), min_size=30, max_size=40),
    default_walltime=st.sampled_from([None, 5.0, 1000.0]),
)
def test_plan_starts_each_job_in_bounded_time(
    widths: list[int], narrow_jobs: list[tuple[int, int]], default_walltime: float | None
) -> None:
    """Each wide job starts within a few job lengths in an endless stream of narrow jobs, however long they run."""
    world = World({"north": 4, "south": 3}, replace(PLANNED, default_walltime=default_walltime))
    for size, run_time in narrow_jobs[:6]:
        world.submit(flexible(size), run_time=run_time)
    wide_jobs = [world.submit(flexible(width) if width > 4 else nonfixed(width), run_time=10) for width in widths]
    for size, run_time in narrow_jobs * 4:
        world.submit(flexible(size), run_time=run_time)
        world.advance(4)
    assert all(world.state(job) is JobState.SUCCEEDED for job in wide_jobs)


def test_plan_skips_job_rejected_by_limit() -> None:
    """The next job gets the plan, since the limit may last."""
    world = World({"north": 4, "south": 4}, PLANNED)
    world.sites["north"].rejection_fault = lambda size: "limit" if size > 2 else ""
    rejected_job = world.submit(fixed(north=4))
    for number in range(6):
        world.submit(fixed(south=1), run_time=30, name=f"narrow-{number}")
        world.advance(5)
    wide_job = world.submit(fixed(south=4), run_time=20)
    for number in range(40):
        world.submit(fixed(south=1), run_time=30, name=f"later-{number}")
        world.advance(5)
    assert world.state(wide_job) is JobState.SUCCEEDED
    assert world.state(rejected_job) is JobState.QUEUED
    for number in range(20):
        world.submit(fixed(north=1), run_time=30, name=f"beside-{number}")
        world.advance(5)
    world.sites["north"].rejection_fault = lambda size: ""
    for number in range(60):
        world.submit(fixed(north=1), run_time=30, name=f"behind-{number}")
        world.advance(5)
    assert world.state(rejected_job) is not JobState.QUEUED, "it has waited longest and is accepted again"


def test_plan_under_lasting_limit_stays_with_second_job() -> None:
    """The plan stays until the job is placed, though an older one may be tried again."""
    world = World({"north": 4, "south": 4}, PLANNED)
    world.sites["north"].rejection_fault = lambda size: "limit" if size > 2 else ""
    for _ in range(4):
        world.submit(fixed(north=1), run_time=300)
        world.submit(fixed(south=1), run_time=300)
        world.advance(75)
    rejected_job = world.submit(fixed(north=4))
    wide_job = world.submit(fixed(south=4), run_time=20)
    for _ in range(160):
        world.submit(fixed(north=1), run_time=300)
        world.submit(fixed(south=1), run_time=300)
        world.advance(20)
    assert (world.state(rejected_job), world.state(wide_job)) == (JobState.QUEUED, JobState.SUCCEEDED)
    started_at = world.job(wide_job).started_at
    assert started_at is not None
    assert started_at < 1200


def test_plan_stays_behind_preempted_job_of_equal_shape() -> None:
    """The preempted job has returned to its earlier position."""
    world = World({"north": 6}, Rules(plan_after=600))
    first = world.submit(fixed(north=4), run_time=100000)
    waiting_job = world.submit(fixed(north=4), run_time=100)
    world.advance(30 * 42)
    narrow = [world.submit(fixed(north=1), run_time=200, walltime=200.0) for _ in range(3)]
    assert world.queries.planned_job == waiting_job
    world.submit(fixed(north=3), run_time=100, walltime=100.0, priority=Priority.HIGH)
    world.settle()
    assert world.state(first) is JobState.QUEUED
    assert world.queries.position(first) == 1
    assert world.queries.planned_job == waiting_job
    world.advance(150)
    assert world.state(waiting_job) is JobState.RUNNING
    assert {world.state(job) for job in narrow} <= {JobState.QUEUED, JobState.RUNNING}


@pytest.mark.parametrize("priority", Priority)
def test_re_placement_of_low_component_avoids_planned_nodes(priority: Priority) -> None:
    rules = Rules(plan_after=0, preemption="never")
    world = World({"north": 4, "south": 4}, rules, links={("north", "south"): Link(0.001, 100.0)})
    world.submit(fixed(north=2), run_time=300)
    waiting_job = world.submit(fixed(north=4))
    world.step([PeriodicScan()] * 8)
    assert world.queries.planned_job == waiting_job
    sites = ("north",) if priority is Priority.LOW else ("north", "east")
    inputs = (InputFile("file", 1000, sites),)
    request = NonFixedRequest((ComponentRequest(2, inputs=inputs),))
    world.sites["north"].add_local_user(2)
    world.settle()
    re_placed_job = world.submit(request, run_time=400, claiming=ClaimingMode.INCREMENTAL, priority=priority)
    assert world.job(re_placed_job).attempt.gang[0].cluster == "south"  # type: ignore[union-attr]
    world.sites["south"].add_local_user(4)
    for user in list(world.sites["north"].local_users):
        world.sites["north"].remove_local_user(user)
    world.settle()
    world.advance(15)
    assert ("re-placed" in world.timeline_events(re_placed_job)) == (priority is Priority.HIGH)
