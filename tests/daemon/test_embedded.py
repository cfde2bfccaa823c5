"""Embedded agents: reports of failures with the last line of the error output, and restarts with growing delays."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from koalapy.daemon.agents.embedded import AgentProcess, EmbeddedAgents
from koalapy.daemon.engine.timeouts import DaemonTimeouts
from tests import signals

pytestmark = pytest.mark.processes

SHELL = ("sh", "-c")
TIMEOUTS = DaemonTimeouts(min_restart_delay_s=0.01, max_restart_delay_s=0.04, last_words_s=60.0)


class Reports:
    """Records the reported failures of agents and the pauses before their restart."""

    def __init__(self) -> None:
        self.words: asyncio.Queue[str] = asyncio.Queue()
        self.pauses: list[float] = []

    def __call__(self, cluster: str, message: str) -> None:
        reason, _, pause = message.partition("; it is started again after ")
        self.pauses.append(float(pause.removesuffix(" s")))
        self.words.put_nowait(f"{cluster}: {reason}")


Keep = Callable[..., Reports]


@pytest_asyncio.fixture
async def start_agents() -> AsyncIterator[Keep]:
    supervisors: list[EmbeddedAgents] = []

    def start(*command: str, timeouts: DaemonTimeouts = TIMEOUTS) -> Reports:
        reports = Reports()
        process = AgentProcess("north", command, {"PATH": "/usr/bin:/bin"}, b"{}\n")
        supervisors.append(EmbeddedAgents([process], reports, timeouts))
        supervisors[-1].start("http://127.0.0.1:1")
        return reports

    yield start
    for agents in supervisors:
        await agents.stop()


async def the_next(reports: Reports) -> str:
    async with asyncio.timeout(30):
        return await reports.words.get()


async def test_embedded_agent_that_cannot_start_is_retried(start_agents: Keep) -> None:
    reports = start_agents("/no/such/python", "-m", "agent")
    assert [await the_next(reports) for _ in range(5)] == ["north: cannot be started: No such file or directory"] * 5
    assert reports.pauses[:5] == [0.01, 0.02, 0.04, 0.04, 0.04]


async def test_embedded_agent_without_memory_is_retried(start_agents: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    started, faults = asyncio.create_subprocess_exec, [12, 11]

    async def full(*command: str, **options: Any) -> asyncio.subprocess.Process:
        if faults:
            raise OSError(number := faults.pop(0), {12: "Cannot allocate memory", 11: "Try again"}[number])
        return await started(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", full)
    reports = start_agents(*SHELL, "echo here at last >&2; exit 1")
    assert await the_next(reports) == "north: cannot be started: Cannot allocate memory"
    assert await the_next(reports) == "north: cannot be started: Try again"
    assert await the_next(reports) == "north: ended with exit code 1: here at last"


@pytest.mark.parametrize(
    ("script", "last_line"),
    [
        ("exit 3", "ended with exit code 3"),
        ("echo first >&2; echo; printf 'the  \\033[1mlast\\n\\n' >&2; exit 1", "ended with exit code 1: the ?[1mlast"),
        ("printf 'no line' >&2; kill -9 $$", "was ended by SIGKILL: no line"),
        ("kill -40 $$", "was ended by signal 40"),
        ("printf '\\377\\n' >&2", "ended with exit code 0: \N{REPLACEMENT CHARACTER}"),
        ("head -c 300000 /dev/zero | tr '\\0' x >&2; exit 1", f"ended with exit code 1: {'x' * 300}"),
    ],
)
async def test_embedded_agent_exit_is_reported_with_last_line(start_agents: Keep, script: str, last_line: str) -> None:
    assert await the_next(start_agents(*SHELL, script)) == f"north: {last_line}"


async def test_embedded_agent_errors_are_written_to_daemon_log(
    start_agents: Keep, capfd: pytest.CaptureFixture[str]
) -> None:
    await the_next(start_agents(*SHELL, "echo one >&2; echo two >&2; exit 1"))
    assert "one\ntwo\n" in capfd.readouterr().err


async def test_embedded_agent_with_inherited_stderr_is_not_awaited(start_agents: Keep) -> None:
    reports = start_agents(*SHELL, "sleep 60 & exit 4", timeouts=replace(TIMEOUTS, last_words_s=0.1))
    assert await the_next(reports) == "north: ended with exit code 4"


async def test_embedded_agent_that_was_stable_restarts_soon(start_agents: Keep) -> None:
    reports = start_agents(*SHELL, "exit 1", timeouts=replace(TIMEOUTS, agent_stable_s=0.0))
    for _ in range(4):
        await the_next(reports)
    assert reports.pauses[:4] == [TIMEOUTS.min_restart_delay_s] * 4


async def test_embedded_agent_receives_handover_and_end_by_one_pipe(start_agents: Keep, tmp_path: Path) -> None:
    got, ended = tmp_path / "got", tmp_path / "ended"
    code = "import sys; open(sys.argv[1], 'w').write(sys.stdin.readline()); sys.stdin.read(); open(sys.argv[2], 'w')"
    handover = b"x" * 300_000 + b"\n"
    agents = EmbeddedAgents(
        [AgentProcess("north", (sys.executable, "-c", code, str(got), str(ended)), {}, handover)], lambda *_: None
    )
    agents.start("http://127.0.0.1:1")
    await signals.until(lambda: not (not got.exists() or got.stat().st_size < len(handover)))
    assert not ended.exists()
    await agents.stop()


def test_embedded_agent_end_closes_no_reused_descriptor() -> None:
    """The daemon's event loop closes a file some time after the request to close it."""
    opened: list[int] = []
    enough = asyncio.Event()

    def tell(cluster: str, message: str) -> None:
        opened.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(8))
        if len(opened) >= 24:
            enough.set()

    async def run() -> None:
        process = AgentProcess("north", (*SHELL, "exit 3"), {"PATH": "/usr/bin:/bin"}, b"{}\n")
        agents = EmbeddedAgents([process], tell, TIMEOUTS)
        agents.start("http://127.0.0.1:1")
        async with asyncio.timeout(30):
            await enough.wait()
        await agents.stop()

    uvloop.run(run())
    for file in opened:
        os.close(file)
