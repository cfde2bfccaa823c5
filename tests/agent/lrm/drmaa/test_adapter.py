"""The adapter of clusters with DRMAA only, over a session in this process."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from koalapy.agent.check import head_node
from koalapy.agent.core.settings import AgentSettings, SiteSettings
from koalapy.agent.lrm.drmaa import adapter
from koalapy.agent.lrm.drmaa.adapter import DrmaaLrm, SubmittedJob, SubmittedJobs
from koalapy.agent.lrm.drmaa.control import NO_SUCH_JOB, DrmaaControl, Unanswered
from koalapy.agent.lrm.port import DrmaaEnding, Finding, JobControl, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.agent.main import check_host
from koalapy.model.errors import SiteError, SiteRejected, SiteUnavailable
from koalapy.runner.folders import replace_file
from tests.virtual_time import VirtualClock, VirtualTimeLoop

from .conftest import make_submission


@pytest.fixture
def settings() -> SiteSettings:
    return SiteSettings(nodes=4, native_specification="-n {nodes} -t {walltime}", fanout="srun", poll_interval=0.1)


class FakeSession(JobControl):
    """A fake ``DrmaaControl``."""

    def __init__(self) -> None:
        self.natives: list[list[str]] = []
        """The native options of each job submitted."""
        self.cancelled: list[str] = []
        self.rejection: SiteError | None = None
        """The error of a submission."""
        self.states: dict[str, str] = {}
        """The state of each job that the library knows."""
        self._endings: dict[str, DrmaaEnding] = {}
        self._listeners: list[Callable[[], None]] = []

    def end(self, state: str, ending: DrmaaEnding) -> None:
        """End a job and notify the listeners."""
        self.states[ending.job], self._endings[ending.job] = state, ending
        for listener in self._listeners:
            listener()

    async def submit_job(self, script: Path, submission: LrmSubmission, native: Sequence[str]) -> str:
        if self.rejection is not None:
            raise self.rejection
        self.natives.append(list(native))
        job = str(len(self.natives))
        self.states[job] = "running"
        return job

    async def cancel_job(self, job: str, user: str = "") -> None:
        self.cancelled.append(job)

    async def read_states(self, jobs: Sequence[str]) -> dict[str, str]:
        return {job: self.states.get(job, NO_SUCH_JOB) for job in jobs}

    def on_ended(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def reported_ending(self, job: str) -> DrmaaEnding | None:
        return self._endings.get(job)


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


MakeLrm = Callable[[], DrmaaLrm]


@pytest.fixture
def make_lrm(session: FakeSession, settings: SiteSettings, tmp_path: Path, virtual_loop: VirtualTimeLoop) -> MakeLrm:
    control: Any = session
    return lambda: DrmaaLrm(settings, control, tmp_path, clock=VirtualClock(virtual_loop))


@pytest.fixture
async def lrm(make_lrm: MakeLrm) -> AsyncIterator[DrmaaLrm]:
    lrm = make_lrm()
    await lrm.open()
    yield lrm
    await lrm.close()


async def first_with(lrm: DrmaaLrm, state: LrmJobState) -> LrmJob:
    async with asyncio.timeout(60):
        async for _ in lrm.watch_changes():
            for job in (await lrm.take_snapshot()).jobs:
                if job.state is state:
                    return job
    raise AssertionError("the changes came to an end")


@pytest.mark.parametrize(
    ("fanout", "walltime", "limit"),
    [("srun", 25 * 3600.0, "25:00:00"), ("srun", 0.5, "0:01:00"), ("qrsh", 90.0, "90"), ("none", 0.2, "1")],
)
def test_walltime_has_the_form_of_the_library(
    control: DrmaaControl, tmp_path: Path, fanout: Literal["srun", "qrsh", "none"], walltime: float, limit: str
) -> None:
    lrm = DrmaaLrm(SiteSettings(native_specification="-l {walltime}", fanout=fanout), control, tmp_path)
    assert lrm._native_options(make_submission(tmp_path, walltime=walltime)) == ["-l", limit]


async def test_nodes_without_grid_jobs_are_idle(lrm: DrmaaLrm, session: FakeSession, tmp_path: Path) -> None:
    assert await lrm.take_snapshot() == LrmSnapshot(4, 4, 0, 0, ())
    job = await lrm.submit_job(make_submission(tmp_path, nodes=3, walltime=90.0))
    assert session.natives == [["-n", "3", "-t", "0:02:00"]]
    assert "srun --nodes=3" in (tmp_path / "launch").read_text()
    running = LrmJob(job, "koala-a", LrmJobState.RUNNING)
    assert await lrm.take_snapshot() == LrmSnapshot(4, 1, 0, 0, (running,))
    session.states[job] = "queued_active"
    assert await lrm.take_snapshot() == LrmSnapshot(4, 4, 0, 0, (replace(running, state=LrmJobState.QUEUED),))


@pytest.mark.parametrize(
    ("state", "ending", "ended"),
    [
        ("done", DrmaaEnding("1", 0), LrmJob("1", "koala-a", LrmJobState.ENDED, exit_code=0)),
        ("done", DrmaaEnding("1", 7), LrmJob("1", "koala-a", LrmJobState.ENDED, exit_code=7)),
        (
            "failed",
            DrmaaEnding("1", 137),
            LrmJob("1", "koala-a", LrmJobState.ENDED, exit_code=137, lost=True, reason="ended by signal 9"),
        ),
        (
            "failed",
            DrmaaEnding("1", signal="SIGTERM"),
            LrmJob("1", "koala-a", LrmJobState.ENDED, lost=True, reason="ended by signal 15"),
        ),
        (
            "failed",
            DrmaaEnding("1", aborted=True),
            LrmJob("1", "koala-a", LrmJobState.ENDED, lost=True, reason="aborted by the resource manager"),
        ),
    ],
)
async def test_ended_job_has_its_ending(
    lrm: DrmaaLrm, session: FakeSession, tmp_path: Path, state: str, ending: DrmaaEnding, ended: LrmJob
) -> None:
    job = await lrm.submit_job(make_submission(tmp_path, walltime=1.0))
    session.end(state, ending)
    assert await first_with(lrm, LrmJobState.ENDED) == ended
    assert (await lrm.take_snapshot()).idle == 4
    assert await lrm.find_job("koala-a") == job


async def test_job_without_state_is_unknown(lrm: DrmaaLrm, session: FakeSession, tmp_path: Path) -> None:
    job = await lrm.submit_job(make_submission(tmp_path, walltime=1.0, nodes=2))
    for answer in ("undetermined", "TryLaterException"):
        session.states[job] = answer
        snapshot = await lrm.take_snapshot()
        assert (snapshot.jobs[0].state, snapshot.idle) == (LrmJobState.UNKNOWN, 2)


async def test_job_is_found_after_restart(
    lrm: DrmaaLrm, make_lrm: MakeLrm, session: FakeSession, tmp_path: Path
) -> None:
    job = await lrm.submit_job(make_submission(tmp_path, walltime=1.0))
    await lrm.close()
    again = make_lrm()
    await again.open()
    assert await again.find_job("koala-a") == job
    assert await again.find_job("koala-b") is None
    del session.states[job]
    assert (await again.take_snapshot()).jobs[0].state is LrmJobState.RUNNING, "its exit code may still come"
    began = asyncio.get_running_loop().time()
    ended = await first_with(again, LrmJobState.ENDED)
    assert (ended.exit_code, ended.lost) == (None, False)
    assert asyncio.get_running_loop().time() >= began + again.max_snapshot_age_s, "another server may still know it"
    await again.close()


async def test_cancel_of_other_name_is_rejected(lrm: DrmaaLrm, session: FakeSession, tmp_path: Path) -> None:
    job = await lrm.submit_job(make_submission(tmp_path, walltime=1.0))
    with pytest.raises(SiteRejected, match="koala-b"):
        await lrm.cancel_job(job, "koala-b")
    await lrm.cancel_job("99", "koala-a")
    assert session.cancelled == []
    await lrm.cancel_job(job, "koala-a")
    assert session.cancelled == [job]
    session.end("failed", DrmaaEnding(job, aborted=True))
    ended = await first_with(lrm, LrmJobState.ENDED)
    assert (ended.lost, ended.reason) == (False, "cancelled")


async def test_unanswered_submission_is_not_repeated(
    lrm: DrmaaLrm, make_lrm: MakeLrm, session: FakeSession, tmp_path: Path
) -> None:
    session.rejection = Unanswered("the library died")
    with pytest.raises(SiteUnavailable):
        await lrm.submit_job(make_submission(tmp_path, walltime=1.0))
    again = make_lrm()
    await again.open()
    for asked in (lrm, again):
        with pytest.raises(SiteRejected, match="is not known"):
            await asked.find_job("koala-a")
    await again.close()


async def test_rejected_submission_may_be_repeated(lrm: DrmaaLrm, session: FakeSession, tmp_path: Path) -> None:
    session.rejection = SiteRejected("DRMAA: denied")
    with pytest.raises(SiteRejected):
        await lrm.submit_job(make_submission(tmp_path, walltime=1.0))
    assert await lrm.find_job("koala-a") is None


@pytest.mark.parametrize(
    ("changes", "message"), [({"nodes": 5, "walltime": 1.0}, "5 nodes requested"), ({}, "requires a walltime")]
)
async def test_impossible_submission_is_rejected(
    lrm: DrmaaLrm, session: FakeSession, tmp_path: Path, changes: dict[str, float], message: str
) -> None:
    with pytest.raises(SiteRejected, match=message):
        await lrm.submit_job(make_submission(tmp_path, **changes))
    assert session.natives == []


def test_jobs_stored_by_two_threads_are_both_in_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table, is_writing, has_stored = SubmittedJobs(tmp_path / "table"), threading.Event(), threading.Event()

    def write_slowly(path: Path, content: bytes) -> None:
        """Let the first writer wait for the other one, unless that waits itself."""
        if not is_writing.is_set():
            is_writing.set()
            has_stored.wait(0.2)
        replace_file(path, content)

    monkeypatch.setattr(adapter, "replace_file", write_slowly)
    first = threading.Thread(target=table.store, args=(SubmittedJob("koala-a", 1, "1"),))
    first.start()
    is_writing.wait()
    table.store(SubmittedJob("koala-b", 1, "2"))
    has_stored.set()
    first.join()
    later = SubmittedJobs(tmp_path / "table")
    later.load()
    assert sorted(later.entries) == ["koala-a", "koala-b"]


async def test_submission_that_cannot_be_recorded_may_be_repeated(
    monkeypatch: pytest.MonkeyPatch, lrm: DrmaaLrm, session: FakeSession, tmp_path: Path
) -> None:
    def fill_disk(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(adapter, "replace_file", fill_disk)
        with pytest.raises(SiteUnavailable, match="No space left"):
            await lrm.submit_job(make_submission(tmp_path, walltime=1.0))
    assert session.natives == []
    assert await lrm.find_job("koala-a") is None


def test_check_leaves_table_to_agent(monkeypatch: pytest.MonkeyPatch, session: FakeSession, tmp_path: Path) -> None:
    async def submit_trial(settings: AgentSettings, expected: object, make: MakeLrm, user: str) -> list[Finding]:
        await make().submit_job(make_submission(tmp_path, walltime=1.0))
        return []

    monkeypatch.setattr(adapter, "drmaa_control", lambda *_: session)
    monkeypatch.setattr(head_node, "check_cluster", submit_trial)
    (tmp_path / "agent").mkdir()
    (tmp_path / "koala.yaml").write_text("clusters: {north: {kind: drmaa, nodes: 4}}")
    check_host("north", "http://127.0.0.1:1", tmp_path / "koala.yaml", tmp_path / "agent", "s3cret", None)
    assert len(session.natives) == 1
    assert not (tmp_path / "agent" / "drmaa-jobs.json").exists()


async def test_unreadable_table_names_its_file(make_lrm: MakeLrm, tmp_path: Path) -> None:
    (tmp_path / "drmaa-jobs.json").write_text('{"koala-a": {"na')
    lrm = make_lrm()
    with pytest.raises(SiteUnavailable, match=r"drmaa-jobs\.json"):
        await lrm.open()
    await lrm.close()
