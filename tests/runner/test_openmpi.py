"""Programs under Open MPI on several nodes."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from koalapy.runner.processes import descendants
from tests.runner.conftest import MPI_ENVIRONMENT, SERIES, SERIES_4, FakeAgent, FakeNode, living_pids, make_plan

pytestmark = [pytest.mark.mpi, pytest.mark.processes]

RANK = ["sh", "-c", "echo $OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE on $KOALA_HOST $KOALA_NODE_INDEX"]


async def start_gang(agent: FakeAgent, environment: dict[str, str] | None = None, **sizes: int) -> list[FakeNode]:
    """Start nodes of components 7.1.0 (127.0.1.x), 7.1.1 (127.0.2.x), … and wait for their hello."""
    return [
        await agent.start(f"7.1.{c}", i, f"127.0.{c + 1}.{i + 1}", **{**MPI_ENVIRONMENT, **(environment or {})})
        for c, size in enumerate(sizes.values())
        for i in range(size)
    ]


def settings_of(series: int) -> dict[str, str]:
    return SERIES_4 if series == 4 else {}


def daemon_of(node: FakeNode) -> int:
    """Return the process id of a node's MPI daemon."""
    assert node.process is not None
    return next(p for p in descendants(node.process.pid) if re.search("/(prted|orted)$", os.readlink(f"/proc/{p}/exe")))


async def run_program(agent: FakeAgent, nodes: list[FakeNode], *commands: list[str], **context: object) -> None:
    for node in nodes:
        node.send(**make_plan(nodes, *commands, launcher="openmpi", **context))


@pytest.mark.parametrize("series", SERIES)
async def test_ranks_are_placed_in_order_of_plan(agent: FakeAgent, series: int) -> None:
    nodes = await start_gang(agent, settings_of(series), north=2, south=1)
    await run_program(agent, nodes, RANK)
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"], end["error"]) == (0, False, "")
    for node in nodes:
        assert await node.ended() == 0
        assert node.said("running")
    assert sorted(nodes[0].output.decode().splitlines()) == [
        "0 of 3 on 127.0.1.1 0",
        "1 of 3 on 127.0.1.2 1",
        "2 of 3 on 127.0.2.1 2",
    ]
    assert [n.said("exit")[-1]["code"] for n in nodes[1:]] == [None, None]


@pytest.mark.parametrize("series", SERIES)
@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -9 $$", 137)])
async def test_failed_program_is_no_infrastructure_error(agent: FakeAgent, script: str, code: int, series: int) -> None:
    nodes = await start_gang(agent, settings_of(series), north=1, south=1)
    await run_program(agent, nodes, ["sh", "-c", f'[ "$OMPI_COMM_WORLD_RANK" = 0 ] || {script}; sleep 1000'])
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"]) == (code, False)
    assert not (await nodes[1].expect("exit"))["infrastructure"]


@pytest.mark.parametrize(
    ("program", "code", "message"),
    [("no-such-program", 127, b"command not found: no-such-program"), ("/etc/passwd", 126, b"it is not executable")],
)
async def test_program_that_cannot_start_names_the_fault(
    agent: FakeAgent, program: str, code: int, message: bytes
) -> None:
    nodes = await start_gang(agent, north=1, south=1)
    await run_program(agent, nodes, [program])
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"]) == (code, False)
    assert message in nodes[0].output
    nodes[1].send(t="stop")
    assert (await nodes[1].expect("exit"))["stopped"]


@pytest.mark.parametrize("lacks", [0, 1])
async def test_missing_workdir_fails_the_job(agent: FakeAgent, tmp_path: Path, lacks: int) -> None:
    nodes = await start_gang(agent, north=1, south=1)
    opening = make_plan(nodes, RANK, launcher="openmpi", workdir=str(tmp_path))
    opening["contexts"][lacks]["workdir"] = "/no/such/folder"
    for node in nodes:
        node.send(**opening)
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"], end["stopped"]) == (126, False, False)
    message = f"koala: cannot run in /no/such/folder on {nodes[lacks].hellos[0]['name']}: No such file or directory\n"
    assert nodes[0].output.decode() == message
    nodes[1].send(t="stop")
    assert (await nodes[1].expect("exit"))["stopped"]


async def test_missing_mpirun_is_infrastructure_error_with_hint(agent: FakeAgent) -> None:
    nodes = [await agent.start("7.1.0", 0, "127.0.1.1", PATH="/bin:/nowhere", KOALA_MPI_PREFIX="/nowhere")]
    await run_program(agent, nodes, ["true"])
    end = await nodes[0].expect("exit")
    assert end["infrastructure"]
    assert end["error"].startswith("mpirun not found on node node-127.0.1.1: install Open MPI")


SLEEPER = ["sh", "-c", "echo up; exec sleep 1000"]


@pytest.mark.parametrize("series", SERIES)
async def test_killed_mpi_daemon_is_infrastructure_error(agent: FakeAgent, series: int) -> None:
    nodes = await start_gang(agent, settings_of(series), north=1, south=1)
    await run_program(agent, nodes, SLEEPER)
    await agent.until(lambda: nodes[0].output.count(b"up") == 2, "both ranks")
    os.kill(daemon_of(nodes[1]), signal.SIGKILL)
    for node in nodes:
        end = await node.expect("exit")
        assert end["infrastructure"], end
        assert "MPI daemon on" in end["error"]
        assert "127.0.2.1" in end["error"]
    if series == 5:
        assert b"PRTE has lost communication with a remote daemon." in nodes[0].output, "what mpirun says is kept"


@pytest.mark.parametrize("series", SERIES)
@pytest.mark.parametrize("is_killed", [False, True])
async def test_daemon_that_lost_its_connection_is_an_error_unless_mpirun_had_ended_the_program(
    agent: FakeAgent, tmp_path: Path, series: int, is_killed: bool
) -> None:
    """A relay is lost after all ranks have ended: their daemon ends with 1, and its node waits for the head's verdict.

    If the daemon is killed instead, it also ends with 1 as far as its node says, and mpirun ends the ranks.
    """

    def lose_relay(sender: FakeNode, payload: dict[str, Any]) -> dict[str, Any]:
        if payload["op"] != "daemon_ended":
            return payload
        sender.send(t="relay_lost", why="its head is gone")
        return {**payload, "code": 1}

    agent.meddle, go = lose_relay, tmp_path / "go"
    nodes = await start_gang(agent, settings_of(series), north=1, south=1)
    await run_program(agent, nodes, ["sh", "-c", f"echo up; while [ ! -e {go} ]; do sleep 0.02; done"])
    await agent.until(lambda: nodes[0].output.count(b"up") == 2, "both ranks")
    os.kill(daemon_of(nodes[1]), signal.SIGKILL) if is_killed else go.touch()
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"]) == ((None, True) if is_killed else (0, False)), end
    nodes[1].send(t="stop")
    end = await nodes[1].expect("exit")
    assert end["infrastructure"] is is_killed, end
    assert await nodes[1].ended() == 0


@pytest.mark.parametrize("series", SERIES)
@pytest.mark.parametrize("victim", [0, 1])
async def test_stop_leaves_no_process(agent: FakeAgent, victim: int, series: int) -> None:
    nodes = await start_gang(agent, settings_of(series), north=2, south=1)
    await run_program(agent, nodes, SLEEPER)
    await agent.until(lambda: nodes[0].output.count(b"up") == 3, "all ranks")
    below = [pid for n in nodes if n.process is not None for pid in descendants(n.process.pid)]
    assert len(below) > 6
    for node in nodes[victim:] + nodes[:victim]:
        node.send(t="stop")
        await asyncio.sleep(0)
    for node in nodes:
        assert await node.ended() == 0
    assert living_pids(" ".join(map(str, below))) == []
    assert series == 4 or nodes[0].output.split() == [b"up"] * 3, "nothing of firewalls"


@pytest.mark.parametrize("series", SERIES)
async def test_stop_of_nodes_in_turn_reports_no_error(agent: FakeAgent, series: int) -> None:
    """Stop a node, and the head only after mpirun has given up."""
    nodes = await start_gang(agent, settings_of(series), north=2, south=1)
    await run_program(agent, nodes, SLEEPER)
    await agent.until(lambda: nodes[0].output.count(b"up") == 3, "all ranks")
    assert nodes[1].process is not None
    pids = " ".join(map(str, descendants(nodes[1].process.pid)))
    nodes[2].send(t="stop")
    assert (await nodes[2].expect("exit"))["stopped"]
    await agent.until(lambda: living_pids(pids) == [], "mpirun to end the program elsewhere")
    nodes[0].send(t="stop")
    assert (await nodes[0].expect("exit"))["stopped"]
    for node in nodes:
        assert await node.ended() == 0
    assert nodes[0].output.split() == [b"up"] * 3


async def test_temporary_folder_is_empty_after_end(agent: FakeAgent, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    node = await agent.start("7.1.0", 0, "127.0.1.1", **MPI_ENVIRONMENT, TMPDIR=str(folder))
    await run_program(agent, [node], ["sh", "-c", 'touch "$TMPDIR/mine"; echo $TMPDIR $PPID; exec sleep 1000'])
    await agent.until(lambda: node.output.endswith(b"\n"), "the program")
    os.kill(int(node.output.split()[1]), signal.SIGKILL)
    assert (await node.expect("exit"))["infrastructure"]
    assert node.output.startswith(bytes(folder))
    assert await node.ended() == 0
    assert list(folder.iterdir()) == []


async def test_launch_request_of_other_node_is_ignored(agent: FakeAgent, tmp_path: Path) -> None:
    mark = tmp_path / "launched"
    nodes = await start_gang(agent, north=1, south=2)
    head, tail, last = nodes
    order = {"op": "launch", "command": f"touch {mark}; #"}

    def try_all() -> None:
        for sender, number in (("8.1.0", 0), ("6.1.0", 0), (last.token, last.node), (head.token, 1), ("", 0)):
            tail.send(t="relay", sender=sender, sender_node=number, payload=order)
            head.send(
                t="relay", sender=sender, sender_node=number, payload={"op": "daemon_ended", "index": 1, "code": 9}
            )
            for nonsense in ({}, {"op": "ready"}, {"op": ["probe"]}, {"op": "launched", "index": []}):
                head.send(t="relay", sender=sender, sender_node=number, payload=nonsense)
                tail.send(t="relay", sender=sender, sender_node=number, payload=nonsense)
        tail.send(t="relay", sender=head.token, sender_node=0, payload={"op": "probe"})
        head.send(t="relay", sender=tail.token, sender_node=0, payload={"op": "daemon_ended", "index": 2, "code": 9})

    try_all()  # before the gang is known
    await run_program(agent, nodes, ["sh", "-c", "read -r line < gate"], workdir=str(tmp_path))
    for node in nodes:
        await node.expect("running")
    try_all()
    assert not mark.exists()
    assert not any(node.said("exit") for node in nodes)
    for node in nodes:
        node.send(t="stop")
    for node in nodes:
        await node.expect("exit")
    assert not mark.exists()


async def test_relays_before_plan_are_limited(agent: FakeAgent) -> None:
    nodes = await start_gang(agent, north=1, south=1)
    assert nodes[0].process is not None
    for _ in range(64):
        nodes[0].send(t="relay", sender="8.1.0", sender_node=0, payload={"op": "x" * 1_000_000})
    await run_program(agent, nodes, RANK)
    end = await nodes[0].expect("exit")
    assert end["code"] == 0, end["error"]
    assert sorted(nodes[0].output.split()) == sorted(b"0 of 2 on 127.0.1.1 0 1 of 2 on 127.0.2.1 1".split())


def make_runtime(folder: Path, version: str) -> dict[str, str]:
    """Return the environment of a node with a container runtime; its images have the files of this machine.

    ``version``: a command that runs in place of ``mpirun --version``.
    """
    program = folder / "apptainer"
    program.write_text(
        '#!/bin/sh\nwhile [ "$1" != /etc/passwd ]; do shift; done; shift\n'
        f'if [ "$1 $2" = "mpirun --version" ]; then {version}; fi\nexec "$@"\n'
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{MPI_ENVIRONMENT['PATH']}", "KOALA_CONTAINER_RUNTIME": "apptainer"}


async def test_ranks_start_in_containers_once_the_images_are_checked(agent: FakeAgent, tmp_path: Path) -> None:
    nodes = await start_gang(agent, make_runtime(tmp_path, "sleep 0.5"), north=1, south=1)
    await run_program(agent, nodes, RANK, container="/etc/passwd")
    assert (await nodes[0].expect("exit"))["code"] == 0
    assert sorted(nodes[0].output.decode().splitlines()) == ["0 of 2 on 127.0.1.1 0", "1 of 2 on 127.0.2.1 1"]


async def test_image_with_another_series_on_any_node_ends_with_126(agent: FakeAgent, tmp_path: Path) -> None:
    version = 'case $KOALA_HOST in 127.0.2.*) echo "mpirun (Open MPI) 3.1.4"; exit;; esac'
    nodes = await start_gang(agent, make_runtime(tmp_path, version), north=1, south=1)
    await run_program(agent, nodes, RANK, container="/etc/passwd")
    end = await nodes[0].expect("exit")
    assert (end["code"], end["infrastructure"]) == (126, False)
    assert b"the container image /etc/passwd has Open MPI 3.1.4, but mpirun" in nodes[0].output


@pytest.mark.parametrize("message", [{"t": "stop"}, {"t": "relay_lost", "why": "its head is gone"}])
async def test_runner_obeys_its_agent_while_an_image_is_checked(
    agent: FakeAgent, tmp_path: Path, message: dict[str, str]
) -> None:
    begun = tmp_path / "begun"
    nodes = await start_gang(agent, make_runtime(tmp_path, f"echo $$ >>{begun}; sleep 1000"), north=1, south=1)
    await run_program(agent, nodes, RANK, container="/etc/passwd")
    await agent.until(lambda: begun.exists() and len(begun.read_text().split()) == 2, "two checks")
    for node in nodes:
        node.send(**message)
        end = await node.expect("exit")
        assert (end["stopped"], "its head is gone" in end["error"]) == (message["t"] == "stop", message["t"] != "stop")
        assert await node.ended() == 0
    assert not living_pids(begun.read_text())
