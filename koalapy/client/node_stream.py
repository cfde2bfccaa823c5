"""Streams between this client and nodes of a job, over WebSockets of the daemon."""

import json
from collections.abc import Mapping
from typing import Any, cast
from urllib.parse import SplitResult, urlencode

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from koalapy.client.http import Answer
from koalapy.system.tls import Trust

OPEN_TIMEOUT_S = 60.0
"""Limit for the daemon, the agent and the node to open a stream."""
CLOSE_TIMEOUT_S = 2.0


class StreamRejected(Exception):
    """The daemon has rejected the stream with a response."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class NodeStream:
    """An open stream. One thread may receive while others send."""

    def __init__(self, socket: ClientConnection) -> None:
        """Read the first message, which names the node. Raise ``OSError`` if the connection breaks."""
        self._socket = socket
        first = self.receive()
        self.opened: Mapping[str, Any] = first if isinstance(first, dict) else {}
        """``opened``: name of the node, ``cluster``, ``used``: bytes of input from earlier streams."""

    def receive(self) -> bytes | dict[str, Any]:
        """Wait for output of the node or a message of the daemon. Raise ``OSError`` if the connection breaks."""
        try:
            frame = self._socket.recv()
        except ConnectionClosed as error:
            raise ConnectionError(str(error)) from error
        return frame if isinstance(frame, bytes) else cast(dict[str, Any], json.loads(frame))

    def send_input(self, data: bytes) -> None:
        """Send bytes to the node. Raise ``OSError`` if the connection breaks."""
        self._send(data)

    def send_message(self, **fields: object) -> None:
        """Send a message to the daemon. Raise ``OSError`` if the connection breaks."""
        self._send(json.dumps(fields))

    def _send(self, frame: str | bytes) -> None:
        try:
            self._socket.send(frame)
        except ConnectionClosed as error:
            raise ConnectionError(str(error)) from error

    def close(self) -> None:
        self._socket.close()


def connect_stream(
    daemon: SplitResult,
    path: str,
    query: Mapping[str, Any],
    headers: Mapping[str, str],
    trust: Trust,
    *,
    by_proxy: bool,
) -> NodeStream:
    """Open a stream. Raise ``StreamRejected`` if the daemon rejects it, and ``OSError`` if it cannot be reached."""
    scheme, host = daemon.scheme.replace("http", "ws", 1), daemon.netloc.rpartition("@")[2]
    parameters = urlencode({name: value for name, value in query.items() if value not in (None, "", ())}, doseq=True)
    try:
        socket = connect(
            f"{scheme}://{host}{daemon.path.rstrip('/')}{path}?{parameters}",
            additional_headers=dict(headers),
            ssl=trust.create_context() if scheme == "wss" else None,
            compression=None,
            proxy=True if by_proxy else None,
            open_timeout=OPEN_TIMEOUT_S,
            close_timeout=CLOSE_TIMEOUT_S,
            max_queue=None,  # the credit bounds what waits
        )
    except InvalidStatus as error:
        response = error.response
        raise StreamRejected(
            Answer(response.status_code, cast(Any, response.headers), bytes(response.body or b""))
        ) from error
    except InvalidHandshake as error:
        raise ConnectionError(str(error)) from error
    return NodeStream(socket)
