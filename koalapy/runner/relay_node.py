"""Relay the streams of one node: a child of its runner, started as ``python -I -S relay_node.py``.

The runner writes one line of JSON, the settings, to its standard input, and keeps the input open; at its end the relay
ends. The relay writes a line of JSON for each event to its standard output: ``ready``, ``taken`` (a port that another
process uses), ``lost`` (the head's relay is gone, so the relay ends) and ``refused``.

A program's connection to a listener is passed to the head, which passes it to the target node. A stream from another
node becomes a connection to a port of this node.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import socket
import struct
import sys

if not __package__:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from koalapy.runner.connections import (
    HEARTBEAT_INTERVAL_S,
    Credentials,
    Loop,
    ParentLink,
    Side,
    connect_side,
    describe_error,
    encode,
    open_listener,
    reset_socket,
)
from koalapy.runner.processes import forbid_dumps
from koalapy.runner.relay_protocol import MAX_NODES, Ranges, TokenBucket, get_number, get_stream, seal_line
from koalapy.runner.relay_streams import Listener, Pair, PipePool, resolve_host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLM_F_REQUEST = 1
NLMSG_ERROR = 2
ALL_STATES = 0xFFFFFFFF
NO_COOKIE = b"\xff" * 8
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI")
_UID_OFFSET = 4 + 48 + 12
"""Bytes of ``struct inet_diag_msg`` before the number of the account."""
_TABLE = "/proc/net/tcp"


class SocketOwners:
    """Answers which account owns a socket, by the kernel's netlink interface, or else by its table of sockets.

    Netlink takes 11 µs, the table 1 to 20 ms.
    """

    def __init__(self) -> None:
        self._netlink: socket.socket | None = None
        try:
            self._netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_SOCK_DIAG)
            self._netlink.settimeout(1.0)
        except OSError:
            pass

    def find_owner(self, local: tuple[str, int], remote: tuple[str, int]) -> int | None:
        """Return the number of the account that owns the IPv4 socket with these addresses; None without a socket."""
        if self._netlink is not None:
            try:
                return _ask_netlink(self._netlink, local, remote)
            except OSError:
                self.close()
        try:
            return _search_table(local, remote)
        except OSError:
            return None

    def close(self) -> None:
        if self._netlink is not None:
            self._netlink.close()
            self._netlink = None


def _ask_netlink(netlink: socket.socket, local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    ports = struct.pack(">HH", local[1], remote[1])
    addresses = b"".join(socket.inet_aton(host) + bytes(12) for host, _ in (local, remote))
    identity = ports + addresses + bytes(4) + NO_COOKIE
    request = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, ALL_STATES) + identity
    netlink.send(_HEADER.pack(_HEADER.size + len(request), SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + request)
    answer = netlink.recv(8192)
    kind, body = _HEADER.unpack_from(answer)[1], answer[_HEADER.size :]
    if kind == NLMSG_ERROR:
        number = -struct.unpack_from("=i", body)[0]
        if number == errno.ENOENT:
            return None
        raise OSError(number, os.strerror(number))
    # A listening socket also answers where no connected one exists.
    found_ports = struct.unpack_from(">HH", body, 4)
    if found_ports != (local[1], remote[1]):
        return None
    (owner, inode) = struct.unpack_from("=II", body, _UID_OFFSET)
    return int(owner) if inode else None


def _search_table(local: tuple[str, int], remote: tuple[str, int]) -> int | None:
    wanted = f" {_hex_address(local)} {_hex_address(remote)} ".encode()
    with open(_TABLE, "rb") as table:
        content = table.read()
    start = content.find(wanted)
    if start < 0:
        return None
    # The columns: local, remote, state, queues, timer, retransmissions, account, timeout, inode.
    fields = content[start : content.index(b"\n", start)].split()
    return int(fields[6]) if fields[8] != b"0" else None


def _hex_address(address: tuple[str, int]) -> str:
    number = struct.unpack("=I", socket.inet_aton(address[0]))[0]
    return f"{number:08X}:{address[1]:04X}"


CHECK_INTERVAL_S = 1.0
ACCEPT_RATE, ACCEPT_BURST = 500.0, 1000.0
"""New streams per second, and at once. Further ones wait."""
REFUSAL_INTERVAL_S = 1.0
"""Seconds between two reports of refused streams."""
BACKLOG = 1024
MAX_SETTINGS_LENGTH = 16 * 1024 * 1024


RESERVED_FILES = 64
"""Open files of a node's relay besides its listeners, with its first streams."""


class PortTaken(Exception):
    """Another process listens on a port of this node."""

    def __init__(self, address: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen at {address}:{port}: {reason}")
        self.port = port


class NodeSettings:
    """The settings that a runner gives to its relay. Raise ``KeyError``, ``TypeError`` or ``ValueError``."""

    def __init__(self, message: dict[str, Any]) -> None:
        self.attempt, self.node = str(message["attempt"]), int(message["node"])
        self.key = bytes.fromhex(message["key"])
        host, port = message["head"]
        self.head = str(host), int(port)
        self.listeners = [(str(a), int(f), int(t), int(n)) for a, f, t, n in message["listeners"]]
        """Address, first and last port to listen on, and the target node of the streams."""
        self.targets = [(Ranges([(f, t)]), str(a), str(s)) for f, t, a, s in message["targets"]]
        """Ports that streams may reach here, the address to connect to, and the address to connect from or nothing."""
        self.heartbeat = float(message.get("heartbeat", HEARTBEAT_INTERVAL_S))
        self.accept_rate = float(message.get("accept_rate", ACCEPT_RATE))
        self.accept_burst = float(message.get("accept_burst", ACCEPT_BURST))


class NodeRelay:
    """The relay of one node."""

    def __init__(
        self,
        loop: Loop,
        settings: NodeSettings,
        report: Callable[[dict[str, Any]], None],
        find_owner: Callable[[tuple[str, int], tuple[str, int]], int | None],
        account: int,
    ) -> None:
        """``report`` sends an event to the runner. ``account``: its processes may use the listeners."""
        self._loop, self._settings, self._report = loop, settings, report
        self._find_owner, self._account = find_owner, account
        self._pool = PipePool()
        self._listeners: list[Listener] = []
        self._pairs: set[Pair] = set()
        self._next_stream = 0
        self._bucket = TokenBucket(settings.accept_rate, settings.accept_burst, loop.time())
        self._head: ParentLink | None = None
        self._refusals: dict[str, int] = {}
        """Refused streams that are not reported yet, by reason."""
        self.has_ended = False

    @property
    def stream_count(self) -> int:
        return len(self._pairs)

    def start(self) -> None:
        """Listen, and connect to the head. Raise ``PortTaken``."""
        for address, first, last, target in self._settings.listeners:
            for port in range(first, last + 1):
                self._listeners.append(self._listen(address, port, target))
        try:
            self._settings.head = resolve_host(*self._settings.head)
            side = connect_side(*self._settings.head)
        except OSError as error:
            self._lose_head(f"cannot connect: {error.strerror}")
            return
        self._head = ParentLink(
            self._loop,
            side,
            self._pool.large,
            Credentials(self._settings.key, self._settings.attempt, self._settings.node),
            self._receive_message,
            lambda error: self._lose_head(describe_error(error)),
            interval=self._settings.heartbeat,
        )
        self._head.start()
        self._loop.set_alarm(f"relay-check-{id(self)}", CHECK_INTERVAL_S, self._check_control)

    def finish(self) -> None:
        """End at the runner's request: the head does not count the attempt as lost."""
        if self._head is not None:
            self._head.send({"t": "bye"})
        self.close()

    def close(self) -> None:
        """Reset all streams and close everything."""
        self.has_ended = True
        for alarm in ("relay-check", "relay-accept", "relay-refusals"):
            self._loop.cancel_alarm(f"{alarm}-{id(self)}")
        for listener in self._listeners:
            listener.close()
        for pair in list(self._pairs):
            pair.close(ConnectionResetError())
        if self._head is not None:
            self._head.close()
        self._pool.close()

    def _listen(self, address: str, port: int, target: int) -> Listener:
        try:
            listener = open_listener((address, port), BACKLOG)
        except OSError as error:
            raise PortTaken(address, port, error.strerror or str(error)) from error
        return Listener(
            self._loop,
            listener,
            lambda connection, peer: self._open_stream(connection, peer, (address, port), target),
            self._count_refusal,
            self._may_accept,
        )

    def _may_accept(self) -> bool:
        """Return whether a stream may be opened now; if not, pause all listeners until it may."""
        if self._bucket.take(self._loop.time()):
            return True
        for listener in self._listeners:
            listener.pause()
        self._loop.set_alarm(f"relay-accept-{id(self)}", self._bucket.wait_time(), self._resume_listeners)
        return False

    def _resume_listeners(self) -> None:
        for listener in self._listeners:
            listener.resume()

    def _open_stream(
        self, connection: socket.socket, peer: tuple[str, int], local: tuple[str, int], target: int
    ) -> None:
        """Pass a connection of a program on this node to the head."""
        owner = self._find_owner(peer, local)
        if owner != self._account:
            reset_socket(connection)
            account = "another machine" if owner is None else f"account {owner}"
            self._count_refusal(f"{account} may not use port {local[1]} of the relay")
            return
        self._next_stream += 1
        settings = self._settings
        line = {"t": "open", "attempt": settings.attempt, "from": settings.node, "stream": self._next_stream}
        try:
            up = connect_side(*settings.head)
        except OSError as error:
            reset_socket(connection)
            self._count_refusal(f"cannot connect to the head's relay: {error.strerror}")
            return
        self._start_pair(Side(connection), up, {**line, "to": target, "port": local[1]}, lambda _: None)

    def _start_pair(self, local: Side, up: Side, line: dict[str, Any], on_failure: Callable[[OSError], None]) -> None:
        """Join a local connection and one to the head, which begins with a line."""

        def forget(error: OSError | None) -> None:
            self._pairs.discard(pair)
            if error is not None:
                on_failure(error)

        stream_key = b"" if self._head is None else self._head.stream_key
        pair = Pair(self._loop, self._pool, (local, up), (seal_line(stream_key, line), b""), on_end=forget)
        self._pairs.add(pair)
        pair.start()

    def _receive_message(self, message: dict[str, Any]) -> None:
        """Handle a message of the head. Raise ``Refused`` if it is malformed."""
        if message["t"] == "welcome":
            self._resume_listeners()
            self._report({"t": "ready"})
        elif message["t"] == "dial":
            self._take_stream(message)

    def _take_stream(self, message: dict[str, Any]) -> None:
        """Connect a stream of another node to a port of this node. Raise ``Refused`` if the line is malformed."""
        attempt, source, stream = get_stream(message)
        port = get_number(message, "port", 1, 65535)
        name = {"attempt": attempt, "from": source, "stream": stream}
        target = next(((address, host) for ports, address, host in self._settings.targets if port in ports), None)
        if target is None or attempt != self._settings.attempt or source > MAX_NODES:
            self._refuse_dial(name, f"port {port} is not one of this node's ports")
            return
        try:
            local = connect_side(target[0], port, target[1])
        except OSError as error:
            self._refuse_dial(name, f"cannot connect to port {port}: {error.strerror}")
            return
        try:
            up = connect_side(*self._settings.head)
        except OSError as error:
            local.close(reset=True)
            self._refuse_dial(name, f"cannot connect to the head's relay: {error.strerror}")
            return

        def explain_failure(error: OSError) -> None:
            if local.events():  # it was never established
                self._refuse_dial(name, f"cannot connect to port {port}: {error.strerror}")

        self._start_pair(local, up, {"t": "take", **name, "node": self._settings.node}, explain_failure)

    def _refuse_dial(self, name: dict[str, Any], reason: str) -> None:
        if self._head is not None:
            self._head.send({"t": "refused", **name, "why": reason})
        self._count_refusal(reason)

    def _count_refusal(self, reason: str) -> None:
        if not self._refusals:
            self._loop.set_alarm(f"relay-refusals-{id(self)}", REFUSAL_INTERVAL_S, self._report_refusals)
        self._refusals[reason] = self._refusals.get(reason, 0) + 1

    def _report_refusals(self) -> None:
        for reason, count in list(self._refusals.items())[:10]:
            self._report({"t": "refused", "why": reason, "count": count})
        self._refusals.clear()

    def _check_control(self) -> None:
        self._loop.set_alarm(f"relay-check-{id(self)}", CHECK_INTERVAL_S, self._check_control)
        if self._head is not None:
            self._head.check()

    def _lose_head(self, reason: str) -> None:
        """Report that the head's relay is lost, and end all streams."""
        if not self.has_ended:
            self._report_refusals()
            host, port = self._settings.head
            self._report({"t": "lost", "why": f"the relay of the head at {host}:{port} is lost: {reason}"})
            self.close()


def main() -> int:
    """Run until the runner ends or the head's relay is lost. Return the exit code."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the runner ends it by the standard input
    forbid_dumps()
    text = sys.stdin.buffer.readline(MAX_SETTINGS_LENGTH)
    if not text:
        return 0
    settings = NodeSettings(json.loads(text))
    allowed = raise_file_limit()
    gc.freeze()

    def report(event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the end of the runner is noticed at the standard input
            os.write(sys.stdout.fileno(), encode(event).encode() + b"\n")

    needed = sum(last - first + 1 for _, first, last, _ in settings.listeners) + RESERVED_FILES
    if needed > allowed:
        why = f"its relay needs {needed} open files and may have {allowed}: raise the hard limit (ulimit -Hn) of jobs"
        report({"t": "lost", "why": why})
        return 1
    loop = Loop()
    owners = SocketOwners()
    relay = NodeRelay(loop, settings, report, owners.find_owner, os.getuid())
    loop.watch(sys.stdin.fileno(), lambda _: relay.finish())
    try:
        relay.start()
    except PortTaken as error:
        report({"t": "taken", "port": error.port, "why": str(error)})
        return 1
    while not relay.has_ended:
        loop.turn()
    return 0


def raise_file_limit() -> int:
    """Allow this process as many open files as the hard limit permits, and return that."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


if __name__ == "__main__":
    sys.exit(main())
