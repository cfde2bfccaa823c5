"""Summaries of all jobs for pages, computed once."""

import asyncio
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from koalapy.api.clusters import record_for
from koalapy.daemon.jobs.changes import Changes
from koalapy.daemon.observability.instruments import Instruments
from koalapy.dashboard.pages.clusters import failures_of, visible_calls
from koalapy.dashboard.rows import SiteUse, Survey, SurveyCache
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.reports import LrmCalls, LrmOperation
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest
from koalapy.ports import ClusterRecord
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure
from koalapy.system.event_loop import SLICE_SIZE

QUEUED_JOB = Job(1, JobSpec(FlexibleRequest(4), owner="alice"), 20.0)


def test_survey_counts_waiting_jobs_and_running_nodes() -> None:
    fixed_request = FixedRequest(
        (ComponentRequest(2, "north"), ComponentRequest(1, "north"), ComponentRequest(1, "south"))
    )
    components = (Component(0, "north", 3, ComponentState.RUNNING), Component(1, "south", 2, ComponentState.CLAIMED))
    survey = Survey()
    for job in (
        QUEUED_JOB,
        replace(QUEUED_JOB, id=2, submitted_at=10.0, spec=JobSpec(fixed_request)),
        replace(QUEUED_JOB, id=3, submitted_at=5.0, spec=replace(QUEUED_JOB.spec, internal=True)),
        replace(QUEUED_JOB, id=4, submitted_at=1.0, state=JobState.HELD),
        replace(QUEUED_JOB, id=5, state=JobState.RUNNING, attempt=Attempt(1, components, 30.0)),
    ):
        survey.add(job)
    assert [survey.count_waiting_for(name) for name in ("north", "south", "east")] == [3, 3, 2]
    assert (survey.waiting, survey.running) == (3, {"north": 3})
    assert survey.oldest is not None
    assert survey.oldest.id == 2


def test_survey_counts_nodes_by_home_site() -> None:
    of_north = replace(QUEUED_JOB.spec, home_site="north")
    spread = (
        Component(0, "north", 3, ComponentState.RUNNING),
        Component(1, "south", 2, ComponentState.CLAIMED),
        Component(2, "east", 7, ComponentState.ENDED, error="lost", superseded=True),
        Component(3, "east", 1, ComponentState.SUBMITTED, replaces=2),
        Component(4, "west", 5, ComponentState.ENDED),
    )
    survey = Survey()
    for job in (
        QUEUED_JOB,
        replace(QUEUED_JOB, spec=of_north),
        replace(QUEUED_JOB, spec=of_north, state=JobState.HELD),
        replace(QUEUED_JOB, spec=of_north, state=JobState.RUNNING, attempt=Attempt(1, spread, 30.0)),
        replace(QUEUED_JOB, spec=of_north, attempt=Attempt(1, spread, 30.0)),
        replace(QUEUED_JOB, state=JobState.RUNNING, attempt=Attempt(1, spread, 30.0)),
    ):
        survey.add(job)
    assert survey.site_use == {
        "north": SiteUse(waiting=2, at_home=3, elsewhere=3),
        "south": SiteUse(guests=2),
        "east": SiteUse(guests=1),
    }


def test_survey_cache_shares_computation_until_change() -> None:
    jobs, looks = [QUEUED_JOB] * (3 * SLICE_SIZE), 0

    def look() -> list[Job]:
        nonlocal looks
        looks += 1
        return jobs

    async def play() -> None:
        engine: Any = SimpleNamespace(queries=SimpleNamespace(jobs=look), changes=Changes())
        surveyor = SurveyCache(cast(Any, engine))
        first = asyncio.ensure_future(surveyor.load())
        second = asyncio.ensure_future(surveyor.load())
        await asyncio.sleep(0)
        assert not first.done()
        assert (await first) is (await second)
        assert (await surveyor.load()).waiting == 3 * SLICE_SIZE
        assert looks == 1
        surveyor._computing_s = 0.0
        engine.changes.note_change("jobs")
        jobs.pop()
        assert (await surveyor.load()).waiting == 3 * SLICE_SIZE - 1
        assert looks == 2

    asyncio.run(play())


def test_failures_of_cluster_are_ordered_by_frequency() -> None:
    instruments = Instruments()
    instruments.claims["north"] = 7
    instruments.claims_failed["north", ClaimFailure.LIMIT] = 1
    instruments.claims_failed["north", ClaimFailure.LOCAL_USERS] = 3
    instruments.claims_failed["south", ClaimFailure.NO_ROOM] = 9
    instruments.attempts_failed["south", AttemptFailure.LOST] = 2
    north, south = failures_of(instruments, "north"), failures_of(instruments, "south")
    assert (north.claims, list(north.claims_failed.items())) == (7, [("local-users", 3), ("limit", 1)])
    assert (north.attempts_failed, south.claims, south.attempts_failed) == ({}, 0, {"lost": 2})


@pytest.mark.evidence("U14")
def test_lrm_errors_are_shown_to_operators_only() -> None:
    calls = tuple(
        LrmCalls(operation, 1, 1, last_error=f"{operation}: alice", failed_ago=1.0)
        for operation in (*LrmOperation, "later")
    )
    cluster = cast(Any, SimpleNamespace(calls=calls, reported_at=5.0))
    errors = {
        role: {operation.last_error for operation in visible_calls(cluster, Identity("bob", role, ""))} for role in Role
    }
    assert errors[Role.OPERATOR] == errors[Role.ADMIN] == {operation.last_error for operation in calls}
    assert errors[Role.USER] == {"", "open: alice", "snapshot: alice", "version: alice"}
    details: dict[str, object] = {"calls": [asdict(call) for call in calls]}
    record = ClusterRecord("north", "slurm", "usable", 4, 4, 0, 0, 0, 0, "", None, 1, 1.0, details=details)
    for role in Role:
        shown: Any = record_for(Identity("bob", role, ""), record).details["calls"]
        assert {call["last_error"] for call in shown} == errors[role], "the REST API shows the same"
