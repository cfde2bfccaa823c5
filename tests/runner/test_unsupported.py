"""Unsupported operations of programs, which end with an error and advice."""

import sys

import pytest

from koalapy.runner.output_streams import ADVICE
from tests.runner.conftest import MPI_ENVIRONMENT, SERIES, FakeAgent
from tests.runner.test_hostile_head import prefix_of, start_pair
from tests.runner.test_openmpi import run_program

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

SPAWN = """
import sys
from mpi4py import MPI
MPI.COMM_WORLD.Spawn(sys.executable, args=["-c", "from mpi4py import MPI; MPI.Comm.Get_parent()"], maxprocs=1)
"""
OPEN_FILE = """
from mpi4py import MPI
MPI.File.Open(MPI.COMM_WORLD, "file", MPI.MODE_CREATE | MPI.MODE_RDWR).Close()
"""


@pytest.mark.parametrize("series", SERIES)
async def test_comm_spawn_adds_hint(agent: FakeAgent, series: int) -> None:
    """Series 5 does not always answer a spawn request: it fails or does not return."""
    nodes = await start_pair(agent, series, {})
    await run_program(agent, nodes, [sys.executable, "-m", "mpi4py", "-c", SPAWN])
    (advice,) = (text for pattern, text in ADVICE.items() if b"already filled" in pattern)
    await agent.until(lambda: f"koala: {advice}\n".encode() in nodes[0].output, "the advice")
    for node in nodes:
        node.send(t="stop")
    for node in nodes:
        assert await node.ended() == 0


async def test_mpi_io_on_unshared_file_fails_on_all_ranks(agent: FakeAgent) -> None:
    """Each component has a separate folder. Without ROMIO, ranks with the file wait for those without it."""
    nodes = await start_pair(agent, 5, {})
    await run_program(agent, nodes, [sys.executable, "-m", "mpi4py", "-c", OPEN_FILE])
    end = await nodes[0].expect("exit")
    assert (end["code"] != 0, end["infrastructure"]) == (True, False)
    assert b"MPI_ERR_" in nodes[0].output


@pytest.mark.parametrize("series", SERIES)
async def test_mpich_program_of_several_ranks_is_rejected(agent: FakeAgent, series: int) -> None:
    nodes = await start_pair(agent, series, {})
    await run_program(agent, nodes, ["sh", "-c", 'echo "${PMI_PORT-none}"'])
    assert (await nodes[0].expect("exit"))["code"] == 0
    assert nodes[0].output == b"127.0.0.1:1\n" * 2
    settings = {**MPI_ENVIRONMENT, "KOALA_MPI_PREFIX": str(prefix_of(series))}
    alone = [await agent.start("7.2.0", 0, "127.0.1.1", **settings)]
    await run_program(agent, alone, ["sh", "-c", 'echo "${PMI_PORT-none}"'])
    assert (await alone[0].expect("exit"))["code"] == 0
    assert alone[0].output == b"none\n"
