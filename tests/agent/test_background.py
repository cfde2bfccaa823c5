"""Background load on an embedded cluster: jobs that look like those of local users."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest
from pydantic import ValidationError

from koalapy.agent.core.background import MAX_CONCURRENT_JOBS, MAX_SECONDS, Background
from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.local.cluster import LocalCluster
from koalapy.agent.lrm.port import LrmSnapshot
from koalapy.model.errors import SiteRejected
from tests.agent.lrm.conftest import TIMEOUT_S, make_cluster
from tests.agent.memory_lrm import MemoryLrm

__all__ = ["make_cluster"]


@pytest.fixture
async def lrm(make_cluster: Callable[..., LocalCluster]) -> AsyncIterator[LocalLrm]:
    lrm = LocalLrm(make_cluster(), "koala-")
    await lrm.open()
    yield lrm
    await lrm.close()


async def wait_for_snapshot(lrm: LocalLrm, condition: Callable[[LrmSnapshot], bool]) -> LrmSnapshot:
    async with asyncio.timeout(TIMEOUT_S), aclosing(lrm.watch_changes()) as changes:
        async for _ in changes:
            if condition(snapshot := await lrm.take_snapshot()):
                return snapshot
    raise AssertionError("the cluster reports no more changes")


@pytest.mark.processes
async def test_background_job_counts_until_it_ends(lrm: LocalLrm, tmp_path: Path) -> None:
    background = Background(lrm, "local", tmp_path / "background")
    answer = await background.start_job({"nodes": 3, "seconds": 300})
    assert str(answer["name"]).startswith("local-")
    assert str(answer["lrm_job"])
    snapshot = await wait_for_snapshot(lrm, lambda s: s.background == 3)
    assert (snapshot.idle, snapshot.jobs) == (1, ())
    await background.stop_jobs({})
    await background.start_job({"nodes": 3, "seconds": 0.5})
    await background.start_job({"nodes": 4, "seconds": 300})
    await wait_for_snapshot(lrm, lambda s: s.background == 4)
    await background.stop_jobs({})
    ended = await wait_for_snapshot(lrm, lambda s: s.idle == 4)
    assert ended.background == 0


@pytest.mark.processes
async def test_background_stop_ends_only_own_jobs(lrm: LocalLrm, tmp_path: Path) -> None:
    background, other_background = (Background(lrm, "local", tmp_path / name) for name in ("one", "other"))
    for _ in range(2):
        await background.start_job({"nodes": 1, "seconds": 300})
    await other_background.start_job({"nodes": 1, "seconds": 300})
    await wait_for_snapshot(lrm, lambda s: s.background == 3)
    assert await background.stop_jobs({}) == {"stopped": 2}
    await wait_for_snapshot(lrm, lambda s: s.background == 1)
    assert await background.stop_jobs({}) == {"stopped": 0}
    await other_background.stop_jobs({})
    await wait_for_snapshot(lrm, lambda s: s.idle == 4)


@pytest.mark.parametrize(
    ("field", "value"),
    [("nodes", value) for value in (0, -1, 1.5, True, "2", None)]
    + [("seconds", value) for value in (0, -1, MAX_SECONDS + 1, float("nan"), float("inf"), True, "2", None)],
)
async def test_background_order_out_of_bounds_is_rejected(tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        await Background(MemoryLrm(), "local", tmp_path).start_job({"nodes": 1, "seconds": 1, field: value})


async def test_background_without_visible_local_users_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SiteRejected, match="kind drmaa"):
        await Background(MemoryLrm(), "drmaa", tmp_path).start_job({"nodes": 1, "seconds": 1})


async def test_background_jobs_beyond_limit_are_rejected(tmp_path: Path) -> None:
    lrm = MemoryLrm()
    await lrm.open()
    background = Background(lrm, "slurm", tmp_path / "background")
    for _ in range(MAX_CONCURRENT_JOBS):
        await background.start_job({"nodes": 1, "seconds": 600})
    with pytest.raises(SiteRejected, match="running already"):
        await background.start_job({"nodes": 1, "seconds": 600})
    assert await background.stop_jobs({}) == {"stopped": MAX_CONCURRENT_JOBS}
