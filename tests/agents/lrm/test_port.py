"""What every resource manager behind the ``Lrm`` port must do; further ones join by another fixture parameter."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from koalapy.agents.lrm.local import LocalCluster, LocalLrm
from koalapy.agents.lrm.port import Lrm, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.model.errors import SiteRejected

from .conftest import WITHIN, eventually, is_alive, numbers_in

NODES = 4


@pytest.fixture(params=["local"])
async def lrm(make_cluster: Callable[..., LocalCluster]) -> AsyncIterator[Lrm]:
    """An LRM of 4 idle nodes, ours by the prefix ``koala-``."""
    lrm = LocalLrm(make_cluster(nodes=NODES), "koala-")
    await lrm.open()
    yield lrm
    await lrm.close()


def submission(folder: Path, script: str, *, name: str = "koala-a", nodes: int = 1, **more: object) -> LrmSubmission:
    argv = ["/bin/sh", "-c", script]
    return LrmSubmission(name, nodes, argv, {"GREETING": "hello"}, folder, folder / f"{name}.out", **more)


async def until(lrm: Lrm, condition: Callable[[LrmSnapshot], bool]) -> LrmSnapshot:
    """The first snapshot that fulfils the condition, looking only when the LRM tells of a change."""
    async with asyncio.timeout(WITHIN), aclosing(lrm.changes()) as changes:
        async for _ in changes:
            snapshot = await lrm.snapshot()
            if condition(snapshot):
                return snapshot
    raise AssertionError("the changes came to an end")


def job_in(snapshot: LrmSnapshot, job: str) -> LrmJob:
    (found,) = [each for each in snapshot.jobs if each.id == job]
    return found


async def state(lrm: Lrm, job: str, wanted: LrmJobState) -> LrmJob:
    snapshot = await until(lrm, lambda seen: any(each.id == job and each.state is wanted for each in seen.jobs))
    return job_in(snapshot, job)


async def test_an_idle_cluster_has_all_nodes_idle(lrm: Lrm) -> None:
    assert await lrm.snapshot() == LrmSnapshot(NODES, NODES, 0, 0, ())


async def test_a_job_holds_its_nodes_and_gives_them_back(lrm: Lrm, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = await lrm.submit(submission(tmp_path, f"until [ -e {gate} ]; do sleep 0.02; done; exit 7", nodes=3))
    running = await until(lrm, lambda seen: seen.idle == NODES - 3)
    assert (running.background, running.down) == (0, 0)
    held = job_in(running, job)
    assert (held.name, held.state, len(set(held.nodes))) == ("koala-a", LrmJobState.RUNNING, 3)
    gate.touch()
    ended = await state(lrm, job, LrmJobState.ENDED)
    assert (ended.exit_code, ended.lost, ended.nodes) == (7, False, held.nodes)
    assert (await lrm.snapshot()).idle == NODES


async def test_the_program_starts_once_on_each_node_in_its_place(lrm: Lrm, tmp_path: Path) -> None:
    job = await lrm.submit(submission(tmp_path, 'echo "$GREETING from $(pwd)"', nodes=2))
    await state(lrm, job, LrmJobState.ENDED)
    assert (tmp_path / "koala-a.out").read_text() == f"hello from {tmp_path}\n" * 2


async def test_jobs_wait_for_nodes_in_order(lrm: Lrm, tmp_path: Path) -> None:
    first = await lrm.submit(submission(tmp_path, "exec sleep 60", nodes=3))
    second = await lrm.submit(submission(tmp_path, "exec sleep 60", name="koala-b", nodes=2))
    third = await lrm.submit(submission(tmp_path, "exec sleep 60", name="koala-c", nodes=1))
    snapshot = await until(lrm, lambda seen: seen.idle == 1)
    assert [job_in(snapshot, job).state for job in (second, third)] == [LrmJobState.QUEUED] * 2
    assert job_in(snapshot, second).nodes == ()
    await lrm.cancel(first, "koala-a")
    await state(lrm, second, LrmJobState.RUNNING)
    await state(lrm, third, LrmJobState.RUNNING)


async def test_a_job_is_found_by_its_name_also_after_its_end(lrm: Lrm, tmp_path: Path) -> None:
    assert await lrm.find("koala-a") is None
    job = await lrm.submit(submission(tmp_path, "true"))
    assert await lrm.find("koala-a") == job
    await state(lrm, job, LrmJobState.ENDED)
    assert await lrm.find("koala-a") == job


async def test_cancel_ends_a_running_job_and_all_it_has_started(lrm: Lrm, tmp_path: Path) -> None:
    output = tmp_path / "koala-a.out"
    script = "setsid sh -c 'echo $$; exec sleep 60' & sleep 60 & echo $!; echo $$; wait"
    job = await lrm.submit(submission(tmp_path, script))
    pids = await asyncio.to_thread(eventually, lambda: len(found := numbers_in(output)) == 3 and found)
    await lrm.cancel(job, "koala-a")
    ended = await state(lrm, job, LrmJobState.ENDED)
    assert (ended.exit_code != 0, ended.lost) == (True, False)
    assert not [pid for pid in pids if is_alive(pid)]


async def test_a_cancelled_job_that_waits_never_starts(lrm: Lrm, tmp_path: Path) -> None:
    first = await lrm.submit(submission(tmp_path, "exec sleep 60", nodes=NODES))
    second = await lrm.submit(submission(tmp_path, "echo started", name="koala-b"))
    await lrm.cancel(second, "koala-b")
    ended = await state(lrm, second, LrmJobState.ENDED)
    assert (ended.exit_code, ended.nodes) == (None, ())
    await lrm.cancel(first, "koala-a")
    await state(lrm, first, LrmJobState.ENDED)
    assert not (tmp_path / "koala-b.out").exists()


async def test_cancel_spares_a_job_of_another_name(lrm: Lrm, tmp_path: Path) -> None:
    job = await lrm.submit(submission(tmp_path, "exec sleep 60"))
    with pytest.raises(SiteRejected, match="koala-b"):
        await lrm.cancel(job, "koala-b")
    assert (await state(lrm, job, LrmJobState.RUNNING)).reason == ""


async def test_cancelling_what_has_ended_is_no_error(lrm: Lrm, tmp_path: Path) -> None:
    job = await lrm.submit(submission(tmp_path, "exit 3"))
    await state(lrm, job, LrmJobState.ENDED)
    await lrm.cancel(job, "koala-a")
    await lrm.cancel("999999", "koala-a")
    assert (await state(lrm, job, LrmJobState.ENDED)).exit_code == 3


async def test_a_job_ends_at_its_walltime(lrm: Lrm, tmp_path: Path) -> None:
    job = await lrm.submit(submission(tmp_path, "exec sleep 60", walltime=0.2))
    ended = await state(lrm, job, LrmJobState.ENDED)
    assert (ended.exit_code != 0, "walltime" in ended.reason) == (True, True)


async def test_more_nodes_than_there_are_is_refused(lrm: Lrm, tmp_path: Path) -> None:
    with pytest.raises(SiteRejected, match="nodes"):
        await lrm.submit(submission(tmp_path, "true", nodes=NODES + 1))
    assert (await lrm.snapshot()).jobs == ()


async def test_a_program_that_does_not_exist_is_the_jobs_failure(lrm: Lrm, tmp_path: Path) -> None:
    wrong = LrmSubmission("koala-a", 1, ["/no/such/program"], {}, tmp_path, tmp_path / "koala-a.out")
    ended = await state(lrm, await lrm.submit(wrong), LrmJobState.ENDED)
    assert (ended.exit_code, ended.lost) == (127, False)
    assert "/no/such/program" in (tmp_path / "koala-a.out").read_text()


async def test_a_runner_killed_by_others_is_lost(lrm: Lrm, tmp_path: Path) -> None:
    ended = await state(lrm, await lrm.submit(submission(tmp_path, "kill -9 $$")), LrmJobState.ENDED)
    assert (ended.lost, "signal 9" in ended.reason) == (True, True)
