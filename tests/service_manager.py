"""The socket of systemd to which a unit of type notify with a watchdog reports."""

import queue
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

WATCHDOG_TIMEOUT_S = 1.5
END_OF_MESSAGES = "END=1"


class ServiceManager:
    """A service manager that receives the messages of one unit.

    A thread reads them at once, as systemd does: a datagram that finds the queue of the socket full is lost.
    """

    def __init__(self, folder: Path, timeout_s: float = WATCHDOG_TIMEOUT_S) -> None:
        """``timeout_s`` is the interval without a watchdog message after which the unit counts as hung."""
        self._timeout_s = timeout_s
        self.address = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.address))
        self._received: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read_messages, daemon=True)
        self._reader.start()
        self.messages: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": str(self.address), "WATCHDOG_USEC": f"{self._timeout_s * 1e6:.0f}"}

    def _read_messages(self) -> None:
        while message := self._socket.recv(4096):
            self._received.put(message.decode())

    def wait_for_message(self, message: str) -> None:
        while True:
            lines = self._received.get(timeout=60.0).splitlines()
            self.messages += lines
            if message in lines:
                return

    def drop_messages(self) -> None:
        """Discard the messages that have arrived."""
        self._socket.sendto(END_OF_MESSAGES.encode(), str(self.address))
        while self._received.get(timeout=60.0) != END_OF_MESSAGES:
            pass

    def check_no_message(self, message: str) -> None:
        """Fail if the message arrives within the timeout of the watchdog."""
        deadline = time.monotonic() + self._timeout_s
        with suppress(queue.Empty):
            while message not in self._received.get(timeout=max(0.0, deadline - time.monotonic())).splitlines():
                pass
            pytest.fail(f"{message} was received")

    def close(self) -> None:
        self._socket.sendto(b"", str(self.address))  # ends the reader
        self._reader.join()
        self._socket.close()
