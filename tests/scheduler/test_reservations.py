"""Advance reservations: jobs that name one get its nodes, and others do not have them in its time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koalapy.model.job import Job, JobId, JobState, parse_token
from koalapy.model.job_sizes import NodeReservation
from koalapy.model.job_spec import Priority
from koalapy.model.reports import ClusterReport
from koalapy.model.reservation import Reservation, ReservationState, ReservedPart
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.events import ClusterDrained, ClusterResumed, ReservationChanged
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.queue.component_sizes import exclude_reserved
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.sites import Site
from tests.scheduler.world import World

BEGINS, ENDS = 1000.0, 2000.0
SITE_NAME = "koala-0123456789ab-1"


def create_reservation(
    parts: Sequence[tuple[str, int]] = (("north", 3), ("south", 2)), name: str = "r1", begins: float = BEGINS
) -> Reservation:
    reserved = tuple(ReservedPart(*part) for part in parts)
    state = ReservationState.MADE
    return Reservation(1, name, SITE_NAME, "ada", begins, ENDS, reserved, 0.0, state=state)


class ReservingSite(Site):
    """A site that reports a reservation as Slurm does: its nodes are not idle once it has begun."""

    reserved: int = 0

    def current_report(self) -> ClusterReport:
        report, now = super().current_report(), self._clock()
        if not self.reserved or now >= ENDS:
            return report
        used = sum(size for token, size in self.held.items() if token in self.runners and self.is_reserved(token))
        left = self.reserved - used
        idle = min(left, report.idle)
        if now >= BEGINS:
            report = replace(report, idle=report.idle - idle, background=report.background + idle)
            idle = 0
        return replace(report, reservations=(NodeReservation(SITE_NAME, self.reserved, idle, BEGINS, ENDS),))

    def is_reserved(self, token: str) -> bool:
        return token in self.reserved_tokens

    reserved_tokens: frozenset[str] = frozenset()


class ReservingWorld(World):
    """A world with a reservation of three nodes of north and two of south; north may report its part."""

    site_class = ReservingSite
    stored = create_reservation()

    def __init__(self, rules: Rules | None = None, *, reports: bool = False) -> None:
        super().__init__({"north": 6, "south": 2}, rules)
        self.step([ReservationChanged(create_reservation())])
        self.reports = reports
        self.refresh()

    def _scheduler(self, clusters: Sequence[ClusterStatus], jobs: Sequence[Job] | None = None) -> Scheduler:
        scheduler = super()._scheduler(clusters)
        if jobs is not None:
            scheduler.restore(jobs, self.now, self.scans, [self.stored])
        return scheduler

    def submit_reserved(self, nodes: int, *, at: float = BEGINS, **spec: object) -> JobId:
        values = {"begin": at, "deadline": ENDS, "reservation": "r1", "run_time": 10.0, **spec}
        return self.submit(flexible(nodes), **values)  # type: ignore[arg-type]

    def refresh(self) -> None:
        """Let the sites report what they hold now."""
        for site in self.sites.values():
            assert isinstance(site, ReservingSite)
            site.reserved_tokens = frozenset(t for t in site.runners if self.jobs[parse_token(t).job].spec.reservation)
            site.reserved = {"north": 3, "south": 2}[site.name] if self.reports else 0
            site.send_report(site.current_report())
        self.settle()

    def wait_until(self, time: float, step: float = 50.0) -> None:
        while self.now < time:
            self.advance(min(step, time - self.now))
            self.refresh()

    def held_by_others(self, cluster: str) -> int:
        """Return the nodes of a cluster that jobs without the reservation have."""
        held = self.sites[cluster].held.items()
        return sum(size for token, size in held if not self.jobs[parse_token(token).job].spec.reservation)


@pytest.mark.parametrize("reports", [False, True])
def test_job_waits_for_its_reservation_and_gets_its_nodes_then(reports: bool) -> None:
    world = ReservingWorld(reports=reports)
    job = world.submit_reserved(5, walltime=100.0)
    others = [world.submit(flexible(1), run_time=5000.0) for _ in range(8)]
    world.wait_until(BEGINS - 50)
    assert world.state(job) is JobState.QUEUED
    assert world.queries.waiting_reason(world.job(job)) == "waits until 00:16:40 UTC"
    assert [world.state(each) for each in others].count(JobState.RUNNING) == 3, "more would lack reserved nodes"
    world.wait_until(BEGINS + 5, step=1)
    attempt = world.job(job).attempt
    assert attempt is not None
    assert {component.cluster: component.size for component in attempt.gang} == {"north": 3, "south": 2}
    assert world.state(job) is JobState.RUNNING
    world.wait_until(ENDS - 500)
    assert world.state(job) is JobState.SUCCEEDED


def test_job_in_reservation_uses_no_other_nodes_and_passes_blocked_head() -> None:
    world = ReservingWorld(Rules(queue="fcfs"))
    world.wait_until(BEGINS)
    blocked = world.submit(flexible(8), walltime=100.0)
    first, second = (world.submit_reserved(3, walltime=100.0) for _ in range(2))
    world.wait_until(BEGINS + 5, step=1)
    assert [world.state(job) for job in (blocked, first, second)] == [
        JobState.QUEUED,
        JobState.RUNNING,
        JobState.QUEUED,
    ]
    reason = world.queries.waiting_reason(world.job(second))
    assert reason.endswith("it gets nodes of reservation r1 only")
    explanation = explain(world.queries, world.job(second), (), world.now)
    assert {finding.cluster: finding.idle for finding in explanation.clusters} == {"north": 0, "south": 2}
    assert explanation.smallest_change is not None
    assert explanation.smallest_change.placement.nodes_on("south") == 2
    world.wait_until(BEGINS + 100)
    assert world.state(second) is JobState.SUCCEEDED


def test_job_that_cannot_end_before_its_reservation_fails_with_that_reason() -> None:
    world = ReservingWorld()
    world.wait_until(BEGINS)
    running = world.submit_reserved(5, walltime=ENDS - BEGINS - 1, run_time=5000.0)
    waiting = world.submit_reserved(1, walltime=600.0)
    world.wait_until(ENDS - 600 + 1, step=10)
    assert world.state(waiting) is JobState.FAILED
    assert world.job(waiting).reason.startswith("the end of reservation r1, 00:33:20 UTC can no longer be met")
    world.wait_until(ENDS + 10, step=10)
    assert world.state(running) is JobState.FAILED


@pytest.mark.parametrize("state", [ReservationState.CANCELLED, ReservationState.BROKEN, ReservationState.OVER])
def test_end_of_reservation_fails_waiting_jobs_and_frees_nodes(state: ReservationState) -> None:
    world = ReservingWorld()
    job, other = world.submit_reserved(2), world.submit(flexible(8), walltime=5000.0)
    assert world.state(other) is JobState.QUEUED
    world.step([ReservationChanged(replace(create_reservation(), state=state, reason="was removed on north"))])
    world.settle()
    assert (world.state(job), world.job(job).reason) == (JobState.FAILED, "reservation r1 was removed on north")
    world.advance(5)
    assert world.state(other) is JobState.RUNNING


@pytest.mark.parametrize("comes", ["from an attempt", "with the daemon", "as a new job"])
def test_job_that_comes_after_the_end_of_its_reservation_fails_with_that_reason(comes: str) -> None:
    world = ReservingWorld()
    broken = replace(create_reservation(), state=ReservationState.BROKEN, reason="was removed on north")
    job = world.submit_reserved(2, run_time=500.0, at=0.0 if comes == "from an attempt" else BEGINS)
    world.advance(5)
    if comes == "with the daemon":
        world.stored = broken
        world.restart()
    else:
        world.step([ReservationChanged(broken)])
    if comes == "from an attempt":
        assert world.state(job) is JobState.RUNNING
        (token,) = world.tokens(job)
        world.site_of(token).fail_component(token, "its node is down")
    elif comes == "as a new job":
        job = world.submit_reserved(1)
    world.advance(1)
    world.step()
    assert (world.state(job), world.job(job).reason) == (JobState.FAILED, "reservation r1 was removed on north")


def test_other_reservation_of_a_name_neither_gives_nodes_nor_ends_jobs() -> None:
    world = ReservingWorld()
    job, other = world.submit_reserved(5), replace(create_reservation([("north", 1)]), id=2, site_name="koala-x-2")
    for state in (ReservationState.MADE, ReservationState.CANCELLED):
        world.step([ReservationChanged(replace(other, state=state, reason="was cancelled by eve"))])
        assert world.queries.reservations.free_nodes("r1", "north") == 3
        assert world.state(job) is JobState.QUEUED


def test_job_in_reservation_is_not_preempted_and_waits_for_drained_cluster() -> None:
    world = ReservingWorld()
    world.wait_until(BEGINS)
    world.step([ClusterDrained("south", reason="disks")])
    wide = world.submit_reserved(5, run_time=500.0)
    world.wait_until(BEGINS + 50)
    assert world.state(wide) is JobState.QUEUED
    world.step([ClusterResumed("south")])
    world.wait_until(BEGINS + 100)
    high = world.submit(fixed(north=4), priority=Priority.HIGH, walltime=100.0)
    world.wait_until(BEGINS + 200)
    assert [world.state(job) for job in (wide, high)] == [JobState.RUNNING, JobState.QUEUED]


def test_restarted_scheduler_keeps_nodes_for_reservation_and_counts_its_jobs_once() -> None:
    world = ReservingWorld()
    world.wait_until(BEGINS)
    job = world.submit_reserved(4, run_time=500.0)
    world.wait_until(BEGINS + 20)
    world.restart()
    for name in world.sites:
        world.connect(name)
    world.wait_until(BEGINS + 100)
    assert world.state(job) is JobState.RUNNING
    second = world.submit_reserved(1)
    long_job = world.submit(fixed(north=4), run_time=10.0)
    world.wait_until(BEGINS + 200)
    assert [world.state(each) for each in (second, long_job)] == [JobState.SUCCEEDED, JobState.QUEUED]


class Order(NamedTuple):
    at: int
    nodes: int
    walltime: float | None
    is_reserved: bool


orders = st.builds(
    Order,
    st.integers(0, 36),
    st.integers(1, 4),
    st.none() | st.sampled_from([30.0, 200.0, 600.0, 3000.0]),
    st.booleans(),
)


@settings(max_examples=5, deadline=None)
@given(st.lists(orders, min_size=3, max_size=12), st.booleans())
def test_no_job_without_reservation_has_its_nodes_in_its_time(jobs: list[Order], reports: bool) -> None:
    world = ReservingWorld(reports=reports)
    for at in range(39):
        for order in (order for order in jobs if order.at == at):
            if not order.is_reserved:
                world.submit(flexible(order.nodes), walltime=order.walltime, run_time=order.walltime or 800.0)
            elif 50.0 * at + (order.walltime or 0.0) + 1 < ENDS:
                world.submit_reserved(order.nodes, walltime=order.walltime, run_time=(order.walltime or 300.0) - 5)
        world.wait_until(50.0 * (at + 1), step=25)
        check_reserved_nodes(world)


def check_reserved_nodes(world: ReservingWorld) -> None:
    """Check what jobs hold now, and that each reserved node is subtracted once from those offered to short jobs."""
    is_active = BEGINS <= world.now < ENDS
    offered, _ = exclude_reserved(world.queries.grid.view(), 1.0, world.now)
    for name, part in (("north", 3), ("south", 2)):
        site, cluster = world.sites[name], world.queries.grid[name]
        held, others = sum(site.held.values()), world.held_by_others(name)
        if is_active:
            assert others <= site.total - part
        assert held - others <= (part if is_active else 0)
        ours = sum(
            size
            for token, size in cluster.nodes.live.items()
            if not world.jobs[parse_token(token).job].spec.reservation
        )
        view = offered.get(name)
        assert view is not None
        is_kept = world.now < ENDS and world.now + 61 > BEGINS  # a job of a second may take a minute
        expected = max(0, site.total - ours - (part if is_kept else 0))
        assert view.idle == (expected if ours == others else min(view.idle, expected))
