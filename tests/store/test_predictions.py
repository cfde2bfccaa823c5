"""Predictions in the database, with the later course of their jobs."""

from dataclasses import replace

from koalapy.model.job import JobState, TimelineEntry
from koalapy.model.prediction import Course, Prediction, PredictionKind, PredictionSource
from koalapy.store.records import Batch
from tests.store.conftest import OpenAll
from tests.store.test_advice import SPEC, make_completed_job, write_jobs


def make_prediction(
    job: int, made_at: float = 50.0, kind: PredictionKind = PredictionKind.START, generation: int = 1
) -> Prediction:
    return Prediction(
        job, kind, made_at, PredictionSource.DAEMON, generation, 10.0, 20.0, 30.0, {"basis": "its walltime"}
    )


def test_predictions_include_course_after_restart(open_stores: OpenAll) -> None:
    stores = open_stores()
    queued_job = make_completed_job(
        1, replace(SPEC, walltime=60.0, owner="ada"), state=JobState.QUEUED, attempt=None, generation=1
    )
    write_jobs(stores, queued_job)
    stores.predictions.add_predictions([make_prediction(1)])
    assert stores.predictions.predictions(0.0, 10) == [(make_prediction(1), Course(JobState.QUEUED, 60.0))]
    entries = [TimelineEntry(1, timestamp, "held", JobState.HELD) for timestamp in (40.0, 70.0, 80.0)]
    stores.jobs.write(
        Batch(at=1.0, epoch=stores.jobs.epoch, jobs={1: make_completed_job(1, queued_job.spec)}, timeline=entries)
    )
    course = Course(JobState.SUCCEEDED, 60.0, None, 101.0, 70.0, 101.0, 101.5, 113.5)
    assert open_stores().predictions.predictions(0.0, 10) == [(make_prediction(1), course)]


def test_predictions_ignore_start_before_prediction(open_stores: OpenAll) -> None:
    stores = open_stores()
    write_jobs(stores, make_completed_job(1, state=JobState.QUEUED))
    stores.predictions.add_predictions([make_prediction(1, generation=2)])
    ((_, course),) = stores.predictions.predictions(0.0, 10)
    assert course.started_at is None


def test_add_predictions_ignores_duplicates_and_removed_jobs(open_stores: OpenAll) -> None:
    stores = open_stores()
    write_jobs(stores, make_completed_job(1), make_completed_job(2))
    stores.predictions.add_predictions(
        [make_prediction(1), make_prediction(3), make_prediction(2, kind=PredictionKind.END)]
    )
    stores.predictions.add_predictions([replace(make_prediction(1), high=99.0), make_prediction(1, 60.0)])
    predictions = [prediction for prediction, _ in stores.predictions.predictions(0.0, 10)]
    assert predictions == [make_prediction(1, 60.0), make_prediction(2, kind=PredictionKind.END), make_prediction(1)]
    stores.history.remove([1])
    assert [prediction.job for prediction, _ in stores.predictions.predictions(0.0, 10)] == [2]
    stores.predictions.add_predictions([make_prediction(1, 70.0)])
    assert [prediction.job for prediction, _ in stores.predictions.predictions(0.0, 10)] == [2]


def test_predictions_are_filtered_and_limited(open_stores: OpenAll) -> None:
    stores = open_stores()
    specs = [
        replace(SPEC, owner=owner, application=application)
        for owner in ("ada", "bob")
        for application in ("wave", "prime")
    ]
    write_jobs(stores, *(make_completed_job(ident, spec) for ident, spec in enumerate(specs, 1)))
    stores.predictions.add_predictions([make_prediction(ident, 50.0 + ident) for ident in (1, 2, 3, 4)])

    def jobs(since: float = 0.0, limit: int = 10, owner: str | None = None, application: str = "") -> list[int]:
        return [prediction.job for prediction, _ in stores.predictions.predictions(since, limit, owner, application)]

    assert jobs() == [4, 3, 2, 1]
    assert jobs(limit=2) == [4, 3]
    assert jobs(since=53.0) == [4, 3]
    assert jobs(owner="ada") == [2, 1]
    assert jobs(owner="bob", application="wave") == [3]
