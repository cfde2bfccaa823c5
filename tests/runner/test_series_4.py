"""Open MPI of series 4, as Debian 12 has it; these tests are there only where it is installed."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from koalapy.runner.processes import descendants
from tests.needs import OPEN_MPI_4_PREFIX
from tests.runner.conftest import MPI_ENVIRONMENT, FakeAgent, FakeNode, alive
from tests.runner.connections import cut
from tests.runner.test_clusters_differ import WHERE_AM_I, said
from tests.runner.test_host_names import WHO_SHARES, groups_agree
from tests.runner.test_openmpi import RANK, SLEEPER, gang, run, stop_one_after_the_other

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

SERIES = {"KOALA_MPI_PREFIX": str(OPEN_MPI_4_PREFIX), "KOALA_MPI_SERIES": "4"}


async def asleep(agent: FakeAgent) -> list[FakeNode]:
    nodes = await gang(agent, SERIES, north=1, south=2)
    await run(agent, nodes, SLEEPER)
    await agent.until(lambda: nodes[0].output.count(b"up") == 3, "all ranks")
    return nodes


def below(node: FakeNode) -> list[int]:
    assert node.process is not None
    return descendants(node.process.pid)


def daemon(node: FakeNode) -> int:
    return next(p for p in below(node) if os.readlink(f"/proc/{p}/exe").endswith("/orted"))


async def test_ranks_follow_the_plans_nodes_over_two_clusters(agent: FakeAgent) -> None:
    nodes = await gang(agent, SERIES, north=2, south=1)
    await run(agent, nodes, RANK)
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"], end["error"]) == (0, False, "")
    for node in nodes:
        assert await node.ended() == 0
    assert sorted(nodes[0].output.decode().splitlines()) == [
        "0 of 3 on 127.0.1.1 0",
        "1 of 3 on 127.0.1.2 1",
        "2 of 3 on 127.0.2.1 2",
    ]


async def test_ranks_share_memory_with_those_of_their_own_node_only(agent: FakeAgent) -> None:
    nodes = await gang(agent, SERIES, north=2, south=1)
    await run(agent, nodes, [sys.executable, "-c", WHO_SHARES])
    assert (await nodes[0].expect("exit"))["code"] == 0, nodes[0].output
    groups_agree(json.loads(nodes[0].output))


async def test_ranks_have_their_own_nodes_path_and_settings(agent: FakeAgent, tmp_path: Path) -> None:
    """Its mpirun puts its own folder before all others on every rank's PATH, and the head node's settings."""
    nodes = [
        await agent.start("7.1.0", 0, "127.0.1.1", **MPI_ENVIRONMENT | SERIES | {"OMPI_MCA_of_north": "yes"}),
        await agent.start("7.1.1", 0, "127.0.2.1", **MPI_ENVIRONMENT | SERIES | {"OMPI_MCA_mpi_yield_when_idle": "0"}),
    ]
    await run(agent, nodes, [sys.executable, "-c", WHERE_AM_I])
    assert (await nodes[0].expect("exit"))["code"] == 0, nodes[0].output
    ours, theirs = said(nodes[0])
    assert ours["PATH"] == theirs["PATH"] == MPI_ENVIRONMENT["PATH"]
    assert (ours["OMPI_MCA_of_north"], theirs["OMPI_MCA_of_north"]) == ("yes", None)
    assert [s["OMPI_MCA_mpi_yield_when_idle"] for s in (ours, theirs)] == ["1", "0"]
    assert [len(s["libraries"]) for s in (ours, theirs)] == [1, 1]


@pytest.mark.parametrize(("script", "code"), [("exit 1", 1), ("exit 3", 3), ("kill -9 $$", 137)])
async def test_a_failing_program_is_no_fault_of_the_infrastructure(agent: FakeAgent, script: str, code: int) -> None:
    nodes = await gang(agent, SERIES, north=1, south=1)
    await run(agent, nodes, ["sh", "-c", f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] || {script}; sleep 1000'])
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"]) == (code, False)
    assert not (await nodes[1].expect("exit"))["infrastructure"]


async def test_who_is_told_to_stop_last_has_no_trouble_either(agent: FakeAgent) -> None:
    assert await stop_one_after_the_other(agent, SERIES) == [b"up"] * 3


async def test_a_lost_connection_is_a_fault_of_the_infrastructure(agent: FakeAgent) -> None:
    nodes = await asleep(agent)
    assert cut(daemon(nodes[2])) > 0
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"]) == (None, True), (end, nodes[0].output)
    assert end["error"] == "the MPI daemon on 127.0.2.2 ended with 1 as it lost its connection"


async def test_a_killed_mpi_daemon_is_a_fault_of_the_infrastructure(agent: FakeAgent) -> None:
    nodes = await asleep(agent)
    os.kill(daemon(nodes[1]), signal.SIGKILL)
    for node in nodes[:2]:
        end = await node.expect("exit")
        assert end["infrastructure"], end
        assert "127.0.2.1 was killed by signal 9" in end["error"]


async def test_stop_leaves_no_process(agent: FakeAgent) -> None:
    nodes = await asleep(agent)
    pids = [pid for node in nodes for pid in below(node)]
    assert len(pids) > 6
    for node in nodes:
        node.send(t="stop")
    for node in nodes:
        assert await node.ended() == 0
    assert alive(" ".join(map(str, pids))) == []
