"""A cluster of which nothing but DRMAA is known, over the real worker process."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from koalapy.agents.lrm.drmaa.adapter import DrmaaLrm
from koalapy.agents.lrm.drmaa.control import DrmaaControl
from koalapy.agents.lrm.port import LrmJob, LrmJobState, LrmSnapshot
from koalapy.agents.lrm.timeouts import LrmTimeouts
from koalapy.agents.settings import SiteSettings
from koalapy.model.errors import SiteRejected, SiteUnavailable

from .conftest import FakeLibrary, make_control, submission


@pytest.fixture
def settings() -> SiteSettings:
    return SiteSettings(nodes=4, native_specification="-n {nodes} -t {walltime}", fanout="srun", poll_interval=0.1)


@pytest.fixture
async def lrm(library: FakeLibrary, settings: SiteSettings, tmp_path: Path) -> AsyncIterator[DrmaaLrm]:
    made = DrmaaLrm(settings, make_control(library), tmp_path)
    await made.open()
    yield made
    await made.close()


async def first_with(lrm: DrmaaLrm, state: LrmJobState) -> LrmJob:
    async with asyncio.timeout(60):
        async for _ in lrm.changes():
            for job in (await lrm.snapshot()).jobs:
                if job.state is state:
                    return job
    raise AssertionError("the changes came to an end")


@pytest.mark.parametrize(
    ("fanout", "walltime", "limit"),
    [("srun", 25 * 3600.0, "25:00:00"), ("srun", 0.5, "0:01:00"), ("qrsh", 90.0, "90"), ("none", 0.2, "1")],
)
def test_a_walltime_is_written_as_the_resource_manager_has_it(
    control: DrmaaControl, tmp_path: Path, fanout: Literal["srun", "qrsh", "none"], walltime: float, limit: str
) -> None:
    lrm = DrmaaLrm(SiteSettings(native_specification="-l {walltime}", fanout=fanout), control, tmp_path)
    assert lrm._native(submission(tmp_path, walltime=walltime)) == ["-l", limit]


@pytest.mark.processes
async def test_what_ours_do_not_hold_is_idle(lrm: DrmaaLrm, library: FakeLibrary, tmp_path: Path) -> None:
    assert await lrm.snapshot() == LrmSnapshot(4, 4, 0, 0, ())
    job = await lrm.submit(submission(tmp_path, nodes=3, walltime=90.0))
    assert '"nativeSpecification": "-n 3 -t 0:02:00"' in library.calls("runJob")[0]
    assert "srun --nodes=3" in (tmp_path / "launch").read_text()
    running = LrmJob(job, "koala-a", LrmJobState.RUNNING)
    assert await lrm.snapshot() == LrmSnapshot(4, 1, 0, 0, (running,))
    library.job(job, "queued_active")
    assert await lrm.snapshot() == LrmSnapshot(4, 4, 0, 0, (replace(running, state=LrmJobState.QUEUED),))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "ended"),
    [
        ("done exit 0", LrmJob("1", "koala-a", LrmJobState.ENDED, exit_code=0)),
        ("done exit 7", LrmJob("1", "koala-a", LrmJobState.ENDED, exit_code=7)),
        (
            "failed exit 137",
            LrmJob("1", "koala-a", LrmJobState.ENDED, exit_code=137, lost=True, reason="ended by signal 9"),
        ),
        ("failed signal SIGTERM", LrmJob("1", "koala-a", LrmJobState.ENDED, lost=True, reason="ended by signal 15")),
        (
            "failed aborted",
            LrmJob("1", "koala-a", LrmJobState.ENDED, lost=True, reason="aborted by the resource manager"),
        ),
    ],
)
async def test_how_a_job_ended(lrm: DrmaaLrm, library: FakeLibrary, tmp_path: Path, words: str, ended: LrmJob) -> None:
    job = await lrm.submit(submission(tmp_path, walltime=1.0))
    library.job(job, words)
    assert await first_with(lrm, LrmJobState.ENDED) == ended
    assert (await lrm.snapshot()).idle == 4
    assert await lrm.find("koala-a") == job


@pytest.mark.processes
async def test_a_job_that_cannot_be_told_of_is_unknown(lrm: DrmaaLrm, library: FakeLibrary, tmp_path: Path) -> None:
    job = await lrm.submit(submission(tmp_path, walltime=1.0, nodes=2))
    library.job(job, "undetermined")
    (seen,) = (await lrm.snapshot()).jobs
    assert seen.state is LrmJobState.UNKNOWN
    library.will("jobStatus", "TryLaterException")
    assert (await lrm.snapshot()).jobs[0].state is LrmJobState.UNKNOWN
    assert (await lrm.snapshot()).idle == 2


@pytest.mark.processes
async def test_a_job_is_known_after_a_restart(
    lrm: DrmaaLrm, library: FakeLibrary, settings: SiteSettings, tmp_path: Path
) -> None:
    job = await lrm.submit(submission(tmp_path, walltime=1.0))
    await lrm.close()
    again = DrmaaLrm(settings, make_control(library), tmp_path, timeouts=LrmTimeouts(drmaa_exit_code_s=0.0))
    await again.open()
    assert await again.find("koala-a") == job
    assert await again.find("koala-b") is None
    (library.state / f"job-{job}").unlink()
    ended = await first_with(again, LrmJobState.ENDED)
    assert (ended.exit_code, ended.lost) == (None, False)
    await again.close()


@pytest.mark.processes
async def test_cancel_asks_for_the_name(lrm: DrmaaLrm, library: FakeLibrary, tmp_path: Path) -> None:
    job = await lrm.submit(submission(tmp_path, walltime=1.0))
    with pytest.raises(SiteRejected, match="koala-b"):
        await lrm.cancel(job, "koala-b")
    await lrm.cancel("99", "koala-a")
    assert not library.calls("terminate")
    await lrm.cancel(job, "koala-a")
    assert library.calls("terminate") == ["terminate 1"]
    library.job(job, "failed aborted")
    ended = await first_with(lrm, LrmJobState.ENDED)
    assert (ended.lost, ended.reason) == (False, "cancelled")


@pytest.mark.processes
async def test_a_job_of_which_nobody_knows_is_not_handed_in_again(
    lrm: DrmaaLrm, library: FakeLibrary, tmp_path: Path
) -> None:
    library.will("runJob", "crash")
    with pytest.raises(SiteUnavailable):
        await lrm.submit(submission(tmp_path, walltime=1.0))
    with pytest.raises(SiteRejected, match="is not known"):
        await lrm.find("koala-a")


@pytest.mark.processes
async def test_a_refused_job_may_be_handed_in_again(lrm: DrmaaLrm, library: FakeLibrary, tmp_path: Path) -> None:
    library.will("runJob", "DeniedByDrmException")
    with pytest.raises(SiteRejected):
        await lrm.submit(submission(tmp_path, walltime=1.0))
    assert await lrm.find("koala-a") is None


@pytest.mark.parametrize(
    ("changes", "says"), [({"nodes": 5, "walltime": 1.0}, "5 nodes asked for"), ({}, "wants a walltime")]
)
async def test_what_cannot_be_is_refused(
    lrm: DrmaaLrm, library: FakeLibrary, tmp_path: Path, changes: dict[str, float], says: str
) -> None:
    with pytest.raises(SiteRejected, match=says):
        await lrm.submit(submission(tmp_path, **changes))
    assert not library.calls()


async def test_a_broken_book_says_where_it_is(library: FakeLibrary, settings: SiteSettings, tmp_path: Path) -> None:
    (tmp_path / "drmaa-jobs.json").write_text('{"koala-a": {"na')
    lrm = DrmaaLrm(settings, make_control(library), tmp_path)
    with pytest.raises(SiteUnavailable, match=r"drmaa-jobs\.json"):
        await lrm.open()
    await lrm.close()
