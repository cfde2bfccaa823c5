"""The watchdog of the event loop, and the service manager that it notifies."""

import socket
import threading
import time
from pathlib import Path

import pytest

from koalapy.daemon.engine.timeouts import DaemonTimeouts
from koalapy.daemon.engine.watchdog import Watchdog
from koalapy.system.process import SOCKET, WATCHDOG_PID, WATCHDOG_SPAN, ServiceManager
from tests import signals

pytestmark = pytest.mark.processes

DEADLINE = 30.0


class Recorded(ServiceManager):
    def __init__(self) -> None:
        super().__init__("", 0.05)
        self.alive_at: list[float] = []
        self.said: list[str] = []
        self.hangs = threading.Event()

    def send_heartbeat(self, status: str) -> None:
        self.alive_at.append(time.monotonic())

    def show_status(self, text: str) -> None:
        self.said.append(text)
        if text.startswith("its loop hangs"):
            self.hangs.set()


async def test_watchdog_sends_no_heartbeat_while_loop_hangs() -> None:
    manager = Recorded()
    timeouts = DaemonTimeouts(watchdog_interval_s=0.02, loop_hangs_s=2.0, max_oversleep_s=DEADLINE)
    watched = Watchdog(manager, lambda: "ready", timeouts)
    watched.start()
    await signals.until(lambda: manager.alive_at and manager.said)
    assert manager.said == ["ready"]
    assert manager.hangs.wait(DEADLINE)  # blocks the loop's thread
    beats = len(manager.alive_at)
    assert manager.said[-1].startswith("its loop hangs: ")
    assert "test_watchdog.py" in manager.said[-1]
    await signals.until(lambda: len(manager.alive_at) > beats and manager.said[-1] == "ready")
    watched.stop()
    assert manager.said[1:] == [manager.said[1], "ready"]


def test_watchdog_without_service_manager_sends_nothing(tmp_path: Path) -> None:
    for address in ("", str(tmp_path / "nobody"), "@nobody-at-all"):
        manager = ServiceManager(address, 1.0)
        manager.notify_ready("x")
        manager.send_heartbeat("x")
        manager.notify_stopping()


@pytest.mark.parametrize(
    ("variables", "interval"),
    [
        ({WATCHDOG_SPAN: "3000000"}, 1.0),
        ({WATCHDOG_SPAN: "3000000", WATCHDOG_PID: "1"}, None),
        ({WATCHDOG_SPAN: "0"}, None),
        ({WATCHDOG_SPAN: "soon"}, None),
        ({}, None),
    ],
)
def test_watchdog_sends_status_and_heartbeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], interval: float | None
) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        for name, value in {SOCKET: str(path), **variables}.items():
            monkeypatch.setenv(name, value)
        manager = ServiceManager.from_environment()
        assert manager.interval == interval
        manager.notify_ready("a status\nREADY=0")
        assert listening.recv(1000) == b"READY=1\nSTATUS=a status READY=0"
        assert ServiceManager.from_environment().interval is None, "nothing is inherited"


def test_watchdog_with_full_manager_socket_continues(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        manager = ServiceManager(str(path), 1.0)
        for _ in range(10_000):
            manager.send_heartbeat("x")
