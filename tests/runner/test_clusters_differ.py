"""Clusters with different paths, series or settings of Open MPI."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from koalapy.runner.connections import Loop
from koalapy.runner.openmpi import Head, LaunchRequests
from koalapy.runner.plan import Plan
from tests.runner.conftest import MPI_ENVIRONMENT, SERIES, FakeAgent, FakeNode, make_plan
from tests.runner.connections import cut_connections
from tests.runner.installations import copy_installation, mpi_prefix
from tests.runner.test_openmpi import SLEEPER, daemon_of, run_program, settings_of, start_gang

pytestmark = [pytest.mark.mpi, pytest.mark.processes]


async def start_pair(agent: FakeAgent, north: dict[str, str], south: dict[str, str]) -> list[FakeNode]:
    """Start one node of each of two clusters with these settings."""
    return [
        await agent.start("7.1.0", 0, "127.0.1.1", **MPI_ENVIRONMENT | north),
        await agent.start("7.1.1", 0, "127.0.2.1", **MPI_ENVIRONMENT | south),
    ]


WHERE_AM_I = """
import ctypes, json, os
library = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
assert library.MPI_Init(None, None) == 0
assert library.MPI_Barrier(ctypes.byref(ctypes.c_char.in_dll(library, "ompi_mpi_comm_world"))) == 0
names = ("PATH", "LD_LIBRARY_PATH", "OPAL_PREFIX", "OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_of_north", "KOALA_HOST")
mine = {name: os.environ.get(name) for name in (*names, "KOALA_MPI_SETTINGS")}
mine["libraries"] = sorted({line.split()[-1] for line in open("/proc/self/maps") if "/libmpi.so" in line})
print(json.dumps(mine), flush=True)
assert library.MPI_Finalize() == 0
"""


def read_reports(head: FakeNode) -> list[dict[str, Any]]:
    """Return the reports of the ranks by node; mpirun may print two in one line."""
    reports, text = [], head.output.decode().strip()
    while text:
        report, end = json.JSONDecoder().raw_decode(text)
        reports.append(report)
        text = text[end:].strip()
    return sorted(reports, key=lambda report: str(report["KOALA_HOST"]))


async def test_ranks_use_open_mpi_of_their_cluster(agent: FakeAgent, tmp_path: Path) -> None:
    prefixes = [
        copy_installation(tmp_path / "north", "127.0.1."),
        copy_installation(tmp_path / "opt" / "south", "127.0.2."),
    ]
    settings = [{"KOALA_MPI_PREFIX": str(p), "LD_LIBRARY_PATH": f"/lib{i}"} for i, p in enumerate(prefixes)]
    nodes = await start_pair(agent, *settings)
    await run_program(agent, nodes, [sys.executable, "-c", WHERE_AM_I])
    assert (await nodes[0].expect("exit"))["code"] == 0, nodes[0].output
    for index, (report, prefix) in enumerate(zip(read_reports(nodes[0]), prefixes, strict=True)):
        assert report["libraries"] == [f"{prefix}/lib/libmpi.so.40"]
        assert report["LD_LIBRARY_PATH"] == f"{prefix}/lib:/lib{index}"
        assert report["OPAL_PREFIX"] == str(prefix)
        assert report["PATH"] == MPI_ENVIRONMENT["PATH"]


async def test_installation_is_first_mpirun_in_path(agent: FakeAgent, tmp_path: Path) -> None:
    south = copy_installation(tmp_path / "south", "127.0.2.")
    nodes = await start_pair(agent, {}, {"PATH": f"{south}/bin:{MPI_ENVIRONMENT['PATH']}"})
    await run_program(agent, nodes, ["sh", "-c", "readlink /proc/$PPID/exe"])
    assert (await nodes[0].expect("exit"))["code"] == 0, nodes[0].output
    expected = [f"{south}/bin/prted.real", f"{mpi_prefix()}/bin/prted"]
    assert sorted(nodes[0].output.decode().split()) == sorted(expected)


@pytest.mark.parametrize("series", SERIES)
async def test_ranks_have_settings_of_their_node(agent: FakeAgent, series: int) -> None:
    """mpirun passes the settings of the head node to all nodes, where a network's name may be wrong."""
    north = {"OMPI_MCA_of_north": "yes", "PATH": f"/of/north:{MPI_ENVIRONMENT['PATH']}"}
    south = {"OMPI_MCA_mpi_yield_when_idle": "0", "PATH": f"/of/south:{MPI_ENVIRONMENT['PATH']}"}
    nodes = await start_pair(agent, north | settings_of(series), south | settings_of(series))
    await run_program(agent, nodes, [sys.executable, "-c", WHERE_AM_I])
    assert (await nodes[0].expect("exit"))["code"] == 0, nodes[0].output
    ours, theirs = read_reports(nodes[0])
    assert (ours["OMPI_MCA_of_north"], theirs["OMPI_MCA_of_north"]) == ("yes", None)
    assert [s["OMPI_MCA_mpi_yield_when_idle"] for s in (ours, theirs)] == ["1", "0"]
    assert [s["PATH"].partition(":")[0] for s in (ours, theirs)] == ["/of/north", "/of/south"]
    assert ours["KOALA_MPI_SETTINGS"] is theirs["KOALA_MPI_SETTINGS"] is None


async def test_nodes_with_different_series_are_rejected(agent: FakeAgent, tmp_path: Path) -> None:
    (tmp_path / "four" / "bin").mkdir(parents=True)
    for name in ("mpirun", "orterun"):
        (tmp_path / "four" / "bin" / name).write_text("#!/bin/sh\n")
        (tmp_path / "four" / "bin" / name).chmod(0o755)
    nodes = await start_pair(agent, {}, {"KOALA_MPI_PREFIX": str(tmp_path / "four")})
    await run_program(agent, nodes, ["true"])
    end = await nodes[0].expect("exit")
    assert end["infrastructure"]
    assert "node node-127.0.1.1 has Open MPI 5, node node-127.0.2.1 has 4: one job needs the same" in end["error"]


@pytest.mark.parametrize("series", SERIES)
async def test_lost_mpi_connection_is_infrastructure_error(agent: FakeAgent, series: int) -> None:
    nodes = await start_gang(agent, settings_of(series), north=1, south=1)
    await run_program(agent, nodes, SLEEPER)
    await agent.until(lambda: nodes[0].output.count(b"up") == 2, "both ranks")
    assert cut_connections(daemon_of(nodes[1])) > 0
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"]) == (None, True), (end, nodes[0].output)
    assert end["error"] == "the MPI daemon on 127.0.2.1 ended with 1 as it lost its connection"


class StubNode:
    """The runner of a head node, which records alarms and the end."""

    def __init__(self) -> None:
        self.alarms: dict[str, Callable[[], None]] = {}
        self.ends: list[tuple[int | None, str, bool]] = []
        self.settings = SimpleNamespace(agent_timeout=60.0, name="node-127.0.1.1")
        self.loop = SimpleNamespace(
            set_alarm=lambda name, _, call: self.alarms.update({name: call}), cancel_alarm=self.alarms.pop
        )

    def relay(self, token: str, node: int, payload: dict[str, Any]) -> None:
        """Drop the message."""

    def conclude(self, code: int | None, error: str = "", *, infrastructure: bool = False) -> None:
        self.ends.append((code, error, infrastructure))


@pytest.mark.parametrize(("code", "ends"), [(1, 1), (0, 0)])
def test_failed_daemon_unnoticed_by_mpirun_is_reported(code: int, ends: int) -> None:
    stub, agent = cast(Any, StubNode()), cast(Any, None)
    nodes = [FakeNode(agent, f"7.1.{i}", 0, f"127.0.{i + 1}.1") for i in range(2)]
    head = Head(stub, Plan(make_plan(nodes, ["true"], launcher="openmpi"), "7.1.0", 0))
    head.relayed(("7.1.1", 0), {"op": "daemon_ended", "index": 1, "code": code})
    for alarm in list(stub.alarms.values()):
        alarm()
    expected = (None, "the MPI daemon on 127.0.2.1 ended with 1, and mpirun did not notice", True)
    assert stub.ends == [expected] * ends


def test_repeated_end_of_a_daemon_counts_once(tmp_path: Path) -> None:
    """A node repeats it until it is answered, and one of a hostile site for ever."""
    stub, agent = cast(Any, StubNode()), cast(Any, None)
    nodes = [FakeNode(agent, f"7.1.{i}", 0, f"127.0.{i + 1}.1") for i in range(2)]
    head = Head(stub, Plan(make_plan(nodes, ["true"], launcher="openmpi"), "7.1.0", 0))
    requests = head._launch_requests = LaunchRequests(Loop(), str(tmp_path), ["127.0.2.1"], lambda *_: None)
    head._by_host = {"127.0.1.1": 0, "127.0.2.1": 1}
    head.relayed(("7.1.1", 0), {"op": "daemon_ended", "index": 1, "code": 1})
    stub.alarms.clear()
    for _ in range(20_000):
        head.relayed(("7.1.1", 0), {"op": "daemon_ended", "index": 1, "code": 1})
    assert not stub.alarms, "the time in which mpirun must notice it begins anew"
    requests.close()
