"""Replays of any sequence of events reproduce the recorded effects."""

import json
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import Phase, given, settings

from koalapy.model.errors import NotFoundError
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import FlexibleRequest
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.events import JobChanged, JobHeld, PeriodicScan
from koalapy.scheduler.rules import Rules
from koalapy.simulation.record.format import Beginning, Step, beginning_from_json, step_from_json, step_to_json
from koalapy.simulation.record.recorder import RecordedScheduler
from koalapy.simulation.record.replay import Divergence, Replay
from tests.scheduler.machine.base import EXAMPLE_COUNT
from tests.scheduler.test_machine import Grid
from tests.scheduler.test_shared_nodes import JOBS, SharingWorld, run_sharing_jobs
from tests.simulation.record.recorded_world import Life, RecordedWorld


def find_divergence(life: Life) -> Divergence | None:
    """Return the first divergence of a replay; None if there is none."""
    beginning, *steps = map(json.loads, life)
    replay = Replay(beginning_from_json(beginning), builtin_policies())
    for step in steps:
        _, difference = replay.take(step_from_json(step))
        if difference is not None:
            return difference
    return None


def test_replay_of_rejected_event_recorded_as_accepted_diverges() -> None:
    beginning = Beginning(Rules(), (), ())
    steps: list[Step] = []
    scheduler = RecordedScheduler(beginning, builtin_policies(), str, float, steps.append)
    scheduler.apply(PeriodicScan(), 1.0)
    with pytest.raises(NotFoundError):
        scheduler.apply(JobHeld(7), 1.0)
    scheduler.step((), 1.0)
    (step,) = steps
    assert step.refused == (1,)
    assert Replay(beginning, builtin_policies()).take(step)[1] is None
    _, divergence = Replay(beginning, builtin_policies()).take(replace(step, refused=()))
    assert divergence == Divergence(1, 1.0, "refused no event", "refused events 1")


class RecordedGrid(Grid):
    """Any events in any order; each daemon run is replayed separately."""

    world_class = RecordedWorld

    def check_nothing_is_kept(self) -> None:
        """Skip the check of retained effects, since recorders retain steps."""

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "world"):
            for life in cast(RecordedWorld, self.world).lives:
                assert find_divergence(life) is None


class RecordedSharingWorld(SharingWorld, RecordedWorld):
    """Recorded clusters with jobs that share nodes."""


@given(JOBS)
def test_replay_with_jobs_that_share_nodes_reproduces_effects(jobs: list[Any]) -> None:
    world = RecordedSharingWorld({"north": 2, "south": 3})
    run_sharing_jobs(world, jobs)
    assert all(find_divergence(life) is None for life in world.lives)


RecordedGrid.TestCase.settings = settings(
    max_examples=EXAMPLE_COUNT or 30,
    stateful_step_count=60,
    deadline=None,
    derandomize=not EXAMPLE_COUNT,
    database=None,
    phases=[Phase.generate],
)
TestRecordedGrid = RecordedGrid.TestCase


def test_changed_job_is_recorded_without_environment() -> None:
    spec = JobSpec(FlexibleRequest(2), ("program",), environment=(("TOKEN", "secret"),), priority=Priority.HIGH)
    line = step_to_json(Step(1, 1.0, (JobChanged(7, spec, "quick", "ada"),)))
    assert "secret" not in json.dumps(line)
    (event,) = step_from_json(line).events
    assert event == JobChanged(7, replace(spec, environment=()), by="ada")
