"""One stream of bytes in files of bounded size, each of which says by itself what it holds.

A segment is called ``stream.OFFSET`` by its first byte's place in the stream. It is a row of frames: a line with a
node, a size and a checksum, and so many bytes of that node's. The first frame says how much of each node's stream came
before, so that any segment can be lost, or dropped when nobody needs it any more, and the others still mean something.
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
"""Bytes of a file at most: what has more was not written by us."""
STATE_FRAME = -1
"""In place of a node: how much there was of each before this segment."""
_NAME = re.compile(r"stream\.(0|[1-9]\d{0,17})", re.ASCII)
_HEADER = re.compile(rb"(-1|\d{1,7}) (\d{1,7}) ([0-9a-f]{8})\n")
MAX_HEADER_LENGTH = 32


@dataclass(slots=True)
class Segment:
    """``start`` and ``end`` are places in the stream; ``size`` is bytes in the file, of whole frames."""

    start: int
    end: int
    path: Path
    size: int = 0


class Segments:
    """The stream of one folder; ``received`` counts each node's bytes and, last, those that were of no node.

    Their sum is always ``total``, the place where the stream goes on.
    """

    def __init__(self, folder: Path, nodes: int, segment: int = SEGMENT_SIZE) -> None:
        self._folder, self._limit = folder, segment
        self._segments: list[Segment] = []
        self.received = [0] * (nodes + 1)
        self.total = 0
        self.torn = 0
        """Bytes in files that were found to be of no use: what may be missing of the stream, as far as known."""
        self._window, self._window_start = bytearray(), 0
        """A part of the stream that is at hand."""

    def recover(self) -> None:
        """Take up what is in the folder, whatever state it is in; what makes no sense is left out."""
        for start, path in self._files():
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
                self._segments[-1].size = -1  # nothing may be appended to it
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
                _cut(segment)
            self._segments.append(segment)
            self.total = segment.end

    def append_bytes(self, node: int, data: bytes) -> None:
        """Add bytes of a node's; ``OSError`` when that cannot be, and all is as it was before."""
        while data:
            part, data = data[:MAX_FRAME_SIZE], data[MAX_FRAME_SIZE:]
            self._append(node, part)

    def skip_bytes(self, node: int, size: int) -> None:
        """Bytes of a node's are gone for ever: the stream goes on behind them."""
        self.received[node] += size
        self.total += size

    def read_bytes(self, offset: int, size: int) -> tuple[int, bytes]:
        """Bytes from an offset on, or from the next that is there; (``total``, nothing) when there are none."""
        while True:
            at = offset - self._window_start
            if 0 <= at < len(self._window):
                return offset, bytes(self._window[at : at + size])
            segment = next((s for s in self._segments if s.end > offset), None)
            if segment is None:
                return self.total, b""
            offset = max(offset, segment.start)
            self._load(segment)

    def drop_segments(self, needless: Callable[[int, int], bool]) -> None:
        """Remove segments from one place to another of which nobody needs a byte, but never the last."""
        kept = [s for s in self._segments[:-1] if not needless(s.start, s.end)]
        for segment in self._segments[:-1]:
            if needless(segment.start, segment.end):
                _remove(segment.path)
        self._segments = kept + self._segments[-1:]

    def forget_before(self, offset: int) -> None:
        """Bytes below will not be read again."""
        drop = min(len(self._window), offset - self._window_start)
        if drop > 0:
            del self._window[:drop]
            self._window_start += drop

    def _files(self) -> Iterator[tuple[int, Path]]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            names = []
        places = sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)
        return ((start, self._folder / f"stream.{start}") for start in places)

    def _append(self, node: int, data: bytes) -> None:
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

    def _load(self, segment: Segment) -> None:
        try:
            data = read_regular(segment.path, MAX_SEGMENT)
            data = data[: max(0, segment.size) or None]
        except OSError:
            data = b""
        self._window = bytearray(b"".join(payload for node, payload, _ in _parse(data) if node != STATE_FRAME))
        self._window_start = segment.start
        if len(self._window) < segment.end - segment.start:  # damaged since: what follows in it is lost
            self.torn += segment.end - segment.start - len(self._window)
            segment.end, segment.size = segment.start + len(self._window), -1


def _frame(node: int, payload: bytes) -> bytes:
    return b"%d %d %08x\n" % (node, len(payload), zlib.crc32(payload)) + payload


def _parse(data: bytes) -> list[tuple[int, bytes, int]]:
    """The (node, payload, end in the data) of the frames up to the first that is not whole."""
    frames: list[tuple[int, bytes, int]] = []
    at = 0
    while header := _HEADER.match(data, at, at + MAX_HEADER_LENGTH):
        end = header.end() + int(header[2])
        payload = data[header.end() : end]
        if len(data) < end or zlib.crc32(payload) != int(header[3], 16):
            break
        frames.append((int(header[1]), payload, end))
        at = end
    return frames


def _state(frames: list[tuple[int, bytes, int]], count: int, start: int) -> list[int] | None:
    """What a segment says of before it; None unless it makes sense."""
    if not frames or frames[0][0] != STATE_FRAME or any(node == STATE_FRAME for node, _, _ in frames[1:]):
        return None
    try:
        state = json.loads(frames[0][1])
    except ValueError:
        return None
    if not isinstance(state, list) or len(state) != count or not all(type(n) is int and n >= 0 for n in state):
        return None
    return state if sum(state) == start else None


def _write(path: Path, at: int, data: bytes) -> None:
    """Write at the end of a file that is ``at``; what was written before an error stands behind it, and is no frame."""
    if not at:
        _remove(path)  # whatever it is
    descriptor = open_regular(path)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(descriptor, data[done:], at + done)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, at)
        raise
    finally:
        os.close(descriptor)


def _cut(segment: Segment) -> None:
    """Remove what stands behind the last whole frame; where that cannot be, nothing is added to the segment."""
    try:
        os.truncate(segment.path, segment.size)
    except OSError:
        segment.size = -1


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):  # else it is found again, and left out again
        path.unlink()
