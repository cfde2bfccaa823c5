"""A hostile head node that tries to start other programs, by launch requests or by its mpirun."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from koalapy.runner.exec_guard import REFUSAL
from koalapy.runner.networks import own_addresses
from tests.needs import OPEN_MPI_4_PREFIX
from tests.runner.conftest import MPI_ENVIRONMENT, SERIES, FakeAgent, FakeNode, living_pids, make_plan
from tests.runner.installations import mpi_prefix
from tests.runner.test_lease import state_of
from tests.runner.test_openmpi import RANK, run_program, start_gang

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

LEASE = 4.0


def prefix_of(series: int) -> Path:
    return mpi_prefix() if series == 5 else OPEN_MPI_4_PREFIX


def write_mpirun(folder: Path, series: int, script: str) -> dict[str, str]:
    """Write an installation with a script as mpirun; return the environment that selects it.

    ``$real`` is the real mpirun. ``$options`` are its arguments before the program, without blanks in any of them.
    """
    (folder / "bin").mkdir(parents=True)
    starter, daemon = ("prterun", "prted") if series == 5 else ("orterun", "orted")
    for name in (starter, daemon):
        (folder / "bin" / name).symlink_to(prefix_of(series) / "bin" / name)
    mpirun = folder / "bin" / "mpirun"
    mpirun.write_text(
        f"#!/bin/sh\nreal={prefix_of(series)}/bin/mpirun; agent=; options=\n"
        'while [ "$1" != /bin/sh ] || [ "$2" != -c ]; do\n'
        "case $1 in plm_ssh_agent|plm_rsh_agent) name=$1; agent=$2; shift 2; continue;; esac\n"
        '[ "$agent" ] || { case $2 in plm_ssh_agent|plm_rsh_agent) flag=$1; shift; continue;; esac; }\n'
        'options="$options $1"; shift; done\n'
        f'exec "$real" "$flag" "$name" "$agent" {script}\n'
    )
    mpirun.chmod(0o755)
    return {"KOALA_MPI_PREFIX": str(folder)}


async def start_pair(agent: FakeAgent, series: int, head: dict[str, str]) -> list[FakeNode]:
    settings = {**MPI_ENVIRONMENT, "KOALA_MPI_PREFIX": str(prefix_of(series))}
    return [
        await agent.start("7.1.0", 0, "127.0.1.1", **{**settings, **head}),
        await agent.start("7.1.1", 0, "127.0.2.1", **settings),
    ]


@pytest.mark.parametrize("series", SERIES)
async def test_mpi_daemon_behind_a_script_starts_ranks(agent: FakeAgent, tmp_path: Path, series: int) -> None:
    """Check the unmodified case of the next tests."""
    nodes = await start_pair(agent, series, write_mpirun(tmp_path / "head", series, '$options "$@"'))
    await run_program(agent, nodes, RANK)
    end = await nodes[0].expect("exit")
    assert (end["code"], end["error"]) == (0, ""), nodes[0].output
    assert sorted(nodes[0].output.decode().splitlines()) == ["0 of 2 on 127.0.1.1 0", "1 of 2 on 127.0.2.1 1"]


@pytest.mark.evidence("P2")
@pytest.mark.parametrize("attack", ["another command", "another program", "exec agent"])
@pytest.mark.parametrize("series", SERIES)
async def test_other_program_of_mpi_daemon_is_killed(
    agent: FakeAgent, tmp_path: Path, series: int, attack: str
) -> None:
    mark, program = tmp_path / "mark", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}.$LOCALD_NODE\n")
    program.chmod(0o755)
    scripts = {
        "another command": f"$options /bin/sh -c 'touch {mark}.$LOCALD_NODE'",
        "another program": f"$options {program}",
        # Series 4 has no such option: each daemon uses the agent that its node names.
        "exec agent": f'--runtime-options exec-agent={program} $options "$@"'
        if series == 5
        else f"$options {program} x",
    }
    nodes = await start_pair(agent, series, write_mpirun(tmp_path / "head", series, scripts[attack]))
    await run_program(agent, nodes, RANK)
    await nodes[0].expect("exit")
    nodes[1].send(t="stop")
    assert await nodes[1].ended() == 0
    assert not Path(f"{mark}.127.0.2.1").exists()  # noqa: ASYNC240
    refused = re.search(rb"koala: '(.*)' was not started on node-127.0.[12].1", nodes[0].output + nodes[1].output)
    script_refused = REFUSAL.encode() in nodes[0].output
    assert refused or script_refused, (nodes[0].output, nodes[1].output)


@pytest.mark.evidence("P4")
@pytest.mark.parametrize("series", SERIES)
async def test_ranks_start_without_variables_of_the_linker(agent: FakeAgent, tmp_path: Path, series: int) -> None:
    """With LD_PRELOAD, the linker would warn of a missing library, as it may in a job of a single cluster."""
    script = '-x LD_PRELOAD=/of/the/head.so -x PYTHONSTARTUP=/of/the/head $options "$@"'
    nodes = await start_pair(agent, series, write_mpirun(tmp_path / "head", series, script))
    await run_program(agent, nodes, ["sh", "-c", "echo $KOALA_HOST $LD_PRELOAD $PYTHONSTARTUP; echo $KOALA_HOST >&2"])
    assert (await nodes[0].expect("exit"))["code"] == 0, nodes[0].output
    assert nodes[0].output.count(b"127.0.2.1\n") == 2
    assert b"cannot be preloaded" not in nodes[0].output
    alone = [
        await agent.start("7.2.0", 0, "127.0.1.1", **{**MPI_ENVIRONMENT, "KOALA_MPI_PREFIX": str(tmp_path / "head")})
    ]
    await run_program(agent, alone, ["true"])
    assert (await alone[0].expect("exit"))["code"] == 0, alone[0].output
    assert b"cannot be preloaded" in alone[0].output


@pytest.mark.evidence("P1")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plm_ssh_agent": "/bin/sh -c id"}, "may not set the parameter 'plm_ssh_agent'"),
        ({"prte_hnp_uri": "x@0.0;tcp://192.0.2.1:1 --prtemca plm ssh"}, "as the parameter prte_hnp_uri"),
    ],
)
async def test_launch_with_other_parameter_is_rejected(
    agent: FakeAgent, change: dict[str, object], message: str
) -> None:
    def meddle(_: FakeNode, payload: dict[str, Any]) -> dict[str, Any]:
        return {**payload, "parameters": {**payload["parameters"], **change}} if payload["op"] == "launch" else payload

    agent.meddle = meddle
    nodes = await start_gang(agent, north=1, south=1)
    await run_program(agent, nodes, RANK)
    end = await nodes[1].expect("exit")
    assert end["infrastructure"]
    assert message in end["error"]


@pytest.mark.evidence("N5", "P1")
async def test_launch_request_with_a_shell_command_runs_nothing(agent: FakeAgent, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def meddle(_: FakeNode, payload: dict[str, Any]) -> dict[str, Any]:
        if payload["op"] != "launch":
            return payload
        return {"op": "launch", "command": f"id > {mark}; exec sleep 3; prted", "parameters": None, "namesakes": ""}

    agent.meddle = meddle
    nodes = await start_gang(agent, north=1, south=1)
    await run_program(agent, nodes, RANK)
    end = await nodes[1].expect("exit")
    assert "launch request without parameters" in end["error"]
    assert not mark.exists()


@pytest.mark.parametrize(
    ("receiver", "message"),
    [
        (0, {"op": "unfit", "code": 1e999, "error": ""}),
        (0, {"op": "ready", "way": 0, "networks": [[7, "127.0.0.1"]]}),
        (1, {"op": "move", "way": 1, "hosts": [], "relayed": {"pairs": [], "networks": []}}),
    ],
)
async def test_malformed_message_of_other_site_is_ignored(
    agent: FakeAgent, receiver: int, message: dict[str, Any]
) -> None:
    nodes = await start_gang(agent, north=1, south=1)

    def meddle(sender: FakeNode, payload: dict[str, Any]) -> dict[str, Any]:
        if payload["op"] in ("ready", "probe") and sender is not nodes[receiver]:
            hostile = {"index": 1 - receiver, **message}
            nodes[receiver].send(t="relay", sender=sender.token, sender_node=0, payload=hostile)
        return payload

    agent.meddle = meddle
    await run_program(agent, nodes, RANK)
    assert (await nodes[0].expect("exit"))["code"] == 0


@pytest.mark.evidence("P3")
@pytest.mark.parametrize("series", SERIES)
async def test_spawn_request_of_other_site_runs_nothing(agent: FakeAgent, tmp_path: Path, series: int) -> None:
    """A site without the head node may replace its rank and request a program from ``mpirun``."""
    mark, program = tmp_path / "mark", tmp_path / "program.py"
    program.write_text(
        "import time\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n"
        "    info = MPI.Info.Create({'map_by': 'node:OVERSUBSCRIBE', 'PMIX_MAPBY': 'node:OVERSUBSCRIBE'})\n"
        f"    MPI.COMM_SELF.Spawn('/bin/sh', ['-c', 'echo > {mark}.$$'], 4, info)\n"
        "time.sleep(60)\n"
    )
    # mpirun starts ranks itself only on a node that it recognizes as the local host.
    address = next(address for _, address in own_addresses() if not address.startswith("127."))
    settings = {name: value for name, value in MPI_ENVIRONMENT.items() if name != "OMPI_MCA_btl_tcp_if_include"}
    settings["KOALA_MPI_PREFIX"] = str(prefix_of(series))
    nodes = [await agent.start("7.1.0", 0, address, **settings), await agent.start("7.1.1", 0, "127.0.2.1", **settings)]
    await run_program(agent, nodes, [sys.executable, str(program)])
    rejection = f"was not started on node-{address}".encode()
    await agent.until(lambda: rejection in nodes[0].output or bool(list(tmp_path.glob("mark*"))), "the spawned program")
    for node in nodes:
        node.send(t="stop")
        assert await node.ended() == 0
    assert not list(tmp_path.glob("mark*"))  # noqa: ASYNC240


@pytest.mark.evidence("P3")
async def test_mpi_daemon_as_child_of_script_is_traced(agent: FakeAgent, tmp_path: Path) -> None:
    """The script of a site may start its daemon as a child and continue after it."""
    settings = {**MPI_ENVIRONMENT, "KOALA_MPI_PREFIX": str(tmp_path / "own")}
    bin_ = tmp_path / "own" / "bin"
    bin_.mkdir(parents=True)
    for name in ("mpirun", "prterun"):
        (bin_ / name).symlink_to(mpi_prefix() / "bin" / name)
    (bin_ / "mpirun").unlink()
    (bin_ / "mpirun").write_text(f'#!/bin/sh\nexec {mpi_prefix()}/bin/mpirun "$@"\n')
    (bin_ / "prted").write_text(
        f'#!/bin/sh\n{mpi_prefix()}/bin/prted --version >{tmp_path}/v\n{mpi_prefix()}/bin/prted "$@"\n'
    )
    for name in ("mpirun", "prted"):
        (bin_ / name).chmod(0o755)
    mark, program = tmp_path / "mark", tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {mark}.$LOCALD_NODE\n")
    program.chmod(0o755)
    head = write_mpirun(tmp_path / "head", 5, f'--runtime-options exec-agent={program} $options "$@"')
    nodes = [
        await agent.start("7.1.0", 0, "127.0.1.1", **{**MPI_ENVIRONMENT, **head}),
        await agent.start("7.1.1", 0, "127.0.2.1", **settings),
    ]
    await run_program(agent, nodes, RANK)
    await nodes[0].expect("exit")
    nodes[1].send(t="stop")
    assert await nodes[1].ended() == 0
    assert not Path(f"{mark}.127.0.2.1").exists()  # noqa: ASYNC240


@pytest.mark.parametrize("renewed", [True, False])
async def test_traced_mpi_daemon_is_halted_at_end_of_lease(agent: FakeAgent, tmp_path: Path, *, renewed: bool) -> None:
    gate = tmp_path / "gate"
    agent.lease = None
    nodes = [await agent.start("7.1.0", 0, "127.0.1.1", **MPI_ENVIRONMENT)]
    agent.lease = LEASE
    nodes.append(await agent.start("7.1.1", 0, "127.0.2.1", **MPI_ENVIRONMENT))
    await run_program(
        agent, nodes, ["sh", "-c", f"echo $PPID $$ $KOALA_HOST; while [ ! -e {gate} ]; do sleep 0.05; done; echo over"]
    )
    await agent.until(lambda: nodes[0].output.count(b"127.0.") == 2, "both ranks")
    pids = next(line.split()[:2] for line in nodes[0].output.splitlines() if line.endswith(b"127.0.2.1"))
    runner = nodes[1].process
    assert runner is not None
    agent.silence = None
    runner.send_signal(signal.SIGSTOP)
    await asyncio.sleep(LEASE + 2.5)
    runner.send_signal(signal.SIGCONT)
    await agent.until(lambda: all(state_of(pid) in ("T", "t", "") for pid in pids), "rank and daemon halted")
    if renewed:
        agent.silence = 0.0
        await agent.until(lambda: all(state_of(pid) == "S" for pid in pids), "rank and daemon going on")
        gate.touch()
        assert (await nodes[0].expect("exit"))["code"] == 0
        assert nodes[0].output.count(b"over\n") == 2
    else:
        assert "its lease is over" in (await nodes[1].expect("exit"))["error"]
        assert living_pids(b" ".join(pids)) == []


@pytest.mark.parametrize("sizes", [{"north": 2}, {"north": 1, "south": 1}], ids=str)
async def test_only_mpi_daemons_of_several_clusters_are_traced(agent: FakeAgent, sizes: dict[str, int]) -> None:
    nodes = await start_gang(agent, **sizes)
    show = "echo $KOALA_HOST $(sed -n s/TracerPid://p /proc/$PPID/status) $(sed -n s/TracerPid://p /proc/$$/status)"
    await run_program(agent, nodes, ["sh", "-c", show])
    assert (await nodes[0].expect("exit"))["code"] == 0
    tracers = [node.process.pid if len(sizes) > 1 else 0 for node in nodes if node.process is not None]
    expected = [f"{node.host} {tracer} 0" for node, tracer in zip(nodes, tracers, strict=True)]
    assert sorted(nodes[0].output.decode().splitlines()) == expected


async def test_mpi_daemon_after_suspension_continues(agent: FakeAgent, tmp_path: Path) -> None:
    """A resource manager may suspend jobs."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    nodes = await start_gang(agent, north=1, south=1)
    await run_program(
        agent, nodes, ["sh", "-c", f'echo $PPID $KOALA_HOST; [ $KOALA_HOST = 127.0.1.1 ] || read -r _ < "{gate}"']
    )
    await agent.until(lambda: nodes[0].output.count(b"127.0.") == 2, "both ranks")
    daemon = next(int(line.split()[0]) for line in nodes[0].output.splitlines() if line.endswith(b"127.0.2.1"))
    os.kill(daemon, 19)
    os.kill(daemon, 18)
    await asyncio.to_thread(gate.write_text, "go on\n")
    assert (await nodes[0].expect("exit"))["code"] == 0


@pytest.mark.parametrize("series", SERIES)
async def test_rank_0_reads_end_of_standard_input(agent: FakeAgent, series: int) -> None:
    nodes = await start_pair(agent, series, {})
    await run_program(agent, nodes, ["sh", "-c", "cat; echo read to the end on $KOALA_HOST"])
    assert (await nodes[0].expect("exit"))["code"] == 0
    assert nodes[0].output.count(b"read to the end on") == 2


async def test_head_node_that_decides_against_required_relays_gets_no_daemon(agent: FakeAgent) -> None:
    nodes = await start_pair(agent, 5, {})
    plan = make_plan(nodes, RANK, launcher="openmpi")
    nodes[0].send(**plan)
    relay = {"attempt": "7.1", "pairs": [["north", "south", "relayed"]], "bases": [21_000]}
    nodes[1].send(**plan, relay=relay)
    end = await nodes[1].expect("exit")
    assert end["infrastructure"]
    assert end["error"] == "clusters north and south must use relayed links, but the job's head node does not"
    assert not nodes[1].said("running")
    nodes[0].send(t="stop")
    for node in nodes:
        assert await node.ended() == 0
