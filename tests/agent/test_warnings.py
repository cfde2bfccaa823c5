"""Stops with a warning: the program receives a signal and a grace, also across restarts of the agent."""

import signal
import time

import pytest

from koalapy.agent.components.component import Grace
from tests.agent.conftest import FakeDaemon, Site

T = "7.1.0"
LONG_GRACE_S = 600.0
LISTEN_SCRIPT = "trap 'echo heard' USR1; echo ready; while :; do sleep 0.05; done"


async def start_program(daemon: FakeDaemon, script: str, size: int = 1) -> None:
    await daemon.submit_component(T, size)
    await daemon.wait_for_state(T, "claimed")
    await daemon.open_barrier(["sh", "-c", script], T)
    await daemon.wait_until(lambda: daemon.output.get(T, b"").count(b"ready") == size)


async def send_warning(daemon: FakeDaemon, seconds: float = LONG_GRACE_S) -> None:
    ident = await daemon.send_command("stop", T, reason="preempted", signal="USR1", grace=seconds)
    assert await daemon.wait_for_ack(ident) == ""


async def wait_until_warned(daemon: FakeDaemon, times: int = 1) -> None:
    await daemon.wait_until(lambda: daemon.output[T].count(b"heard") == times and daemon.status(T)["warned"])


@pytest.mark.processes
async def test_warned_program_is_stopped_after_grace(site: Site, daemon: FakeDaemon) -> None:
    """The program may end before it can print that it received the warning."""
    await start_program(daemon, LISTEN_SCRIPT)
    await send_warning(daemon, 0.3)
    end = await daemon.wait_for_state(T, "ended")
    assert (end["program_exit"], end["error"], end["warned"]) == (None, "", True)


@pytest.mark.processes
async def test_restarted_agent_continues_grace(site: Site, daemon: FakeDaemon) -> None:
    await start_program(daemon, LISTEN_SCRIPT)
    await send_warning(daemon)
    await wait_until_warned(daemon)
    await site.stop()
    await site.start()
    await daemon.wait_until(lambda: (daemon.status(T)["state"], daemon.status(T)["warned"]) == ("running", True))
    await daemon.send_command("stop", T, reason="cancelled")
    end = await daemon.wait_for_state(T, "ended")
    assert (daemon.output[T].count(b"heard"), end["infrastructure"]) == (1, False)


@pytest.mark.processes
async def test_plan_contains_walltime_warning(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit_component(T)
    host = (await daemon.wait_for_state(T, "claimed"))["hosts"][0]
    context = {"token": T, "command": ["sleep", "1000"], "environment": {}, "workdir": None, "output": None}
    node = {"host": host, "cluster": "north", "token": T, "node": 0, "slots": 1}
    plan = {"job": 7, "generation": 1, "launcher": "processes", "head": T, "nodes": [node]}
    warning = {"signal": "USR1", "after": 0.2, "grace": LONG_GRACE_S}
    await daemon.send_command("open", T, contexts=[{**context, "nodes": [0]}], warning=warning, **plan)
    end = await daemon.wait_for_state(T, "ended")
    assert (end["program_exit"], end["warned"]) == (128 + signal.SIGUSR1, True), "the program had no handler"


def test_remaining_grace_counts_from_boot_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: 9e9)
    monkeypatch.setattr(time, "clock_gettime", lambda _: now)
    grace = Grace.start_now("TERM", 30.0)
    assert grace is not None
    for now, expected in ((1010.0, 20.0), (1030.0, 0.0), (5000.0, 0.0), (10.0, 30.0)):  # noqa: B007
        assert grace.remaining_s == expected
    assert [Grace.start_now("", 30.0), Grace.start_now("TERM", 0.0)] == [None] * 2
