"""What the alerts about jobs are made of, updated with each change, compared with a walk over all jobs."""

import random
from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.daemon.alerts import job_checks
from koalapy.daemon.alerts.job_checks import MAX_LONG_WAITS, MAX_STARVING, JobChecks
from koalapy.model.alert import Alert, AlertKind, AlertRules
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.placement import Explanation
from koalapy.model.request import FlexibleRequest
from koalapy.scheduler.events import ClusterDisconnected, ClusterDrained, Event
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.world import World

NOW = 1000.0
RULES = AlertRules(claim_stuck_after=inf, starving_after=400.0, flood_jobs=4, flood_share=0.5)
STATES = (JobState.QUEUED, JobState.QUEUED, JobState.QUEUED, JobState.RUNNING, JobState.HELD, JobState.CANCELLED)


class Jobs:
    """The unfinished jobs, of which observers hear as from the engine."""

    def __init__(self) -> None:
        self.unfinished: dict[int, Job] = {}
        self._observers: list[Any] = []
        self.walks = 0
        self.queries = cast("Any", self)
        self.subscribe = self._observers.append

    def jobs(self) -> list[Job]:
        self.walks += 1
        return list(self.unfinished.values())

    def job(self, ident: int) -> Job | None:
        return self.unfinished.get(ident)

    def change(self, job: Job) -> None:
        previous = self.unfinished.pop(job.id, None)
        if not job.state.is_final:
            self.unfinished[job.id] = job
        for observer in self._observers:
            observer(job, previous and previous.state)


def draw_job(ident: int, draw: random.Random) -> Job:
    """Return a job as any change may leave it."""
    spec = JobSpec(
        FlexibleRequest(1),
        ("true",),
        owner=draw.choice(("ada", "bob")),
        internal=ident % 7 == 0,
        priority=draw.choice(tuple(Priority)),
        begin=5.0 if ident % 5 == 0 else None,
    )
    state, began = draw.choice(STATES), float(draw.randrange(0, 1000, 50))
    attempt = Attempt(1, (Component(0, "north", 1, ComponentState.RUNNING),), began, ended_at=began)
    return Job(
        ident,
        spec,
        float(draw.randrange(0, 1000, 50)),
        state,
        attempt=attempt if state is JobState.RUNNING or draw.random() < 0.3 else None,
        placed_at=began if state is JobState.RUNNING else None,
        eligible_at=draw.choice((None, began)),
    )


def starving_jobs(jobs: list[Job]) -> list[int]:
    """Return the jobs that starve by a walk over all jobs."""
    users_jobs = [job for job in jobs if not job.spec.internal]
    waiting = []
    for job in users_jobs:
        if job.state is JobState.QUEUED and not job.is_deferred:
            since = max(job.waits_since, (job.attempt.ended_at or 0.0) if job.attempt else 0.0)
            if NOW - since >= RULES.starving_after:
                waiting.append((since, job.id, job.spec.priority))
    active = [job for job in users_jobs if job.state.is_active and job.placed_at is not None]
    return [
        ident
        for since, ident, priority in sorted(waiting)[:MAX_LONG_WAITS]
        if any(o.id > ident and (o.placed_at or 0.0) >= since and o.spec.priority == priority for o in active)
    ][:MAX_STARVING]


@pytest.fixture(autouse=True)
def no_explanations(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Replace explanations of the jobs of ``Jobs``, which have no scheduler."""
    if "walk" in request.node.name:
        explanation = Explanation(1, JobState.QUEUED, "it waits")
        monkeypatch.setattr(job_checks, "explain", lambda *_, **__: explanation)
        monkeypatch.setattr(job_checks, "find_awaited_clusters", lambda *_: ([], []))


async def find_alerts(checks: JobChecks, kind: AlertKind) -> list[Alert]:
    return [alert async for alert in checks(NOW) if alert.kind is kind]


@given(seed=st.integers(0, 2**32))
async def test_job_checks_after_any_changes_are_those_of_a_walk(seed: int) -> None:
    draw, engine = random.Random(seed), Jobs()
    for ident in range(1, 10):
        engine.change(draw_job(ident, draw))
    checks = JobChecks(cast("Any", engine), RULES)
    for _ in range(draw.randrange(1, 60)):
        ident = draw.randrange(1, 30)
        present = engine.job(ident)
        changed = draw_job(ident, draw)
        if present is not None:  # no change of a job changes its owner
            changed = replace(changed, spec=replace(changed.spec, owner=present.spec.owner))
        engine.change(changed)
    jobs = engine.jobs()
    starving = await find_alerts(checks, AlertKind.JOB_STARVES)
    assert [alert.job for alert in starving] == starving_jobs(jobs)
    queued = [job for job in jobs if job.state is JobState.QUEUED and not job.spec.internal]
    by_owner = Counter(job.spec.owner for job in queued)
    floods = {alert.user: alert.summary for alert in await find_alerts(checks, AlertKind.QUEUE_FLOODED)}
    assert floods == {
        owner: f"{count} of the {by_owner.total()} queued jobs belong to {owner}"
        for owner, count in by_owner.items()
        if len(by_owner) > 1 and count >= RULES.flood_jobs and count >= RULES.flood_share * by_owner.total()
    }


async def test_job_checks_walk_over_queued_jobs_only_at_the_start() -> None:
    engine = Jobs()
    checks = JobChecks(cast("Any", engine), RULES)
    for ident in range(1, 50):
        engine.change(draw_job(ident, random.Random(ident)))
    for _ in range(3):
        assert [alert async for alert in checks(NOW)]
    assert engine.walks == 1


class GridJobs:
    """The jobs of a virtual grid, as the engine shows them to checks."""

    def __init__(self, world: World) -> None:
        self.queries = world.queries

    def subscribe(self, observer: object) -> None:
        """Ignore the observer: the checks are built when the jobs have the states of interest."""


def grid_with_starving_job() -> tuple[World, int]:
    """Return a grid on which narrow jobs start for an hour while a job of four nodes waits for its cluster."""
    world = World({"north": 4, "south": 4}, Rules(plan_after=None, scan_interval=10, high_scans_per_low=1))
    starts(world, 6)
    wide_job = world.submit(fixed(north=4))
    starts(world, 20)
    assert world.state(wide_job) is JobState.QUEUED
    return world, wide_job


def starts(world: World, count: int) -> None:
    for _ in range(count):
        world.submit(fixed(north=1), run_time=30)
        world.advance(5)


async def starvation_alerts(world: World) -> list[Alert]:
    checks = JobChecks(cast("Any", GridJobs(world)), AlertRules(starving_after=60.0))
    return [alert async for alert in checks(world.now) if alert.kind is AlertKind.JOB_STARVES]


async def test_starving_job_alert_has_cause_and_remedy_of_its_explanation() -> None:
    world, wide_job = grid_with_starving_job()
    (alert,) = await starvation_alerts(world)
    explanation = explain(world.queries, world.job(wide_job), (), world.now, high_priority_allowed=False)
    assert (alert.job, alert.cause) == (wide_job, explanation.headline)
    assert explanation.smallest_change is not None
    assert explanation.notes[-1].startswith("no starts are planned here: jobs of fewer nodes may start before it")
    assert alert.remedy.startswith("have nodes kept for it: set rules.plan_after; or ")
    assert explanation.suffices[0] in alert.remedy
    is_similar = 2 * explanation.smallest_change.spec.request.total_size >= 4
    assert (explanation.smallest_change.text in alert.remedy) == is_similar
    assert f"koala explain {wide_job}" in alert.remedy


@pytest.mark.parametrize(
    "absence", [ClusterDrained("north", "olga", "disks", ends_at=1e6), ClusterDisconnected("north", "no agent", 1.0)]
)
async def test_job_that_waits_for_absent_cluster_has_no_starvation_alert(absence: Event) -> None:
    world, _ = grid_with_starving_job()
    world.step([absence])
    assert await starvation_alerts(world) == []


async def test_job_that_only_a_permanently_drained_cluster_can_run_starves_by_its_drain() -> None:
    world, _ = grid_with_starving_job()
    world.step([ClusterDrained("north", "olga", "disks")])
    (alert,) = await starvation_alerts(world)
    assert alert.cause == "it cannot run without north, which is drained by olga: disks"
    assert alert.remedy.startswith("resume it: koala clusters resume north; or ")


async def test_job_with_room_on_other_clusters_starves_while_one_is_drained() -> None:
    world, _ = grid_with_starving_job()
    world.step([ClusterDrained("south", "olga", "disks")])
    assert len(await starvation_alerts(world)) == 1


async def test_job_that_absent_clusters_would_serve_has_no_starvation_alert() -> None:
    world = World({"north": 4, "south": 8}, Rules(plan_after=None, scan_interval=10, high_scans_per_low=1))
    world.step([ClusterDrained("south", "olga", "disks")])
    starts(world, 6)
    world.submit(flexible(4))
    starts(world, 20)
    assert await starvation_alerts(world) == []
