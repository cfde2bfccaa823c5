"""The program's output on its way to the agent."""

from __future__ import annotations

import os
from collections.abc import Iterator

CHUNK = 48 * 1024
WINDOW = 256 * 1024
MEMORY = 1024 * 1024
SPILL_LIMIT = 256 * 1024 * 1024


class Output:
    """The program's output from the first byte the agent has not acknowledged: in memory, or in a file when long."""

    def __init__(self, spill: str) -> None:
        self.start = self.sent = self.total = 0
        self._memory = bytearray()
        self._path, self._file = spill, -1
        self._file_start = 0

    @property
    def full(self) -> bool:
        return self.total - self.start > SPILL_LIMIT

    def append(self, data: bytes) -> None:
        self.total += len(data)
        if self._file < 0 and len(self._memory) + len(data) > MEMORY:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._file_start = self.start
            data, self._memory = bytes(self._memory) + data, bytearray()
        if self._file < 0:
            self._memory += data
        while self._file >= 0 and data:
            data = data[os.write(self._file, data) :]

    def acknowledge(self, offset: int) -> None:
        if offset <= self.start:
            return
        if self._file < 0:
            del self._memory[: offset - self.start]
        self.start, self.sent = offset, max(self.sent, offset)
        if self._file >= 0 and self.start == self.total:
            os.close(self._file)
            os.unlink(self._path)
            self._file = -1

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """What may be sent now: a window's worth beyond what is acknowledged."""
        while self.sent < min(self.total, self.start + WINDOW):
            offset, size = self.sent, min(CHUNK, self.total - self.sent)
            if self._file >= 0:
                data = os.pread(self._file, size, offset - self._file_start)
            else:
                data = bytes(self._memory[offset - self.start : offset - self.start + size])
            self.sent += len(data)
            yield offset, data
