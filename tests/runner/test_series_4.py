"""Open MPI of series 4, as in Debian 12; tests run only where it is installed."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from koalapy.runner.processes import descendants
from tests.needs import OPEN_MPI_4_PREFIX
from tests.runner.conftest import MPI_ENVIRONMENT, FakeAgent, FakeNode, living_pids
from tests.runner.connections import cut_connections
from tests.runner.test_clusters_differ import WHERE_AM_I, read_reports
from tests.runner.test_host_names import WHO_SHARES, assert_groups_agree
from tests.runner.test_openmpi import RANK, SLEEPER, run_program, start_gang, stop_nodes_in_turn

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

SERIES = {"KOALA_MPI_PREFIX": str(OPEN_MPI_4_PREFIX), "KOALA_MPI_SERIES": "4"}


async def start_sleeping_job(agent: FakeAgent) -> list[FakeNode]:
    nodes = await start_gang(agent, SERIES, north=1, south=2)
    await run_program(agent, nodes, SLEEPER)
    await agent.until(lambda: nodes[0].output.count(b"up") == 3, "all ranks")
    return nodes


def descendants_of(node: FakeNode) -> list[int]:
    assert node.process is not None
    return descendants(node.process.pid)


def daemon_pid(node: FakeNode) -> int:
    return next(p for p in descendants_of(node) if os.readlink(f"/proc/{p}/exe").endswith("/orted"))


async def test_ranks_are_placed_in_order_of_plan(agent: FakeAgent) -> None:
    nodes = await start_gang(agent, SERIES, north=2, south=1)
    await run_program(agent, nodes, RANK)
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"], end["error"]) == (0, False, "")
    for node in nodes:
        assert await node.ended() == 0
    assert sorted(nodes[0].output.decode().splitlines()) == [
        "0 of 3 on 127.0.1.1 0",
        "1 of 3 on 127.0.1.2 1",
        "2 of 3 on 127.0.2.1 2",
    ]


async def test_ranks_with_equal_host_names_share_no_memory(agent: FakeAgent) -> None:
    nodes = await start_gang(agent, SERIES, north=2, south=1)
    await run_program(agent, nodes, [sys.executable, "-c", WHO_SHARES])
    assert (await nodes[0].expect("exit"))["code"] == 0, nodes[0].output
    assert_groups_agree(json.loads(nodes[0].output))


async def test_ranks_have_path_and_settings_of_their_node(agent: FakeAgent, tmp_path: Path) -> None:
    """mpirun of series 4 puts its folder first on every rank's PATH and passes on the head node's settings."""
    nodes = [
        await agent.start("7.1.0", 0, "127.0.1.1", **MPI_ENVIRONMENT | SERIES | {"OMPI_MCA_of_north": "yes"}),
        await agent.start("7.1.1", 0, "127.0.2.1", **MPI_ENVIRONMENT | SERIES | {"OMPI_MCA_mpi_yield_when_idle": "0"}),
    ]
    await run_program(agent, nodes, [sys.executable, "-c", WHERE_AM_I])
    assert (await nodes[0].expect("exit"))["code"] == 0, nodes[0].output
    ours, theirs = read_reports(nodes[0])
    assert ours["PATH"] == theirs["PATH"] == MPI_ENVIRONMENT["PATH"]
    assert (ours["OMPI_MCA_of_north"], theirs["OMPI_MCA_of_north"]) == ("yes", None)
    assert [s["OMPI_MCA_mpi_yield_when_idle"] for s in (ours, theirs)] == ["1", "0"]
    assert [len(s["libraries"]) for s in (ours, theirs)] == [1, 1]


@pytest.mark.parametrize(("script", "code"), [("exit 1", 1), ("exit 3", 3), ("kill -9 $$", 137)])
async def test_failed_program_is_no_infrastructure_error(agent: FakeAgent, script: str, code: int) -> None:
    nodes = await start_gang(agent, SERIES, north=1, south=1)
    await run_program(agent, nodes, ["sh", "-c", f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] || {script}; sleep 1000'])
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"]) == (code, False)
    assert not (await nodes[1].expect("exit"))["infrastructure"]


async def test_stop_of_nodes_in_turn_reports_no_error(agent: FakeAgent) -> None:
    assert await stop_nodes_in_turn(agent, SERIES) == [b"up"] * 3


async def test_lost_mpi_connection_is_infrastructure_error(agent: FakeAgent) -> None:
    nodes = await start_sleeping_job(agent)
    assert cut_connections(daemon_pid(nodes[2])) > 0
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"]) == (None, True), (end, nodes[0].output)
    assert end["error"] == "the MPI daemon on 127.0.2.2 ended with 1 as it lost its connection"


async def test_killed_mpi_daemon_is_infrastructure_error(agent: FakeAgent) -> None:
    nodes = await start_sleeping_job(agent)
    os.kill(daemon_pid(nodes[1]), signal.SIGKILL)
    for node in nodes[:2]:
        end = await node.expect("exit")
        assert end["infrastructure"], end
        assert "127.0.2.1 was killed by signal 9" in end["error"]


async def test_stop_leaves_no_process(agent: FakeAgent) -> None:
    nodes = await start_sleeping_job(agent)
    pids = [pid for node in nodes for pid in descendants_of(node)]
    assert len(pids) > 6
    for node in nodes:
        node.send(t="stop")
    for node in nodes:
        assert await node.ended() == 0
    assert living_pids(" ".join(map(str, pids))) == []
