"""Jobs as seen by users, with simulated clusters."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.daemon.engine.engine import WorkItem
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.daemon.jobs.jobs import MAX_IDS_PER_QUERY, Jobs
from koalapy.daemon.jobs.output import OutputEnd
from koalapy.model.errors import ConflictError, NotFoundError, StoreUnavailable
from koalapy.model.job import ComponentState, Job, JobState, TimelineEntry
from koalapy.model.job_spec import JobSpec
from koalapy.model.reports import ComponentStatus
from koalapy.model.request import FlexibleRequest
from koalapy.scheduler.events import ClusterDrained, ClusterResumed
from tests import signals
from tests.daemon.test_hub import DEADLINE, Agent, Daemon, connect_agent, running_daemon
from tests.identities import ADA

SPEC = JobSpec(FlexibleRequest(2), ("true",), owner="ada")


@asynccontextmanager
async def north_and_jobs(path: Path) -> AsyncIterator[tuple[Daemon, Agent, Jobs]]:
    async with running_daemon(path / "koala.db") as daemon, daemon.agent_of("north") as north:
        await connect_agent(daemon, "north", north)
        await daemon.engine.commit(WorkItem())  # wait until states are written and no placement round is running
        yield daemon, north, daemon.jobs


async def job_when(jobs: Jobs, state: JobState, generation: int) -> Job:
    """Wait until job 1 is in this state of this attempt; return it."""

    async def look() -> Job | None:
        job = (await jobs.get(1)).job
        return job if (job.state, job.generation) == (state, generation) else None

    job = await signals.poll(look)
    assert job is not None
    return job


async def test_list_attempts_joins_stored_and_current_attempt(tmp_path: Path) -> None:
    async with north_and_jobs(tmp_path) as (daemon, north, jobs):
        await jobs.submit(SPEC, ADA)
        job = await job_when(jobs, JobState.CLAIMING, 1)
        record, attempts = await jobs.list_attempts(1)
        assert (record.job, attempts) == (job, [job.attempt])
        north.say_to_daemon(ComponentStatus(token="1.1.0.fa", state=ComponentState.WAITING, hosts=()))
        north.say_to_daemon(
            ComponentStatus(
                token="1.1.0.fa", state=ComponentState.ENDED, hosts=(), error="no shell", infrastructure=True
            )
        )
        second = await job_when(jobs, JobState.CLAIMING, 2)
        first, under_way = (await jobs.list_attempts(1))[1]
        assert under_way == second.attempt
        assert first.generation == 1
        assert (first.components[0].state, first.components[0].ended_at) == (ComponentState.ENDED, first.ended_at)
        assert "no shell" in first.end_reason
        assert (await jobs.list_attempts(1, last=1))[1] == [under_way]
        assert (await jobs.list_attempts(1, last=7))[1] == [first, under_way]
        assert daemon.store.attempts(1)[-1] == under_way
        with pytest.raises(NotFoundError):
            await jobs.list_attempts(2)


async def test_follow_output_survives_database_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with north_and_jobs(tmp_path) as (_, _, jobs):
        await jobs.submit(SPEC, ADA)
        answers, away = jobs.get, 0

        async def get(job: int) -> JobRecord:
            nonlocal away
            away -= 1
            if away in range(3):
                raise StoreUnavailable("the database does not answer")
            record = await answers(job)
            return replace(record, job=replace(record.job, state=JobState.SUCCEEDED))

        monkeypatch.setattr(jobs, "get", get)
        for follow in (True, False):
            away = 4  # the first read checks that the job exists
            if not follow:
                with pytest.raises(StoreUnavailable):
                    [piece async for piece in jobs.follow_output(1, follow)]
            else:
                parts = [part async for part in jobs.follow_output(1, follow)]
                assert parts == [None, None, None, OutputEnd(JobState.SUCCEEDED, is_complete=True)]
                assert away == -1


async def test_follow_output_of_removed_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with north_and_jobs(tmp_path) as (_, _, jobs):
        await jobs.submit(SPEC, ADA)
        answers, call_count = jobs.get, 0

        async def get(job: int) -> JobRecord:
            nonlocal call_count
            call_count += 1
            if call_count > 1:
                raise NotFoundError("there is no job 1")
            return await answers(job)

        monkeypatch.setattr(jobs, "get", get)
        assert [piece async for piece in jobs.follow_output(1, follow=True)] == []


async def test_follow_job_reads_long_timeline_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("koalapy.daemon.jobs.jobs.TIMELINE_PAGE_SIZE", 10)
    async with north_and_jobs(tmp_path) as (daemon, _, jobs):
        waiting_job = (await jobs.submit(replace(SPEC, request=FlexibleRequest(4)), ADA))[0].job.id
        waits = (await jobs.submit(replace(SPEC, request=FlexibleRequest(4)), ADA))[0].job.id
        for _ in range(12):
            await jobs.hold(waits, ADA, "later")
            await jobs.release(waits, ADA)
        read: list[int] = []
        timeline = daemon.store.timeline

        def counted(job: int, start: int = 0, limit: int | None = None) -> list[TimelineEntry]:
            lines = timeline(job, start, limit)
            read.append(len(lines))
            return lines

        monkeypatch.setattr(daemon.store, "timeline", counted)
        async with asyncio.timeout(DEADLINE):
            following = jobs.follow_job(waits, line_number=3)
            lines = [line for _ in range(3) for line in (await anext(following)).timeline]
            await jobs.cancel(waits, ADA, "enough")
            lines += [line async for change in following for line in change.timeline]
        assert [number for number, _ in lines] == list(range(4, len(timeline(waits)) + 1))
        assert [entry for _, entry in lines] == timeline(waits)[3:]
        assert (sum(read), max(read)) == (len(lines), 10)
        assert [change.timeline async for change in jobs.follow_job(waits, line_number=2**63)] == [()]
        assert waiting_job != waits


async def test_get_many_beyond_ids_of_one_query_returns_all_ended_jobs(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        for job in (1, 2):
            await daemon.jobs.submit(SPEC, ADA)
            await daemon.jobs.cancel(job, ADA, "")
        await daemon.engine.commit(WorkItem())
        ids = [1, *range(3, 3 + MAX_IDS_PER_QUERY), 2]
        states = {ident: job.state for ident, job in (await daemon.jobs.get_many(ids)).items()}
        assert states == {1: JobState.CANCELLED, 2: JobState.CANCELLED}


def with_size(size: int) -> Callable[[JobSpec], JobSpec]:
    return lambda spec: replace(spec, request=FlexibleRequest(size))


async def test_change_of_waiting_job_starts_it_and_of_placed_job_is_rejected(tmp_path: Path) -> None:
    async with north_and_jobs(tmp_path) as (_, _, jobs):
        await jobs.submit(replace(SPEC, request=FlexibleRequest(4)), ADA)
        await job_when(jobs, JobState.CLAIMING, 1)
        waiting = (await jobs.submit(SPEC, ADA))[0].job
        assert waiting.state is JobState.QUEUED
        with pytest.raises(ConflictError, match="job 1 is claiming: only jobs that wait can be changed") as error:
            await jobs.change(1, ADA, with_size(1), "")
        assert "koala cancel 1" in error.value.hint
        await jobs.cancel(1, ADA, "")
        assert (await jobs.change(2, ADA, with_size(1), "")).job.spec.request.total_size == 1


async def test_change_that_meets_placement_is_rejected_and_changes_nothing(tmp_path: Path) -> None:
    async with north_and_jobs(tmp_path) as (daemon, _, jobs):
        await daemon.engine.commit(WorkItem(events=(ClusterDrained("north", "ops", "later"),)))
        await jobs.submit(SPEC, ADA)
        resumed = daemon.engine.commit(WorkItem(events=(ClusterResumed("north"),)))
        changed = jobs.change(1, ADA, with_size(1), "")
        results = await asyncio.gather(resumed, changed, jobs.change(1, ADA, with_size(3), ""), return_exceptions=True)
        job = (await jobs.get(1)).job
        sizes = [result.job.spec.request.total_size for result in results if isinstance(result, JobRecord)]
        assert all(isinstance(result, JobRecord | ConflictError) for result in results[1:])
        assert job.spec.request.total_size == (sizes[-1] if sizes else 2)
        assert job.attempt is None or sum(c.size for c in job.attempt.gang) == job.spec.request.total_size


async def test_change_is_loaded_by_next_daemon(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        await daemon.jobs.submit(SPEC, ADA)
        changed = (await daemon.jobs.change(1, ADA, with_size(1), "smaller")).job
        (loaded,) = daemon.store.load().jobs
        assert (loaded.spec, loaded.submitted_at, loaded.queue_seq) == (
            changed.spec,
            changed.submitted_at,
            changed.queue_seq,
        )
        assert loaded.spec.request == FlexibleRequest(1)
