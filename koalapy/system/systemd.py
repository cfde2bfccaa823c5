"""Notify the service manager that started this process (systemd's ``sd_notify``)."""

import os
import socket
from contextlib import suppress

SOCKET, WATCHDOG_SPAN, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
SEND_TIMEOUT_S = 0.5
"""Limit for the notifications that are sent once only."""
HEARTBEATS_PER_TIMEOUT = 3
"""Heartbeats that are sent within the service manager's watchdog timeout."""
MAX_STATUS_LENGTH = 500


class ServiceManager:
    """A connection to systemd. Every call returns soon, and does nothing if no service manager listens."""

    def __init__(self, address: str = "", watchdog_timeout_s: float | None = None) -> None:
        """``watchdog_timeout_s``: it restarts this process after so long without a heartbeat; None: never."""
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self.interval = None if watchdog_timeout_s is None else watchdog_timeout_s / HEARTBEATS_PER_TIMEOUT
        """Seconds between two heartbeats; None if it expects none."""

    @classmethod
    def from_environment(cls) -> "ServiceManager":
        """Connect as the environment says, and remove its variables, so that children inherit none of them."""
        variables = {name: os.environ.pop(name, "") for name in (SOCKET, WATCHDOG_SPAN, WATCHDOG_PID)}
        is_for_us = variables[WATCHDOG_PID] in ("", str(os.getpid()))
        span = variables[WATCHDOG_SPAN]
        timeout_s = int(span) / 1e6 if is_for_us and span.isdecimal() and int(span) else None
        return cls(variables[SOCKET], timeout_s if variables[SOCKET] else None)

    def notify_ready(self, status: str) -> None:
        self._send("READY=1", f"STATUS={_one_line(status)}", timeout_s=SEND_TIMEOUT_S)

    def show_status(self, text: str) -> None:
        """Set the line that ``systemctl status`` shows."""
        self._send(f"STATUS={_one_line(text)}")

    def send_heartbeat(self, status: str) -> None:
        """Reset the watchdog, and repeat the status in case an earlier one was lost."""
        self._send("WATCHDOG=1", f"STATUS={_one_line(status)}")

    def notify_stopping(self) -> None:
        self._send("STOPPING=1", "STATUS=ending", timeout_s=SEND_TIMEOUT_S)

    def _send(self, *lines: str, timeout_s: float = 0.0) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.settimeout(timeout_s)
            connection.sendto("\n".join(lines).encode(errors="replace"), self._address)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_STATUS_LENGTH]
