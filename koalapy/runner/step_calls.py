"""Receive the calls of ``mpirun`` from a job's script, by a socket in the runner's folder."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
from collections.abc import Callable

from koalapy.runner.link import Loop
from koalapy.runner.processes import parent_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SOCKET = "calls"
MAX_CALLS = 256
"""Calls that run or wait at the same time; further ones are rejected."""
MAX_REQUEST_SIZE = 4 * 1024 * 1024
SIGNALS = ("TERM", "INT", "HUP", "USR1", "USR2", "CONT")
"""Signals that a call passes to its program."""


class Call:
    """One call of ``mpirun``: its request, the descriptors of its output, and the answer."""

    def __init__(self, loop: Loop, connection: socket.socket, calls: Calls) -> None:
        self._loop, self._connection, self._calls = loop, connection, calls
        self._incoming = b""
        self.outputs: tuple[int, int] | None = None
        """The caller's standard output and error."""
        self.on_signal: Callable[[int], None] | None = None
        self.on_gone: Callable[[], None] | None = None
        """Called once if the caller ends before the program."""
        self._is_read = False
        loop.watch(connection.fileno(), self._read)

    def say(self, line: str) -> None:
        """Print a line on the caller's standard error."""
        self._send({"say": line[:4000]})

    def finish(self, code: int) -> None:
        """Close the call's output, then let it end with an exit code."""
        self._close_outputs()
        self._send({"code": code})
        self.close()

    def close(self) -> None:
        if self._connection.fileno() >= 0:
            self._loop.forget(self._connection.fileno())
            self._connection.close()
            self._close_outputs()
            self._calls.forget_call(self)

    def _close_outputs(self) -> None:
        for file in self.outputs or ():
            os.close(file)
        self.outputs = None

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message, or drop it if the caller takes none."""
        try:
            self._connection.send(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def _read(self, _events: int) -> None:
        """Read a request with its descriptors, and later signals. Close a call that has ended or is invalid."""
        try:
            if self.outputs is None and not self._is_read:
                data, files, _, _ = socket.recv_fds(self._connection, 65536, 2)
                for file in files:
                    os.set_inheritable(file, False)
                self.outputs = (files[0], files[1]) if len(files) == 2 else None
            else:
                data = self._connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        try:
            for line in lines:
                self._handle_line(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self.say(f"koala: mpirun sent an invalid request: {error}")
            self.finish(1)
            return
        if not data or len(self._incoming) > MAX_REQUEST_SIZE:
            gone, self.on_gone = self.on_gone, None
            self.close()
            if gone is not None:
                gone()

    def _handle_line(self, message: dict[str, Any]) -> None:
        if not self._is_read:
            self._is_read = True
            self._calls.handle(self, message)
        elif message["signal"] in SIGNALS and self.on_signal is not None:
            self.on_signal(getattr(signal, f"SIG{message['signal']}"))


class Calls:
    """A socket in a folder, at which processes of this job call ``mpirun``."""

    def __init__(self, loop: Loop, folder: str, handle: Callable[[Call, dict[str, Any]], None]) -> None:
        self._loop, self.handle = loop, handle
        self._calls: set[Call] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._listener.bind(f"/proc/self/fd/{opened}/{SOCKET}")  # a path of a socket has at most 107 characters
        finally:
            os.close(opened)
        self._listener.listen(MAX_CALLS)
        loop.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for call in list(self._calls):
            call.close()

    def forget_call(self, call: Call) -> None:
        self._calls.discard(call)

    def _accept(self, _events: int) -> None:
        """Accept a call from a process of this job; reject others, and calls beyond ``MAX_CALLS``."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setblocking(False)
        call = Call(self._loop, connection, self)
        self._calls.add(call)
        if not is_descendant(peer_of(connection)):
            call.say("koala: mpirun was called by a process that is not of this job")
            call.finish(1)
        elif len(self._calls) > MAX_CALLS:
            call.say(f"koala: more than {MAX_CALLS} calls of mpirun run or wait: wait for some to end")
            call.finish(1)


def peer_of(connection: socket.socket) -> int:
    """Return the process id of the other side of a connection, as the kernel knows it; 0 if it is not visible here."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def is_descendant(pid: int) -> bool:
    """Return whether a process is below this one."""
    while pid > 1 and pid != os.getpid():
        pid = parent_of(pid)
    return pid == os.getpid()
