"""The socket of systemd to which a unit of type notify with a watchdog reports."""

import socket
from pathlib import Path

import pytest

WATCHDOG_TIMEOUT_S = 1.5


class ServiceManager:
    """A service manager that receives the messages of one unit."""

    def __init__(self, folder: Path, timeout_s: float = WATCHDOG_TIMEOUT_S) -> None:
        """``timeout_s`` is the interval without a watchdog message after which the unit counts as hung."""
        self._timeout_s = timeout_s
        self.address = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.address))
        self.messages: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": str(self.address), "WATCHDOG_USEC": f"{self._timeout_s * 1e6:.0f}"}

    def wait_for_message(self, message: str) -> None:
        self._socket.settimeout(60.0)
        while True:
            lines = self._socket.recv(4096).decode().splitlines()
            self.messages += lines
            if message in lines:
                return

    def drop_messages(self) -> None:
        """Discard the messages that have arrived."""
        self._socket.setblocking(False)
        try:
            while True:
                self._socket.recv(4096)
        except BlockingIOError:
            pass

    def check_no_message(self, message: str) -> None:
        """Fail if the message arrives within the timeout of the watchdog."""
        self._socket.settimeout(self._timeout_s)
        try:
            while message not in self._socket.recv(4096).decode().splitlines():
                pass
        except TimeoutError:
            return
        pytest.fail(f"{message} was received")

    def close(self) -> None:
        self._socket.close()
