"""The runner under other versions of Python, within narrow limits, and with defects."""

import sys
from pathlib import Path

import pytest

from tests.needs import OLDER_PYTHONS
from tests.runner.conftest import MPI_ENVIRONMENT, RUNNER, FakeAgent, FakeNode, make_plan
from tests.runner.test_openmpi import run_program

pytestmark = pytest.mark.processes

OLD_C_LIBRARY = """
def refuse(*args, **options):
    raise NotImplementedError("The 'setsid' parameter is not supported on this system")

os.posix_spawn = refuse
"""
BUG = """
def refuse(*args, **options):
    raise LookupError("nobody thought of this")

os.posix_spawn = refuse
"""
FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
"""
ONE_RANK_FAILS = """
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 1:
    raise ValueError("wrong")
MPI.COMM_WORLD.barrier()
"""
IMPATIENT = """
import koalapy.runner.output_streams
koalapy.runner.output_streams.HINT_DELAY = 0.2
"""


def patch_runner(tmp_path: Path, change: str) -> list[str]:
    """Return a command that runs the runner after a change to its Python process."""
    driver = tmp_path / "driver.py"
    driver.write_text(
        f"import os, runpy, sys\nsys.path.insert(0, {str(RUNNER.parents[2])!r})\n{change}\n"
        "sys.argv = sys.argv[-2:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return [sys.executable, str(driver)]


async def start_program(agent: FakeAgent, prefix: list[str], command: list[str]) -> FakeNode:
    node = await agent.start("7.1.0", 0, "127.0.1.1", prefix)
    node.send(**make_plan([node], command))
    return node


async def test_python_for_old_c_library_runs_program(agent: FakeAgent, tmp_path: Path) -> None:
    script = "trap '' TERM; read -r line || echo none; echo $(cut -d ' ' -f 6 /proc/$$/stat) $$; kill -PIPE $$"
    node = await start_program(agent, patch_runner(tmp_path, OLD_C_LIBRARY), ["sh", "-c", script])
    end = await node.expect("exit")
    assert (end["code"], end["infrastructure"]) == (128 + 13, False)
    nothing, session, leader = node.output.split()
    assert nothing == b"none"
    assert session == leader
    assert await node.ended() == 0


async def test_unexpected_error_names_the_node(agent: FakeAgent, tmp_path: Path) -> None:
    node = await start_program(agent, patch_runner(tmp_path, BUG), ["true"])
    end = await node.expect("exit")
    assert (end["code"], end["infrastructure"]) == (None, True)
    assert end["error"] == "the runner on node-127.0.1.1 failed: LookupError('nobody thought of this')"
    assert await node.ended() == 0


async def run_under(python: str, agent: FakeAgent) -> None:
    nodes = []
    for index in range(2):
        prefix = ["sh", "-c", f'shift; exec {python} "$@"', "sh"]
        nodes.append(await agent.start("7.1.0", index, f"127.0.1.{index + 1}", prefix, **MPI_ENVIRONMENT))
    await run_program(agent, nodes, ["sh", "-c", "echo $OMPI_COMM_WORLD_RANK"])
    end = await nodes[0].expect("exit")
    assert (end["code"], end["error"]) == (0, "")
    assert sorted(nodes[0].output.split()) == [b"0", b"1"]
    for node in nodes:
        assert await node.ended() == 0


# Linters check for newer syntax on every machine.
if OLDER_PYTHONS:

    @pytest.mark.mpi
    @pytest.mark.parametrize("name", OLDER_PYTHONS)
    async def test_an_older_python(agent: FakeAgent, name: str) -> None:
        await run_under(OLDER_PYTHONS[name], agent)


@pytest.mark.mpi
async def test_head_of_large_gang_raises_file_limit(agent: FakeAgent, tmp_path: Path) -> None:
    limits = patch_runner(tmp_path, FILES.format(soft=100, hard=1000))
    node = await agent.start("7.1.0", 0, "127.0.1.1", limits, **MPI_ENVIRONMENT)
    await run_program(agent, [node], ["sh", "-c", "ulimit -Sn"])
    assert (await node.expect("exit"))["code"] == 0
    assert int(node.output) > 400


@pytest.mark.mpi
async def test_head_with_too_low_file_limit_fails(agent: FakeAgent, tmp_path: Path) -> None:
    limits = patch_runner(tmp_path, FILES.format(soft=1024, hard=1024))
    node = await agent.start("7.1.0", 0, "127.0.1.1", limits, **MPI_ENVIRONMENT)
    other_nodes = [FakeNode(agent, "7.1.0", i, f"127.0.{2 + i // 250}.{1 + i % 250}") for i in range(1, 1100)]
    node.send(**make_plan([node, *other_nodes], ["true"], launcher="openmpi"))
    end = await node.expect("exit")
    assert (end["code"], end["infrastructure"]) == (None, True)
    assert "node-127.0.1.1, needs 1548 open files, and may have 1024: raise the hard limit" in end["error"]
    assert await node.ended() == 0


@pytest.mark.mpi
async def test_exception_of_rank_adds_hint(agent: FakeAgent, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ONE_RANK_FAILS)
    prefix = patch_runner(tmp_path, IMPATIENT)
    nodes = [await agent.start("7.1.0", i, f"127.0.1.{i + 1}", prefix, **MPI_ENVIRONMENT) for i in range(2)]
    await run_program(agent, nodes, [sys.executable, str(program)])
    await agent.until(lambda: b"python -m mpi4py" in nodes[0].output, "the hint")
    for node in nodes:
        node.send(t="stop")
    for node in nodes:
        await node.expect("exit")
    assert nodes[0].output.count(b"koala: a rank wrote a traceback") == 1
