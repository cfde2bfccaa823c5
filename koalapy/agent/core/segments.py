"""One stream of bytes in files of bounded size, each of which can be read by itself.

A segment ``stream.OFFSET`` starts at that offset of the stream. It is a sequence of frames: a line with node, size and
checksum, then the bytes of that node. The first frame holds the size of each node's stream before the segment, so that
any other segment may be lost or dropped.
"""

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from koalapy.agent.core.spool import open_regular, read_regular

SEGMENT_SIZE = 1024 * 1024
"""Bytes after which a new segment begins."""
MAX_FRAME_SIZE = 1024 * 1024
MAX_SEGMENT = 64 * 1024 * 1024
"""Maximum bytes of a file. The agent writes none that is larger."""
STATE_FRAME = -1
"""Node number of the first frame, with each node's bytes before the segment."""
_NAME = re.compile(r"stream\.(0|[1-9]\d{0,17})", re.ASCII)
_HEADER = re.compile(rb"(-1|\d{1,7}) (\d{1,7}) ([0-9a-f]{8})\n")
MAX_HEADER_LENGTH = 32


@dataclass(slots=True)
class Segment:
    """A file of the stream. ``start`` and ``end`` are stream offsets; ``size`` is its bytes of whole frames."""

    start: int
    end: int
    path: Path
    size: int = 0


class Segments:
    """The stream of one folder. ``received`` holds each node's bytes and, last, those of the agent.

    Their sum is always ``total``, the end of the stream.
    """

    def __init__(self, folder: Path, nodes: int, segment: int = SEGMENT_SIZE) -> None:
        self._folder, self._limit = folder, segment
        self._segments: list[Segment] = []
        self.received = [0] * (nodes + 1)
        self.total = 0
        self.torn = 0
        """Bytes in damaged files: an upper bound of the missing bytes, as far as known."""
        self._window, self._window_start = bytearray(), 0
        """The part of the stream in memory."""

    def recover(self) -> None:
        """Load the segments of the folder; remove damaged ones."""
        for start, path in self._list_files():
            try:
                data = read_regular(path, MAX_SEGMENT)
            except OSError:
                data = b""
            frames = _parse(data)
            state = _state(frames, len(self.received), start)
            if state is None or start < self.total:
                self.torn += len(data)
                _remove(path)
                continue
            if self._segments and start > self._segments[-1].end:
                self._segments[-1].size = -1  # append nothing to it
            segment = Segment(start, start, path)
            self.received = state
            for node, payload, end in frames:
                if node >= len(state):
                    break
                segment.size = end
                if node != STATE_FRAME:
                    segment.end += len(payload)
                    self.received[node] += len(payload)
            if segment.size < len(data):
                self.torn += len(data) - segment.size
                try:
                    os.truncate(path, segment.size)
                except OSError:
                    segment.size = -1  # append nothing to it
            self._segments.append(segment)
            self.total = segment.end

    def append_bytes(self, node: int, data: bytes) -> None:
        """Append bytes of a node. Raise ``OSError`` and change nothing if that fails."""
        while data:
            part, data = data[:MAX_FRAME_SIZE], data[MAX_FRAME_SIZE:]
            self._append_data(node, part)

    def skip_bytes(self, node: int, size: int) -> None:
        """Advance the stream over lost bytes of a node."""
        self.received[node] += size
        self.total += size

    def read_bytes(self, offset: int, size: int) -> tuple[int, bytes]:
        """Return offset and bytes at an offset, or at the next available one; (``total``, nothing) at the end."""
        while True:
            position = offset - self._window_start
            if 0 <= position < len(self._window):
                return offset, bytes(self._window[position : position + size])
            segment = next((s for s in self._segments if s.end > offset), None)
            if segment is None:
                return self.total, b""
            offset = max(offset, segment.start)
            self._load_segment(segment)

    def drop_segments(self, needless: Callable[[int, int], bool]) -> None:
        """Remove the segments, by start and end, that are not needed; keep the last one."""
        retained = [s for s in self._segments[:-1] if not needless(s.start, s.end)]
        for segment in self._segments[:-1]:
            if needless(segment.start, segment.end):
                _remove(segment.path)
        self._segments = retained + self._segments[-1:]

    def forget_before(self, offset: int) -> None:
        """Free the memory of bytes before an offset."""
        drop = min(len(self._window), offset - self._window_start)
        if drop > 0:
            del self._window[:drop]
            self._window_start += drop

    def _list_files(self) -> Iterator[tuple[int, Path]]:
        """Return stream offset and path of the segment files in the folder, in the order of the offsets."""
        try:
            names = os.listdir(self._folder)
        except OSError:
            names = []
        places = sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)
        return ((start, self._folder / f"stream.{start}") for start in places)

    def _append_data(self, node: int, data: bytes) -> None:
        """Append one frame to the last segment, or to a new one if that is full or damaged. Raise ``OSError``."""
        last = self._segments[-1] if self._segments else None
        if last is None or last.end != self.total or not 0 <= last.size < self._limit:
            last = Segment(self.total, self.total, self._folder / f"stream.{self.total}")
            frames = _frame(STATE_FRAME, json.dumps(self.received).encode()) + _frame(node, data)
        else:
            frames = _frame(node, data)
        _write(last.path, last.size, frames)
        if not self._segments or self._segments[-1] is not last:
            self._segments.append(last)
        last.size += len(frames)
        last.end += len(data)
        if not self._window:
            self._window_start = self.total
        if self._window_start + len(self._window) == self.total and len(self._window) < self._limit:
            self._window += data
        self.received[node] += len(data)
        self.total += len(data)

    def _load_segment(self, segment: Segment) -> None:
        """Read a segment into memory. If it is damaged, count its remaining bytes as lost."""
        try:
            data = read_regular(segment.path, MAX_SEGMENT)
            data = data[: max(0, segment.size) or None]
        except OSError:
            data = b""
        self._window = bytearray(b"".join(payload for node, payload, _ in _parse(data) if node != STATE_FRAME))
        self._window_start = segment.start
        if len(self._window) < segment.end - segment.start:  # the file was damaged: its remaining bytes are lost
            self.torn += segment.end - segment.start - len(self._window)
            segment.end, segment.size = segment.start + len(self._window), -1


def _frame(node: int, payload: bytes) -> bytes:
    """Return a frame of the stream: a line with node, size and checksum, then the payload."""
    return b"%d %d %08x\n" % (node, len(payload), zlib.crc32(payload)) + payload


def _parse(data: bytes) -> list[tuple[int, bytes, int]]:
    """Return node, payload and end position of the frames before the first damaged one."""
    frames: list[tuple[int, bytes, int]] = []
    position = 0
    while header := _HEADER.match(data, position, position + MAX_HEADER_LENGTH):
        end = header.end() + int(header[2])
        payload = data[header.end() : end]
        if len(data) < end or zlib.crc32(payload) != int(header[3], 16):
            break
        frames.append((int(header[1]), payload, end))
        position = end
    return frames


def _state(frames: list[tuple[int, bytes, int]], count: int, start: int) -> list[int] | None:
    """Return the first frame's byte counts, None if the segment is invalid."""
    if not frames or frames[0][0] != STATE_FRAME or any(node == STATE_FRAME for node, _, _ in frames[1:]):
        return None
    try:
        state = json.loads(frames[0][1])
    except ValueError:
        return None
    if not isinstance(state, list) or len(state) != count or not all(type(n) is int and n >= 0 for n in state):
        return None
    return state if sum(state) == start else None


def _write(path: Path, offset: int, data: bytes) -> None:
    """Write data at the end of a file, which is ``offset``. Bytes of a failed write stay behind the end and are no
    frame."""
    if not offset:
        _remove(path)  # it may be of any type
    descriptor = open_regular(path)
    try:
        written = 0
        while written < len(data):
            written += os.pwrite(descriptor, data[written:], offset + written)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, offset)
        raise
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # else the next start removes it
        path.unlink()
