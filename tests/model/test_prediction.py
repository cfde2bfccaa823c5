"""Outcomes and coverage of predictions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobState
from koalapy.model.prediction import (
    Course,
    JudgedPrediction,
    Outcome,
    Prediction,
    PredictionKind,
    PredictionSource,
    classify_outcome,
    compute_coverage,
    judge_prediction,
    wilson_interval,
)

MADE_AT = 1000.0
START, END, RUN_TIME = PredictionKind.START, PredictionKind.END, PredictionKind.RUN_TIME


def make_prediction(kind: PredictionKind) -> Prediction:
    return Prediction(1, kind, MADE_AT, PredictionSource.DAEMON, 0, 100.0, 200.0, 300.0)


QUEUED = Course(JobState.QUEUED)


@pytest.mark.parametrize(
    ("kind", "course", "now", "outcome", "error"),
    [
        (START, QUEUED, 1300.0, Outcome.OPEN, None),
        (START, QUEUED, 1301.0, Outcome.LATE, 101.0),
        (START, QUEUED, 10.0, Outcome.OPEN, None),
        (START, Course(JobState.RUNNING, started_at=1150.0), 9e9, Outcome.WITHIN, -50.0),
        (START, Course(JobState.RUNNING, started_at=1099.0), 9e9, Outcome.EARLY, -101.0),
        (START, Course(JobState.RUNNING, started_at=1301.0), 9e9, Outcome.LATE, 101.0),
        (START, Course(JobState.RUNNING, started_at=900.0), 950.0, Outcome.CENSORED, None),
        (START, Course(JobState.RUNNING, started_at=1150.0, touched_at=1140.0), 9e9, Outcome.CENSORED, None),
        (START, Course(JobState.RUNNING, started_at=1350.0, touched_at=1310.0), 9e9, Outcome.LATE, 110.0),
        (START, Course(JobState.CANCELLED, ended_at=1200.0), 9e9, Outcome.CENSORED, None),
        (START, Course(JobState.CANCELLED, ended_at=1400.0), 9e9, Outcome.LATE, 200.0),
        (START, Course(JobState.CANCELLED, started_at=1150.0, ended_at=1200.0), 9e9, Outcome.WITHIN, -50.0),
        (END, Course(JobState.SUCCEEDED, started_at=1100.0, ended_at=1200.0), 9e9, Outcome.WITHIN, 0.0),
        (END, Course(JobState.FAILED, started_at=1100.0, ended_at=1200.0, exit_code=1), 9e9, Outcome.CENSORED, None),
        (RUN_TIME, QUEUED, 9e9, Outcome.OPEN, None),
        (RUN_TIME, Course(JobState.RUNNING, barrier_at=5000.0), 5301.0, Outcome.LATE, 101.0),
        (RUN_TIME, Course(JobState.SUCCEEDED, barrier_at=5000.0, attempt_ended_at=5050.0), 9e9, Outcome.EARLY, -150.0),
        (
            RUN_TIME,
            Course(JobState.FAILED, 150.0, barrier_at=5000.0, launched_at=5001.0, attempt_ended_at=5152.0),
            9e9,
            Outcome.WITHIN,
            -48.0,
        ),
        (RUN_TIME, Course(JobState.CANCELLED, ended_at=9000.0), 9e9, Outcome.CENSORED, None),
    ],
)
def test_judge_prediction_classifies_course(
    kind: PredictionKind, course: Course, now: float, outcome: Outcome, error: float | None
) -> None:
    judged = judge_prediction(make_prediction(kind), course, now)
    assert (judged.outcome, judged.error) == (outcome, error)


SECONDS = st.floats(0, 1e9)


@given(st.tuples(SECONDS, SECONDS).map(sorted), SECONDS)
def test_classify_outcome_late_stays_late(bounds: list[float], elapsed: float) -> None:
    low, high = bounds
    if classify_outcome(low, high, None, None, elapsed) is Outcome.LATE:
        assert classify_outcome(low, high, elapsed, None, elapsed) is Outcome.LATE
        assert classify_outcome(low, high, None, elapsed, elapsed) is Outcome.LATE
    else:
        assert classify_outcome(low, high, None, elapsed, elapsed) is Outcome.CENSORED


JUDGED = st.builds(
    lambda job, outcome, error: JudgedPrediction(job, START, MADE_AT, outcome, error if outcome.is_decided else None),
    st.integers(1, 20),
    st.sampled_from(list(Outcome)),
    st.floats(-1e6, 1e6),
)


@given(st.lists(JUDGED, max_size=60))
def test_compute_coverage_counts_each_prediction_once(judged: list[JudgedPrediction]) -> None:
    coverage = compute_coverage(START, 7.0, judged)
    assert coverage.predictions + coverage.open + coverage.censored == len(judged)
    assert coverage.jobs == len({prediction.job for prediction in judged if prediction.outcome.is_decided})
    if coverage.within is None or coverage.early is None or coverage.late is None or coverage.within_between is None:
        assert coverage.predictions == 0
        return
    assert coverage.within + coverage.early + coverage.late == pytest.approx(1.0)
    low, high = coverage.within_between
    assert 0.0 <= low <= coverage.within <= high <= 1.0
    assert coverage.median_error is not None
    assert coverage.bias is not None
    assert abs(coverage.bias) <= max(abs(prediction.error) for prediction in judged if prediction.error is not None)


@given(st.lists(JUDGED, min_size=1, max_size=20), st.integers(2, 5))
def test_compute_coverage_of_repeated_predictions_is_unchanged(judged: list[JudgedPrediction], times: int) -> None:
    once, again = compute_coverage(START, 7.0, judged), compute_coverage(START, 7.0, judged * times)
    assert again.jobs == once.jobs
    assert again.within == (None if once.within is None else pytest.approx(once.within))
    if once.within_between is not None:
        assert again.within_between == pytest.approx(once.within_between)


@given(st.floats(0, 1), st.integers(1, 10**6))
def test_wilson_interval_contains_share_and_narrows(share: float, number: int) -> None:
    low, high = wilson_interval(share, number)
    assert 0.0 <= low <= share <= high <= 1.0
    closer = wilson_interval(share, 4 * number)
    assert closer[1] - closer[0] < high - low


def test_wilson_interval_equals_published_value() -> None:
    """The interval of 8 of 10 is a published value."""
    assert wilson_interval(0.8, 10) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
