"""Removal of ended jobs, which keeps their numbers and runs."""

from dataclasses import replace
from itertools import pairwise

from sqlalchemy import func, select

from koalapy.model.advice import AdvisedPlacement
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState, PlannedStart, TimelineEntry
from koalapy.model.job_spec import JobSpec
from koalapy.model.limits import Charge, NodeUse
from koalapy.model.request import FlexibleRequest
from koalapy.store import tables
from koalapy.store.history import HistoryStore
from koalapy.store.opening import Stores
from koalapy.store.records import Batch, StoredResult, Submitted
from tests.store.conftest import OpenAll
from tests.store.test_advice import SPEC, make_completed_job, write_jobs

OF_JOBS = [table for table in tables.metadata.sorted_tables if "job_id" in table.c and table.name != "measurements"]


def write_ended_jobs(stores: Stores, first: int, last: int, spec: JobSpec = SPEC, ended: float = 0.0) -> None:
    """Write jobs that end one second after the other, with rows in every table."""
    jobs = {
        ident: make_completed_job(ident, spec, float(ident), ended_at=ended + ident) for ident in range(first, last + 1)
    }
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


def count_rows(stores: Stores, job: int) -> dict[str, int]:
    with stores.jobs.database.engine.connect() as connection:
        return {
            table.name: connection.execute(select(func.count()).where(table.c.job_id == job)).scalar_one()
            for table in OF_JOBS
        }


def test_removed_job_leaves_only_its_run(open_stores: OpenAll) -> None:
    stores = open_stores()
    write_ended_jobs(stores, 1, 3)
    row_counts = count_rows(stores, 3)
    assert all(count for name, count in row_counts.items() if name not in ("runs", "plans")), (
        "plans are removed with their commands"
    )
    runs = stores.advice.runs(10)
    assert [run.seconds for run in runs] == [1.0, 2.0, 3.0]
    stores.history.remove([2, 1])
    assert [stores.jobs.job(ident) is None for ident in (1, 2, 3)] == [True, True, False]
    no_rows = dict.fromkeys(row_counts, 0)
    assert count_rows(stores, 1) == count_rows(stores, 2) == no_rows | {"runs": 1}
    assert count_rows(stores, 3) == row_counts
    assert stores.jobs.submitted(["key 1"]) == {}, "its submission key may be used again"
    assert stores.advice.runs(10) == runs
    assert stores.advice.runs(2) == runs[1:]
    stores.history.remove([1, 2])
    assert open_stores().advice.runs(10) == runs


def test_next_job_after_removal_is_unchanged(open_stores: OpenAll) -> None:
    stores = open_stores()
    write_ended_jobs(stores, 1, 5)
    for removed, next_job in (([2], 6), ([5, 4], 6), ([3, 1], 6)):
        stores.history.remove(removed)
        assert stores.jobs.load().next_job == next_job
    assert open_stores().jobs.load().next_job == 6


def test_over_returns_jobs_ordered_by_end(stores: Stores) -> None:
    write_ended_jobs(stores, 1, 3, ended=100.0)
    write_ended_jobs(stores, 4, 6, replace(SPEC, internal=True))
    write_ended_jobs(stores, 7, 9)
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={10: make_completed_job(10, state=JobState.RUNNING)}))
    expired_jobs = stores.history.expired_jobs
    assert expired_jobs(1000.0, 10, internal=False) == [7, 8, 9, 1, 2, 3]
    assert expired_jobs(1000.0, 4, internal=False) == [7, 8, 9, 1]
    assert expired_jobs(8.0, 10, internal=False) == [7]
    assert expired_jobs(1000.0, 10, internal=True) == [4, 5, 6]


def test_retained_runs_are_limited_in_number(stores: Stores) -> None:
    history = HistoryStore(stores.jobs.database, max_runs=3)
    write_ended_jobs(stores, 1, 8)
    for job in range(1, 7):
        history.remove([job])
    assert [run.seconds for run in stores.advice.runs(10)] == [4.0, 5.0, 6.0, 7.0, 8.0]
    assert [run.seconds for run in stores.advice.runs(3)] == [6.0, 7.0, 8.0]


def test_remove_of_job_without_run_succeeds(stores: Stores) -> None:
    jobs = {ident: make_completed_job(ident, replace(SPEC, application="-"), ended_at=1.0) for ident in range(1, 4)}
    queued = replace(jobs[1], id=4, state=JobState.CANCELLED, generation=0, attempt=None)
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={**jobs, 4: queued}))
    stores.history.remove([1, 2, 3, 4])
    assert stores.advice.runs(10) == []
    assert stores.jobs.load().next_job == 5


def test_shrink_returns_unused_pages_in_steps(stores: Stores) -> None:
    spec = JobSpec(FlexibleRequest(1), ("true", "x" * 9000), application="-")
    jobs = {ident: make_completed_job(ident, spec, ended_at=1.0) for ident in range(1, 1001)}
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs=dict(jobs)))
    database = stores.jobs.database
    sqlite, history = database.is_sqlite, HistoryStore(database, max_freed_pages=500)

    def pages() -> int:
        with database.engine.connect() as connection:
            return int(connection.exec_driver_sql("PRAGMA page_count").scalar_one())

    first_size = pages() if sqlite else 0
    for first in range(1, 1001, 100):
        stores.history.remove(range(first, first + 100))
    sizes = [first_size]
    while history.shrink():
        sizes.append(pages())
    if sqlite:
        assert all(500 <= larger - smaller < 510 for larger, smaller in pairwise(sizes)), "each step is limited"
        assert pages() < first_size / 10


def test_killed_run_is_kept_after_job_removal(stores: Stores) -> None:
    attempt = make_completed_job(1).attempt
    assert attempt is not None
    killed = replace(attempt, ended_at=attempt.launched_at + 60.0, exit_code=None)  # type: ignore[operator]
    job = make_completed_job(1, replace(SPEC, walltime=60.0), state=JobState.FAILED, attempt=killed, ended_at=200.0)
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={1: job}))
    runs = stores.advice.runs(10)
    assert [run.killed for run in runs] == [True]
    stores.history.remove([1])
    assert stores.advice.runs(10) == runs


def test_first_submission_is_of_oldest_stored_job(stores: Stores) -> None:
    assert stores.history.first_submission() is None
    write_ended_jobs(stores, 1, 3)
    first, second = (stores.jobs.job(ident).submitted_at for ident in (1, 2))
    assert stores.history.first_submission() == first
    stores.history.remove([1])
    assert stores.history.first_submission() == second


def with_attempt(job: Job, *components: Component, **times: float) -> Job:
    attempt = Attempt(job.generation + 1, components, **({"placed_at": 0.0} | times))  # type: ignore[arg-type]
    return replace(job, generation=attempt.generation, attempt=attempt)


def test_node_use_counts_ended_attempts_by_owner(stores: Stores) -> None:
    """Running attempts are counted by their unfinished jobs, and internal jobs are not counted."""

    def part(index: int, claimed: float | None, ended: float | None) -> Component:
        return Component(index, "north", 2, ComponentState.ENDED, claimed_at=claimed, ended_at=ended)

    def job(ident: int, state: JobState, *parts: Component, owner: str = "alice", internal: bool = False) -> Job:
        return with_attempt(Job(ident, replace(SPEC, owner=owner, internal=internal), 0.0, state), *parts)

    ended = job(1, JobState.SUCCEEDED, part(0, 10.0, 20.0), part(1, None, 20.0), part(2, 20.0, None), part(3, 5.0, 9.0))
    internal_job = job(2, JobState.SUCCEEDED, part(0, 10.0, 20.0), owner="koala", internal=True)
    restarted_job = job(3, JobState.RUNNING, part(0, 11.0, 21.0), owner="bob")
    write_jobs(stores, ended, internal_job, restarted_job)
    next_attempt = with_attempt(restarted_job, part(0, 30.0, 31.0))
    assert restarted_job.attempt is not None
    stores.jobs.write(Batch(at=1.0, epoch=1, jobs={3: next_attempt}, attempts=[(3, restarted_job.attempt)]))
    uses = sorted(stores.history.node_use(9.5, 99.0), key=lambda use: use.owner)
    assert uses == [NodeUse("alice", 2, 10.0, 20.0), NodeUse("bob", 2, 11.0, 21.0)]
    assert len(stores.history.node_use(8.5, 99.0)) == 3
    assert {use.start for use in stores.history.node_use(8.5, 10.5)} == {10.0, 5.0}
    assert [use.owner for use in stores.history.node_use(8.5, 99.0, ["bob", "cyd"])] == ["bob"]
    assert stores.history.node_use(100.0, 199.0) == []


def test_charges_are_of_last_attempts_whose_infrastructure_held(stores: Stores) -> None:
    def part(index: int, ended: float, *, infrastructure: bool = False) -> Component:
        state = ComponentState.ENDED
        return Component(index, "north", 2, state, claimed_at=10.0, ended_at=ended, infrastructure=infrastructure)

    def job(ident: int, state: JobState, *parts: Component, owner: str = "alice") -> Job:
        return with_attempt(Job(ident, replace(SPEC, owner=owner), 0.0, state), *parts)

    ended = job(1, JobState.SUCCEEDED, part(0, 20.0), part(1, 30.0))
    failed = job(2, JobState.FAILED, part(0, 20.0), part(1, 20.0, infrastructure=True))
    restarted = job(3, JobState.RUNNING, part(0, 20.0), owner="bob")
    of_today, of_tomorrow = (job(n, JobState.CANCELLED, part(0, end), owner="cyd") for n, end in ((4, 20.0), (5, 1e5)))
    shared = with_attempt(
        Job(6, replace(SPEC, owner="dan"), 0.0, JobState.SUCCEEDED), replace(part(0, 20.0), node_part=0.25)
    )
    reserved = with_attempt(
        Job(7, replace(SPEC, owner="eve", reservation="lecture"), 0.0, JobState.SUCCEEDED), part(0, 20.0)
    )
    preempted = with_attempt(
        Job(8, replace(SPEC, owner="fay"), 0.0, JobState.CANCELLED, ended_at=25.0), part(0, 20.0), ended_at=20.0
    )
    cancelled = with_attempt(
        Job(9, replace(SPEC, owner="gus"), 0.0, JobState.CANCELLED, ended_at=19.0), part(0, 20.0), ended_at=19.0
    )
    write_jobs(stores, ended, failed, restarted, of_today, of_tomorrow, shared, reserved, preempted, cancelled)
    again = with_attempt(replace(restarted, state=JobState.SUCCEEDED), part(0, 12.0))
    assert restarted.attempt is not None
    stores.jobs.write(Batch(at=1.0, epoch=1, jobs={3: again}, attempts=[(3, restarted.attempt)]))
    assert sorted(stores.history.charges(9.0, 1e6)) == [
        Charge("alice", 60.0, 30.0),
        Charge("bob", 4.0, 12.0),
        Charge("cyd", 20.0, 20.0),
        Charge("cyd", 2 * (1e5 - 10), 1e5),
        Charge("dan", 5.0, 20.0),
        Charge("gus", 20.0, 20.0),
    ]
    of_last = [Charge("alice", 40.0, 30.0), Charge("cyd", 2 * (1e5 - 10), 1e5)]
    assert sorted(stores.history.charges(25.0, 1e6)) == of_last
    assert [charge.at for charge in sorted(stores.history.charges(25.0, 500.0))] == [30.0, 500.0]


def test_planned_starts_are_the_newest_that_have_passed(open_stores: OpenAll) -> None:
    stores = open_stores()
    planned = PlannedStart(1.0, 60.0, 120.0, ("north", "south"), True, 9.5)
    late_by_job = {1: 5.0, 2: -10.0, 3: None, 5: 70.0}
    jobs = {ident: replace(planned, late=late) for ident, late in late_by_job.items()}
    write_jobs(stores, *[replace(make_completed_job(n, SPEC, 1.0), planned_start=jobs.get(n)) for n in range(1, 7)])
    assert [entry.late for entry in stores.history.planned_starts(10)] == [5.0, -10.0, 70.0]
    assert stores.history.planned_starts(3) == [jobs[2], jobs[5]]
