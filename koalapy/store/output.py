"""Store the output of components in files: complete up to a limit, and the head and tail of longer output.

The output of a component is in the files ``JOB/TOKEN@OFFSET``, segments of bounded size named by the offset of their
first byte. Names and sizes hold the complete state. Bytes are written at their offset, so repeated writes are harmless.
A loss of power may leave zeros in place of bytes that were not flushed and not acknowledged, also before bytes that
were. So bytes from such zeros on are not acknowledged until the agent has sent them again, or goes on after them.
"""

import contextlib
import errno
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from koalapy.model.job import JobId, Token, parse_token
from koalapy.runner.folders import make_durable_folder, sync_folder
from koalapy.store.records import OutputPiece
from koalapy.system.files import file_identity

SEGMENT = 4 * 1024 * 1024
"""Maximum bytes of a segment."""
MAX_READ = 1024 * 1024
"""Maximum bytes that one call reads."""
MAX_DOUBTFUL = 512 * 1024
"""Maximum bytes at the end of an output that one loss of power can cut: an agent sends less without an answer."""
BLOCK = 4096
"""Bytes of a file that are flushed together: those that a loss of power takes reach to the end of a block."""
MAX_RETAINED_STREAMS = 10_000
"""Maximum components with file lists in memory."""
_NAME = re.compile(r"(.+)@(0|[1-9]\d{0,18})", re.ASCII)


@dataclass(slots=True)
class Segment:
    start: int
    end: int
    path: Path


@dataclass(slots=True)
class Stream:
    """The stored segments of one component's output, in order."""

    segments: list[Segment] = field(default_factory=list)
    doubtful: int = 0
    """Number of bytes at its end of which a loss of power may have taken some."""
    is_read: bool = False
    """Whether its files have been found."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    users: int = 0
    """Number of threads that use the stream or wait for it."""

    @property
    def end(self) -> int:
        return self.segments[-1].end if self.segments else 0


class OutputStore:
    """The output of components in a folder. Calls block, come from several threads, and may raise ``OSError``."""

    def __init__(
        self, directory: Path, limit: int, segment: int = SEGMENT, max_streams: int = MAX_RETAINED_STREAMS
    ) -> None:
        """``limit``: maximum bytes of a component's output; ``max_streams``: components with state in memory."""
        self._max_streams = max_streams
        self._directory, self._segment = directory, segment
        self.limit, self.head = limit, limit // 2
        self._tail = limit - self.head
        self._streams: dict[Token, Stream] = {}
        self._lock = threading.Lock()
        make_durable_folder(directory)
        sync_folder(directory)  # the names of folders that a killed daemon created
        self._identity = file_identity(directory)

    def append(self, token: Token, pieces: Sequence[OutputPiece]) -> int:
        """Store the new bytes of pieces durably, and return the offset up to which the output is known.

        A piece is stored unless earlier bytes, other than its ``missing`` ones, are not stored yet. Such a piece and
        those after it are left for a later call.
        """
        if file_identity(self._directory) != self._identity:
            raise OSError(errno.ESTALE, "the folder was replaced while the daemon uses it", str(self._directory))
        with self._use_stream(token) as stream:
            stored = [replace(segment) for segment in stream.segments], stream.doubtful
            try:
                self._append_pieces(token, stream, pieces)
            except OSError:
                # Files stay as they are: another daemon may have taken over, and write them.
                stream.segments, stream.doubtful = stored
                raise
            return stream.end - stream.doubtful

    def read(self, token: Token, offset: int, *, to_the_end: bool) -> list[OutputPiece]:
        """Return the next pieces after an offset, about 1 MiB; empty if there are none.

        ``to_the_end``: the output is complete, so bytes that are missing after the last piece are reported, too.
        """
        with self._use_stream(token) as stream:
            segments = [replace(segment) for segment in stream.segments]
            end = stream.end if to_the_end else stream.end - stream.doubtful
        pieces: list[OutputPiece] = []
        room, position = MAX_READ, offset
        for segment, start, stop in self._readable_ranges(segments, end, offset):
            data = _read_segment(segment, start, min(stop, start + room))
            if data:
                pieces.append(OutputPiece(start, data, start - position))
                room, position = room - len(data), start + len(data)
            if room <= 0:
                return pieces
        if to_the_end and position < end:
            pieces.append(OutputPiece(end, b"", end - position))
        return pieces

    def size(self, token: Token) -> int:
        """Return the number of bytes that the component is known to have written."""
        with self._use_stream(token) as stream:
            return stream.end

    def remove(self, jobs: Collection[JobId]) -> None:
        """Delete the output of jobs; ignore jobs without output."""
        with self._lock:
            removed_tokens = [
                token for token, stream in self._streams.items() if parse_token(token).job in jobs and not stream.users
            ]
            for token in removed_tokens:
                del self._streams[token]
        for job in jobs:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(self._directory / str(job))

    def _readable_ranges(self, segments: list[Segment], end: int, offset: int) -> Iterator[tuple[Segment, int, int]]:
        """Yield the readable ranges of each segment, as segment, start and end."""
        tail = max(end - self._tail, self.head)
        for segment in segments:
            for first, last in ((0, min(end, self.head)), (tail, end)):
                start, stop = max(segment.start, first, offset), min(segment.end, last)
                if start < stop:
                    yield segment, start, stop

    # Files

    @contextlib.contextmanager
    def _use_stream(self, token: Token) -> Iterator[Stream]:
        """Yield the stream of a component to one thread at a time.

        Beyond ``max_streams``, the least recently used stream is dropped from memory, unless it is in use.
        """
        with self._lock:
            self._streams[token] = stream = self._streams.pop(token, None) or Stream()
            stream.users += 1
            if len(self._streams) > self._max_streams:
                idle = next((candidate for candidate, entry in self._streams.items() if not entry.users), None)
                self._streams.pop(idle or "", None)
        try:
            with stream.lock:
                if not stream.is_read:
                    stream.segments = self._list_segments(token)
                    stream.doubtful, stream.is_read = _count_doubtful(stream.segments), True
                yield stream
        finally:
            with self._lock:
                stream.users -= 1

    def _folder_of(self, token: Token) -> Path:
        return self._directory / str(parse_token(token)[0])

    def _list_segments(self, token: Token) -> list[Segment]:
        """Return the segments of a component's output in order, from the names and sizes of its files."""
        folder = self._folder_of(token)
        try:
            names = os.listdir(folder)
        except FileNotFoundError:
            return []
        starts = sorted(int(match[2]) for name in names if (match := _NAME.fullmatch(name)) and match[1] == token)
        segments: list[Segment] = []
        for start in starts:
            path = folder / f"{token}@{start}"
            size = path.stat().st_size
            if segments and start in (segments[-1].start + self._segment, self.head):
                segments[-1].end = start  # it was full: a loss of power took its end
            if not segments or start >= segments[-1].end:
                segments.append(Segment(start, start + size, path))
        return segments

    def _append_pieces(self, token: Token, stream: Stream, pieces: Sequence[OutputPiece]) -> None:
        """Store new bytes durably, up to the first piece before which bytes have yet to arrive."""
        with _Writing(self._folder_of(token)) as writing:
            for piece in pieces:
                if piece.offset - piece.missing > stream.end:
                    break  # the bytes in between arrive first
                if stream.doubtful:
                    self._replace_doubtful(stream, piece, writing)
                data = piece.data[max(0, stream.end - piece.offset) :]
                self._write_data(token, stream, max(piece.offset, stream.end), data, writing)
            writing.sync()
        self._drop_middle(stream)

    @staticmethod
    def _replace_doubtful(stream: Stream, piece: OutputPiece, writing: "_Writing") -> None:
        """Write a piece over doubtful bytes. The piece shows that the bytes before it were acknowledged."""
        begin, end = max(stream.end - stream.doubtful, piece.offset), piece.offset + len(piece.data)
        for segment in stream.segments:
            start, stop = max(segment.start, begin), min(segment.end, end)
            if start < stop:
                data = piece.data[start - piece.offset : stop - piece.offset]
                writing.write(segment.path, start - segment.start, data)
        stream.doubtful = max(0, stream.end - max(begin, end))

    def _write_data(self, token: Token, stream: Stream, position: int, data: bytes, writing: "_Writing") -> None:
        """Write bytes at a position at or after the end of the output, divided into segments of bounded size."""
        while data or position > stream.end:
            last = stream.segments[-1] if stream.segments else None
            if last is None or last.end != position or position == self.head or last.end - last.start >= self._segment:
                last = Segment(position, position, self._folder_of(token) / f"{token}@{position}")
                stream.segments.append(last)
                writing.create(last.path)
            size = self._segment - (last.end - last.start)
            size = min(size, self.head - position) if position < self.head else size
            writing.write(last.path, position - last.start, data[:size])
            last.end = position = position + len(data[:size])
            data = data[size:]

    def _drop_middle(self, stream: Stream) -> None:
        """Delete segments outside head and tail. The last segment stays, since its end is the size of the output."""
        tail = stream.end - self._tail
        for segment in stream.segments[:-1]:
            if segment.start >= self.head and segment.end <= tail:
                with contextlib.suppress(OSError):
                    segment.path.unlink()
                    stream.segments.remove(segment)


class _Writing:
    """A set of files that are written together, and durable after ``sync``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[Path, int] = {}
        self._has_new_names = False

    def __enter__(self) -> "_Writing":
        return self

    def create(self, path: Path) -> None:
        """Open a new file, in a folder that is created if needed."""
        if not self._folder.is_dir():
            # Another component of the job may create it at the same time.
            self._folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self._folder.parent)
        self._open[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._has_new_names = True

    def write(self, path: Path, offset: int, data: bytes) -> None:
        """Write bytes at an offset of a file."""
        if path not in self._open:
            self._open[path] = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        count = 0
        while count < len(data):
            count += os.pwrite(self._open[path], data[count:], offset + count)

    def sync(self) -> None:
        for descriptor in self._open.values():
            os.fsync(descriptor)
        if self._has_new_names:
            sync_folder(self._folder)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)


def _count_doubtful(segments: Sequence[Segment]) -> int:
    """Return the number of bytes, at most ``MAX_DOUBTFUL``, from the first block on that ends with zeros or is cut."""
    end, doubtful = segments[-1].end if segments else 0, 0
    for segment in reversed(segments):
        if (begin := max(segment.start, end - MAX_DOUBTFUL)) >= segment.end:
            break
        data = _read_segment(segment, begin, segment.end).ljust(segment.end - begin, b"\0")
        for stop in range(BLOCK - (begin - segment.start) % BLOCK, len(data) + BLOCK, BLOCK):
            block = data[max(0, stop - BLOCK) : stop]
            if block.endswith(b"\0"):
                doubtful = end - begin - max(0, stop - BLOCK) - len(block.rstrip(b"\0"))
                break
    return doubtful


def _read_segment(segment: Segment, start: int, stop: int) -> bytes:
    """Return bytes of a segment; empty if it was just deleted, as segments before the tail are."""
    try:
        descriptor = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(descriptor, stop - start, start - segment.start)
    finally:
        os.close(descriptor)
