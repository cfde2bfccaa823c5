"""What runs on an embedded cluster ends with its resource manager, whatever it has done to be found by nobody."""

import os
import signal
from pathlib import Path

import pytest

from tests.agent.conftest import FakeDaemon, Site, alive

pytestmark = pytest.mark.processes

T = "7.1.0"
SLEEP = "echo $$; exec sleep 300"
PROGRAMS = {
    "plain": ["sh", "-c", SLEEP],
    "clean environment": ["env", "-i", "sh", "-c", SLEEP],
    "daemon": ["sh", "-c", f"env -i setsid sh -c '{SLEEP}' & wait"],
    "daemon without a parent": ["sh", "-c", f"(env -i setsid sh -c '{SLEEP}' &); sleep 300"],
    "ignores signals": ["env", "-i", "sh", "-c", "trap '' TERM HUP INT; echo $$; while :; do sleep 1; done"],
}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def run_program(daemon: FakeDaemon, program: list[str]) -> None:
    """Run a program as component ``T``, and wait for its first line."""
    await daemon.submit(T)
    await daemon.reaches(T, "claimed")
    await daemon.open(program, T)
    await daemon.until(lambda: daemon.output.get(T, b"").endswith(b"\n"))


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_runner_ends_program_when_lrm_is_killed(daemon: FakeDaemon, site: Site, program: list[str]) -> None:
    await run_program(daemon, program)
    assert len(alive(daemon.output[T])) == 1
    os.kill(int((site.cluster.directory / "locald.pid").read_text()), signal.SIGKILL)
    status = await daemon.reaches(T, "ended")
    assert alive(daemon.output[T]) == [], "none is left when it is told that it has ended"
    assert status["infrastructure"]
    assert "resource manager" in status["error"]


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
async def test_component_ends_when_lrm_and_runner_are_killed(
    daemon: FakeDaemon, site: Site, program: list[str]
) -> None:
    await run_program(daemon, program)
    (pid,) = alive(daemon.output[T])
    locald = int((site.cluster.directory / "locald.pid").read_text())
    runners = children_of(locald)
    assert runners
    try:
        for each in (locald, *runners):
            os.kill(each, signal.SIGKILL)
        status = await daemon.reaches(T, "ended")
        assert alive(daemon.output[T]) == []
        assert status["infrastructure"]
    finally:
        if alive(daemon.output[T]):
            os.kill(pid, signal.SIGKILL)
