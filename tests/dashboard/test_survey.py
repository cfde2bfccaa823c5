"""Summaries of all jobs for pages, kept up to date."""

import json
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
from fastapi.encoders import jsonable_encoder

from koalapy.api.clusters import record_for
from koalapy.daemon.observability.instruments import Instruments
from koalapy.dashboard.pages.clusters import shown_health
from koalapy.dashboard.pages.scheduler import failures_of
from koalapy.dashboard.rows import SiteUse, Survey
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.reports import LrmCalls, LrmOperation
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest
from koalapy.scheduler.cluster_conditions import LAST_ERROR, HealthStatus
from koalapy.scheduler.effects import AttemptFailure, ClaimFailure
from koalapy.store.records import ClusterRecord

QUEUED_JOB = Job(1, JobSpec(FlexibleRequest(4), owner="alice"), 20.0)


def test_survey_counts_waiting_jobs_and_running_nodes() -> None:
    fixed_request = FixedRequest(
        (ComponentRequest(2, "north"), ComponentRequest(1, "north"), ComponentRequest(1, "south"))
    )
    components = (Component(0, "north", 3, ComponentState.RUNNING), Component(1, "south", 2, ComponentState.CLAIMED))
    jobs = (
        QUEUED_JOB,
        replace(QUEUED_JOB, id=2, submitted_at=10.0, spec=JobSpec(fixed_request)),
        replace(QUEUED_JOB, id=3, submitted_at=5.0, spec=replace(QUEUED_JOB.spec, internal=True)),
        replace(QUEUED_JOB, id=4, submitted_at=1.0, state=JobState.HELD),
        replace(QUEUED_JOB, id=5, state=JobState.RUNNING, attempt=Attempt(1, components, 30.0)),
    )
    survey = Survey(jobs)
    assert [survey.count_waiting_for(name) for name in ("north", "south", "east")] == [3, 3, 2]
    assert survey.running == {"north": 3}
    assert survey.oldest is not None
    assert survey.oldest.id == 2
    # Each job ends; then one is submitted.
    for job in jobs:
        survey.update(replace(job, state=JobState.CANCELLED))
        assert survey.oldest is None or survey.oldest.state is JobState.QUEUED
    assert [survey.count_waiting_for(name) for name in ("north", "south", "east")] == [0, 0, 0]
    assert (+survey.running, survey.oldest) == ({}, None)
    survey.update(replace(QUEUED_JOB, id=6))
    assert survey.oldest == replace(QUEUED_JOB, id=6)
    survey.update(replace(QUEUED_JOB, id=7, array_job=6))
    assert survey.listed == 1, "without the task of an array"


def test_oldest_job_is_known_after_many_changes() -> None:
    survey = Survey([QUEUED_JOB, replace(QUEUED_JOB, id=2, submitted_at=30.0)])
    for _ in range(20):
        for state in (JobState.HELD, JobState.QUEUED):
            survey.update(replace(QUEUED_JOB, id=2, submitted_at=30.0, state=state))
            survey.update(replace(QUEUED_JOB, state=state))
            survey.update(replace(QUEUED_JOB, state=state, reason="again"))
    assert survey.oldest == replace(QUEUED_JOB, reason="again")
    assert len(survey._by_age) < 10, "entries of earlier states are dropped"
    survey.update(replace(QUEUED_JOB, state=JobState.HELD))
    assert survey.oldest == replace(QUEUED_JOB, id=2, submitted_at=30.0)


def test_survey_counts_nodes_by_home_site() -> None:
    of_north = replace(QUEUED_JOB.spec, home_site="north")
    spread = (
        Component(0, "north", 3, ComponentState.RUNNING),
        Component(1, "south", 2, ComponentState.CLAIMED),
        Component(2, "east", 7, ComponentState.ENDED, error="lost", superseded=True),
        Component(3, "east", 1, ComponentState.SUBMITTED, replaces=2),
        Component(4, "west", 5, ComponentState.ENDED),
    )
    jobs = (
        QUEUED_JOB,
        replace(QUEUED_JOB, id=2, spec=of_north),
        replace(QUEUED_JOB, id=3, spec=of_north, state=JobState.HELD),
        replace(QUEUED_JOB, id=4, spec=of_north, state=JobState.RUNNING, attempt=Attempt(1, spread, 30.0)),
        replace(QUEUED_JOB, id=5, spec=of_north, attempt=Attempt(1, spread, 30.0)),
        replace(QUEUED_JOB, id=6, state=JobState.RUNNING, attempt=Attempt(1, spread, 30.0)),
    )
    survey = Survey(jobs)
    assert [survey.site_use(name) for name in ("north", "south", "east", "west")] == [
        SiteUse(waiting=2, at_home=3, elsewhere=3),
        SiteUse(guests=2),
        SiteUse(guests=1),
        SiteUse(),
    ]
    for job in jobs:
        survey.update(replace(job, state=JobState.FAILED))
    assert survey.site_use("north") == survey.site_use("south") == SiteUse()


def test_failures_of_cluster_are_ordered_by_frequency() -> None:
    instruments = Instruments()
    instruments.claims["north"] = 7
    instruments.claims_failed["north", ClaimFailure.LIMIT] = 1
    instruments.claims_failed["north", ClaimFailure.LOCAL_USERS] = 3
    instruments.claims_failed["south", ClaimFailure.NO_ROOM] = 9
    instruments.attempts_failed["south", AttemptFailure.LOST] = 2
    north, south = failures_of(instruments, "north"), failures_of(instruments, "south")
    assert (north["claims"], list(north["claims_failed"].items())) == (7, [("local-users", 3), ("limit", 1)])
    assert (north["attempts_failed"], south["claims"], south["attempts_failed"]) == ({}, 0, {"lost": 2})


def test_users_see_no_data_of_others_in_the_health_of_a_cluster() -> None:
    health = HealthStatus(2, note=f"2 errors{LAST_ERROR}alice's job", trial_components={"koala-7-1-0-nonce"})
    health.unknown_refusals.add("no such queue for alice", ("alice", "simulation", QUEUED_JOB.spec.request))
    health.proofs.add("koala-7-1-0-nonce")
    shown = json.dumps(jsonable_encoder(shown_health(health, is_operator=False)))
    assert not {"alice", "simulation", "nonce"} & set(re.split(r"\W", shown))
    assert "alice" in json.dumps(jsonable_encoder(shown_health(health, is_operator=True)))


@pytest.mark.evidence("U14")
def test_lrm_errors_are_shown_to_operators_only() -> None:
    calls = tuple(
        LrmCalls(operation, 1, 1, last_error=f"{operation}: alice", failed_ago=1.0)
        for operation in (*LrmOperation, "later")
    )
    details: dict[str, object] = {"calls": [asdict(call) for call in calls]}
    record = ClusterRecord("north", "slurm", "usable", 4, 4, 0, 0, 0, 0, "", None, 1, 1.0, details=details)
    errors = {}
    for role in Role:
        shown: Any = record_for(Identity("bob", role, ""), record).details["calls"]
        errors[role] = {call["last_error"] for call in shown}
    assert errors[Role.OPERATOR] == errors[Role.ADMIN] == {operation.last_error for operation in calls}
    assert errors[Role.USER] == {"", "open: alice", "snapshot: alice", "version: alice"}
