"""A component's output as one stream of bytes, put together from its nodes' streams."""

import os
from pathlib import Path

PARTIAL = 64 * 1024
"""Bytes of an unfinished line that are held back at most, waiting for its end."""
CACHE = 64 * 1024


class OutputLog:
    """Appends what nodes send, line by line where there are several, and remembers how much it has from each.

    With several nodes a second file says which node each piece came from, so that after a crash every node's stream
    goes on exactly where it was.
    """

    def __init__(self, folder: Path, nodes: int) -> None:
        self._path, self._index = folder / "output", folder / "output.index"
        self._held = [b""] * nodes
        self.received = [0] * nodes
        """Bytes taken from each node's stream."""
        self.total = 0
        self.sent = 0
        self.acknowledged = 0
        self._cache: bytes | None = b""

    @property
    def pending(self) -> bool:
        return self.sent < self.total

    def recover(self) -> None:
        """Read from the files how far things had come."""
        self._cache = None
        try:
            self.total = self._path.stat().st_size
        except FileNotFoundError:
            return
        if len(self.received) == 1:
            self.received[0] = self.total
            return
        pieces = [line.split() for line in self._index.read_text().splitlines(keepends=True) if line.endswith("\n")]
        for node, size in pieces:
            self.received[int(node)] += int(size)
        os.truncate(self._path, min(self.total, sum(self.received)))
        self.total = sum(self.received)

    def take(self, node: int, offset: int, data: bytes) -> int:
        """Add a piece of a node's stream; returns how far that stream may be forgotten by its sender."""
        held = self._held[node]
        known = self.received[node] + len(held)
        if offset > known:
            return self.received[node]
        held += data[known - offset :]
        whole = len(held) if len(self.received) == 1 or len(held) > PARTIAL else held.rfind(b"\n") + 1
        self._held[node] = held[whole:]
        self._append(node, held[:whole])
        return self.received[node]

    def finish(self, node: int) -> None:
        """No more will come from that node: its last line need not end."""
        held, self._held[node] = self._held[node], b""
        self._append(node, held)

    def add(self, line: bytes) -> None:
        """A line of our own, after the last of the nodes'."""
        self._append(0, line)

    def break_off(self, node: int) -> None:
        """The connection is gone; what was held back will be sent again."""
        self._held[node] = b""

    def read(self, offset: int, size: int) -> bytes:
        if self._cache is not None:
            return self._cache[offset : offset + size]
        with self._path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    def acknowledge(self, offset: int) -> None:
        self.acknowledged = min(self.total, max(self.acknowledged, offset))
        self.sent = max(self.sent, self.acknowledged)

    def _append(self, node: int, data: bytes) -> None:
        if not data:
            return
        _append_to(self._path, data)
        if len(self.received) > 1:
            _append_to(self._index, f"{node} {len(data)}\n".encode())
        if self._cache is not None:
            self._cache = self._cache + data if self.total + len(data) <= CACHE else None
        self.received[node] += len(data)
        self.total += len(data)


def _append_to(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
