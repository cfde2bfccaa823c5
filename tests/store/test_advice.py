"""The advisor's record in the database, and the runs that a daemon learns from at its start."""

from dataclasses import replace

from koalapy.model.advice import AdvisedPlacement, Option, Run, Size, completed_run_of
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobSpec, JobState
from koalapy.model.request import FlexibleRequest
from koalapy.ports import Batch
from koalapy.store.opening import Stores

SPEC = JobSpec(FlexibleRequest(4), ("./wave",), policy="auto")
OPTIONS = (Option(("north", "south"), 1.5, 0.0, 2.0, 15.0), Option(("north",), 1.0, None, 0.0, 10.0))


def ran(ident: int, spec: JobSpec = SPEC, seconds: float = 12.5, **changes: object) -> Job:
    """A job that succeeded on two clusters, one component of which had to be replaced."""
    components = (
        Component(0, "north", 2, ComponentState.ENDED),
        Component(1, "west", 2, ComponentState.ENDED, superseded=True),
        Component(2, "south", 2, ComponentState.ENDED, replaces=1),
    )
    attempt = Attempt(2, components, 100.0, barrier_at=101.0, launched_at=101.5, ended_at=101.0 + seconds)
    job = Job(ident, spec, 90.0, JobState.SUCCEEDED, generation=2, attempt=attempt)
    return replace(job, **changes)  # type: ignore[arg-type]


def given(ident: int, application: str = "wave", at: float = 100.0) -> AdvisedPlacement:
    return AdvisedPlacement(ident, 2, at, application, 2, OPTIONS, "co-allocated, since it pays", 15.0)


def write(stores: Stores, *jobs: Job, advised: tuple[AdvisedPlacement, ...] = ()) -> None:
    stores.jobs.write(Batch(at=1.0, epoch=stores.jobs.epoch, jobs={job.id: job for job in jobs}, advised=list(advised)))


def test_an_advice_is_completed_when_its_job_has_succeeded(stores: Stores) -> None:
    running = ran(1, state=JobState.RUNNING)
    write(stores, running, advised=(given(1),))
    advice = stores.advice
    assert advice.record("", 10) == [given(1)]
    write(stores, ran(1))
    assert advice.record("", 10) == [replace(given(1), actual=12.5)]


def test_an_advice_whose_attempt_failed_stays_without_an_end(stores: Stores) -> None:
    first = replace(given(1), generation=1)
    write(stores, ran(1, state=JobState.RUNNING), advised=(first, given(1)))
    write(stores, ran(1))
    actual = {found.generation: found.actual for found in stores.advice.record("", 10)}
    assert actual == {1: None, 2: 12.5}
    write(stores, ran(2, state=JobState.RUNNING), advised=(given(2, at=200.0),))
    write(stores, ran(2, state=JobState.FAILED))
    assert stores.advice.record("", 1) == [given(2, at=200.0)]


def test_the_record_is_told_newest_first_by_application_and_not_without_end(stores: Stores) -> None:
    advised = [given(ident, "wave" if ident % 2 else "prime", 100.0 + ident) for ident in range(1, 7)]
    write(stores, *(ran(ident) for ident in range(1, 7)), advised=tuple(advised))
    advice = stores.advice
    assert [found.job for found in advice.record("", 4)] == [6, 5, 4, 3]
    assert [found.job for found in advice.record("wave", 2)] == [5, 3]
    assert advice.record("other", 2) == []


def test_the_last_runs_are_read_from_the_oldest_on(stores: Stores) -> None:
    many = replace(SPEC, processes_per_node=2, application="ocean")
    nameless = replace(SPEC, command=("sh", "-c", "x"))
    write(
        stores,
        *(ran(ident, seconds=float(ident)) for ident in (1, 2)),
        ran(3, many, 3.0),
        ran(4, nameless),
        ran(5, state=JobState.FAILED),
        ran(6, state=JobState.RUNNING),
    )
    found = stores.advice.runs(10)
    on = ("north", "south")
    assert found == [Run("wave", Size(4), on, 1.0), Run("wave", Size(4), on, 2.0), Run("ocean", Size(4, 2), on, 3.0)]
    assert stores.advice.runs(2) == found[1:]


def killed(ident: int, spec: JobSpec, lasted: float, exit_code: int | None = None) -> Job:
    job = ran(ident, spec, state=JobState.FAILED)
    assert job.attempt is not None
    attempt = replace(job.attempt, ended_at=101.5 + lasted, exit_code=exit_code)
    return replace(job, attempt=attempt, exit_code=exit_code)


def test_what_was_killed_at_its_walltime_is_read_as_such_and_as_it_was_learned_at_once(stores: Stores) -> None:
    limited = replace(SPEC, walltime=30.0)
    jobs = [
        ran(1, limited),
        killed(2, limited, 30.0),
        killed(3, limited, 30.0, exit_code=1),
        killed(4, limited, 29.0),
        killed(5, SPEC, 30.0),
        killed(6, limited, 31.0),
    ]
    write(stores, *jobs)
    found = stores.advice.runs(10)
    assert [(run.seconds, run.killed) for run in found] == [(12.5, False), (30.5, True), (31.5, True)]
    assert found == [run for job in jobs if (run := completed_run_of(job)) is not None]
    assert stores.advice.runs(1) == found[2:]
    stores.history.remove([1, 2, 3, 4, 5])
    assert stores.advice.runs(10) == found, "also when its job is not kept any more"
