"""The Unix socket by which the daemon controls the hub, and an agent its head: lines of JSON.

Each connection that changes something begins with ``state``: the keys and the complete list of live attempts. Then
``add`` and ``remove`` change the list. ``metrics`` and ``describe`` need no state and change nothing. Each request may
have an ``id``, which its answer repeats: ``done``, ``error`` or ``metrics``. The answers to a state and to ``describe``
have the attempts that have ``lost`` streams, and of a head ``hub_connected`` and its ``certificate``; that to
``describe`` also has the numbers of open ``files`` needed and allowed. After its state a connection receives events:
``lost``, ``removed``, and ``hub`` of a head.
"""

import os
import socket
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from koalapy.relay.attempts import files_needed
from koalapy.relay.relay import Relay
from koalapy.runner.connections import LineConnection, Loop, Refused, Side, encode, parse_line
from koalapy.runner.folders import short_socket_path
from koalapy.runner.relay_streams import Listener
from koalapy.system.process import count_open_files, get_peer

MAX_REQUEST = 64 * 1024 * 1024
MAX_ANSWERS = 64 * 1024 * 1024
"""Bytes that a connection may leave unread before it is closed."""


class ControlServer:
    """The control socket of one relay."""

    def __init__(self, loop: Loop, path: Path, relay: Relay) -> None:
        """Listen at a path, replacing the socket of an earlier process. Raise ``OSError``."""
        self._loop, self._relay, self._path = loop, relay, path
        self._connections: dict[LineConnection, bool] = {}
        """Whether each connection has sent its state."""
        if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
            path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        former_mask = os.umask(0o177)
        try:
            with short_socket_path(path) as short_path:
                listener.bind(short_path)
            listener.listen(16)
        except BaseException:
            listener.close()
            raise
        finally:
            os.umask(former_mask)
        self._listener = Listener(loop, listener, lambda connection, _: self._accept(connection), lambda _: None)
        self._listener.resume()
        relay.on_event = self._send_event

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()
        self._path.unlink(missing_ok=True)

    def _accept(self, connection: socket.socket) -> None:
        if get_peer(connection).uid not in (0, os.getuid()):
            connection.close()
            return
        lines = LineConnection(
            self._loop,
            Side(connection),
            self._relay.pool.large,
            self._receive_request,
            lambda connection, _error: self._connections.pop(connection, None),
            MAX_REQUEST,
            MAX_ANSWERS,
        )
        self._connections[lines] = False

    def _receive_request(self, connection: LineConnection, line: bytes) -> None:
        request_id = None
        try:
            request = parse_line(line)
            request_id = request.get("id")
            answer = self._handle_request(connection, request)
        except (Refused, ValueError) as error:
            answer = {"t": "error", "why": str(error)}
        connection.send(encode({**answer, "id": request_id}).encode() + b"\n")

    def _handle_request(self, connection: LineConnection, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request. Raise ``Refused`` or ``ValueError``."""
        kind = request["t"]
        if kind == "metrics":
            return {"t": "metrics", "text": generate_latest(Exposition(self._relay)).decode()}
        if kind == "describe":
            return {
                **self._describe(),
                "files": {"needed": files_needed(self._relay.limits), "allowed": count_open_files()[1]},
            }
        if kind == "state":
            had_state, self._connections[connection] = self._connections[connection], True
            try:
                self._relay.replace_state(request)  # it reports removed attempts
            except BaseException:
                self._connections[connection] = had_state
                raise
            return self._describe()
        if not self._connections.get(connection):
            raise Refused("no-state", f"{kind} came before the state: send all keys and live attempts first")
        if kind == "add":
            if not isinstance(entry := request.get("attempt"), dict):
                raise ValueError("add needs an attempt, an object")
            self._relay.add_attempt(entry)
        elif kind == "remove":
            self._relay.remove_attempt(str(request.get("attempt")))
        else:
            raise Refused("malformed", f"there is no request {kind}; send state, add, remove, describe or metrics")
        return {"t": "done"}

    def _describe(self) -> dict[str, Any]:
        return {"t": "done", "lost": self._relay.lost, **self._relay.describe()}

    def _send_event(self, event: dict[str, Any]) -> None:
        line = encode(event).encode() + b"\n"
        for connection, has_state in list(self._connections.items()):
            if has_state:
                connection.send(line)


Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class Exposition:
    """The metrics of a relay."""

    relay: Relay

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their samples; the Prometheus client calls this to encode them."""
        relay, attempts = self.relay, self.relay.attempts.values()
        open_files, max_files = count_open_files()
        yield _gauge("streams", "Open streams.", [((), len(relay.streams))])
        yield _counter("streams", "Streams since the start.", [((), relay.total_streams)])
        yield _gauge("streams_limit", "Maximum open streams.", [((), relay.limits.streams)])
        yield _gauge("children", "Connected nodes or heads.", [((), len(relay.children))])
        yield _gauge("pipes", "Open pipes.", [((), relay.pool.open_pipes)])
        yield _gauge("open_files", "Open files.", [((), open_files)])
        yield _gauge("open_files_limit", "Maximum open files.", [((), max_files)])
        refusals = [((reason,), count) for reason, count in sorted(relay.refusals.items())]
        yield _counter("refused", "Refused streams and connections, by reason.", refusals, "reason")
        streams = [((attempt.token,), attempt.stream_count) for attempt in attempts]
        yield _gauge("attempt_streams", "Open streams of a live attempt.", streams, "attempt")
        moved = [
            ((attempt.token, *pair), count[0]) for attempt in attempts for pair, count in attempt.bytes_moved.items()
        ]
        text = "Bytes that a live attempt has sent from one cluster to another."
        yield _counter("attempt_bytes", text, moved, "attempt", "from", "to")


def _gauge(name: str, text: str, samples: Iterable[Sample], *labels: str) -> Metric:
    return _with(GaugeMetricFamily(f"koala_relay_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, samples: Iterable[Sample], *labels: str) -> Metric:
    return _with(CounterMetricFamily(f"koala_relay_{name}", text, labels=labels), samples)


def _with(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    for values, value in samples:
        family.add_metric(values, value)
    return family
