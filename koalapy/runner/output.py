"""Keep the program's output until the agent acknowledges it, in memory and in files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from koalapy.runner.session import FILE_TAG_LENGTH, open_file, seal_file

CHUNK = 48 * 1024
WINDOW = 256 * 1024
BLOCK = 1024 * 1024
MEMORY = 4 * BLOCK
SPILL_LIMIT = 64 * 1024 * 1024


class Block:
    """A range of the output, held in memory, in a file, or in both."""

    __slots__ = ("data", "path", "size", "start")

    def __init__(self, start: int) -> None:
        self.start, self.size = start, 0
        self.data: bytearray | None = bytearray()
        self.path = ""

    @property
    def end(self) -> int:
        return self.start + self.size

    def spill(self, path: str, secret: bytes) -> None:
        """Move the data to a file; keep it in memory if the disk is full."""
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError:
            return
        try:
            remaining = memoryview(seal_file(secret, os.path.basename(path), self.data or bytearray()))
            while remaining:
                remaining = remaining[os.write(file, remaining) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            return
        finally:
            os.close(file)
        self.path, self.data = path, None

    def load(self, secret: bytes) -> bytearray:
        """Return the bytes, or a message of that length if the file is lost or was changed."""
        if self.data is None:
            try:
                with open(self.path, "rb") as file:
                    sealed = file.read(self.size + FILE_TAG_LENGTH)
                data = open_file(secret, os.path.basename(self.path), sealed)
            except (OSError, ValueError) as error:
                data = f"\nkoala: {self.size} bytes of output are lost: cannot read {self.path}: {error}\n".encode()
            self.data = bytearray(data[: self.size].ljust(self.size, b"\n"))
        return self.data

    def drop(self) -> None:
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


class Output:
    """The program's output from the first byte that the agent has not acknowledged.

    It is kept in blocks, all but two of which are in files ``SPILL.OFFSET``.
    """

    def __init__(
        self,
        spill: str,
        secret: bytes,
        *,
        chunk: int = CHUNK,
        window: int = WINDOW,
        block: int = BLOCK,
        memory: int = MEMORY,
        spill_limit: int = SPILL_LIMIT,
    ) -> None:
        """``secret`` authenticates the files. All sizes are bytes."""
        self._chunk, self._window, self._block = chunk, window, block
        self._memory, self._spill_limit = memory, spill_limit
        self.start = self.sent = self.total = 0
        self._blocks: list[Block] = []
        self._spill, self._secret = spill, secret

    @property
    def full(self) -> bool:
        """Whether the program must wait, since the agent is slow or unreachable and the space is used up."""
        in_memory = sum(len(block.data) for block in self._blocks if block.data)
        return self.total - self.start > self._spill_limit or in_memory > self._memory

    def append(self, data: bytes) -> None:
        """Add new output of the program at the end. Write full blocks to files, except the first block."""
        if not self._blocks or self._blocks[-1].data is None or self._blocks[-1].size >= self._block:
            self._blocks.append(Block(self.total))
        last = self._blocks[-1]
        last.data += data  # type: ignore[operator]
        last.size += len(data)
        self.total += len(data)
        for block in self._blocks[1:]:
            if block.size >= self._block:
                self._spill_block(block)

    def save(self) -> None:
        """Write all unacknowledged output to files, as far as the disk has space, to outlive this process."""
        for block in self._blocks:
            self._spill_block(block)

    def _spill_block(self, block: Block) -> None:
        if block.data is not None and not block.path:
            block.spill(f"{self._spill}.{block.start}", self._secret)

    def acknowledge(self, offset: int) -> None:
        if offset <= self.start:
            return
        while self._blocks and self._blocks[0].end <= offset:
            self._blocks.pop(0).drop()
        self.start, self.sent = offset, max(self.sent, offset)

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, data) to send now: up to ``window`` bytes beyond the acknowledged output."""
        while self.sent < min(self.total, self.start + self._window):
            block = next(block for block in self._blocks if block.end > self.sent)
            offset, begin = self.sent, self.sent - block.start
            data = bytes(block.load(self._secret)[begin : begin + self._chunk])
            self.sent += len(data)
            yield offset, data
