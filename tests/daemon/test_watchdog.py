"""The watchdog: it detects a hanging loop and answers requests itself, with and without TLS."""

import asyncio
import socket
import ssl
import threading
import time
from pathlib import Path

import httpx2
import pytest

from koalapy.daemon.engine.daemon import StandIn, Watchdog
from koalapy.daemon.engine.timeouts import DaemonTimeouts
from koalapy.system.process import SOCKET, WATCHDOG_PID, WATCHDOG_SPAN, ServiceManager
from tests import signals
from tests.certificates import CertificateAuthority

pytestmark = pytest.mark.processes

DEADLINE = 30.0
Pairs = tuple[ssl.SSLContext | None, ssl.SSLContext | bool]
"""The TLS contexts of the server and of the client."""


class Recorded(ServiceManager):
    def __init__(self) -> None:
        super().__init__("", 0.05)
        self.alive_at: list[float] = []
        self.said: list[str] = []

    def send_heartbeat(self, status: str) -> None:
        self.alive_at.append(time.monotonic())

    def show_status(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(params=["http", "https"])
def listening_socket(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, socket.socket, Pairs]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    if request.param == "http":
        return f"http://127.0.0.1:{port}", listener, (None, True)
    authority = CertificateAuthority(tmp_path)
    pair = authority.issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    return f"https://127.0.0.1:{port}", listener, (context, ssl.create_default_context(cafile=str(authority.file)))


def hung_up_on(silent: socket.socket) -> None:
    silent.settimeout(DEADLINE)
    assert silent.recv(1) == b""


async def test_stand_in_answers_while_loop_hangs(listening_socket: tuple[str, socket.socket, Pairs]) -> None:
    url, listener, (context, verify) = listening_socket
    timeouts = DaemonTimeouts(
        watchdog_interval_s=0.02, loop_hangs_s=2.0, max_oversleep_s=DEADLINE, stand_in_request_s=2.0
    )
    manager = Recorded()
    watched = Watchdog(manager, lambda: "ready", timeouts)
    watched.start(StandIn(listener, context, timeouts))
    await signals.until(lambda: manager.alive_at and manager.said)
    assert manager.said == ["ready"]
    answers: list[httpx2.Response] = []

    def ask() -> None:
        # A silent client delays other clients only briefly.
        with socket.create_connection(listener.getsockname()) as silent:
            hung_up_on(silent)
            answers.append(httpx2.get(f"{url}/livez", verify=verify, timeout=DEADLINE))
            answers.append(httpx2.get(f"{url}/readyz", verify=verify, timeout=DEADLINE))
            answers.append(httpx2.head(f"{url}/readyz", verify=verify, timeout=DEADLINE))
            answers.append(httpx2.post(f"{url}/api/v1/jobs", content=b"x" * 100_000, verify=verify, timeout=DEADLINE))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()  # blocks the loop's thread until all requests are answered
    assert [answer.status_code for answer in answers] == [503] * 4
    assert [check["name"] for check in answers[1].json()["checks"]] == ["engine"]
    assert (answers[2].content, answers[1].headers["Retry-After"]) == (b"", "5")
    silent = len(manager.alive_at)
    (place,) = [message for message in manager.said if message != "ready"]
    assert place.startswith("its loop hangs: ")
    assert "test_watchdog.py" in place
    await signals.until(lambda: len(manager.alive_at) > silent and manager.said[-1] == "ready")
    watched.stop()
    listener.setblocking(False)
    with socket.create_connection(listener.getsockname()):
        await asyncio.get_running_loop().sock_accept(listener)  # the loop accepts connections again
    listener.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))


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


def test_stand_in_does_not_wait_for_silent_clients() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    standing = StandIn(listener, timeouts=DaemonTimeouts(stand_in_request_s=1.0))
    standing.start(time.monotonic())
    silent = [socket.create_connection(listener.getsockname()) for _ in range(2)]
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/readyz"
    for client in silent:
        hung_up_on(client)
    assert httpx2.get(url, timeout=DEADLINE).status_code == 503
    for client in silent:
        client.close()
    standing.close()
    listener.close()
