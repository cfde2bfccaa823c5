"""Jobs that are not kept any more: nothing of theirs is left, but their numbers and what they taught."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from sqlalchemy import func, insert, select

from koalapy.model.advice import Advised
from koalapy.model.job import JobSpec, JobState, TimelineEntry
from koalapy.model.request import FlexibleRequest
from koalapy.ports import Batch, MeanTimes, StoredResult, Submitted
from koalapy.store import history, tables
from koalapy.store.advice import SqlAdvice
from koalapy.store.history import SqlHistory
from koalapy.store.replicas import SqlFiles
from koalapy.store.sql import SqlStore
from tests.store.test_advice import SPEC, ran

Open = Callable[[], SqlStore]
OF_JOBS = [table for table in tables.metadata.sorted_tables if "job_id" in table.c and table.name != "measurements"]


def history_of(store: SqlStore) -> SqlHistory:
    return SqlHistory(store._engine, store.lease)


def write(store: SqlStore, first: int, last: int, spec: JobSpec = SPEC, ended: float = 0.0) -> None:
    """Jobs that succeeded one second after the other, with something in every table."""
    jobs = {ident: ran(ident, spec, float(ident), ended_at=ended + ident) for ident in range(first, last + 1)}
    running = {ident: replace(job, state=JobState.RUNNING, ended_at=None) for ident, job in jobs.items()}
    store.write(
        Batch(
            at=1.0,
            epoch=store.epoch,
            jobs=running,
            timeline=[TimelineEntry(ident, 1.0, "submitted", JobState.QUEUED) for ident in jobs],
            submitted=[Submitted(f"key {ident}", ident, "d") for ident in jobs],
            advised=[Advised(ident, 2, 1.0, "wave", 2, (), "") for ident in jobs],
        )
    )
    store.write(Batch(at=2.0, epoch=store.epoch, jobs=dict(jobs)))
    for ident in jobs:
        SqlFiles(store._engine, store.lease).save_result(StoredResult(ident, 2, 0, "north", 7, 1, 1.0))
    with store._engine.begin() as connection:
        rows = [{"job_id": ident, "generation": 2, "component": 0, "offset": 0, "data": b"x"} for ident in jobs]
        connection.execute(insert(tables.output), rows)


def rows_of(store: SqlStore, job: int) -> dict[str, int]:
    with store._engine.connect() as connection:
        return {
            table.name: connection.execute(select(func.count()).where(table.c.job_id == job)).scalar_one()
            for table in OF_JOBS
        }


def test_nothing_of_a_job_is_left_but_what_it_taught(open_store: Open) -> None:
    store = open_store()
    write(store, 1, 3)
    whole = rows_of(store, 3)
    assert all(count for name, count in whole.items() if name != "runs")
    taught = SqlAdvice(store._engine).runs(10)
    assert [run.seconds for run in taught] == [1.0, 2.0, 3.0]
    history_of(store).remove([2, 1])
    assert [store.job(ident) is None for ident in (1, 2, 3)] == [True, True, False]
    nothing = dict.fromkeys(whole, 0)
    assert rows_of(store, 1) == rows_of(store, 2) == nothing | {"runs": 1}
    assert rows_of(store, 3) == whole
    assert store.submitted(["key 1"]) == {}, "and what it was submitted with may be used for another"
    assert SqlAdvice(store._engine).runs(10) == taught
    assert SqlAdvice(store._engine).runs(2) == taught[1:]
    history_of(store).remove([1, 2])
    assert SqlAdvice(open_store()._engine).runs(10) == taught


def test_no_number_is_given_twice(open_store: Open) -> None:
    store = open_store()
    write(store, 1, 5)
    for gone, there in (([2], 6), ([5, 4], 6), ([3, 1], 6)):
        history_of(store).remove(gone)
        assert store.load().next_job == there
    assert open_store().load().next_job == 6


def test_those_come_first_that_ended_first(store: SqlStore) -> None:
    write(store, 1, 3, ended=100.0)
    write(store, 4, 6, replace(SPEC, internal=True))
    write(store, 7, 9)
    store.write(Batch(at=1.0, epoch=store.epoch, jobs={10: ran(10, state=JobState.RUNNING)}))
    over = history_of(store).over
    assert over(1000.0, 10, internal=False) == [7, 8, 9, 1, 2, 3]
    assert over(1000.0, 4, internal=False) == [7, 8, 9, 1]
    assert over(8.0, 10, internal=False) == [7]
    assert over(1000.0, 10, internal=True) == [4, 5, 6]


def test_what_jobs_taught_is_not_kept_for_ever_either(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "RUNS_KEPT", 3)
    write(store, 1, 8)
    for job in range(1, 7):
        history_of(store).remove([job])
    assert [run.seconds for run in SqlAdvice(store._engine).runs(10)] == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert [run.seconds for run in SqlAdvice(store._engine).runs(3)] == [6.0, 7.0, 8.0]


def test_a_job_that_taught_nothing_goes_as_well(store: SqlStore) -> None:
    jobs = {ident: ran(ident, replace(SPEC, application="-"), ended_at=1.0) for ident in range(1, 4)}
    queued = replace(jobs[1], id=4, state=JobState.CANCELLED, generation=0, attempt=None)
    store.write(Batch(at=1.0, epoch=store.epoch, jobs={**jobs, 4: queued}))
    history_of(store).remove([1, 2, 3, 4])
    assert SqlAdvice(store._engine).runs(10) == []
    assert store.load().next_job == 5


def test_the_daemons_own_jobs_count_in_no_statistics(store: SqlStore) -> None:
    own = replace(SPEC, internal=True)
    for ident, spec in ((1, own), (2, SPEC)):
        attempt = ran(ident, spec).attempt
        assert attempt is not None
        held = tuple(replace(c, claimed_at=10.0, ended_at=20.0) for c in attempt.components)
        job = ran(ident, spec, attempt=replace(attempt, components=held), placed_at=95.0, started_at=101.0)
        going = tuple(replace(c, index=0, ended_at=None) for c in held[:1])
        running = replace(job, id=ident + 2, state=JobState.RUNNING, attempt=replace(attempt, components=going))
        store.write(Batch(at=1.0, epoch=store.epoch, jobs={ident: replace(job, ended_at=113.5), ident + 2: running}))
    usage = store.usage(0.0, 200.0)
    assert usage.ended == {JobState.SUCCEEDED: 1}
    assert sum(waiting.jobs for waiting in usage.mean_times.values()) == 1
    assert usage.mean_times[SPEC.priority] != MeanTimes()
    assert usage.node_seconds == {"north": 20.0 + 2 * 190.0, "west": 20.0, "south": 20.0}


def test_room_is_given_back_to_the_disk(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PAGES_AT_ONCE", 500)
    spec = JobSpec(FlexibleRequest(1), ("true", "x" * 9000), application="-")
    jobs = {ident: ran(ident, spec, ended_at=1.0) for ident in range(1, 1001)}
    store.write(Batch(at=1.0, epoch=store.epoch, jobs=dict(jobs)))
    sqlite = store._engine.dialect.name == "sqlite"

    def pages() -> int:
        with store._engine.connect() as connection:
            return int(connection.exec_driver_sql("PRAGMA page_count").scalar_one())

    before = pages() if sqlite else 0
    for first in range(1, 1001, 100):
        history_of(store).remove(range(first, first + 100))
    sizes = [before]
    while history_of(store).shrink():
        sizes.append(pages())
    if sqlite:
        assert all(500 <= one - other < 510 for one, other in pairwise(sizes)), (
            "no step keeps others from writing for long"
        )
        assert pages() < before / 10


def test_a_kill_teaches_the_same_when_its_job_is_gone(store: SqlStore) -> None:
    attempt = ran(1).attempt
    assert attempt is not None
    killed = replace(attempt, ended_at=attempt.launched_at + 60.0, exit_code=None)  # type: ignore[operator]
    job = ran(1, replace(SPEC, walltime=60.0), state=JobState.FAILED, attempt=killed, ended_at=200.0)
    store.write(Batch(at=1.0, epoch=store.epoch, jobs={1: job}))
    taught = SqlAdvice(store._engine).runs(10)
    assert [run.killed for run in taught] == [True]
    history_of(store).remove([1])
    assert SqlAdvice(store._engine).runs(10) == taught
