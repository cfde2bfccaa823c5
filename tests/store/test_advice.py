"""Advice in the database, and the runs from which a daemon learns at its start."""

from dataclasses import replace

from koalapy.model.advice import AdvisedPlacement, Option, Run, Size, completed_run_of
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.store.opening import Stores
from koalapy.store.records import Batch

SPEC = JobSpec(FlexibleRequest(4), ("./wave",), policy="auto")
OPTIONS = (Option(("north", "south"), 1.5, 0.0, 2.0, 15.0), Option(("north",), 1.0, None, 0.0, 10.0))


def make_completed_job(ident: int, spec: JobSpec = SPEC, seconds: float = 12.5, **changes: object) -> Job:
    """Return a job that succeeded on two clusters, with one replaced component."""
    components = (
        Component(0, "north", 2, ComponentState.ENDED),
        Component(1, "west", 2, ComponentState.ENDED, superseded=True),
        Component(2, "south", 2, ComponentState.ENDED, replaces=1),
    )
    attempt = Attempt(2, components, 100.0, barrier_at=101.0, launched_at=101.5, ended_at=101.0 + seconds)
    job = Job(ident, spec, 90.0, JobState.SUCCEEDED, generation=2, attempt=attempt)
    return replace(job, **changes)  # type: ignore[arg-type]


def make_advised_placement(ident: int, application: str = "wave", advised_at: float = 100.0) -> AdvisedPlacement:
    return AdvisedPlacement(ident, 2, advised_at, application, 2, OPTIONS, "co-allocated, since it pays", 15.0)


def write_jobs(stores: Stores, *jobs: Job, advised: tuple[AdvisedPlacement, ...] = ()) -> None:
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={job.id: job for job in jobs}, advised=list(advised)))


def test_advice_of_succeeded_job_gets_run_time(stores: Stores) -> None:
    running = make_completed_job(1, state=JobState.RUNNING)
    write_jobs(stores, running, advised=(make_advised_placement(1),))
    advice = stores.advice
    assert advice.record("", 10) == [make_advised_placement(1)]
    write_jobs(stores, make_completed_job(1))
    assert advice.record("", 10) == [replace(make_advised_placement(1), actual=12.5)]


def test_advice_of_failed_attempt_has_no_run_time(stores: Stores) -> None:
    first = replace(make_advised_placement(1), generation=1)
    write_jobs(stores, make_completed_job(1, state=JobState.RUNNING), advised=(first, make_advised_placement(1)))
    write_jobs(stores, make_completed_job(1))
    actual = {placement.generation: placement.actual for placement in stores.advice.record("", 10)}
    assert actual == {1: None, 2: 12.5}
    write_jobs(
        stores, make_completed_job(2, state=JobState.RUNNING), advised=(make_advised_placement(2, advised_at=200.0),)
    )
    write_jobs(stores, make_completed_job(2, state=JobState.FAILED))
    assert stores.advice.record("", 1) == [make_advised_placement(2, advised_at=200.0)]
    limited = replace(SPEC, walltime=30.0)
    write_jobs(stores, make_completed_job(3, limited, state=JobState.RUNNING), advised=(make_advised_placement(3),))
    write_jobs(stores, make_killed_job(3, limited, 30.0))
    assert stores.advice.record("", 1)[0].actual is None, "it would have run for longer"


def test_advice_record_is_newest_first_filtered_and_limited(stores: Stores) -> None:
    advised = [make_advised_placement(ident, "wave" if ident % 2 else "prime", 100.0 + ident) for ident in range(1, 7)]
    write_jobs(stores, *(make_completed_job(ident) for ident in range(1, 7)), advised=tuple(advised))
    advice = stores.advice
    assert [placement.job for placement in advice.record("", 4)] == [6, 5, 4, 3]
    assert [placement.job for placement in advice.record("wave", 2)] == [5, 3]
    assert advice.record("other", 2) == []


def test_runs_returns_last_runs_oldest_first(stores: Stores) -> None:
    many = replace(SPEC, processes_per_node=2, application="ocean")
    nameless = replace(SPEC, command=("sh", "-c", "x"))
    write_jobs(
        stores,
        *(make_completed_job(ident, seconds=float(ident)) for ident in (1, 2)),
        make_completed_job(3, many, 3.0),
        make_completed_job(4, nameless),
        make_completed_job(5, state=JobState.FAILED),
        make_completed_job(6, state=JobState.RUNNING),
    )
    runs = stores.advice.runs(10)
    clusters = ("north", "south")
    assert runs == [
        Run("wave", Size(4), clusters, 1.0),
        Run("wave", Size(4), clusters, 2.0),
        Run("ocean", Size(4, 2), clusters, 3.0),
    ]
    assert stores.advice.runs(2) == runs[1:]


def make_killed_job(ident: int, spec: JobSpec, lasted: float, exit_code: int | None = None) -> Job:
    job = make_completed_job(ident, spec, state=JobState.FAILED)
    assert job.attempt is not None
    attempt = replace(job.attempt, ended_at=101.5 + lasted, exit_code=exit_code)
    return replace(job, attempt=attempt, exit_code=exit_code)


def test_runs_killed_at_walltime_are_marked_as_killed(stores: Stores) -> None:
    limited = replace(SPEC, walltime=30.0)
    jobs = [
        make_completed_job(1, limited),
        make_killed_job(2, limited, 30.0),
        make_killed_job(3, limited, 30.0, exit_code=1),
        make_killed_job(4, limited, 29.0),
        make_killed_job(5, SPEC, 30.0),
        make_killed_job(6, limited, 31.0),
    ]
    write_jobs(stores, *jobs)
    runs = stores.advice.runs(10)
    assert [(run.seconds, run.killed) for run in runs] == [(12.5, False), (30.5, True), (31.5, True)]
    assert runs == [run for job in jobs if (run := completed_run_of(job)) is not None]
    assert stores.advice.runs(1) == runs[2:]
    stores.history.remove([1, 2, 3, 4, 5])
    assert stores.advice.runs(10) == runs, "also after their jobs were removed"
