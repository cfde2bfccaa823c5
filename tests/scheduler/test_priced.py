"""Priced claiming: nodes are held for files or other components while that costs less than to let them go."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import Link
from koalapy.model.job import ClaimingMode, ComponentState, JobState
from koalapy.scheduler.claims.evidence import ClaimEvidence
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.laws import check_quiet
from tests.scheduler.requests import fixed, nonfixed
from tests.scheduler.test_incremental import GRID, LINKS, with_input
from tests.scheduler.world import World


def world_of(grid: dict[str, int] = GRID, links: Any = LINKS, **rules: Any) -> World:
    return World(grid, Rules(claiming=ClaimingMode.PRICED, **rules), links=links)


def evidence(world: World, cluster: str) -> ClaimEvidence:
    return world.queries.grid[cluster].evidence


def states(world: World, job: int) -> list[ComponentState]:
    return [component.state for component in world.job(job).attempt.gang]  # type: ignore[union-attr]


def test_what_nobody_else_wants_is_held_from_the_first_claiming_try_on() -> None:
    world = world_of()
    job = world.submit(with_input(fixed(north=2, south=3)))
    world.advance(13)
    assert states(world, job) == [ComponentState.CLAIMED] * 2
    (told,) = world.reasons(job, "priced")
    assert told.startswith("held: to hold 5 nodes for 2.")
    world.advance(3.1)
    assert world.job(job).started_at == 16
    world.advance(20)
    check_quiet(world)


def test_while_others_wait_nodes_that_are_seldom_lost_are_left_to_them_until_the_files_are_there() -> None:
    """The first try is at 12 s, the next one at 15, which is as good as the start at 16."""
    world = world_of(event_driven=False, scan_interval=1000)
    for _ in range(200):
        evidence(world, "north").watched(4, 10.0, had_room=True, has_room=True, now=0.0)
        evidence(world, "north").started(4, 0.1, 0.0)
    job = world.submit(with_input(fixed(north=4)))
    world.advance(11)
    other = world.submit(fixed(north=3), lasts=1)
    later = world.submit(fixed(north=4))
    assert world.state(later) is JobState.QUEUED
    world.advance(1.5)
    assert (world.state(job), world.state(other)) == (JobState.PLACED, JobState.SUCCEEDED), "another had them meanwhile"


def test_a_job_that_lacks_nodes_which_hardly_come_back_starts_nothing() -> None:
    world = world_of(event_driven=False, scan_interval=1000, claim_epsilon=0.05)
    for _ in range(50):
        evidence(world, "south").watched(4, 1000.0, had_room=False, has_room=False, now=0.0)
    job = world.submit(with_input(fixed(north=4, south=4)))
    world.submit(fixed(north=4, south=4))
    waiting = world.submit(fixed(north=4), lasts=1)
    assert world.state(waiting) is JobState.QUEUED
    world.advance(11)
    world.sites["south"].local_user(1)
    world.advance(4)
    assert [c for c in world.commands(job) if c[0] == "Submit"] == []
    assert all(told.startswith("let go until the next try") for told in world.reasons(job, "priced"))
    world.advance(2)
    assert world.reasons(job, "requeued") == ["claim-failed: no room on south before its start time"]
    check_quiet(world)


def overtaken(world: World) -> tuple[int, str]:
    """A job of two components without inputs, one of which a local user has overtaken; and that user."""
    user = world.sites["south"].local_user(1)  # not yet reported
    job = world.submit(fixed(north=4, south=4), lasts=5)
    return job, user


def test_who_has_overtaken_a_component_is_waited_for_if_such_users_soon_leave() -> None:
    world = world_of(claim_grace=2)
    for _ in range(20):
        evidence(world, "south").watched(4, 5.0, had_room=False, has_room=True, now=0.0)
    job, user = overtaken(world)
    world.advance(2.5)
    assert world.state(job) is JobState.CLAIMING
    assert states(world, job) == [ComponentState.CLAIMED, ComponentState.PLACED]
    (told,) = world.reasons(job, "priced")
    assert told.startswith("waits on: to hold 4 nodes for 5.0")
    world.sites["south"].local_user_leaves(user)
    world.advance(30)
    assert (world.state(job), world.job(job).generation) == (JobState.SUCCEEDED, 1)
    check_quiet(world)


def test_and_not_if_they_stay() -> None:
    world = world_of(claim_grace=2)
    for _ in range(20):
        evidence(world, "south").watched(4, 5000.0, had_room=False, has_room=True, now=0.0)
    job, _ = overtaken(world)
    world.advance(2.5)
    assert world.state(job) is JobState.QUEUED
    assert world.reasons(job, "priced")[0].startswith("let go: to hold 4 nodes")
    assert world.queries.grid["north"].available == 4


def test_nobody_is_waited_for_longer_than_the_barrier_may_take() -> None:
    world = world_of(claim_grace=2, barrier_timeout=30)
    job, _ = overtaken(world)
    for _ in range(100):
        evidence(world, "south").watched(4, 0.01, had_room=False, has_room=True, now=0.0)
        world.advance(1)
        if world.state(job) is JobState.QUEUED:
            break
    assert world.state(job) is JobState.QUEUED
    assert world.now <= 30 + 2
    world.sites["south"].local_user_leaves("user-1")
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    check_quiet(world)


def test_nodes_that_are_held_are_let_go_when_files_come_much_later_and_are_claimed_again() -> None:
    world = World(GRID, Rules(claiming=ClaimingMode.PRICED), links=LINKS, manual=True)
    for name in GRID:
        world.deliver(name)
    for cluster in ("north", "south"):
        for _ in range(200):
            evidence(world, cluster).watched(4, 100.0, had_room=True, has_room=True, now=0.0)
            evidence(world, cluster).started(4, 0.1, 0.0)
    job = world.submit(with_input(fixed(north=4, south=4)))
    for name in GRID:
        world.obey(name)
        world.deliver(name)
    world.now = 12.0
    world.step()
    for name in ("north", "south"):
        world.obey(name)
        for token in world.sites[name].startable():
            world.sites[name].runners_report(token)
        world.deliver(name)
    assert states(world, job) == [ComponentState.CLAIMED] * 2
    assert world.state(world.submit(fixed(north=4, south=4))) is JobState.QUEUED
    world.now = 14.0
    for name in ("north", "south"):
        token = next(iter(world.sites[name].stages))
        world.sites[name].stage(token, 5)
        world.deliver(name)
    assert states(world, job) == [ComponentState.PLACED] * 2, "5 % in 14 s: another 266 s"
    assert world.reasons(job, "priced")[-1].startswith("let go until the next try: to hold 8 nodes for")
    attempt = world.job(job).attempt
    assert attempt is not None
    assert attempt.start_estimate == pytest.approx(280)
    assert attempt.claim_at == pytest.approx(14 + 0.75 * 266)
    assert [(c.index, c.rank) for c in attempt.gang] == [(2, 0), (3, 1)]


def test_who_asks_is_told_how_claims_fared_there() -> None:
    world = world_of(claim_grace=2)
    for _ in range(3):
        job, user = overtaken(world)
        world.advance(2.5)
        world.cancel(job)
        world.sites["south"].local_user_leaves(user)
        world.advance(1)
    job, _ = overtaken(world)
    found = explain(world.queries, world.job(job), world.timeline, world.now)
    said = {cluster.cluster: cluster.reason for cluster in found.clusters}
    assert said["south"].endswith("; of claims for about 4 nodes there 99% came to nothing lately"), said["south"]
    assert "came to nothing" not in said["north"]


@given(
    sizes=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=8),
    users=st.lists(st.tuples(st.floats(0, 60), st.sampled_from(["north", "south"]), st.integers(1, 4)), max_size=10),
    files=st.booleans(),
)
def test_every_job_ends_whatever_local_users_do(
    sizes: list[list[int]], users: list[tuple[float, str, int]], files: bool
) -> None:
    world = world_of({"north": 6, "south": 6, "files": 0}, links={p: Link(0.001, 100.0) for p in LINKS}, claim_grace=2)
    for at, cluster, size in users:
        world.later(at, lambda site=world.sites[cluster], size=size: _comes(world, site, size))  # type: ignore[misc]
    jobs = []
    for each in sizes:
        request = nonfixed(*each)
        jobs.append(world.submit(with_input(request) if files else request, lasts=3))
        world.advance(3)
    world.advance(900)
    assert all(world.state(job) is JobState.SUCCEEDED for job in jobs)
    check_quiet(world)


def _comes(world: World, site: Any, size: int) -> None:
    name = site.local_user(size)

    def leaves() -> None:
        if name in site.held:
            site.local_user_leaves(name)
        else:
            world.later(1.0, leaves)

    world.later(20.0, leaves)
