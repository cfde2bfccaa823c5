"""Warnings to programs before they are stopped, and the grace period."""

import signal
import sys
from typing import Any

import pytest

from tests.runner.conftest import MPI_ENVIRONMENT, FakeAgent, FakeNode, living_pids, make_plan

pytestmark = pytest.mark.processes

TOKEN = "7.1.0"
LONG = 600.0
SAVES = """
import os, signal, sys
def save(number, frame):
    # The interrupted code may be printing.
    os.write(1, b"saved by " + signal.Signals(number).name.encode() + bytes([10]))
    sys.exit(7)
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), save)
print("ready", os.getpid(), flush=True)
while True:
    signal.pause()
"""
PROGRAM = [sys.executable, "-c", SAVES]


async def start_program(agent: FakeAgent, command: list[str], ready: int = 1, **warning: Any) -> FakeNode:
    node = await agent.start(TOKEN, 0, "127.0.1.1")
    node.send(**make_plan([node], command), **warning)
    await agent.until(lambda: node.output.count(b"ready") == ready, "a program that is ready")
    return node


def send_stop(node: FakeNode, grace: float, signal_name: str = "TERM") -> None:
    node.send(t="stop", signal=signal_name, grace=grace)


@pytest.mark.parametrize("signal_name", ["TERM", "USR1"])
async def test_warned_program_exit_code_is_reported(agent: FakeAgent, signal_name: str) -> None:
    node = await start_program(agent, PROGRAM)
    send_stop(node, LONG, signal_name)
    end = await node.expect("exit")
    assert f"saved by SIG{signal_name}".encode() in node.output
    assert (end["code"], end["stopped"], end["infrastructure"]) == (7, False, False)
    assert len(node.said("warned")) == 1


async def test_warned_child_of_ended_shell_has_grace(agent: FakeAgent) -> None:
    slow = SAVES.replace("    sys.exit(7)", "    import time; time.sleep(1.5); os.write(1, b'late'); sys.exit(7)")
    node = await start_program(
        agent, ["sh", "-c", f"{sys.executable} -c '{slow.replace(chr(39), chr(34))}'; echo never"]
    )
    send_stop(node, LONG)
    end = await node.expect("exit")
    assert b"late" in node.output
    assert b"never" not in node.output
    assert (end["code"], end["stopped"]) == (143, False)


async def test_warned_program_may_fork_away(agent: FakeAgent) -> None:
    away = f"import subprocess, time; subprocess.Popen([{sys.executable!r}, '-c', {SAVES!r}], start_new_session=True)"
    node = await start_program(agent, [sys.executable, "-c", f"{away}; time.sleep(600)"])
    send_stop(node, LONG)
    await node.expect("exit")
    assert b"saved by SIGTERM" in node.output


async def test_warned_program_ignoring_signal_is_stopped_after_grace(agent: FakeAgent) -> None:
    node = await start_program(agent, ["sh", "-c", "trap '' TERM; echo ready $$; sleep 600; sleep 600"])
    pid = node.output.split()[1]
    send_stop(node, 0.2)
    end = await node.expect("exit")
    assert (end["code"], end["stopped"]) == (None, True)
    assert not living_pids(pid)


async def test_second_stop_within_grace_ends_program(agent: FakeAgent) -> None:
    node = await start_program(agent, ["sh", "-c", "trap 'echo heard' TERM; echo ready; while :; do sleep 0.05; done"])
    send_stop(node, LONG)
    await agent.until(lambda: b"heard" in node.output, "the warning")
    node.send(t="stop")
    assert (await node.expect("exit"))["stopped"] is True


async def test_stop_ends_remaining_processes_of_warned_program(agent: FakeAgent) -> None:
    script = "trap 'exit 3' TERM; (trap '' TERM; echo ready; while :; do sleep 0.05; done) & wait"
    node = await start_program(agent, ["sh", "-c", script])
    send_stop(node, LONG)
    await node.expect("ending")
    assert not node.said("exit")
    node.send(t="stop")
    assert (await node.expect("exit"))["code"] == 3


@pytest.mark.parametrize(
    "message", [{"signal": "KOALA", "grace": LONG}, {"grace": LONG}, {"signal": "TERM", "grace": 0}]
)
async def test_stop_with_unknown_signal_stops_program(agent: FakeAgent, message: dict[str, Any]) -> None:
    node = await start_program(agent, ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done"])
    node.send(t="stop", **message)
    assert (await node.expect("exit"))["stopped"] is True


async def test_walltime_warning_is_sent_by_runner(agent: FakeAgent) -> None:
    """The program may have no handler yet."""
    node = await start_program(
        agent, ["sleep", "600"], ready=0, warning={"signal": "USR1", "grace": LONG, "after": 0.3}
    )
    end = await node.expect("exit")
    assert (end["code"], end["stopped"], end["warned"]) == (128 + signal.SIGUSR1, False, True)
    assert len(node.said("warned")) == 1


async def test_stop_after_walltime_warning_keeps_grace(agent: FakeAgent) -> None:
    """The first warning may precede the program's handler, so its signal is one that is ignored by default."""
    script = "trap 'echo heard' USR1; echo ready; while :; do sleep 0.05; done"
    node = await start_program(agent, ["sh", "-c", script], warning={"signal": "WINCH", "grace": 0.5, "after": 0.1})
    await node.expect("warned")
    send_stop(node, LONG, "USR1")
    assert (await node.expect("exit"))["stopped"] is True
    assert node.output == b"ready\n"
    assert len(node.said("warned")) == 1


async def test_hello_after_reconnection_reports_warning(agent: FakeAgent) -> None:
    node = await start_program(agent, ["sh", "-c", "trap 'echo heard' TERM; echo ready; while :; do sleep 0.05; done"])
    assert node.hellos[-1]["warned"] is False
    send_stop(node, LONG)
    await node.expect("warned")
    await agent.leave()
    await agent.listen()
    await agent.until(lambda: len(node.hellos) == 2, "its hello")
    assert node.hellos[-1]["warned"] is True
    node.send(t="stop")
    await node.expect("exit")


@pytest.mark.mpi
async def test_warning_under_open_mpi_signals_ranks_only(agent: FakeAgent) -> None:
    nodes = [await agent.start(TOKEN, i, f"127.0.1.{i + 1}", **MPI_ENVIRONMENT) for i in range(2)]
    rank = SAVES.replace("sys.exit(7)", "sys.exit(0)").replace('"ready"', '"ready", os.environ["OMPI_COMM_WORLD_RANK"]')
    command = ["sh", "-c", 'exec "$0" -c "$1"', sys.executable, rank]
    for node in nodes:
        node.send(**make_plan(nodes, command, launcher="openmpi"))
    await agent.until(lambda: nodes[0].output.count(b"ready") == 2, "two ranks")
    for node in nodes:
        await node.expect("running")
        send_stop(node, LONG)
    end = await nodes[0].expect("exit")
    assert nodes[0].output.count(b"saved by SIGTERM") == 2
    assert (end["code"], end["error"]) == (0, "")
    for node in nodes:
        await node.expect("exit")
