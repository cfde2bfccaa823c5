"""The adapter of embedded clusters, and commands of local users."""

import asyncio
import fcntl
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.local.cluster import LocalCluster, run_as_local_user
from koalapy.agent.lrm.local.processes import LOCK_FILE
from koalapy.agent.lrm.port import LrmSubmission
from koalapy.model.errors import SiteRejected, SiteUnavailable
from tests.agent.lrm.conftest import TIMEOUT_S, Site, connect, is_alive, pid_of_locald
from tests.signals import until

processes = pytest.mark.processes


@pytest.fixture
async def lrm(site: Site) -> AsyncIterator[LocalLrm]:
    lrm = LocalLrm(site.cluster, "koala-1-")
    await lrm.open()
    yield lrm
    await lrm.close()


def sleep_submission(site: Site, name: str) -> LrmSubmission:
    folder = site.cluster.directory
    return LrmSubmission(name, 1, ["/bin/sleep", "60"], {}, folder, folder / f"{name}.out")


@processes
async def test_snapshot_counts_jobs_of_other_users_as_background(site: Site, lrm: LocalLrm) -> None:
    job = await lrm.submit_job(sleep_submission(site, "koala-1-a"))
    site.submit("exec sleep 60", name="other", user="alice", nodes=2)
    site.submit("exec sleep 60", name="koala-2-a", user="grid")
    site.submit("exec sleep 60", name="waiting", user="alice")
    snapshot = await lrm.take_snapshot()
    assert [listed.id for listed in snapshot.jobs] == [job]
    assert (snapshot.total, snapshot.idle, snapshot.background, snapshot.down) == (4, 0, 3, 0)
    assert sorted(node.state for node in snapshot.nodes) == ["held", "local", "local", "local"]


@processes
async def test_adapter_replaces_killed_locald_which_forgets_its_jobs(site: Site, lrm: LocalLrm) -> None:
    job = await lrm.submit_job(sleep_submission(site, "koala-1-a"))
    first = pid_of_locald(site.cluster)
    async with asyncio.timeout(TIMEOUT_S), aclosing(lrm.watch_changes()) as changes:
        await anext(changes)
        os.kill(first, signal.SIGKILL)
        async for _ in changes:
            with suppress(SiteUnavailable):  # it was ending; its successor reports the next change
                snapshot = await lrm.take_snapshot()
                if not snapshot.jobs:
                    break
    assert snapshot.idle == 4
    assert await lrm.find_job("koala-1-a") is None
    assert pid_of_locald(site.cluster) != first
    assert int(await lrm.submit_job(sleep_submission(site, "koala-1-c"))) > int(job)


@processes
async def test_close_ends_changes_and_keeps_jobs(site: Site, lrm: LocalLrm) -> None:
    job = await lrm.submit_job(sleep_submission(site, "koala-1-a"))

    async def follow() -> None:
        async for _ in lrm.watch_changes():
            pass

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    await lrm.close()
    await asyncio.wait_for(following, TIMEOUT_S)
    assert site.find(job)["state"] == "running"
    with pytest.raises(SiteUnavailable):
        await lrm.submit_job(sleep_submission(site, "koala-1-b"))


@processes
async def test_agents_starting_at_once_share_one_locald(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster()
    lrms = [LocalLrm(cluster, "koala-") for _ in range(8)]
    await asyncio.gather(*(lrm.open() for lrm in lrms))
    assert [(await lrm.take_snapshot()).total for lrm in lrms] == [4] * 8
    for lrm in lrms:
        await lrm.close()


@processes
def test_start_with_held_lock_starts_no_locald(tmp_path: Path) -> None:
    """Otherwise locald would wait for further starters, since it waits for all processes of its directory."""
    cluster = LocalCluster(tmp_path, "north", 4, start_timeout=0.0)  # a process would be an error at once
    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cluster.start()
    with pytest.raises(SiteUnavailable, match="locald does not start"):
        cluster.start()


@processes
async def test_adapter_rejects_directory_held_by_other_settings(
    site: Site, make_cluster: Callable[..., LocalCluster]
) -> None:
    with pytest.raises(SiteRejected, match="of 4 nodes"):
        await LocalLrm(make_cluster(nodes=5), "koala-").open()
    assert site.list()["total"] == 4


@processes
async def test_adapter_replaces_unused_locald_with_other_settings(make_cluster: Callable[..., LocalCluster]) -> None:
    await asyncio.to_thread(lambda: connect(make_cluster(nodes=4)).close())
    lrm = LocalLrm(make_cluster(nodes=5), "koala-")
    await lrm.open()
    assert (await lrm.take_snapshot()).total == 5
    await lrm.close()


@processes
async def test_adapter_with_preload_without_main_fails(
    make_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    empty = tmp_path / "empty.py"
    empty.touch()
    with pytest.raises(SiteRejected, match=r"empty\.py has no function main"):
        await LocalLrm(make_cluster(preload=empty), "koala-").open()


RUN = """
import sys
from pathlib import Path
from koalapy.agent.lrm.local.cluster import LocalCluster, run_as_local_user
assert not {"asyncio", "pydantic"} & sys.modules.keys()
cluster = LocalCluster(Path(sys.argv[1]), "north", 4)
sys.exit(run_as_local_user(cluster, int(sys.argv[2]), sys.argv[3:], "alice", {"GREETING": "hello"}, Path("/")))
"""


async def start_local_run(cluster: LocalCluster, nodes: int, script: str) -> asyncio.subprocess.Process:
    arguments = [str(cluster.directory), str(nodes), "/bin/sh", "-c", script]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, *arguments, stdout=pipe)


@processes
async def test_local_run_copies_output_and_exit_code(site: Site) -> None:
    process = await start_local_run(site.cluster, 2, "echo $GREETING; exit 5")
    output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert (output, process.returncode) == (b"hello\nhello\n", 5)
    assert not list((site.cluster.directory / "local-run").iterdir())


@processes
async def test_local_run_waits_until_the_agent_starts_locald(make_cluster: Callable[..., LocalCluster]) -> None:
    """``koala local-run`` does not know the network, so its nodes could get addresses of other clusters."""
    cluster = make_cluster(network="127.0.9")
    await asyncio.to_thread(lambda: connect(cluster).close())
    os.kill(pid_of_locald(cluster), signal.SIGKILL)
    process = await start_local_run(cluster, 1, "echo $LOCALD_NODE")
    lrm = LocalLrm(cluster, "koala-")
    await lrm.open()
    output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert (output, process.returncode) == (b"127.0.9.1\n", 0)
    await lrm.close()


def test_local_run_without_locald_names_the_agent(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "north", "north", 4, start_timeout=0.0)
    with pytest.raises(SiteUnavailable, match="locald does not") as error:
        run_as_local_user(cluster, 1, ["true"], "alice", {}, Path("/"))
    assert "agent" in error.value.hint
    assert not cluster.directory.exists()


@processes
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_local_run_that_is_ended_ends_its_job(site: Site, signum: signal.Signals) -> None:
    process = await start_local_run(site.cluster, 1, "echo $$; sleep 60")
    assert process.stdout is not None
    pid = int(await asyncio.wait_for(process.stdout.readline(), TIMEOUT_S))
    process.send_signal(signum)
    await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    assert process.returncode == (-signum if signum == signal.SIGKILL else 130)
    await until(lambda: not is_alive(pid))
    await until(lambda: site.list()["idle"] == 4)
