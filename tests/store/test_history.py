"""Jobs that are not kept any more: nothing of theirs is left, but their numbers and what they taught."""

from dataclasses import replace
from itertools import pairwise

from sqlalchemy import func, select

from koalapy.model.advice import AdvisedPlacement
from koalapy.model.job import JobSpec, JobState, TimelineEntry
from koalapy.model.prediction import Prediction, PredictionKind, PredictionSource
from koalapy.model.request import FlexibleRequest
from koalapy.ports import Batch, MeanTimes, StoredResult, Submitted
from koalapy.store import tables
from koalapy.store.history import SqlHistory
from koalapy.store.opening import Stores
from tests.store.conftest import OpenAll
from tests.store.test_advice import SPEC, ran

OF_JOBS = [table for table in tables.metadata.sorted_tables if "job_id" in table.c and table.name != "measurements"]


def write(stores: Stores, first: int, last: int, spec: JobSpec = SPEC, ended: float = 0.0) -> None:
    """Jobs that succeeded one second after the other, with something in every table."""
    jobs = {ident: ran(ident, spec, float(ident), ended_at=ended + ident) for ident in range(first, last + 1)}
    running = {ident: replace(job, state=JobState.RUNNING, ended_at=None) for ident, job in jobs.items()}
    stores.jobs.write(
        Batch(
            at=1.0,
            epoch=stores.jobs.epoch,
            jobs=running,
            timeline=[TimelineEntry(ident, 1.0, "submitted", JobState.QUEUED) for ident in jobs],
            submitted=[Submitted(f"key {ident}", ident, "d") for ident in jobs],
            advised=[AdvisedPlacement(ident, 2, 1.0, "wave", 2, (), "") for ident in jobs],
        )
    )
    stores.jobs.write(Batch(at=2.0, epoch=stores.jobs.epoch, jobs=dict(jobs)))
    for ident in jobs:
        stores.files.save_result(StoredResult(ident, 2, 0, "north", 7, 1, 1.0))
    told = (PredictionKind.START, 1.0, PredictionSource.DAEMON, 1, 1.0, 2.0, 3.0)
    stores.predictions.add_predictions([Prediction(ident, *told) for ident in jobs])


def rows_of(stores: Stores, job: int) -> dict[str, int]:
    with stores.jobs.database.engine.connect() as connection:
        return {
            table.name: connection.execute(select(func.count()).where(table.c.job_id == job)).scalar_one()
            for table in OF_JOBS
        }


def test_nothing_of_a_job_is_left_but_what_it_taught(open_stores: OpenAll) -> None:
    stores = open_stores()
    write(stores, 1, 3)
    whole = rows_of(stores, 3)
    assert all(count for name, count in whole.items() if name not in ("runs", "plans")), "plans go with their commands"
    taught = stores.advice.runs(10)
    assert [run.seconds for run in taught] == [1.0, 2.0, 3.0]
    stores.history.remove([2, 1])
    assert [stores.jobs.job(ident) is None for ident in (1, 2, 3)] == [True, True, False]
    nothing = dict.fromkeys(whole, 0)
    assert rows_of(stores, 1) == rows_of(stores, 2) == nothing | {"runs": 1}
    assert rows_of(stores, 3) == whole
    assert stores.jobs.submitted(["key 1"]) == {}, "and what it was submitted with may be used for another"
    assert stores.advice.runs(10) == taught
    assert stores.advice.runs(2) == taught[1:]
    stores.history.remove([1, 2])
    assert open_stores().advice.runs(10) == taught


def test_no_number_is_given_twice(open_stores: OpenAll) -> None:
    stores = open_stores()
    write(stores, 1, 5)
    for gone, there in (([2], 6), ([5, 4], 6), ([3, 1], 6)):
        stores.history.remove(gone)
        assert stores.jobs.load().next_job == there
    assert open_stores().jobs.load().next_job == 6


def test_those_come_first_that_ended_first(stores: Stores) -> None:
    write(stores, 1, 3, ended=100.0)
    write(stores, 4, 6, replace(SPEC, internal=True))
    write(stores, 7, 9)
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={10: ran(10, state=JobState.RUNNING)}))
    over = stores.history.over
    assert over(1000.0, 10, internal=False) == [7, 8, 9, 1, 2, 3]
    assert over(1000.0, 4, internal=False) == [7, 8, 9, 1]
    assert over(8.0, 10, internal=False) == [7]
    assert over(1000.0, 10, internal=True) == [4, 5, 6]


def test_what_jobs_taught_is_not_kept_for_ever_either(stores: Stores) -> None:
    history = SqlHistory(stores.jobs.database, max_runs=3)
    write(stores, 1, 8)
    for job in range(1, 7):
        history.remove([job])
    assert [run.seconds for run in stores.advice.runs(10)] == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert [run.seconds for run in stores.advice.runs(3)] == [6.0, 7.0, 8.0]


def test_a_job_that_taught_nothing_goes_as_well(stores: Stores) -> None:
    jobs = {ident: ran(ident, replace(SPEC, application="-"), ended_at=1.0) for ident in range(1, 4)}
    queued = replace(jobs[1], id=4, state=JobState.CANCELLED, generation=0, attempt=None)
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={**jobs, 4: queued}))
    stores.history.remove([1, 2, 3, 4])
    assert stores.advice.runs(10) == []
    assert stores.jobs.load().next_job == 5


def test_the_daemons_own_jobs_count_in_no_statistics(stores: Stores) -> None:
    own = replace(SPEC, internal=True)
    for ident, spec in ((1, own), (2, SPEC)):
        attempt = ran(ident, spec).attempt
        assert attempt is not None
        held = tuple(replace(c, claimed_at=10.0, ended_at=20.0) for c in attempt.components)
        job = ran(ident, spec, attempt=replace(attempt, components=held), placed_at=95.0, started_at=101.0)
        going = tuple(replace(c, index=0, ended_at=None) for c in held[:1])
        running = replace(job, id=ident + 2, state=JobState.RUNNING, attempt=replace(attempt, components=going))
        stores.jobs.write(
            Batch(at=1.0, epoch=stores.jobs.epoch, jobs={ident: replace(job, ended_at=113.5), ident + 2: running})
        )
    usage = stores.jobs.usage(0.0, 200.0)
    assert usage.ended == {JobState.SUCCEEDED: 1}
    assert sum(waiting.jobs for waiting in usage.mean_times.values()) == 1
    assert usage.mean_times[SPEC.priority] != MeanTimes()
    assert usage.node_seconds == {"north": 20.0 + 2 * 190.0, "west": 20.0, "south": 20.0}


def test_room_is_given_back_to_the_disk(stores: Stores) -> None:
    spec = JobSpec(FlexibleRequest(1), ("true", "x" * 9000), application="-")
    jobs = {ident: ran(ident, spec, ended_at=1.0) for ident in range(1, 1001)}
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs=dict(jobs)))
    database = stores.jobs.database
    sqlite, history = database.is_sqlite, SqlHistory(database, max_freed_pages=500)

    def pages() -> int:
        with database.engine.connect() as connection:
            return int(connection.exec_driver_sql("PRAGMA page_count").scalar_one())

    before = pages() if sqlite else 0
    for first in range(1, 1001, 100):
        stores.history.remove(range(first, first + 100))
    sizes = [before]
    while history.shrink():
        sizes.append(pages())
    if sqlite:
        assert all(500 <= one - other < 510 for one, other in pairwise(sizes)), (
            "no step keeps others from writing for long"
        )
        assert pages() < before / 10


def test_a_kill_teaches_the_same_when_its_job_is_gone(stores: Stores) -> None:
    attempt = ran(1).attempt
    assert attempt is not None
    killed = replace(attempt, ended_at=attempt.launched_at + 60.0, exit_code=None)  # type: ignore[operator]
    job = ran(1, replace(SPEC, walltime=60.0), state=JobState.FAILED, attempt=killed, ended_at=200.0)
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={1: job}))
    taught = stores.advice.runs(10)
    assert [run.killed for run in taught] == [True]
    stores.history.remove([1])
    assert stores.advice.runs(10) == taught


def test_first_submission_is_that_of_oldest_job_that_is_kept(stores: Stores) -> None:
    assert stores.history.first_submission() is None
    write(stores, 1, 3)
    first, second = (stores.jobs.job(ident).submitted_at for ident in (1, 2))
    assert stores.history.first_submission() == first
    stores.history.remove([1])
    assert stores.history.first_submission() == second
