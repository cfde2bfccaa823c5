"""Jobs and batches for the tests of stores."""

from dataclasses import replace

from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState, PlannedStart
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.store.records import Batch


def make_job(ident: int, state: JobState = JobState.QUEUED, **changes: object) -> Job:
    spec = JobSpec(FlexibleRequest(3), ("true",), name=f"n{ident % 2}", owner="ada" if ident % 3 else "bob")
    return replace(Job(ident, spec, 100.0 + ident, state, queue_seq=ident), **changes)  # type: ignore[arg-type]


def make_running_job(ident: int, generation: int = 1) -> Job:
    components = (
        Component(
            0,
            "north",
            2,
            ComponentState.RUNNING,
            hosts=("127.0.1.1", "127.0.1.2"),
            lrm_job="7",
            submitted_at=1.5,
            claimed_at=3.5,
        ),
        Component(
            1,
            "south",
            1,
            ComponentState.STOPPING,
            error="lost",
            infrastructure=True,
            unknown_since=9.0,
            superseded=True,
        ),
        Component(2, "west", 1, ComponentState.PLACED, sources=("south",), transfer_time=2.5, replaces=1),
    )
    attempt = Attempt(
        generation,
        components,
        placed_at=1.0,
        start_estimate=6.0,
        claim_at=4.5,
        barrier_at=2.0,
        launched_at=3.0,
        end_reason="because",
        nonce="5eed",
        streams=8,
        relayed=(("north", "south"), ("south", "west")),
    )
    return make_job(
        ident,
        JobState.RUNNING,
        generation=generation,
        attempt=attempt,
        ending=JobState.QUEUED,
        claim_factor=0.625,
        first_start_estimate=5.5,
        planned_start=PlannedStart(1.0, 60.0, 120.0, ("north",), True, 9.5, 30, 27, "local users took nodes on north"),
    )


def make_batch(*jobs: Job, **fields: object) -> Batch:
    return Batch(at=1.0, epoch=1, jobs={job.id: job for job in jobs}, **fields)  # type: ignore[arg-type]
