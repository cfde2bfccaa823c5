"""What was foretold is kept beside the jobs, and what came is read from these."""

from dataclasses import replace

from koalapy.model.job import JobState, TimelineEntry
from koalapy.model.prediction import Course, Prediction, PredictionKind, PredictionSource
from koalapy.ports import Batch
from tests.store.conftest import OpenAll
from tests.store.test_advice import SPEC, ran, write


def made(job: int, at: float = 50.0, kind: PredictionKind = PredictionKind.START, generation: int = 1) -> Prediction:
    return Prediction(job, kind, at, PredictionSource.DAEMON, generation, 10.0, 20.0, 30.0, {"basis": "its walltime"})


def test_what_came_is_known_however_often_a_daemon_begins_anew(open_stores: OpenAll) -> None:
    stores = open_stores()
    waits = ran(1, replace(SPEC, walltime=60.0, owner="ada"), state=JobState.QUEUED, attempt=None, generation=1)
    write(stores, waits)
    stores.predictions.add_predictions([made(1)])
    assert stores.predictions.predictions(0.0, 10) == [(made(1), Course(JobState.QUEUED, 60.0))]
    held = [TimelineEntry(1, at, "held", JobState.HELD) for at in (40.0, 70.0, 80.0)]
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={1: ran(1, waits.spec)}, timeline=held))
    came = Course(JobState.SUCCEEDED, 60.0, None, 101.0, 70.0, 101.0, 101.5, 113.5)
    assert open_stores().predictions.predictions(0.0, 10) == [(made(1), came)]


def test_a_start_before_the_prediction_is_not_what_was_foretold(open_stores: OpenAll) -> None:
    stores = open_stores()
    write(stores, ran(1, state=JobState.QUEUED))
    stores.predictions.add_predictions([made(1, generation=2)])
    ((_, course),) = stores.predictions.predictions(0.0, 10)
    assert course.started_at is None


def test_none_is_kept_twice_nor_of_a_job_that_is_gone(open_stores: OpenAll) -> None:
    stores = open_stores()
    write(stores, ran(1), ran(2))
    stores.predictions.add_predictions([made(1), made(3), made(2, kind=PredictionKind.END)])
    stores.predictions.add_predictions([replace(made(1), high=99.0), made(1, 60.0)])
    found = [told for told, _ in stores.predictions.predictions(0.0, 10)]
    assert found == [made(1, 60.0), made(2, kind=PredictionKind.END), made(1)]
    stores.history.remove([1])
    assert [told.job for told, _ in stores.predictions.predictions(0.0, 10)] == [2]
    stores.predictions.add_predictions([made(1, 70.0)])
    assert [told.job for told, _ in stores.predictions.predictions(0.0, 10)] == [2]


def test_they_are_found_by_time_owner_and_application_and_no_more_than_asked_for(open_stores: OpenAll) -> None:
    stores = open_stores()
    specs = [replace(SPEC, owner=owner, application=known) for owner in ("ada", "bob") for known in ("wave", "prime")]
    write(stores, *(ran(ident, spec) for ident, spec in enumerate(specs, 1)))
    stores.predictions.add_predictions([made(ident, 50.0 + ident) for ident in (1, 2, 3, 4)])

    def jobs(since: float = 0.0, limit: int = 10, owner: str | None = None, application: str = "") -> list[int]:
        return [told.job for told, _ in stores.predictions.predictions(since, limit, owner, application)]

    assert jobs() == [4, 3, 2, 1]
    assert jobs(limit=2) == [4, 3]
    assert jobs(since=53.0) == [4, 3]
    assert jobs(owner="ada") == [2, 1]
    assert jobs(owner="bob", application="wave") == [3]
