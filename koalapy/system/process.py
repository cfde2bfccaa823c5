"""Protect this process from others of its account, raise its limit of open files, and notify systemd. Linux only.

Imports the standard library only, since programs on nodes import it, too.
"""

import errno
import os
import resource
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

TRANSIENT_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of a system that is short of files or memory: the same call may succeed a moment later."""
PR_SET_DUMPABLE = 4
VARIABLE_PREFIX = "KOALA_"
"""Prefix of the environment variables that our processes read and no child inherits."""


def read_boot_id() -> str:
    """Return the id of this boot of the machine; empty if the kernel does not provide one."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def forbid_dumps() -> None:
    """Let only root read the memory of this process and of those it forks, from now on."""
    import ctypes  # slow to import, and most commands do not need it

    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def scrub_environment() -> None:
    """Overwrite the environment that this process was started with, and forbid dumps.

    ``/proc`` shows the original bytes for as long as the process lives, whatever happens to its variables. The
    variables themselves are copied first and keep their values.
    """
    import ctypes

    for name, value in os.environb.items():
        os.putenv(name, value)
    with open("/proc/self/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    ctypes.memset(start, 0, end - start)
    forbid_dumps()


def drop_own_variables() -> None:
    """Remove our variables from the environment that children inherit."""
    for name in [name for name in os.environ if name.startswith(VARIABLE_PREFIX)]:
        del os.environ[name]


def raise_file_limit(count: int) -> int:
    """Allow this process ``count`` open files, or as many as the hard limit permits; return the number allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return count if soft == resource.RLIM_INFINITY else soft


def count_open_files() -> tuple[int, int]:
    """Return the number of open files of this process and its limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return len(os.listdir("/proc/self/fd")), soft
    except OSError:  # there is no file left to list them with
        return soft, soft


SOCKET, WATCHDOG_SPAN, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
SEND_TIMEOUT_S = 0.5
"""Limit for the notifications that are sent once only."""
HEARTBEATS_PER_TIMEOUT = 3
"""Heartbeats that are sent within the service manager's watchdog timeout."""
MAX_STATUS_LENGTH = 500


_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a Unix socket, as the kernel recorded it at ``connect`` or ``listen``."""

    pid: int
    uid: int


def get_peer(connected: socket.socket) -> Peer:
    """Ask the kernel for the process at the other end. Raise ``OSError``."""
    pid, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


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
