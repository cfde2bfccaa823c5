"""A component's output: one stream of bytes from its nodes' streams, and what of it is sent.

Only the head and the tail of an output longer than ``limit`` are sent, half each; the middle is skipped. Acknowledged
and unneeded bytes are removed from the disk, so that a spool holds little more than the limit.
"""

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import structlog

from koalapy.agent.core.spool import has_failed_disk, open_regular, read_regular
from koalapy.model.bounds import MAX_TEXT_LENGTH
from koalapy.protocol.messages import MAX_START
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

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
    """The stream of one folder, in files of bounded size, each of which can be read by itself.

    A segment ``stream.OFFSET`` starts at that offset of the stream. It is a sequence of frames: a line with node, size
    and checksum, then the bytes of that node. The first frame holds the size of each node's stream before the segment,
    so that any other segment may be lost or dropped. ``received`` holds each node's bytes and, last, those of the
    agent. Their sum is always ``total``, the end of the stream.
    """

    def __init__(self, folder: Path, nodes: int, segment: int = SEGMENT_SIZE) -> None:
        self._folder, self._limit = folder, segment
        self.segments: list[Segment] = []
        self.received = [0] * (nodes + 1)
        self.total = 0
        self.torn = 0
        """Bytes in damaged files: an upper bound of the missing bytes, as far as known."""
        self._window, self._window_start = bytearray(), 0
        """The part of the stream in memory."""

    def recover(self) -> None:
        """Load the segments of the folder; remove damaged ones. Raise ``OSError`` if the disk fails."""
        for start, path in self._list_files():
            try:
                data = read_regular(path, MAX_SEGMENT)
            except OSError as error:
                if has_failed_disk(error):
                    raise
                data = b""
            frames = _parse(data)
            state = _state(frames, len(self.received), start)
            if state is None or start < self.total:
                self.torn += len(data)
                _remove_segment(path)
                continue
            if self.segments and start > self.segments[-1].end:
                self.segments[-1].size = -1  # append nothing to it
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
            self.segments.append(segment)
            self.total = segment.end

    def append_bytes(self, node: int, data: bytes) -> None:
        """Append bytes of a node. Raise ``OSError`` and change nothing if that fails."""
        while data:
            part, data = data[:MAX_FRAME_SIZE], data[MAX_FRAME_SIZE:]
            self._append_data(node, part)

    def skip_bytes(self, node: int, size: int) -> int:
        """Advance the stream over lost bytes of a node, at most to ``MAX_START``. Return their number."""
        size = max(0, min(size, MAX_START - self.total))
        self.received[node] += size
        self.total += size
        return size

    def read_bytes(self, offset: int, size: int) -> tuple[int, bytes]:
        """Return offset and bytes at an offset, or at the next available one; (``total``, nothing) at the end."""
        while True:
            position = offset - self._window_start
            if 0 <= position < len(self._window):
                return offset, bytes(self._window[position : position + size])
            segment = next((s for s in self.segments if s.end > offset), None)
            if segment is None:
                return self.total, b""
            offset = max(offset, segment.start)
            self._load_segment(segment)

    def drop_segments(self, needless: Callable[[int, int], bool]) -> None:
        """Remove the segments, by start and end, that are not needed; keep the last one."""
        retained = [s for s in self.segments[:-1] if not needless(s.start, s.end)]
        for segment in self.segments[:-1]:
            if needless(segment.start, segment.end):
                _remove_segment(segment.path)
        self.segments = retained + self.segments[-1:]

    def forget_before(self, offset: int) -> None:
        """Free the memory of bytes before an offset."""
        drop = min(len(self._window), offset - self._window_start)
        if drop > 0:
            del self._window[:drop]
            self._window_start += drop

    def _list_files(self) -> Iterator[tuple[int, Path]]:
        """Return stream offset and path of the segment files in the folder, in the order of the offsets."""
        names = (path.name for path in self._folder.glob("stream.*"))
        places = sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)
        return ((start, self._folder / f"stream.{start}") for start in places)

    def _append_data(self, node: int, data: bytes) -> None:
        """Append one frame to the last segment, or to a new one if that is full or damaged. Raise ``OSError``."""
        last = self.segments[-1] if self.segments else None
        if last is None or last.end != self.total or not 0 <= last.size < self._limit:
            last = Segment(self.total, self.total, self._folder / f"stream.{self.total}")
            frames = _frame(STATE_FRAME, json.dumps(self.received).encode()) + _frame(node, data)
        else:
            frames = _frame(node, data)
        _write(last.path, last.size, frames)
        if not self.segments or self.segments[-1] is not last:
            self.segments.append(last)
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
    return state if sum(state) == start <= MAX_START else None


def _write(path: Path, offset: int, data: bytes) -> None:
    """Write data at the end of a file, which is ``offset``. Bytes of a failed write stay behind the end and are no
    frame."""
    if not offset:
        _remove_segment(path)  # it may be of any type
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


def _remove_segment(path: Path) -> None:
    with contextlib.suppress(OSError):  # else the next start removes it
        path.unlink()


MAX_PARTIAL_LINE = 64 * 1024
"""Maximum bytes of an unfinished line that are buffered."""
CHUNK_SIZE = 64 * 1024
MAX_UNACKNOWLEDGED = 512 * 1024
"""Maximum bytes of a component's output that are sent and not acknowledged."""
MAX_UNSENT = 4 * 1024 * 1024
"""Maximum bytes of a file with a runner's unsent output, which is one block."""
DEFAULT_OUTPUT_LIMIT = 64 * 1024 * 1024
Unsent = Iterable[tuple[int, Path]]
"""Offsets in a node's stream, and files with the output from there on."""
ReadFile = Callable[[int, Path, int], bytes]
"""Return a verified file of a node, up to a size."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes to send, and the number of lost bytes before them (``gap``)."""

    offset: int
    data: bytes
    gap: int


class OutputLog:
    """Stores the nodes' output, by whole lines if there are several nodes, and counts the bytes of each."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        limit: int = DEFAULT_OUTPUT_LIMIT,
        segment: int = SEGMENT_SIZE,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._folder, self._clock = folder, clock
        self._stored = Segments(folder, nodes, segment)
        self._head, self._tail = limit // 2, limit - limit // 2
        self._buffered = [b""] * nodes
        self._agent_index = nodes
        self._floor = 0
        """End of the last piece that was sent."""
        self.sent = 0
        self.acknowledged = 0
        self.progress_at = self.tried_at = self._clock.monotonic()
        """When the daemon made progress, or said that its disk is full, and when sending was tried last."""
        self._closed = False
        self._again = False
        """Whether the next piece was sent before."""
        self.received_at = 0.0
        """When the last bytes of a node arrived (monotonic)."""
        self.is_given_up = False
        self.missing = ""
        """Description of lost output; empty if none is lost."""
        self.error = ""
        """Why nothing can be written now. Until then, runners get no acknowledgement and wait."""

    @property
    def total(self) -> int:
        return self._stored.total

    @property
    def is_pending(self) -> bool:
        """Whether the daemon does not yet have all output that it should have."""
        return self.acknowledged < self.total and not self.is_given_up

    def kept_bytes(self, node: int) -> int:
        """Return the stored bytes of a node's stream, which its runner may forget."""
        return self._stored.received[node]

    def _end_of(self, node: int) -> int:
        """Return the same including buffered bytes."""
        return self.kept_bytes(node) + len(self._buffered[node])

    @property
    def paths(self) -> list[Path]:
        """The files of the stored output."""
        return [segment.path for segment in self._stored.segments]

    def recover(self, missing: str = "", total: int = 0) -> None:
        """Load the stored output after a restart. It had ``total`` bytes, of which ``missing`` had been lost before."""
        self._stored.recover()
        self.missing = missing
        if self._stored.torn:
            self._report_loss(f"up to {self._stored.torn} bytes: files below {self._folder} were damaged")
        elif total > self.total:
            self._report_loss(f"up to {total - self.total} bytes: they are not in {self._folder} any more")

    # From the nodes

    def accept_stream(self, node: int, start: int) -> int:
        """Start or resume a node's stream, which its runner holds from ``start`` on. Return the next offset."""
        self._buffered[node] = b""
        if lost := self._stored.skip_bytes(node, start - self.kept_bytes(node)):
            self._report_loss(f"{lost} bytes of node {node}: they are not in {self._folder} any more")
        return self.kept_bytes(node)

    def add_bytes(self, node: int, offset: int, data: bytes) -> int:
        """Store bytes of a node's stream. Return the stored bytes, which its runner may forget."""
        position = self._end_of(node)
        if offset <= position < offset + len(data):
            self.received_at = self._clock.monotonic()
            self._buffered[node] += data[position - offset :]
            self._store_lines(node, with_partial_line=self._agent_index == 1)
        return self.kept_bytes(node)

    def copy_unsent(self, node: int, unsent: Unsent, total: int | None, read_file: ReadFile) -> None:
        """Store unsent output that a runner, which wrote ``total`` bytes, saved in files, up to the first gap.

        Keep the files: the runner may reconnect and send the rest.
        """
        with contextlib.suppress(OSError, ValueError):
            for start, path in unsent:
                if start > self._end_of(node):
                    break
                self.add_bytes(node, start, read_file(node, path, MAX_UNSENT))
        if self._end_of(node) == total:
            self.finish_node(node)

    def recover_unsent(self, node: int, unsent: Unsent, total: int | None, read_file: ReadFile) -> None:
        """Store and remove the files of a lost runner that wrote ``total`` bytes, None if unknown; skip its gaps."""
        for start, path in unsent:
            try:
                data = read_file(node, path, MAX_UNSENT)
            except OSError:
                continue
            except ValueError:  # a program's, or its key is lost; the result's total or a missing result tells that
                _remove(path)
                continue
            if start > self._end_of(node):
                self.finish_node(node)
                self.accept_stream(node, start)
            self.add_bytes(node, start, data)
            if not self.error:
                _remove(path)
        if total is not None and total > self._end_of(node) and not self.error:
            self._report_loss(f"{total - self._end_of(node)} bytes of node {node}: they are not in {self._folder}")

    def note_killed_runner(self, node: int) -> None:
        """Report that unsent output of a killed runner was lost; its size is unknown."""
        self._report_loss(f"possibly the end of what node {node} wrote: its runner was killed")

    def retry_write(self, node: int) -> int:
        """Retry to store a node's output after a failed write. Return its stored bytes."""
        self._store_lines(node, with_partial_line=self._agent_index == 1)
        return self.kept_bytes(node)

    def finish_node(self, node: int) -> bool:
        """Store a node's last unfinished line. Return False if the disk is full."""
        return self._store_lines(node, with_partial_line=True)

    def close(self) -> None:
        """Store unfinished lines at the component's end, and report output that can no longer be stored."""
        for node, partial_line in enumerate(self._buffered):
            if partial_line and not self.finish_node(node):
                self._report_loss(f"{len(self._buffered[node])} bytes of node {node}: {self.error}")
        self._buffered = [b""] * self._agent_index
        spilled = 0 if self._closed else sum(map(_size, self._folder.glob("output.*.*")))
        if spilled:
            self._report_loss(f"more than {spilled} bytes that its runners could not hand over")
        self._closed = True

    def append_line(self, line: bytes) -> None:
        """Append a line of the agent itself to a component's output."""
        try:
            self._stored.append_bytes(self._agent_index, line)
        except OSError as error:
            self._failed(error)

    def _store_lines(self, node: int, *, with_partial_line: bool) -> bool:
        """Store a node's buffered whole lines, or everything. Return False, and keep the rest, if the disk is full."""
        buffered, stored = self._buffered[node], self.kept_bytes(node)
        size = len(buffered) if with_partial_line or len(buffered) > MAX_PARTIAL_LINE else buffered.rfind(b"\n") + 1
        try:
            self._stored.append_bytes(node, buffered[:size])
            self.error = ""
        except OSError as error:
            self._failed(error)
        self._buffered[node] = buffered[self.kept_bytes(node) - stored :]
        self._drop()
        return not self.error

    def _failed(self, error: OSError) -> None:
        self.error = f"cannot write below {self._folder}: {error.strerror or error}"

    def _report_loss(self, loss: str) -> None:
        """Add a loss to the description of lost output, unless that is as long as the daemon accepts."""
        if len(self.missing) < MAX_TEXT_LENGTH:
            self.missing = f"{self.missing}; {loss}" if self.missing else loss

    # To the daemon

    def next_piece(self) -> Piece | None:
        """Return the next output to send; None if all is sent or too much is unacknowledged.

        Skip the middle of an output that exceeds the limit.
        """
        if self.sent >= self.total or self.sent - self.acknowledged >= MAX_UNACKNOWLEDGED:
            return None
        if self.sent == self.acknowledged and not self._again:
            self.progress_at = self.tried_at = self._clock.monotonic()
        position, size = self.sent, CHUNK_SIZE
        if position < self._head:
            size = min(size, self._head - position)
        else:
            position = max(position, self.total - self._tail)
        offset, data = self._stored.read_bytes(position, size)
        piece = Piece(offset, data, offset - self._floor)
        self.sent = self._floor = offset + len(data)
        return piece

    def rewind(self) -> None:
        """Set the sending position back to the last acknowledged byte, so that the rest is sent once more."""
        self.sent, self._floor, self._again = self.acknowledged, 0, True
        self.tried_at = self._clock.monotonic()

    def restart_sending(self) -> None:
        """Start sending on a new connection."""
        self.rewind()
        self.progress_at = self.tried_at

    def acknowledge_to(self, offset: int) -> None:
        """Record that the daemon has everything before ``offset``, or knows that it is lost.

        With 0, its disk takes nothing now: keep the output, and send it again later.
        """
        if lost := self._stored.skip_bytes(self._agent_index, offset - self.total):
            self._report_loss(f"up to {lost} bytes: the daemon has had more than there is in {self._folder}")
        if offset > self.acknowledged:
            self.acknowledged, self._again = offset, False
            self.progress_at = self.tried_at = self._clock.monotonic()
        elif offset == 0:
            self.progress_at = self._clock.monotonic()
        self.sent = max(self.sent, self.acknowledged)
        self._stored.forget_before(self.acknowledged)
        self._drop()

    def give_up(self, reason: str) -> None:
        self._report_loss(f"the last {self.total - self.acknowledged} bytes: {reason}")
        self.is_given_up = True

    def _drop(self) -> None:
        acknowledged, head, tail = self.acknowledged, self._head, self.total - self._tail
        self._stored.drop_segments(lambda start, end: end <= acknowledged or (start >= head and end <= tail))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _remove(path: Path) -> None:
    """Remove a file. One that remains is recognised later by its offset in the stream."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("cannot remove a file of a runner", action="left-file-not-removed", reason=str(error))
