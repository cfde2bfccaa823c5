"""Answer every request on new connections with 503, from a thread, while the daemon's event loop hangs."""

import json
import select
import socket
import ssl
import threading
import time
from contextlib import suppress

from koalapy.daemon.engine.timeouts import DEFAULT_TIMEOUTS, DaemonTimeouts
from koalapy.model.errors import ProblemCode

POLL_INTERVAL = 0.2
"""Seconds between two checks whether the loop accepts connections again."""
MAX_REQUEST_SIZE = 65536
"""Maximum size of a request's headers in bytes."""
HEAD = """HTTP/1.1 503 Service Unavailable
Content-Type: application/problem+json
Content-Length: {length}
Retry-After: 5
Cache-Control: no-store
X-Content-Type-Options: nosniff
Connection: close

"""


class StandIn:
    """A thread that serves new connections on the daemon's port; earlier connections wait for the loop."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext | None = None,
        timeouts: DaemonTimeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        """``context``: the TLS context of the port; None for a port without TLS."""
        self._listener, self._context, self._timeout_s = listener.dup(), context, timeouts.stand_in_request_s
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self, since: float) -> None:
        """Start answering. ``since``: the monotonic time at which the loop last ran."""
        self._stopping.clear()
        self._thread = threading.Thread(target=self._serve_requests, args=(since,), name="stand-in", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop answering, so that the loop accepts new connections."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self.stop()
        self._listener.close()

    def _serve_requests(self, since: float) -> None:
        """Answer requests one at a time, in a thread, until stopped; the event loop hangs ``since`` a time."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while not self._stopping.is_set():
            if poll.poll(POLL_INTERVAL * 1000):
                with suppress(OSError), self._listener.accept()[0] as connection:
                    connection.settimeout(self._timeout_s)
                    silence = time.monotonic() - since
                    if self._context is None:
                        self._answer_request(connection, silence)
                    else:
                        with self._context.wrap_socket(connection, server_side=True) as encrypted:
                            self._answer_request(encrypted, silence)

    def _answer_request(self, connection: socket.socket, silence: float) -> None:
        """Read a request, and answer that the daemon has hung for ``silence`` seconds."""
        end, request = time.monotonic() + self._timeout_s, b""
        while b"\r\n\r\n" not in request and len(request) < MAX_REQUEST_SIZE and time.monotonic() < end:
            if not (data := connection.recv(8192)):
                return
            request += data
        body = _build_problem(silence)
        head = HEAD.format(length=len(body)).replace("\n", "\r\n").encode()
        connection.sendall(head + (b"" if request.startswith(b"HEAD ") else body))
        connection.shutdown(socket.SHUT_WR)
        # Unread data would reset the connection before the client reads the answer.
        while time.monotonic() < end and connection.recv(8192):
            pass


def _build_problem(silence: float) -> bytes:
    """Return the body of the answer, which has the fields of ``/readyz`` as well."""
    reason = f"the daemon's loop has not moved for {silence:.0f} s"
    answer = {
        "type": "about:blank",
        "title": "Service Unavailable",
        "status": 503,
        "code": ProblemCode.NOT_READY,
        "detail": reason,
        "field": "",
        "value": None,
        "hint": "its log says where it hangs; a service manager with a watchdog starts it again",
        "ready": False,
        "checks": [{"name": "engine", "cluster": None, "ok": False, "needed": True, "reason": reason}],
    }
    return json.dumps(answer).encode()
