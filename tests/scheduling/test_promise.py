"""Who is promised that jobs of high priority delay it no more."""

from dataclasses import replace

import pytest

from koalapy.model.errors import UsageError
from koalapy.model.job import Attempt, Job, JobSpec, JobState, Priority
from koalapy.model.request import FlexibleRequest
from koalapy.scheduling.queueing.promise import is_promised
from koalapy.scheduling.rules import Rules

RULES = Rules(low_patience=100.0)
LOW = Job(1, JobSpec(FlexibleRequest(2), ("program",), priority=Priority.LOW), submitted_at=50.0)


def placed(at: float) -> Job:
    return replace(LOW, state=JobState.RUNNING, generation=1, attempt=Attempt(1, (), at))


def test_a_job_of_low_priority_is_promised_its_turn_once_it_has_waited() -> None:
    assert not is_promised(LOW, RULES, 149.9)
    assert is_promised(LOW, RULES, 150.0)


def test_one_that_was_placed_before_that_may_still_be_preempted_however_long_it_runs() -> None:
    assert not is_promised(placed(149.9), RULES, 1e6)
    assert is_promised(placed(150.0), RULES, 150.0)


def test_one_that_queues_again_has_waited_since_it_was_submitted() -> None:
    preempted = replace(placed(60.0), state=JobState.QUEUED)
    assert not is_promised(preempted, RULES, 149.0)
    assert is_promised(preempted, RULES, 150.0)


def test_nobody_else_is_promised_anything() -> None:
    assert not is_promised(replace(LOW, spec=replace(LOW.spec, priority=Priority.HIGH)), RULES, 1e6)
    assert not is_promised(replace(LOW, spec=replace(LOW.spec, internal=True)), RULES, 1e6)
    assert not is_promised(LOW, Rules(low_patience=None), 1e6)


@pytest.mark.parametrize("patience", [0.0, -1.0, float("inf"), float("nan")])
def test_patience_is_a_time_or_left_out(patience: float) -> None:
    with pytest.raises(UsageError, match="low_patience"):
        Rules(low_patience=patience)
