"""Runners end their program when the daemon was silent for the lease."""

import shlex
import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.runner.lease import SilenceClock, renewal_interval
from tests.runner.conftest import FakeAgent, FakeNode, living_pids, make_plan

TOKEN = "7.1.0"
WARNED = ["sh", "-c", "trap 'echo warned; exit 3' USR1; echo $$; while :; do sleep 0.05; done"]
STUBBORN = ["sh", "-c", "trap '' TERM USR1; echo $$; while :; do sleep 0.05; done"]


async def start_program(
    agent: FakeAgent, command: list[str], lease: float | None = None, **plan_fields: object
) -> FakeNode:
    """Start a runner, wait until its program has printed its process id, and shorten its lease if one is given.

    A busy machine may not finish a start within a short lease.
    """
    await agent.listen()
    node = await agent.start(TOKEN, 0, "127.0.1.1")
    node.send(**{**make_plan([node], command), **plan_fields})
    await agent.until(lambda: node.output.endswith(b"\n"), "the program")
    if lease is not None:
        renewals = len(node.said("renew"))
        await agent.until(lambda: len(node.said("renew")) > renewals, "a renewal")
        node.send(t="welcome", lease=lease, output=len(node.output))
    return node


def pid_of(node: FakeNode) -> bytes:
    return node.output.splitlines()[0]


@pytest.mark.processes
async def test_lease_with_silent_daemon_ends_program(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path, lease=20.0)
    node = await start_program(agent, STUBBORN, 1.0)
    agent.silence = 100.0
    end = await node.expect("exit")
    assert (end["infrastructure"], end["stopped"]) == (True, False)
    assert "its lease is over, the daemon was silent" in end["error"]
    assert living_pids(pid_of(node)) == []
    await node.ended()  # with 0, or with 1 if this agent took the result later than one lease
    await agent.leave()


@pytest.mark.processes
async def test_lease_end_warns_program(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path, lease=20.0)
    node = await start_program(agent, WARNED, 1.0, lease_warning={"signal": "USR1", "grace": 60.0})
    agent.silence = None
    end = await node.expect("exit")
    assert (end["code"], end["warned"]) == (3, True)
    assert node.output.endswith(b"warned\n")
    await agent.leave()


@pytest.mark.processes
async def test_runner_without_lease_ignores_silence(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path, lease=None)
    gate = tmp_path / "gate"
    node = await start_program(agent, ["sh", "-c", f"echo $$; while [ ! -e {gate} ]; do sleep 0.05; done"])
    agent.silence = 1e6
    gate.touch()
    assert (await node.expect("exit"))["code"] == 0
    await agent.leave()


@pytest.mark.processes
async def test_runner_stopped_beyond_lease_kills_program(tmp_path: Path) -> None:
    """The program is halted first, since the next attempt may already run."""
    agent = FakeAgent(tmp_path, lease=20.0)
    node = await start_program(agent, STUBBORN, 0.5)
    assert node.process is not None
    node.process.send_signal(signal.SIGSTOP)
    agent.silence = None
    clock = SilenceClock(0.0)
    began = clock.silence
    await agent.until(lambda: clock.silence > began + 3.0, "the end of its lease")
    node.process.send_signal(signal.SIGCONT)
    await agent.until(lambda: state_of(pid_of(node)) in ("T", ""), "the program to be halted")
    assert (await node.expect("exit"))["infrastructure"]
    assert living_pids(pid_of(node)) == []
    await agent.leave()


def state_of(pid: bytes) -> str:
    """Return ``T`` for a halted process; empty for an ended one."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.processes
@pytest.mark.parametrize("command", [STUBBORN, ["sh", "-c", f"{shlex.join(STUBBORN)} & sleep 0.5; wait"]])
async def test_walltime_ends_program_despite_grace(tmp_path: Path, command: list[str]) -> None:
    """The daemon counts the walltime, whether or not a warning began before it lost its agent."""
    agent = FakeAgent(tmp_path, lease=None)
    node = await start_program(agent, command, walltime=3.0)
    pid = pid_of(node)
    clock = SilenceClock(0.0)
    began = clock.silence
    node.send(t="stop", signal="USR1", grace=50.0)
    await node.expect("warned")
    await agent.leave()
    await agent.until(lambda: living_pids(pid) == [], "the end of the program")
    assert clock.silence < began + 20.0
    await agent.listen()
    await node.expect("exit")
    await agent.leave()


@pytest.mark.processes
async def test_walltime_without_agent_ends_program(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path, lease=None)
    node = await start_program(agent, STUBBORN, walltime=1.0)
    node.ack_exit = False
    end = await node.expect("exit")
    assert (end["code"], end["infrastructure"]) == (128 + signal.SIGTERM, False)
    assert living_pids(pid_of(node)) == []
    assert node.process is not None
    node.process.kill()
    await node.ended()
    await agent.leave()


# How the silence is counted


@given(st.lists(st.tuples(*[st.floats(0.0, 100.0)] * 6, st.booleans()), min_size=1, max_size=20))
def test_silence_clock_never_underestimates_silence(
    rounds: list[tuple[float, float, float, float, float, float, bool]],
) -> None:
    """Queries and answers take any time, either side may be stopped before reading, and some are lost."""
    now, daemon_heard_at = 0.0, 0.0
    agent, runner = SilenceClock(0.0, lambda: now), SilenceClock(0.0, lambda: now)
    for to_daemon, in_daemon, to_agent, pause, to_agent_2, to_runner, is_lost in rounds:
        question = agent.start_query()
        now += to_daemon
        daemon_heard_at = now  # the frame is read: from here on the daemon counts
        now += in_daemon + to_agent
        if not is_lost:
            agent.record_answer(question)
        now += pause
        query = runner.start_query()
        now += to_agent_2
        silence = agent.silence
        now += to_runner
        runner.record_answer(query, silence)
        assert runner.contact_at <= agent.contact_at + 1e-6
        assert agent.contact_at <= daemon_heard_at


@given(st.lists(st.integers(0, 10), max_size=30))
def test_silence_clock_ignores_old_and_unknown_answers(answers: list[int]) -> None:
    now = 5.0
    clock = SilenceClock(5.0, lambda: now)
    numbers = [clock.start_query() for _ in range(3)]
    now = 50.0
    for answer in answers:
        clock.record_answer(answer)
    assert clock.contact_at == 5.0
    assert numbers == [1, 2, 3]


@pytest.mark.parametrize(("lease", "interval"), [(None, 10.0), (2400.0, 10.0), (5.0, 0.5), (1e-9, 0.02)])
def test_renewal_interval_is_short_part_of_lease(lease: float | None, interval: float) -> None:
    assert renewal_interval(lease) == interval
