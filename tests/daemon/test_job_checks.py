"""What the alerts about jobs are made of, updated with each change, compared with a walk over all jobs."""

import random
from collections import Counter
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from koalapy.daemon.alerts.job_checks import MAX_LISTED, MAX_STARVING, JobChecks
from koalapy.model.alert import Alert, AlertKind, AlertRules
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import FlexibleRequest

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
        self.waiting_reason = str
        self.planned_job, self.rules = None, SimpleNamespace(plans_starts=False)

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
        for since, ident, priority in sorted(waiting)[:MAX_STARVING]
        if any(o.id > ident and (o.placed_at or 0.0) >= since and o.spec.priority == priority for o in active)
    ]


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
    for alert in starving:
        later = [str(job.id) for job in sorted(queued, key=lambda job: job.id) if job.id > (alert.job or 0)]
        assert not later or f"koala hold {' '.join(later[:MAX_LISTED])} --reason" in alert.remedy
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
