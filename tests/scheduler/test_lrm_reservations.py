"""Reservations of nodes by resource managers, which jobs must not run into."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobState
from koalapy.model.job_sizes import MAX_TIME, NodeReservation, count_peak
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import flexible
from tests.scheduler.world import World

HOUR = 3600.0


def create_world(*reservations: NodeReservation, rules: Rules | None = None, **sizes: int) -> World:
    world = World(sizes or {"north": 3, "south": 2}, rules)
    world.sites["north"].reservations = reservations
    world.sites["north"].send_report(world.sites["north"].current_report())
    world.advance(1)
    return world


def test_job_that_would_run_into_reservation_is_placed_elsewhere() -> None:
    world = create_world(NodeReservation("works", 3, 3, 2 * HOUR, 4 * HOUR))
    long_job = world.submit(flexible(2), walltime=3 * HOUR)
    short_job = world.submit(flexible(2), walltime=HOUR)
    world.advance(1)
    placed = [{c.cluster for c in attempt.gang} for job in (long_job, short_job) if (attempt := world.job(job).attempt)]
    assert placed == [{"south"}, {"north"}]


def test_weekly_reservations_keep_the_nodes_of_one_from_jobs_without_walltime() -> None:
    weeks = [NodeReservation(f"week-{n}", 2, 2, n * 168 * HOUR, (n * 168 + 2) * HOUR) for n in (1, 2, 3)]
    world = create_world(*weeks, rules=Rules(plan_after=0, scan_interval=10.0), north=3)
    first, second = world.submit(flexible(1)), world.submit(flexible(2))
    world.advance(1)
    assert [world.state(job) for job in (first, second)] == [JobState.RUNNING, JobState.QUEUED]
    world.cancel(second)
    world.advance(10)
    short_job = world.submit(flexible(3), walltime=HOUR, run_time=HOUR)
    third = world.submit(flexible(1), walltime=400 * HOUR)
    world.advance(60)
    planned_start = world.queries.planned_start(third)
    assert world.state(short_job) is JobState.RUNNING
    assert planned_start is not None
    assert planned_start < 2 * HOUR, "the short job leaves the node that no reservation has"


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 4)), max_size=6))
def test_count_peak_returns_most_nodes_in_use_at_one_time(spans: list[tuple[int, int, int]]) -> None:
    uses = [(float(begin), float(begin + length), nodes) for begin, length, nodes in spans]
    at_once = [sum(nodes for begin, end, nodes in uses if begin <= time < end) for time in range(15)]
    assert count_peak(uses) == max(at_once)


@pytest.mark.parametrize(("default", "starts"), [(MAX_TIME, False), (HOUR, True)])
def test_job_without_walltime_counts_with_default_of_resource_manager(default: float, starts: bool) -> None:
    world = create_world(NodeReservation("works", 3, 3, 2 * HOUR, 4 * HOUR, default), north=3)
    job = world.submit(flexible(2))
    world.advance(1)
    assert (world.state(job) is not JobState.QUEUED) == starts


def test_waiting_job_and_explanation_name_reservation_until_it_is_over() -> None:
    world = create_world(NodeReservation("works", 3, 3, 2 * HOUR, 4 * HOUR), north=3)
    job = world.submit(flexible(2), walltime=3 * HOUR)
    short_job = world.submit(flexible(1), walltime=HOUR, run_time=1)
    world.advance(5)
    assert (world.state(job), world.state(short_job)) == (JobState.QUEUED, JobState.SUCCEEDED)
    assert world.queries.waiting_reason(world.job(job)).endswith("north has 3 nodes reserved from 02:00 to 04:00 UTC")
    (finding,) = explain(world.queries, world.job(job), (), world.now).clusters
    assert "3 nodes reserved from 02:00 to 04:00 UTC" in finding.reason
    assert world.queries.grid["north"].status_text == "3 nodes reserved from 02:00 to 04:00 UTC"
    world.sites["north"].reservations = ()
    world.sites["north"].send_report(world.sites["north"].current_report())
    world.advance(1)
    assert world.state(job) is not JobState.QUEUED


def test_nodes_of_present_reservation_are_not_those_of_local_users() -> None:
    world = create_world(NodeReservation("works", 3, 0, 0.0, 4 * HOUR), north=3)
    world.sites["north"].add_local_user(3)
    world.sites["north"].send_report(world.sites["north"].current_report())
    world.advance(1)
    job = world.submit(flexible(2), walltime=HOUR)
    world.advance(1)
    (finding,) = explain(world.queries, world.job(job), (), world.now).clusters
    assert "3 nodes reserved until 04:00 UTC" in finding.reason
    assert "local users" not in finding.reason


@given(st.floats(0, 1e6), st.none() | st.floats(1, 1e6), st.floats(0, 1e6), st.floats(0, 1e6))
def test_reservation_bars_exactly_jobs_that_run_into_it(
    now: float, walltime: float | None, begins: float, default: float
) -> None:
    reservation = NodeReservation("works", 1, 1, begins, MAX_TIME, default)
    end = now + (default if walltime is None else walltime) + 60
    assert reservation.bars(walltime, now) == (begins < end and now < reservation.ends)
    assert "reserved" in reservation.describe(now)
