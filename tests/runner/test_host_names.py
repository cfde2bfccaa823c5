"""Nodes that share host names, and gangs of many nodes."""

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from koalapy.runner.parameters import Installation
from koalapy.runner.plan import Plan
from tests.needs import OPEN_MPI_4, needs
from tests.runner.conftest import MPI_ENVIRONMENT, SERIES_4, FakeAgent, FakeNode, make_plan
from tests.runner.installations import copy_installation
from tests.runner.test_openmpi import start_gang

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

WHO_SHARES = """
import json, os
from mpi4py import MPI

world = MPI.COMM_WORLD
near = world.Split_type(MPI.COMM_TYPE_SHARED)
group = MPI.Group.Translate_ranks(near.group, range(near.size), world.group)
window = MPI.Win.Allocate_shared(8, 8, comm=near)
mine, _ = window.Shared_query(near.rank)
mine[:] = world.rank.to_bytes(8, "little")
window.Sync(); near.Barrier(); window.Sync()
seen = [int.from_bytes(bytes(window.Shared_query(rank)[0]), "little") for rank in range(near.size)]
window.Free()
names = [name for name in os.environ if name.startswith("SLURM")]
told = world.gather([world.rank, os.environ["KOALA_HOST"], list(group), seen, names])
if world.rank == 0:
    print(json.dumps(told))
"""
Told = list[tuple[int, str, list[int], list[int], list[str]]]
"""Of each rank: rank, node, ranks with shared memory, ranks read from it, and unexpected names."""


def assert_groups_agree(reports: Told) -> None:
    """Assert that groups are equal for all members, cover all ranks, and are within one node."""
    groups = {tuple(group) for _, _, group, _, _ in reports}
    assert sorted(chain.from_iterable(groups)) == list(range(len(reports)))
    for rank, _, group, neighbours, names in reports:
        assert rank in group
        assert neighbours == group
        assert not names
    assert len(groups) == len({host for _, host, _, _, _ in reports})


async def run_program(agent: FakeAgent, nodes: list[FakeNode], slots: int) -> dict[str, Any]:
    opening = make_plan(nodes, [sys.executable, "-c", WHO_SHARES], launcher="openmpi")
    for place in opening["nodes"]:
        place["slots"] = slots
    for node in nodes:
        node.send(**opening)
    return await nodes[0].expect("exit")


@pytest.mark.parametrize(
    "settings",
    [{"PMIX_MCA_gds": "hash"}, {"PMIX_MCA_gds": "shmem2,hash"}, pytest.param(SERIES_4, marks=needs(OPEN_MPI_4))],
)
async def test_ranks_with_equal_host_names_share_no_memory(agent: FakeAgent, settings: dict[str, str]) -> None:
    """The stores of PMIx look up nodes in different ways."""
    nodes = await start_gang(agent, settings, north=2, south=2)
    end = await run_program(agent, nodes, 2)
    assert (end["code"], end["error"]) == (0, ""), nodes[0].output
    assert_groups_agree(json.loads(nodes[0].output))


async def test_nodes_with_equal_host_names_are_rejected(agent: FakeAgent, tmp_path: Path) -> None:
    prefix = copy_installation(tmp_path / "openmpi", only_on="127.")
    for library in prefix.glob("lib/**/libprrte.so*"):
        library.write_bytes(library.read_bytes().replace(b"ess_slurm", b"ess_other"))
    [head] = await start_gang(agent, north=1)
    second = await agent.start("7.1.1", 0, "127.0.2.1", KOALA_MPI_PREFIX=str(prefix))
    await start_program(agent, [head, second])
    end = await second.expect("exit")
    assert end["infrastructure"]
    assert "nodes node-127.0.1.1 of north and node-127.0.2.1 of south have the same host name" in end["error"]
    assert str(prefix) in end["error"]
    head.send(t="stop")


async def start_program(agent: FakeAgent, nodes: list[FakeNode]) -> None:
    """Start the program without waiting for its end."""
    for node in nodes:
        node.send(**make_plan(nodes, ["true"], launcher="openmpi"))


HOSTS = 130
LAUNCH_AGENT = 'shift; TMPDIR=$(mktemp -d) && export TMPDIR && exec sh -c "$*"\n'
"""Starts a daemon as ssh does, on this host, in a new folder as a runner does."""


@pytest.mark.parametrize(
    "profile", [pytest.param({}, id="series 5"), pytest.param(SERIES_4, id="series 4", marks=needs(OPEN_MPI_4))]
)
def test_mpirun_on_many_hosts_starts_all_daemons(tmp_path: Path, profile: dict[str, str]) -> None:
    agent: object = None
    nodes = [FakeNode(agent, "7.1.0", i, f"127.0.1.{i + 1}") for i in range(HOSTS)]  # type: ignore[arg-type]
    node_plan = Plan(make_plan(nodes, ["true"], launcher="openmpi"), "7.1.0", 0)
    environment = {**os.environ, **MPI_ENVIRONMENT, **profile, "TMPDIR": str(tmp_path)}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launch = tmp_path / "launch"
    launch.write_text(LAUNCH_AGENT)
    installed = Installation(environment, "n1", node_plan)
    options = installed.mpirun_options(f"/bin/sh {launch}", len(node_plan.nodes), tags_output=False)
    hosts = ",".join(f"{node['host']}:1" for node in node_plan.nodes)
    result = subprocess.run(
        [installed.mpirun, *options, "--host", hosts, "-np", str(HOSTS), "sh", "-c", "echo $OMPI_COMM_WORLD_RANK"],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(map(int, result.stdout.split())) == list(range(HOSTS))
