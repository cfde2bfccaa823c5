"""More MPI daemons than Open MPI launches at once by itself, which is 128."""

import os
import subprocess
from pathlib import Path

import pytest

from koalapy.runner.installation import Installation
from koalapy.runner.plan import Plan
from tests.needs import OPEN_MPI_4, SERIES_4, needs
from tests.runner.conftest import MPI_ENVIRONMENT, FakeNode, plan

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

HOSTS = 130
LAUNCH_AGENT = 'shift; TMPDIR=$(mktemp -d) && export TMPDIR && exec sh -c "$*"\n'
"""Starts a daemon as ssh would, on the one host there is, in a folder of its own as a runner does."""


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param({}, id="series 5"),
        pytest.param({"KOALA_MPI_PREFIX": str(SERIES_4)}, id="series 4", marks=needs(OPEN_MPI_4)),
    ],
)
def test_a_program_on_more_hosts_than_open_mpi_launches_at_once(tmp_path: Path, profile: dict[str, str]) -> None:
    agent: object = None
    nodes = [FakeNode(agent, "7.1.0", i, f"127.0.1.{i + 1}") for i in range(HOSTS)]  # type: ignore[arg-type]
    own = Plan(plan(nodes, ["true"], launcher="openmpi"), "7.1.0", 0)
    environment = {**os.environ, **MPI_ENVIRONMENT, **profile, "TMPDIR": str(tmp_path)}
    environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launch = tmp_path / "launch"
    launch.write_text(LAUNCH_AGENT)
    found = Installation(environment, "n1", own)
    options = found.options(f"/bin/sh {launch}", len(own.nodes))
    hosts = ",".join(f"{node['host']}:1" for node in own.nodes)
    done = subprocess.run(
        [found.mpirun, *options, "--host", hosts, "-np", str(HOSTS), "sh", "-c", "echo $OMPI_COMM_WORLD_RANK"],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(map(int, done.stdout.split())) == list(range(HOSTS))
