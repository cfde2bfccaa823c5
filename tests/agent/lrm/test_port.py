"""Requirements of every resource manager behind the ``Lrm`` port.

``KOALA_PORT_KIND`` selects it: the embedded one by default; ``slurm`` or ``sge`` on a head node of the testbed, where
``tests/grid/test_testbed.py`` runs this suite.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from koalapy.agent.core.settings import SiteSettings
from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.local.cluster import LocalCluster
from koalapy.agent.lrm.port import Lrm, LrmJob, LrmJobState, LrmSnapshot, LrmSubmission
from koalapy.model.errors import SiteRejected

from .conftest import TIMEOUT_S, eventually, is_alive, numbers_in

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class ClusterUnderTest:
    """Properties of the tested resource manager."""

    nodes: int
    walltime: float
    """Shortest walltime in seconds."""
    within: float
    """Longest time of a change in seconds."""


KIND = os.environ.get("KOALA_PORT_KIND", "local")
CLUSTER = {
    "local": ClusterUnderTest(4, 0.2, TIMEOUT_S),
    "slurm": ClusterUnderTest(3, 60, 120),
    "sge": ClusterUnderTest(3, 1, 60),
}[KIND]
NODES = CLUSTER.nodes
run = ""
"""Identifier of the running test, since resource managers remember the jobs of earlier tests."""


@pytest.fixture(autouse=True)
def new_run() -> None:
    global run
    run = uuid4().hex[:8]


def job_name(letter: str = "a") -> str:
    """Return the name of a job of this test."""
    return f"koala-{run}-{letter}"


@pytest.fixture
async def lrm(make_cluster: Callable[..., LocalCluster]) -> AsyncIterator[Lrm]:
    """Yield a resource manager with idle nodes. The prefix ``koala-`` marks grid jobs."""
    lrm: Lrm
    if KIND == "slurm":
        from koalapy.agent.lrm.slurm.adapter import SlurmLrm

        lrm = SlurmLrm(SiteSettings(partition=os.environ.get("KOALA_PORT_PARTITION", "batch"), poll_interval=1.0))
    elif KIND == "sge":
        from koalapy.agent.lrm.drmaa.control import DrmaaControl
        from koalapy.agent.lrm.sge.adapter import SgeLrm

        control = DrmaaControl("/usr/lib/gridengine-drmaa/lib/libdrmaa.so.1.0")
        lrm = SgeLrm(SiteSettings(queue="all.q", poll_interval=1.0), control)
    else:
        lrm = LocalLrm(make_cluster(nodes=NODES), "koala-")
    await lrm.open()
    yield lrm
    for job in (await lrm.take_snapshot()).jobs:
        await lrm.cancel_job(job.id, job.name)
    await wait_for_snapshot(lrm, lambda snapshot: snapshot.idle == NODES)
    await lrm.close()


def make_submission(folder: Path, script: str, *, letter: str = "a", nodes: int = 1, **fields: Any) -> LrmSubmission:
    name = job_name(letter)
    argv = ["/bin/sh", "-c", script]
    return LrmSubmission(name, nodes, argv, {"GREETING": "hello"}, folder, folder / f"{name}.out", **fields)


async def wait_for_snapshot(lrm: Lrm, condition: Callable[[LrmSnapshot], bool]) -> LrmSnapshot:
    """Return the first snapshot that meets the condition, taken only after changes are announced."""
    async with asyncio.timeout(CLUSTER.within), aclosing(lrm.watch_changes()) as changes:
        async for _ in changes:
            snapshot = await lrm.take_snapshot()
            if condition(snapshot):
                return snapshot
    raise AssertionError("the changes came to an end")


def job_in(snapshot: LrmSnapshot, job: str) -> LrmJob:
    (matches,) = [listed for listed in snapshot.jobs if listed.id == job]
    return matches


async def wait_for_state(lrm: Lrm, job: str, expected: LrmJobState) -> LrmJob:
    snapshot = await wait_for_snapshot(
        lrm, lambda snapshot: any(listed.id == job and listed.state is expected for listed in snapshot.jobs)
    )
    return job_in(snapshot, job)


async def test_snapshot_of_idle_cluster_has_all_nodes_idle(lrm: Lrm) -> None:
    snapshot = await lrm.take_snapshot()
    assert (snapshot.total, snapshot.idle, snapshot.background, snapshot.down) == (NODES, NODES, 0, 0)


async def test_job_holds_its_nodes_until_its_end(lrm: Lrm, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    job = await lrm.submit_job(make_submission(tmp_path, f"until [ -e {gate} ]; do sleep 0.02; done; exit 7", nodes=3))
    running = await wait_for_snapshot(lrm, lambda snapshot: snapshot.idle == NODES - 3)
    assert (running.background, running.down) == (0, 0)
    running_job = job_in(running, job)
    assert (running_job.name, running_job.state, len(set(running_job.nodes))) == (job_name(), LrmJobState.RUNNING, 3)
    gate.touch()
    ended = await wait_for_state(lrm, job, LrmJobState.ENDED)
    assert (ended.exit_code, ended.lost, ended.nodes) == (7, False, running_job.nodes)
    assert (await lrm.take_snapshot()).idle == NODES


async def test_program_starts_once_on_each_node(lrm: Lrm, tmp_path: Path) -> None:
    job = await lrm.submit_job(make_submission(tmp_path, 'echo "$GREETING from $(pwd)"', nodes=2))
    await wait_for_state(lrm, job, LrmJobState.ENDED)
    assert (tmp_path / f"{job_name()}.out").read_text() == f"hello from {tmp_path}\n" * 2


async def test_job_waits_until_its_nodes_are_idle(lrm: Lrm, tmp_path: Path) -> None:
    first = await lrm.submit_job(make_submission(tmp_path, "exec sleep 60", nodes=NODES - 1))
    second = await lrm.submit_job(make_submission(tmp_path, "exec sleep 60", letter="b", nodes=2))
    snapshot = await wait_for_snapshot(lrm, lambda snapshot: snapshot.idle == 1)
    assert (job_in(snapshot, second).state, job_in(snapshot, second).nodes) == (LrmJobState.QUEUED, ())
    await lrm.cancel_job(first, job_name())
    await wait_for_state(lrm, second, LrmJobState.RUNNING)


async def test_find_job_returns_ended_job(lrm: Lrm, tmp_path: Path) -> None:
    assert await lrm.find_job(job_name()) is None
    job = await lrm.submit_job(make_submission(tmp_path, "true"))
    assert await lrm.find_job(job_name()) == job
    await wait_for_state(lrm, job, LrmJobState.ENDED)
    assert await lrm.find_job(job_name()) == job


async def test_cancel_ends_all_processes_of_job(lrm: Lrm, tmp_path: Path) -> None:
    output = tmp_path / f"{job_name()}.out"
    script = "setsid sh -c 'echo $$; exec sleep 60' & sleep 60 & echo $!; echo $$; wait"
    job = await lrm.submit_job(make_submission(tmp_path, script))
    pids = await asyncio.to_thread(eventually, lambda: len(matches := numbers_in(output)) == 3 and matches)
    await lrm.cancel_job(job, job_name())
    ended = await wait_for_state(lrm, job, LrmJobState.ENDED)
    assert (ended.exit_code != 0, ended.lost) == (True, False)
    if KIND == "local":  # otherwise the processes run in containers of nodes, which tests/grid checks
        assert not [pid for pid in pids if is_alive(pid)]


async def test_cancelled_queued_job_never_starts(lrm: Lrm, tmp_path: Path) -> None:
    first = await lrm.submit_job(make_submission(tmp_path, "exec sleep 60", nodes=NODES))
    second = await lrm.submit_job(make_submission(tmp_path, "echo started", letter="b"))
    await lrm.cancel_job(second, job_name("b"))
    ended = await wait_for_state(lrm, second, LrmJobState.ENDED)
    assert (ended.exit_code, ended.nodes) == (None, ())
    await lrm.cancel_job(first, job_name())
    await wait_for_state(lrm, first, LrmJobState.ENDED)
    assert not (tmp_path / f"{job_name('b')}.out").exists()


async def test_cancel_of_job_with_other_name_is_rejected(lrm: Lrm, tmp_path: Path) -> None:
    job = await lrm.submit_job(make_submission(tmp_path, "exec sleep 60"))
    with pytest.raises(SiteRejected, match=job_name("b")):
        await lrm.cancel_job(job, job_name("b"))
    assert (await wait_for_state(lrm, job, LrmJobState.RUNNING)).reason == ""


async def test_cancel_of_ended_job_is_no_error(lrm: Lrm, tmp_path: Path) -> None:
    job = await lrm.submit_job(make_submission(tmp_path, "exit 3"))
    await wait_for_state(lrm, job, LrmJobState.ENDED)
    await lrm.cancel_job(job, job_name())
    await lrm.cancel_job("999999", job_name())
    assert (await wait_for_state(lrm, job, LrmJobState.ENDED)).exit_code == 3


async def test_job_ends_at_its_walltime(lrm: Lrm, tmp_path: Path) -> None:
    job = await lrm.submit_job(make_submission(tmp_path, "exec sleep 300", walltime=CLUSTER.walltime))
    ended = await wait_for_state(lrm, job, LrmJobState.ENDED)
    assert (ended.exit_code != 0, "walltime" in ended.reason) == (True, True)


async def test_submit_of_too_many_nodes_is_rejected(lrm: Lrm, tmp_path: Path) -> None:
    with pytest.raises(SiteRejected, match="nodes"):
        await lrm.submit_job(make_submission(tmp_path, "true", nodes=NODES + 1))
    assert not [job for job in (await lrm.take_snapshot()).jobs if job.name == job_name()]


async def test_missing_program_exits_127(lrm: Lrm, tmp_path: Path) -> None:
    wrong = LrmSubmission(job_name(), 1, ["/no/such/program"], {}, tmp_path, tmp_path / f"{job_name()}.out")
    ended = await wait_for_state(lrm, await lrm.submit_job(wrong), LrmJobState.ENDED)
    assert (ended.exit_code, ended.lost) == (127, False)
    assert "/no/such/program" in (tmp_path / f"{job_name()}.out").read_text()


async def test_killed_runner_is_lost(lrm: Lrm, tmp_path: Path) -> None:
    ended = await wait_for_state(lrm, await lrm.submit_job(make_submission(tmp_path, "kill -9 $$")), LrmJobState.ENDED)
    assert (ended.lost, "signal 9" in ended.reason) == (True, True)
