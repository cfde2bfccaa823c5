"""The ``local`` cluster seen from its agent: background load, nodes out of use, a locald that dies."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from pathlib import Path

import pytest

from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.local.cluster import LocalCluster
from koalapy.agent.lrm.local.run import local_run as run_locally
from koalapy.agent.lrm.port import LrmJobState, LrmSubmission
from koalapy.model.errors import SiteRejected, SiteUnavailable
from tests.agent.lrm.conftest import WITHIN, Site, is_alive, pid_of_locald
from tests.signals import until

pytestmark = pytest.mark.processes


@pytest.fixture
async def lrm(site: Site) -> AsyncIterator[LocalLrm]:
    lrm = LocalLrm(site.cluster, "koala-1-")
    await lrm.open()
    yield lrm
    await lrm.close()


def sleeping(site: Site, name: str) -> LrmSubmission:
    folder = site.cluster.directory
    return LrmSubmission(name, 1, ["/bin/sleep", "60"], {}, folder, folder / f"{name}.out")


async def test_jobs_of_others_are_background(site: Site, lrm: LocalLrm) -> None:
    ours = await lrm.submit_job(sleeping(site, "koala-1-a"))
    site.submit("exec sleep 60", name="theirs", user="alice", nodes=2)
    site.submit("exec sleep 60", name="koala-2-a", user="grid")
    site.submit("exec sleep 60", name="waiting", user="alice")
    snapshot = await lrm.take_snapshot()
    assert [job.id for job in snapshot.jobs] == [ours]
    assert (snapshot.total, snapshot.idle, snapshot.background, snapshot.down) == (4, 0, 3, 0)


async def test_nodes_out_of_use_are_down(site: Site, lrm: LocalLrm) -> None:
    await lrm.submit_job(sleeping(site, "koala-1-a"))
    for node, state in (("north-1", "drain"), ("north-2", "drain"), ("north-3", "down")):
        site.connection.request("node", node=node, state=state)
    snapshot = await lrm.take_snapshot()
    # The first node still holds our job.
    assert (snapshot.total, snapshot.idle, snapshot.background, snapshot.down) == (4, 1, 0, 2)


async def test_a_locald_that_was_killed_is_replaced_and_its_jobs_are_lost(site: Site, lrm: LocalLrm) -> None:
    job = await lrm.submit_job(sleeping(site, "koala-1-a"))
    ended = await lrm.submit_job(LrmSubmission("koala-1-b", 1, ["/bin/true"], {}, Path("/"), site.output()))
    await asyncio.to_thread(site.wait, ended)
    first = pid_of_locald(site.cluster)
    async with asyncio.timeout(WITHIN), aclosing(lrm.watch_changes()) as changes:
        await anext(changes)
        os.kill(first, signal.SIGKILL)
        async for _ in changes:
            with suppress(SiteUnavailable):  # asked while it was dying; the next change comes with its successor
                seen = {each.id: each for each in (await lrm.take_snapshot()).jobs}
                if seen[job].state is LrmJobState.ENDED:
                    break
    assert (seen[job].lost, seen[ended].lost, seen[ended].exit_code) == (True, False, 0)
    assert await lrm.find_job("koala-1-a") == job
    assert pid_of_locald(site.cluster) != first
    assert int(await lrm.submit_job(sleeping(site, "koala-1-c"))) > int(ended)


async def test_many_requests_share_a_connection(site: Site, lrm: LocalLrm) -> None:
    jobs = await asyncio.gather(*(lrm.submit_job(sleeping(site, f"koala-1-{k}")) for k in range(50)))
    found = await asyncio.gather(*(lrm.find_job(f"koala-1-{k}") for k in range(50)))
    assert found == jobs
    assert len((await lrm.take_snapshot()).jobs) == 50


async def test_closing_ends_the_changes_but_not_the_jobs(site: Site, lrm: LocalLrm) -> None:
    job = await lrm.submit_job(sleeping(site, "koala-1-a"))

    async def follow() -> None:
        async for _ in lrm.watch_changes():
            pass

    following = asyncio.create_task(follow())
    await asyncio.sleep(0)
    await lrm.close()
    await asyncio.wait_for(following, WITHIN)
    assert site.look(job)["state"] == "running"
    with pytest.raises(SiteUnavailable):
        await lrm.submit_job(sleeping(site, "koala-1-b"))


async def test_several_agents_starting_at_once_share_one_locald(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster()
    lrms = [LocalLrm(cluster, "koala-") for _ in range(4)]
    await asyncio.gather(*(lrm.open() for lrm in lrms))
    assert [(await lrm.take_snapshot()).total for lrm in lrms] == [4] * 4
    for lrm in lrms:
        await lrm.close()


async def test_a_directory_held_by_another_cluster_is_refused(
    site: Site, make_cluster: Callable[..., LocalCluster]
) -> None:
    with pytest.raises(SiteRejected, match="of 4 nodes"):
        await LocalLrm(make_cluster(nodes=5), "koala-").open()
    with pytest.raises(SiteRejected, match="of 4 nodes"):
        make_cluster(nodes=5).connect()
    assert site.list()["total"] == 4


async def test_other_settings_replace_a_locald_without_work(make_cluster: Callable[..., LocalCluster]) -> None:
    make_cluster(nodes=4).connect().close()
    lrm = LocalLrm(make_cluster(nodes=5), "koala-")
    await lrm.open()
    assert (await lrm.take_snapshot()).total == 5
    await lrm.close()
    with make_cluster(nodes=6).connect() as connection:
        assert connection.request("list")["total"] == 6


async def test_a_preload_without_main_is_told(make_cluster: Callable[..., LocalCluster], tmp_path: Path) -> None:
    empty = tmp_path / "empty.py"
    empty.touch()
    with pytest.raises(SiteRejected, match=r"empty\.py has no function main"):
        await LocalLrm(make_cluster(preload=empty), "koala-").open()


RUN = """
import sys
from pathlib import Path
from koalapy.agent.lrm.local.cluster import LocalCluster
from koalapy.agent.lrm.local.run import local_run
assert not {"asyncio", "pydantic"} & sys.modules.keys()
cluster = LocalCluster(Path(sys.argv[1]), "north", 4)
sys.exit(local_run(cluster, int(sys.argv[2]), sys.argv[3:], "alice", {"GREETING": "hello"}, Path("/")))
"""


async def local_run(cluster: LocalCluster, nodes: int, script: str) -> asyncio.subprocess.Process:
    arguments = [str(cluster.directory), str(nodes), "/bin/sh", "-c", script]
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, *arguments, stdout=pipe)


async def test_local_run_shows_the_output_and_exits_like_its_command(site: Site) -> None:
    process = await local_run(site.cluster, 2, "echo $GREETING; exit 5")
    shown, _ = await asyncio.wait_for(process.communicate(), WITHIN)
    assert (shown, process.returncode) == (b"hello\nhello\n", 5)
    assert not list((site.cluster.directory / "local-run").iterdir())


async def test_local_run_waits_for_the_agent_to_start_the_cluster(make_cluster: Callable[..., LocalCluster]) -> None:
    """It does not know the network: a locald that it started would give the nodes other clusters' addresses."""
    cluster = make_cluster(network="127.0.9")
    cluster.connect().close()
    os.kill(pid_of_locald(cluster), signal.SIGKILL)
    process = await local_run(cluster, 1, "echo $LOCALD_NODE")
    lrm = LocalLrm(cluster, "koala-")
    await lrm.open()
    shown, _ = await asyncio.wait_for(process.communicate(), WITHIN)
    assert (shown, process.returncode) == (b"127.0.9.1\n", 0)
    await lrm.close()


def test_a_user_of_a_cluster_that_nobody_starts_is_told_so(make_cluster: Callable[..., LocalCluster]) -> None:
    cluster = make_cluster(start_timeout=0.1)
    with pytest.raises(SiteUnavailable, match="locald does not") as told:
        run_locally(cluster, 1, ["true"], "alice", {}, Path("/"))
    assert "agent" in told.value.hint
    assert not cluster.directory.exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_local_run_takes_its_job_along_however_it_ends(site: Site, how: signal.Signals) -> None:
    process = await local_run(site.cluster, 1, "echo $$; sleep 60")
    assert process.stdout is not None
    pid = int(await asyncio.wait_for(process.stdout.readline(), WITHIN))
    process.send_signal(how)
    await asyncio.wait_for(process.communicate(), WITHIN)
    assert process.returncode == (-how if how == signal.SIGKILL else 130)
    await until(lambda: not is_alive(pid))
    await until(lambda: site.list()["idle"] == 4)


async def test_local_run_interrupted_before_its_submission_is_answered_goes_at_once(tmp_path: Path) -> None:
    """It goes, and its job with it, whose number it never heard."""
    cluster = LocalCluster(tmp_path, "north", 4)
    (tmp_path / "locald.json").write_text(json.dumps({"socket": str(tmp_path / "socket")}))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        process = await local_run(cluster, 1, "sleep 60")
        taken, _ = await asyncio.to_thread(listener.accept)
        with taken, taken.makefile("rb") as asked:
            assert json.loads(await asyncio.to_thread(asked.readline))["op"] == "hello"
            taken.sendall(b"{}\n")
            assert json.loads(await asyncio.to_thread(asked.readline))["attached"] is True
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(asked.readline) == b""
    assert await asyncio.wait_for(process.wait(), WITHIN) == 130
    assert not list((tmp_path / "local-run").iterdir())
