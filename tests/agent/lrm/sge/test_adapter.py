"""The adapter over recorded answers."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.lrm.commands import CommandResult
from koalapy.agent.lrm.port import DrmaaEnding, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.agent.lrm.sge.adapter import ACCOUNTING_TIMEOUT_S, LAYOUT_MAX_AGE_S, MAX_CONCURRENT_QACCT, SgeLrm
from koalapy.agent.lrm.sge.commands import SgeCommands
from koalapy.model.errors import SiteRejected, SiteUnavailable
from tests.virtual_time import VirtualClock, VirtualTimeLoop

from .conftest import OWNER, FakeGridEngine, RememberingControl


@pytest.fixture
async def lrm(
    engine: FakeGridEngine, control: RememberingControl, virtual_loop: VirtualTimeLoop
) -> AsyncIterator[SgeLrm]:
    lrm = engine.make_lrm(control, VirtualClock(virtual_loop), native_specification="-P grid", poll_interval=10.0)
    await lrm.open()
    yield lrm
    await lrm.close()


def make_submission(
    folder: Path, *, nodes: int = 2, walltime: float | None = None, reservation: str = ""
) -> LrmSubmission:
    return LrmSubmission("koala-new", nodes, ["true"], {}, folder, folder / "out", walltime, reservation=reservation)


def get_job(snapshot: LrmSnapshot, name: str) -> LrmJob:
    (match,) = [job for job in snapshot.jobs if job.name == name]
    return match


async def wait_until_ended(lrm: SgeLrm, name: str) -> LrmJob:
    async with asyncio.timeout(600):
        async for _ in lrm.watch_changes():
            if (job := get_job(await lrm.take_snapshot(), name)).state is LrmJobState.ENDED:
                return job
    raise AssertionError("the changes came to an end")


async def test_snapshot_lists_grid_jobs_and_their_nodes(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("busy.xml")
    snapshot = await lrm.take_snapshot()
    assert (snapshot.total, snapshot.idle, snapshot.background, snapshot.down) == (4, 0, 0, 0)
    states = {job.name: (job.state, len(job.nodes), job.lost, job.reason) for job in snapshot.jobs}
    assert states == {
        "koala-h": (LrmJobState.QUEUED, 0, False, "Grid Engine holds it (qrls releases it)"),
        "koala-m": (LrmJobState.RUNNING, 2, False, ""),
        "koala-q": (LrmJobState.QUEUED, 0, False, ""),
        "koala-x1": (LrmJobState.RUNNING, 1, False, ""),
        "koala-x2": (LrmJobState.RUNNING, 1, False, ""),
    }
    engine.show_recording("deleting.xml")
    assert get_job(await lrm.take_snapshot(), "koala-m").state is LrmJobState.RUNNING


async def test_snapshot_runs_one_query(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    for _ in range(3):
        await lrm.take_snapshot()
    assert engine.list_calls("qstat") == [
        f"qstat -f -g t -s {which} -u {OWNER} -xml" for which in ("prsz", "prs", "prs")
    ]
    assert len(engine.list_calls("qconf")) == len(engine.list_calls("qselect")) == 1


async def test_snapshot_with_old_layout_reads_queues_again(
    lrm: SgeLrm, engine: FakeGridEngine, virtual_loop: VirtualTimeLoop
) -> None:
    await lrm.take_snapshot()
    engine.set_answer("qselect", "all.q@h2-1\nall.q@h2-2\n")
    assert (await lrm.take_snapshot()).total == 4
    virtual_loop.jump(LAYOUT_MAX_AGE_S + 1)
    assert (await lrm.take_snapshot()).total == 2


async def test_jobs_in_error_are_lost(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("troubled.xml")
    engine.set_answer("qstat -j 95", 'job_number: 95\nerror reason    1:      can\'t stat() "/root/no"\n')
    for _ in range(2):
        snapshot = await lrm.take_snapshot()
    assert (snapshot.total, snapshot.idle, snapshot.background, snapshot.down) == (4, 0, 1, 2)
    broken = get_job(snapshot, "koala-err")
    assert (broken.state, broken.lost) == (LrmJobState.QUEUED, True)
    assert broken.reason == 'Grid Engine will not start it: can\'t stat() "/root/no"'
    assert get_job(snapshot, "koala-sus").reason == "suspended by Grid Engine"
    assert len(engine.list_calls("qstat -j")) == 1


async def test_deleted_job_on_unreachable_node_has_ended(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("silent.xml", **{"<state>dr</state>": "<state>r</state>"})
    snapshot = await lrm.take_snapshot()
    job = get_job(snapshot, "koala-d1")
    assert (job.state, job.lost, job.reason) == (LrmJobState.RUNNING, False, "node h2-3 does not answer Grid Engine")
    assert (snapshot.idle, snapshot.background, snapshot.down) == (1, 0, 0)
    engine.show_recording("silent.xml")
    snapshot = await lrm.take_snapshot()
    assert get_job(snapshot, "koala-d1").state is LrmJobState.ENDED
    assert (snapshot.idle, snapshot.background, snapshot.down) == (1, 2, 1)


async def test_ended_job_has_its_exit_code(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("busy.xml")
    running_job = get_job(await lrm.take_snapshot(), "koala-m")
    engine.add_accounting(running_job.id, "koala-m", "0", 7, running_job.nodes[0])
    engine.show_recording("idle.xml")
    for _ in range(2):
        snapshot = await lrm.take_snapshot()
        assert get_job(snapshot, "koala-m") == LrmJob(
            running_job.id, "koala-m", LrmJobState.ENDED, running_job.nodes, 7
        )
        assert snapshot.idle == 4
    assert await lrm.find_job("koala-m") == running_job.id
    assert len(engine.list_calls(f"qacct -o {OWNER} -j {running_job.id}")) == 1


async def test_job_missing_in_unreadable_listing_has_not_ended(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("busy.xml")
    job = get_job(await lrm.take_snapshot(), "koala-m")
    engine.show_recording("idle.xml", **{"<queue_info>": "<queue_info>\n<JB_job_number>7 <\n"})
    await lrm.take_snapshot()
    assert engine.list_calls("qacct") == []
    engine.show_recording("idle.xml")
    assert get_job(await lrm.take_snapshot(), "koala-m").state is LrmJobState.RUNNING
    assert len(engine.list_calls(f"qacct -o {OWNER} -j {job.id}")) == 1


async def test_job_submitted_during_a_listing_has_not_ended(
    lrm: SgeLrm, engine: FakeGridEngine, tmp_path: Path
) -> None:
    await lrm.take_snapshot()
    release = engine.block_command("qstat")
    snapshot = asyncio.create_task(lrm.take_snapshot())
    await asyncio.sleep(0)
    await lrm.submit_job(make_submission(tmp_path))
    release()
    assert (await snapshot).jobs == ()
    assert engine.list_calls("qacct") == []


async def test_accounting_record_of_first_host_is_used(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("busy.xml")
    job = get_job(await lrm.take_snapshot(), "koala-m")
    first, second = job.nodes
    engine.add_accounting(job.id, "koala-m", "0", 3, first)
    engine.add_accounting(job.id, "koala-m", "100 : assumedly after job", 129, second)
    engine.show_recording("idle.xml")
    ended_job = get_job(await lrm.take_snapshot(), "koala-m")
    assert (ended_job.state, ended_job.exit_code, ended_job.lost) == (LrmJobState.ENDED, 3, False)


@pytest.mark.parametrize(
    ("ending", "end"),
    [
        (None, (None, False, "Grid Engine does not say how it ended")),
        (DrmaaEnding("", exit_code=3), (3, False, "")),
        (DrmaaEnding("", aborted=True), (None, True, "Grid Engine ended it")),
        (DrmaaEnding("", signal="SIGKILL"), (None, True, "Grid Engine ended it SIGKILL")),
    ],
)
async def test_end_without_accounting_is_recorded_after_delay(
    lrm: SgeLrm,
    engine: FakeGridEngine,
    control: RememberingControl,
    ending: DrmaaEnding | None,
    end: tuple[int | None, bool, str],
) -> None:
    engine.show_recording("busy.xml")
    job = get_job(await lrm.take_snapshot(), "koala-m")
    engine.show_recording("idle.xml")
    engine.add_accounting(job.id, "koala-of-long-ago", "0", 0, job.nodes[0])  # job numbers are reused
    if ending is not None:
        control.endings[job.id] = ending
    known = ending is not None and ending.exit_code is not None
    assert (get_job(await lrm.take_snapshot(), "koala-m").state is LrmJobState.ENDED) == known
    ended_job = await wait_until_ended(lrm, "koala-m")
    assert (ended_job.exit_code, ended_job.lost, ended_job.reason) == end


async def test_job_of_earlier_agent_is_looked_up_in_accounting(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.add_accounting("12", "koala-old", "100 : assumedly after job", 137)
    lrm.expect_job("12", "koala-old")
    ended_job = get_job(await lrm.take_snapshot(), "koala-old")
    assert (ended_job.state, ended_job.exit_code) == (LrmJobState.ENDED, 137)
    lrm.expect_job("12", "koala-old")
    assert [job.state for job in (await lrm.take_snapshot()).jobs] == [LrmJobState.ENDED]


async def test_job_missing_in_stale_listing_has_not_ended(
    lrm: SgeLrm, engine: FakeGridEngine, virtual_loop: VirtualTimeLoop, tmp_path: Path
) -> None:
    job = await lrm.submit_job(make_submission(tmp_path))
    began = virtual_loop.time()
    while virtual_loop.time() < began + lrm.max_snapshot_age_s - 2:
        virtual_loop.jump(1.0)
        assert get_job(await lrm.take_snapshot(), "koala-new").state is LrmJobState.RUNNING
    assert await lrm.find_job("koala-new") == job
    assert (await wait_until_ended(lrm, "koala-new")).reason == "Grid Engine does not say how it ended"


async def test_cancelled_job_of_earlier_agent_may_run_while_listing_is_stale(
    lrm: SgeLrm, engine: FakeGridEngine, virtual_loop: VirtualTimeLoop
) -> None:
    engine.show_recording("busy.xml")
    job = await lrm.find_job("koala-m")
    assert job is not None
    lrm.expect_job(job, "koala-m")
    await lrm.cancel_job(job, "koala-m")
    engine.show_recording("idle.xml")
    began = virtual_loop.time()
    assert get_job(await lrm.take_snapshot(), "koala-m").state is LrmJobState.RUNNING
    assert (await wait_until_ended(lrm, "koala-m")).reason == "cancelled"
    assert virtual_loop.time() > began + lrm.max_snapshot_age_s


async def test_slow_accounting_delays_its_job_only(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("busy.xml")
    running_job = get_job(await lrm.take_snapshot(), "koala-m")
    engine.add_accounting(running_job.id, "koala-m", "0", 7, running_job.nodes[0])
    release = engine.block_command("qacct")
    engine.show_recording("idle.xml")
    async with asyncio.timeout(20):
        for _ in range(3):
            snapshot = await lrm.take_snapshot()
            assert snapshot.idle == 4
            job = get_job(snapshot, "koala-m")
            assert (job.state, job.gone) == (LrmJobState.RUNNING, True)
    release()
    assert (await wait_until_ended(lrm, "koala-m")).exit_code == 7


async def test_accounting_without_answer_is_given_up(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("busy.xml")
    await lrm.take_snapshot()
    engine.block_command("qacct")
    engine.show_recording("idle.xml")
    assert get_job(await lrm.take_snapshot(), "koala-m").state is LrmJobState.RUNNING
    ended_job = await wait_until_ended(lrm, "koala-m")
    assert ended_job.reason == "Grid Engine does not say how it ended: its accounting has not answered for 60 s"


async def test_accounting_that_answers_about_other_jobs_is_not_given_up(
    lrm: SgeLrm, engine: FakeGridEngine, virtual_loop: VirtualTimeLoop
) -> None:
    for job in map(str, range(1, MAX_CONCURRENT_QACCT + 2)):
        engine.add_accounting(job, f"koala-{job}", "0", 7)
        lrm.expect_job(job, f"koala-{job}")
    release_first = engine.block_command("qacct")
    await lrm.take_snapshot()
    virtual_loop.jump(ACCOUNTING_TIMEOUT_S - 10)
    release_last = engine.block_command("qacct")
    release_first()
    await lrm.take_snapshot()
    virtual_loop.jump(ACCOUNTING_TIMEOUT_S - 10)
    states = [job.state for job in (await lrm.take_snapshot()).jobs]
    assert (states.count(LrmJobState.ENDED), states.count(LrmJobState.RUNNING)) == (MAX_CONCURRENT_QACCT, 1)
    release_last()
    assert (await wait_until_ended(lrm, f"koala-{MAX_CONCURRENT_QACCT + 1}")).exit_code == 7


async def test_failed_accounting_is_queried_again(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("busy.xml")
    running_job = get_job(await lrm.take_snapshot(), "koala-m")
    engine.set_answer("qacct", "error: commlib error: got read error\n", 1)
    engine.show_recording("idle.xml")
    snapshot = await lrm.take_snapshot()
    assert (snapshot.idle, get_job(snapshot, "koala-m").state) == (4, LrmJobState.RUNNING)
    engine.add_accounting(running_job.id, "koala-m", "0", 7, running_job.nodes[0])
    assert (await wait_until_ended(lrm, "koala-m")).exit_code == 7


async def test_job_error_without_answer_leaves_snapshot(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("troubled.xml")
    engine.set_answer("qstat -j 95", "error: commlib error: got read error\n", 1)
    snapshot = await lrm.take_snapshot()
    assert (snapshot.total, get_job(snapshot, "koala-err").lost) == (4, True)


async def test_submit_requests_whole_nodes(lrm: SgeLrm, control: RememberingControl, tmp_path: Path) -> None:
    assert await lrm.submit_job(make_submission(tmp_path, walltime=90.5)) == "7"
    assert control.native == [
        ["-pe", "koala", "4", "-q", "all.q", "-l", "h_rt=91", "-b", "y", "-shell", "n", "-r", "n", "-P", "grid"]
    ]
    assert "qrsh -inherit" in (tmp_path / "launch").read_text()
    assert await lrm.find_job("koala-new") == "7"


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ('job rejected: the requested parallel environment "x" does not exist', "qconf -spl"),
        ('Job was rejected because job requests unknown queue "nope.q"', "qconf -sql"),
        ("error: no suitable queues", "native_specification"),
        ('denied: host "h9" is no submit host', "qconf -as"),
        ('invalid option argument "-zzz"', "native_specification"),
    ],
)
async def test_rejection_has_hint(
    lrm: SgeLrm, control: RememberingControl, tmp_path: Path, message: str, hint: str
) -> None:
    control.rejection = SiteRejected(f"DRMAA: {message}")
    with pytest.raises(SiteRejected) as raised:
        await lrm.submit_job(make_submission(tmp_path))
    assert message in raised.value.message
    assert hint in raised.value.hint


async def test_submit_of_too_many_nodes_is_rejected(lrm: SgeLrm, control: RememberingControl, tmp_path: Path) -> None:
    with pytest.raises(SiteRejected, match=r"5 nodes requested, but queue all\.q has 4"):
        await lrm.submit_job(make_submission(tmp_path, nodes=5))
    assert not control.native


async def test_find_job_uses_queue_and_accounting(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    engine.show_recording("busy.xml")
    assert (await lrm.find_job("koala-q")) is not None
    assert (await lrm.find_job("koala-nobody")) is None
    engine.add_accounting("12", "koala-old", "0", 0, asked_by="koala-old")
    assert (await lrm.find_job("koala-old")) == "12"


async def test_cancel_of_other_name_is_rejected(
    lrm: SgeLrm, engine: FakeGridEngine, control: RememberingControl
) -> None:
    engine.show_recording("busy.xml")
    snapshot = get_job(await lrm.take_snapshot(), "koala-m")
    job = snapshot.id
    with pytest.raises(SiteRejected, match="koala-m, not koala-b"):
        await lrm.cancel_job(job, "koala-b")
    await lrm.cancel_job("999999", "koala-a")
    assert not control.cancelled
    await lrm.cancel_job(job, "koala-m")
    assert control.cancelled == [job]
    engine.show_recording("deleting.xml")
    await lrm.cancel_job(job, "koala-m")
    assert control.cancelled == [job]
    engine.add_accounting(job, "koala-m", "100 : assumedly after job", 137, snapshot.nodes[0])
    engine.show_recording("idle.xml")
    ended_job = get_job(await lrm.take_snapshot(), "koala-m")
    assert (ended_job.exit_code, ended_job.lost, ended_job.reason) == (137, False, "cancelled")


async def test_cancelled_queued_job_has_ended_at_once(
    lrm: SgeLrm, engine: FakeGridEngine, control: RememberingControl
) -> None:
    engine.show_recording("busy.xml")
    job = get_job(await lrm.take_snapshot(), "koala-q").id
    await lrm.cancel_job(job, "koala-q")
    engine.show_recording("idle.xml")
    ended_job = get_job(await lrm.take_snapshot(), "koala-q")
    assert (ended_job.state, ended_job.exit_code, ended_job.nodes, ended_job.lost) == (
        LrmJobState.ENDED,
        None,
        (),
        False,
    )


async def test_snapshot_without_master_is_unavailable(lrm: SgeLrm, engine: FakeGridEngine) -> None:
    await lrm.take_snapshot()
    engine.set_answer(
        "qstat", "error: commlib error: got select error (Connection refused)\nerror: unable to send\n", 1
    )
    with pytest.raises(SiteUnavailable, match="qstat: error: commlib error: got select error"):
        await lrm.take_snapshot()


async def test_job_with_other_name_is_not_tracked(
    lrm: SgeLrm, engine: FakeGridEngine, control: RememberingControl, tmp_path: Path
) -> None:
    assert await lrm.submit_job(replace(make_submission(tmp_path), name="local-1")) == "7"
    for _ in range(2):
        assert (await lrm.take_snapshot()).jobs == ()
    assert engine.list_calls("qacct") == []


async def test_cancel_by_force_of_deleted_job_forces_qdel(
    lrm: SgeLrm, engine: FakeGridEngine, control: RememberingControl
) -> None:
    engine.show_recording("deleting.xml")
    job = get_job(await lrm.take_snapshot(), "koala-m").id
    engine.set_answer("qdel", f"koala has registered the job {job} for deletion\n............\n", code=1)
    await lrm.cancel_job(job, "koala-m")
    assert engine.list_calls("qdel") == []
    await lrm.cancel_job(job, "koala-m", by_force=True)
    assert engine.list_calls("qdel") == [f"qdel -f {job}"]
    assert control.cancelled == []
    engine.set_answer("qdel", f"job {job} is already in deletion\nkoala forced the deletion of job {job}\n", code=1)
    await lrm.cancel_job(job, "koala-m", by_force=True)
    engine.set_answer("qdel", "koala - you are not a manager\n", code=1)
    with pytest.raises(SiteRejected, match="you are not a manager") as caught:
        await lrm.cancel_job(job, "koala-m", by_force=True)
    assert "ENABLE_FORCED_QDEL" in caught.value.hint


async def test_snapshot_contains_submit_error(lrm: SgeLrm, control: RememberingControl) -> None:
    control.problem = "there is no library"
    assert (await lrm.take_snapshot()).submit_error == "there is no library"


@pytest.mark.parametrize(
    ("text", "error_type"),
    [
        ("error: commlib error: got select error (Connection refused)", SiteUnavailable),
        ("Unable to run job: unable to send message to qmaster using port 6444: got send error.", SiteUnavailable),
        ("ERROR: unable to contact qmaster using port 6444", SiteUnavailable),
        ("Exiting.\nerror: failed receiving gdi request response (receive timeout error).", SiteUnavailable),
        ("Unable to run job: the timeout of communication tests is 10 minutes, says qmaster", SiteRejected),
        ('Unable to run job: unknown queue "timeout.q"', SiteRejected),
    ],
)
def test_error_is_unavailable_for_unreachable_master_only(text: str, error_type: type[Exception]) -> None:
    commands = SgeCommands(JobFolders.for_own_account().run_as)
    assert type(commands.error("qsub", CommandResult(1, b"", text))) is error_type
