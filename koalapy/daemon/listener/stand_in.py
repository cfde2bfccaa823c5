"""Answers those who connect while the daemon's loop hangs, from a thread: that it does, and nothing else."""

import json
import select
import socket
import ssl
import threading
import time
from contextlib import suppress
from typing import Any

from koalapy.daemon.engine.timeouts import DEFAULT_TIMEOUTS, DaemonTimeouts
from koalapy.model.errors import ProblemCode

POLL = 0.2
"""Seconds in which it is seen that the loop takes connections in again."""
MAX_REQUEST_SIZE = 65536
"""Bytes up to the end of a request's headers."""
RETRY_AFTER = 5
"""Seconds."""


class StandIn:
    """On the daemon's own port: who is connected already has to wait for the loop."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None = None,
        timeouts: DaemonTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        """``context``: where TLS is spoken."""
        self._listener, self._context, self._timeout_s = listener.dup(), context, timeouts.stand_in_request_s
        self._serving: threading.Thread | None = None
        self._over = threading.Event()

    def start(self, since: float) -> None:
        """``since``: the monotonic time at which the loop was last known to move."""
        self._over.clear()
        self._serving = threading.Thread(target=self._serve, args=(since,), name="stand-in", daemon=True)
        self._serving.start()

    def stop(self) -> None:
        """Leave what comes from now on to the loop."""
        self._over.set()
        if self._serving is not None:
            self._serving.join()
            self._serving = None

    def close(self) -> None:
        self.stop()
        self._listener.close()

    def _serve(self, since: float) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._over.is_set():
            if poll.poll(POLL * 1000):
                with suppress(OSError):
                    self._answer(self._listener.accept()[0], time.monotonic() - since)

    def _answer(self, accepted: socket.socket, silence: float) -> None:
        with accepted as connection:
            connection.settimeout(self._timeout_s)
            if self._context is None:
                _say(connection, silence, self._timeout_s)
                return
            with self._context.wrap_socket(connection, server_side=True) as speaking:
                _say(speaking, silence, self._timeout_s)


def _say(connection: socket.socket, silence: float, timeout_s: float) -> None:
    until, asked = time.monotonic() + timeout_s, b""
    while b"\r\n\r\n" not in asked and len(asked) < MAX_REQUEST_SIZE and time.monotonic() < until:
        if not (piece := connection.recv(8192)):
            return
        asked += piece
    body = json.dumps(problem(silence)).encode()
    head = [
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/problem+json",
        f"Content-Length: {len(body)}",
        f"Retry-After: {RETRY_AFTER}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    connection.sendall("\r\n".join([*head, "", ""]).encode() + (b"" if asked.startswith(b"HEAD ") else body))
    connection.shutdown(socket.SHUT_WR)
    # What is left unread would reset the connection, and with it the answer.
    while time.monotonic() < until and connection.recv(8192):
        pass


def problem(silence: float) -> dict[str, Any]:
    """What everybody is told, and who asks whether the daemon is ready in the form of that answer."""
    reason = f"the daemon's loop has not moved for {silence:.0f} s"
    check = {"name": "engine", "cluster": None, "ok": False, "needed": True, "reason": reason}
    return {
        "type": "about:blank",
        "title": "Service Unavailable",
        "status": 503,
        "code": ProblemCode.NOT_READY,
        "detail": reason,
        "field": "",
        "value": None,
        "hint": "its log says where it hangs; a service manager with a watchdog starts it again",
        "ready": False,
        "checks": [check],
    }
