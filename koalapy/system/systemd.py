"""What is told to the service manager that started this process (systemd's sd_notify): it serves, it lives, it ends."""

import os
import socket
from contextlib import suppress

SOCKET, WATCHDOG_SPAN, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
SEND_TIMEOUT = 0.5
"""Seconds that a service manager may take to take in a word that is told once."""
SHARE = 3
"""How often, in the time after which a service manager takes a silent process for hung, it is told that it lives."""
MAX_STATUS_LENGTH = 500


class ServiceManager:
    """Every call returns soon, and does nothing where there is no service manager that listens."""

    def __init__(self, address: str = "", patience: float | None = None) -> None:
        """``patience``: seconds without a sign of life after which it ends this process and starts another."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.interval = None if patience is None else patience / SHARE
        """Seconds between two signs of life; None where it waits for none."""

    @classmethod
    def of_environment(cls) -> "ServiceManager":
        """The one whose child this process is; what is started from here inherits nothing of it."""
        told = {name: os.environ.pop(name, "") for name in (SOCKET, WATCHDOG_SPAN, WATCHDOG_PID)}
        is_ours = told[WATCHDOG_PID] in ("", str(os.getpid()))
        span = told[WATCHDOG_SPAN]
        patience = int(span) / 1e6 if is_ours and span.isdecimal() and int(span) else None
        return cls(told[SOCKET], patience if told[SOCKET] else None)

    def ready(self, status: str) -> None:
        self._tell("READY=1", f"STATUS={_one_line(status)}", timeout=SEND_TIMEOUT)

    def status(self, text: str) -> None:
        """A line for people."""
        self._tell(f"STATUS={_one_line(text)}")

    def alive(self, status: str) -> None:
        """With how it is: a word that came while nobody took it in is told again by this."""
        self._tell("WATCHDOG=1", f"STATUS={_one_line(status)}")

    def stopping(self) -> None:
        self._tell("STOPPING=1", "STATUS=ending", timeout=SEND_TIMEOUT)

    def _tell(self, *lines: str, timeout: float = 0.0) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaking:
            speaking.settimeout(timeout)
            speaking.sendto("\n".join(lines).encode(errors="replace"), self._address)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_STATUS_LENGTH]
