"""What systemd is to a unit of the type notify with a watchdog, as far as its process sees it."""

import socket
from pathlib import Path

import pytest

PATIENCE = 1.5
"""Seconds."""


class ServiceManager:
    """What systemd is to a unit of the type notify with a watchdog."""

    def __init__(self, folder: Path, patience: float = PATIENCE) -> None:
        """``patience``: seconds without a sign of life after which it takes a process for hung."""
        self._patience = patience
        self.address = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.address))
        self.told: list[str] = []

    @property
    def environment(self) -> dict[str, str]:
        return {"NOTIFY_SOCKET": str(self.address), "WATCHDOG_USEC": f"{self._patience * 1e6:.0f}"}

    def hears(self, word: str) -> None:
        """Wait for a word."""
        self._socket.settimeout(60.0)
        while True:
            lines = self._socket.recv(4096).decode().splitlines()
            self.told += lines
            if word in lines:
                return

    def forget(self) -> None:
        """What was said before."""
        self._socket.setblocking(False)
        try:
            while True:
                self._socket.recv(4096)
        except BlockingIOError:
            pass

    def hears_nothing_of(self, word: str) -> None:
        """Nobody says so for as long as a service manager waits."""
        self._socket.settimeout(self._patience)
        try:
            while word not in self._socket.recv(4096).decode().splitlines():
                pass
        except TimeoutError:
            return
        pytest.fail(f"{word} was told")

    def close(self) -> None:
        self._socket.close()
