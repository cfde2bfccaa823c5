"""Streams of bytes between clients and this node: terminals of the job's user, and the program's standard input.

Each side sends at most ``STREAM_WINDOW`` bytes beyond those that the other has used, so that a slow terminal or program
fills no memory and delays no other message.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import selectors
import signal

from koalapy.runner.exec_guard import OPENED_SUFFIX
from koalapy.runner.processes import Processes, find_program, require_program, signal_and_continue
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from koalapy.runner.connections import Loop

STREAM_WINDOW = 256 * 1024
"""Bytes of a stream that may be under way in one direction."""
STREAM_PIECE = 16 * 1024
"""Bytes of one message."""
MAX_NODE_STREAMS = 32
"""Streams of one node."""
HANGUP_GRACE = 5.0
"""Seconds from the hangup of a terminal to the end of its shell by force."""
DEFAULT_ROWS, DEFAULT_COLUMNS = 24, 80
END_OF_FILE = b"\x04"
END_OF_FILE_INTERVAL = 1.0
"""Seconds between two end-of-file characters: one that comes while the shell starts is lost when it sets its modes."""
LINE_ENDS = (b"\n", b"\r")
OPENED_INTERVAL = 0.1
"""Seconds between two checks whether the program has opened its standard input."""
SHELLS = ("/bin/bash", "/bin/sh")
NO_SHELLS = ("nologin", "false")
ATTACH_TERMINAL = 'exec "$@" <>"$0" >&0 2>&0'
"""Shell command that makes the terminal ``$0`` the controlling one: a session's leader gets the first that it opens."""


class Inlet:
    """Bytes of a client on their way to a file of this node, in order and each once."""

    def __init__(self, loop: Loop, file: int, report: Callable[[int], None], end: Callable[[], None]) -> None:
        """``report`` is called with the number of bytes that the file has taken (``used``).

        ``end`` is called once, when the file has taken the last byte.
        """
        self._loop, self._file, self._report, self._end = loop, file, report, end
        self.received = self.used = self._reported = 0
        self._pending = bytearray()
        self._is_last = self._has_ended = self._is_broken = False

    def receive(self, offset: int, data: bytes, *, is_last: bool) -> None:
        """Add a piece. Ignore bytes received before. Raise ``ValueError`` for a gap or too many bytes."""
        new = data[max(0, self.received - offset) :]
        if offset > self.received or len(self._pending) + len(new) > STREAM_WINDOW:
            raise ValueError("the client has sent more than it was allowed to")
        self._pending += new
        self.received += len(new)
        self._is_last |= is_last
        self.write()

    def write(self, _events: int = 0) -> None:
        """Write as much as the file takes now, and watch it for the rest. Discard what a closed file cannot take."""
        while self._pending and not self._is_broken:
            try:
                written = os.write(self._file, self._pending[:STREAM_PIECE])
            except BlockingIOError:
                break
            except OSError:  # the program has closed its standard input
                self._is_broken = True
            else:
                del self._pending[:written]
        if self._is_broken:
            self._pending.clear()
        self.used = self.received - len(self._pending)
        if self.used > self._reported and (not self._pending or self.used - self._reported >= STREAM_WINDOW // 4):
            self._reported = self.used
            self._report(self.used)
        if self._pending:
            self._loop.watch(self._file, self.write, selectors.EVENT_WRITE)
            return
        self._loop.forget(self._file)
        if self._is_last and not self._has_ended:
            self._has_ended = True
            self._end()


class Terminal:
    """A pseudo-terminal of this node with a shell, and its connection to a client."""

    def __init__(self, loop: Loop, send: Callable[..., None], order: dict[str, Any]) -> None:
        """``send`` sends a message of this stream, given its type and its fields. Raise ``OSError``."""
        self._loop, self._send, self.name = loop, send, str(order["stream"])
        self._master, self.slave = os.openpty()
        os.set_blocking(self._master, False)
        # Bytes are written by a duplicate, since a selector has one callback for each file.
        self._writing = os.dup(self._master)
        self._inlet = Inlet(
            loop, self._writing, lambda offset: send("stream_credit", offset=offset), self._type_end_of_file
        )
        self._is_line_start = True
        """Whether the last byte of input has ended a line."""
        self._sent, self._credit = 0, STREAM_WINDOW
        self._code: int | None = None
        self.pid = 0
        self.resize(order["rows"], order["columns"])

    def start(self, processes: Processes, command: list[str], environment: dict[str, str]) -> None:
        """Start a command as the leader of a new session, with this as its terminal. Raise ``OSError``."""
        argv = ["/bin/sh", "-c", ATTACH_TERMINAL, os.ttyname(self.slave), *command]
        self.pid = processes.start(argv, environment, self.slave)
        self._loop.watch(self._master, self._read)

    def resize(self, rows: int, columns: int) -> None:
        """Set the size, of which 0 means unknown. The kernel tells the program in the foreground."""
        import fcntl
        import struct
        import termios

        size = struct.pack("HHHH", rows or DEFAULT_ROWS, columns or DEFAULT_COLUMNS, 0, 0)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def receive(self, offset: int, data: bytes, *, is_last: bool) -> None:
        """Type bytes of the client into the terminal; after the last ones, its end-of-file character."""
        self._is_line_start = data.endswith(LINE_ENDS) if data else self._is_line_start
        self._inlet.receive(offset, data, is_last=is_last)

    def _type_end_of_file(self) -> None:
        """End the input, again and again; the first of two characters would end an incomplete line only."""
        with contextlib.suppress(OSError):  # the terminal takes no more bytes now
            os.write(self._writing, END_OF_FILE if self._is_line_start else END_OF_FILE * 2)
        self._loop.set_alarm(f"end-{self.name}", END_OF_FILE_INTERVAL, self._type_end_of_file)

    def grant(self, offset: int) -> None:
        """Allow output up to the window after ``offset``, which the client has used."""
        self._credit = max(self._credit, min(offset, self._sent) + STREAM_WINDOW)
        self._loop.watch(self._master, self._read)
        if self._code is not None:  # without more output, no event follows
            self._read(0)

    def child_ended(self, code: int) -> None:
        """Send the rest of the output, then the end with the shell's exit code."""
        self._code = code if code >= 0 else 128 - code
        self._read(0)

    def _read(self, _events: int) -> None:
        """Send output that the window allows. Without more output of an ended shell, end the stream."""
        try:
            data = os.read(self._master, min(STREAM_PIECE, self._credit - self._sent))
        except BlockingIOError:
            data = b""
        if data:
            self._send("stream_data", offset=self._sent, data=base64.b64encode(data).decode())
            self._sent += len(data)
        if self._sent >= self._credit:
            self._loop.forget(self._master)
        elif self._code is not None and not data:
            self.close()
            self._send("stream_end", code=self._code)
        elif self._code is not None:
            self._loop.set_alarm(f"drain-{self.name}", 0.0, lambda: self._read(0))

    @property
    def is_closed(self) -> bool:
        return self._master < 0

    def close(self) -> None:
        """Hang up: the kernel signals the processes in the foreground and the shell, which signals those it started."""
        if self._master < 0:
            return
        # Once only: after a second signal bash ends without those. The kernel signals no shell without its terminal.
        if self.pid and self._code is None and not os.tcgetpgrp(self._master):
            signal_and_continue(self.pid, signal.SIGHUP)
        for alarm in ("drain", "end"):
            self._loop.cancel_alarm(f"{alarm}-{self.name}")
        for file in (self._master, self._writing, self.slave):
            self._loop.forget(file)
            os.close(file)
        self._master = -1


class ProgramInput:
    """The standard input of the job's program, a pipe to which one client at a time writes."""

    def __init__(self, loop: Loop, send: Callable[..., None], path: str) -> None:
        """``send`` sends a message of the present stream, given the stream, its type and its fields.

        ``path``: the FIFO to create, if the program does not inherit the pipe. Its reader creates a file with this name
        and ``OPENED_SUFFIX``.
        """
        self._loop, self._send, self._path = loop, send, path
        if path:
            os.mkfifo(path, 0o600)
            flags = os.O_NONBLOCK | os.O_CLOEXEC
            self.reading, self._writing = os.open(path, os.O_RDONLY | flags), os.open(path, os.O_WRONLY | flags)
        else:
            self.reading, self._writing = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._writing, False)
        self.stream = ""
        self._inlet = Inlet(loop, self._writing, self._report, self._close_when_read)

    def attach(self, stream: str, node: str) -> None:
        """Let a stream write from now on; an earlier one ends."""
        if self.stream:
            self._send(self.stream, "stream_end", error="another client sends the program's input")
        self.stream = stream
        self._send(stream, "stream_opened", node=node, used=self._inlet.used)

    def receive(self, offset: int, data: bytes, *, is_last: bool) -> None:
        """Add a piece of input. Close the pipe after the last one."""
        if self._writing >= 0:
            self._inlet.receive(offset, data, is_last=is_last)

    def close_reading(self) -> None:
        """Close the reading end once the program has opened it, so that the end of the program is noticed."""
        if self._path and not os.path.exists(f"{self._path}{OPENED_SUFFIX}"):
            self._loop.set_alarm("input-opened", OPENED_INTERVAL, self.close_reading)
            return
        if self.reading >= 0:
            os.close(self.reading)
            self.reading = -1

    def _close_when_read(self) -> None:
        """Close the pipe, so that the program reads the end of the file, once it has the other end."""
        self.close_reading()
        if self.reading >= 0:
            self._loop.set_alarm("input-closed", OPENED_INTERVAL, self._close_when_read)
        else:
            self.close()

    def close(self) -> None:
        """Close the pipe at once."""
        self._loop.cancel_alarm("input-opened")
        self._loop.cancel_alarm("input-closed")
        if self.reading >= 0:
            os.close(self.reading)
            self.reading = -1
        if self._writing >= 0:
            self._loop.forget(self._writing)
            os.close(self._writing)
            self._writing = -1

    def _report(self, taken: int) -> None:
        if self.stream:
            self._send(self.stream, "stream_credit", offset=taken)


class Streams:
    """The streams of this node by their names."""

    def __init__(
        self,
        loop: Loop,
        processes: Processes,
        send: Callable[[dict[str, Any]], None],
        node: str,
        grace: float = HANGUP_GRACE,
    ) -> None:
        """``send`` sends a message to the agent; ``grace``: seconds from a hangup to the end of a shell by force."""
        self._loop, self._processes, self._send_message, self._node = loop, processes, send, node
        self._grace = grace
        self._terminals: dict[str, Terminal] = {}
        self.shells: dict[int, Terminal] = {}
        """Terminals by the process id of their shell, until that has ended."""
        self.input: ProgramInput | None = None

    def make_input(self, path: str) -> None:
        """Create the pipe of the program's standard input, with a name if a path is given. Raise ``OSError``."""
        self.input = ProgramInput(self._loop, self._send, path)

    def receive(self, message: dict[str, Any], environment: dict[str, str] | None) -> None:
        """Act on a message of a client. ``environment``: that of the program, None while it does not run."""
        name, kind = str(message["stream"]), message["type"]
        try:
            is_input = self.input is not None and self.input.stream == name
            target = self.input if is_input else self._terminals.get(name)
            if kind == "stream_open":
                self._open(name, message, environment)
            elif target is not None and kind == "stream_data":
                data = base64.b64decode(message["data"])
                target.receive(message["offset"], data, is_last=message["is_last"])
            elif target is not None and kind == "stream_end":
                self._end(name)  # a program goes on: the client of its input may come back
            elif isinstance(target, Terminal) and kind == "stream_credit":
                target.grant(message["offset"])
            elif isinstance(target, Terminal) and kind == "stream_resize":
                target.resize(message["rows"], message["columns"])
        except Failure as failure:
            self._end(name, failure.message)
        except (OSError, ValueError, LookupError, TypeError, binascii.Error) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._end(name, f"the stream failed on {self._node}: {reason}")

    def child_ended(self, pid: int, code: int) -> bool:
        """Handle the end of a shell; return False for another process."""
        terminal = self.shells.pop(pid, None)
        if terminal is None:
            return False
        self._loop.cancel_alarm(f"hangup-{pid}")
        if terminal.is_closed:
            # Not all shells hang up their background processes: bash may read the end of its input first.
            self._processes.end_sessions({pid}, signal.SIGHUP)
        else:
            terminal.child_ended(code)
        return True

    def close_terminals(self, reason: str) -> None:
        """Hang up all terminals, and tell their clients why."""
        for name in list(self._terminals):
            self._end(name, reason)

    def on_disconnect(self) -> None:
        """Hang up all terminals, since their clients cannot be reached without the agent."""
        self.close_terminals("the connection to the agent was lost")

    def close(self, reason: str) -> None:
        """Hang up all terminals and close the program's standard input."""
        self.close_terminals(reason)
        if self.input is not None:
            self.input.close()

    def _open(self, name: str, order: dict[str, Any], environment: dict[str, str] | None) -> None:
        """Open a terminal, or attach a client to the program's standard input. Raise ``Failure``."""
        if environment is None:
            raise Failure(f"the job's program does not run on {self._node}: wait until it has started")
        if order["kind"] == "input":
            if self.input is None:
                raise Failure("the program reads no input of clients: submit it with koala run")
            self.input.attach(name, self._node)
            return
        if len(self.shells) >= MAX_NODE_STREAMS:
            raise Failure(f"{self._node} has {MAX_NODE_STREAMS} terminals already: end one of them")
        command = list(order["command"]) or [login_shell(environment)]
        command[0] = require_program(command[0], environment)
        terminal = Terminal(self._loop, lambda kind, **fields: self._send(name, kind, **fields), order)
        self._terminals[name] = terminal
        term = order["term"] or "dumb"
        terminal.start(self._processes, command, {**environment, "TERM": term})
        self.shells[terminal.pid] = terminal
        self._send(name, "stream_opened", node=self._node, used=0)

    def _end(self, name: str, reason: str = "") -> None:
        """End a stream for a reason, empty if its client has ended it. Kill its shell later if it ignores that."""
        if reason:
            self._send(name, "stream_end", error=reason)
        if self.input is not None and self.input.stream == name:
            self.input.stream = ""
        terminal = self._terminals.pop(name, None)
        if terminal is None:
            return
        terminal.close()
        if (pid := terminal.pid) in self.shells:
            self._loop.set_alarm(f"hangup-{pid}", self._grace, lambda: signal_and_continue(pid, signal.SIGKILL))

    def _send(self, stream: str, kind: str, **fields: Any) -> None:
        if kind == "stream_end" and (terminal := self._terminals.get(stream)) and terminal.is_closed:
            del self._terminals[stream]
        self._send_message({"t": "stream", "message": {"type": kind, "stream": stream, **fields}})


def login_shell(environment: dict[str, str]) -> str:
    """Return the shell of this account, or another one if it has none."""
    import pwd

    try:
        shell = pwd.getpwuid(os.geteuid()).pw_shell
    except KeyError:
        shell = ""
    candidates = (*((shell,) if os.path.basename(shell) not in NO_SHELLS else ()), *SHELLS)
    return next((path for path in candidates if path and find_program(path, environment)), SHELLS[-1])
