"""A stop with a warning: the agent has the program told, and gives it its grace, whoever is restarted meanwhile."""

import json
import signal
from typing import Any

import pytest

from koalapy.agent.components import component
from koalapy.agent.components.component import Grace
from koalapy.protocol.messages import Open, Stop, from_daemon
from tests.agent.conftest import FakeDaemon, Site

T = "7.1.0"
LONG = 600.0
LISTENS = "trap 'echo heard' USR1; echo ready; while :; do sleep 0.05; done"
SAVES = "trap 'echo saved; exit 7' USR1; echo ready; while :; do sleep 0.05; done"


async def runs(daemon: FakeDaemon, script: str, size: int = 1) -> None:
    await daemon.submit(T, size)
    await daemon.reaches(T, "claimed")
    await daemon.open(["sh", "-c", script], T)
    await daemon.wait_until(lambda: daemon.output.get(T, b"").count(b"ready") == size)


async def warn(daemon: FakeDaemon, seconds: float = LONG) -> None:
    ident = await daemon.command("stop", T, reason="preempted", signal="USR1", grace=seconds)
    assert await daemon.acknowledged(ident) == ""


async def is_heard(daemon: FakeDaemon, times: int = 1) -> None:
    await daemon.wait_until(lambda: daemon.output[T].count(b"heard") == times and daemon.status(T)["warned"])


@pytest.mark.processes
async def test_warned_program_that_ends_is_not_stopped(site: Site, daemon: FakeDaemon) -> None:
    await runs(daemon, SAVES, size=2)
    assert daemon.status(T)["warned"] is False
    await warn(daemon)
    end = await daemon.reaches(T, "ended")
    assert daemon.output[T].count(b"saved") == 2
    assert (end["program_exit"], end["error"], end["warned"]) == (7, "", True)


@pytest.mark.processes
async def test_warned_program_is_stopped_after_grace(site: Site, daemon: FakeDaemon) -> None:
    """Whether it has had the time to say that it heard the warning or not."""
    await runs(daemon, LISTENS)
    await warn(daemon, 0.3)
    end = await daemon.reaches(T, "ended")
    assert (end["program_exit"], end["error"], end["warned"]) == (None, "", True)


@pytest.mark.processes
async def test_stop_without_warning_ends_grace(site: Site, daemon: FakeDaemon) -> None:
    await runs(daemon, LISTENS)
    await warn(daemon)
    await is_heard(daemon)
    await daemon.command("stop", T, reason="cancelled")
    await daemon.reaches(T, "ended")


@pytest.mark.processes
async def test_repeated_warning_changes_nothing(site: Site, daemon: FakeDaemon) -> None:
    await runs(daemon, "trap '' TERM; " + LISTENS)
    await warn(daemon)
    await warn(daemon)
    await is_heard(daemon)
    await daemon.command("stop", T, reason="cancelled")
    await warn(daemon)
    await daemon.reaches(T, "ended")
    assert daemon.output[T].count(b"heard") == 1


@pytest.mark.processes
async def test_restarted_agent_continues_grace(site: Site, daemon: FakeDaemon) -> None:
    await runs(daemon, LISTENS)
    await warn(daemon)
    await is_heard(daemon)
    await site.stop()
    await site.start()
    await daemon.wait_until(lambda: (daemon.status(T)["state"], daemon.status(T)["warned"]) == ("running", True))
    await daemon.command("stop", T, reason="cancelled")
    end = await daemon.reaches(T, "ended")
    assert (daemon.output[T].count(b"heard"), end["infrastructure"]) == (1, False)


@pytest.mark.processes
async def test_grace_without_agent_expires(site: Site, daemon: FakeDaemon) -> None:
    await runs(daemon, LISTENS)
    await warn(daemon, 0.3)
    await site.stop()
    await site.start()
    end = await daemon.reaches(T, "ended")
    assert (end["program_exit"], end["infrastructure"]) == (None, False)


@pytest.mark.processes
@pytest.mark.parametrize("more", [{}, {"signal": "USR1", "grace": LONG}])
async def test_component_without_program_stops_at_once(site: Site, daemon: FakeDaemon, more: dict[str, Any]) -> None:
    await daemon.submit(T)
    await daemon.reaches(T, "claimed")
    await daemon.command("stop", T, reason="test", **more)
    assert (await daemon.reaches(T, "ended"))["warned"] is False


@pytest.mark.processes
async def test_plan_contains_walltime_warning(site: Site, daemon: FakeDaemon) -> None:
    await daemon.submit(T)
    host = (await daemon.reaches(T, "claimed"))["hosts"][0]
    context = {"token": T, "command": ["sleep", "1000"], "environment": {}, "workdir": None, "output": None}
    node = {"host": host, "cluster": "north", "token": T, "node": 0, "slots": 1}
    plan = {"job": 7, "generation": 1, "launcher": "processes", "head": T, "nodes": [node]}
    warning = {"signal": "USR1", "after": 0.2, "grace": LONG}
    await daemon.command("open", T, contexts=[{**context, "nodes": [0]}], warning=warning, **plan)
    end = await daemon.reaches(T, "ended")
    assert (end["program_exit"], end["warned"]) == (128 + signal.SIGUSR1, True), "it had no handler"


def test_stop_and_plan_without_warnings_are_valid() -> None:
    """It knew none of the new fields, and takes no offence at any."""
    stop = {"type": "stop", "id": 1, "epoch": 1, "token": T, "reason": "r", "signal": "TERM", "grace": 3.0, "later": 1}
    own = {"job": 7, "generation": 1, "launcher": "processes", "head": T, "nodes": [], "contexts": []}
    begin = {"type": "open", "id": 2, "epoch": 1, "token": T, **own}
    found = from_daemon.validate_json(json.dumps([stop, begin]))
    assert isinstance(found[0], Stop)
    assert isinstance(found[1], Open)
    assert found[1].plan()["warning"] is None
    bare = from_daemon.validate_json(json.dumps([{k: v for k, v in stop.items() if k not in ("signal", "grace")}]))[0]
    assert isinstance(bare, Stop)
    assert (bare.signal, bare.grace) == ("", 0.0)


def test_grace_left_is_counted_since_boot_and_never_longer_than_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(component.time, "time", lambda: 9e9)
    monkeypatch.setattr(component.time, "clock_gettime", lambda _: now)
    begun = Grace.start_now("TERM", 30.0)
    assert begun is not None
    assert Grace.from_journal(begun.to_journal()) == begun
    for now, left in ((1010.0, 20.0), (1030.0, 0.0), (5000.0, 0.0), (10.0, 30.0)):  # noqa: B007
        assert begun.remaining_s == left
    assert [Grace.start_now("", 30.0), Grace.start_now("TERM", 0.0), Grace.from_journal(None)] == [None] * 3
