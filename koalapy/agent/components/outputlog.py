"""A component's output as one stream of bytes, put together from its nodes' streams, and what of it is to be sent.

Of an output that is longer than ``limit`` only the head and the tail are sent, half each: who falls behind the tail
skips what is no longer part of it. What was acknowledged or is needed no more does not stay on disk, so that a spool
holds little more than the limit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from koalapy.agent.core.segments import SEGMENT_SIZE, Segments
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

MAX_PARTIAL_LINE = 64 * 1024
"""Bytes of an unfinished line that are held back at most, waiting for its end."""
CHUNK_SIZE = 64 * 1024
MAX_UNACKNOWLEDGED = 512 * 1024
"""Bytes of a component's output on their way to the daemon at most."""
MAX_UNSENT = 4 * 1024 * 1024
"""Bytes of a file with what a runner could not send, which is a block of its own at most."""
DEFAULT_OUTPUT_LIMIT = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Something to send; of the ``gap`` bytes before it there is nothing any more."""

    offset: int
    data: bytes
    gap: int


class OutputLog:
    """Appends what nodes send, line by line where there are several, and remembers how much it has from each."""

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
        self._held = [b""] * nodes
        self._own = nodes
        self._floor = 0
        """Where the last piece that was sent has ended."""
        self.sent = 0
        self.acknowledged = 0
        self.progress_at = self.tried_at = self._clock.monotonic()
        """Since when the daemon owes an acknowledgement, and since when on this try."""
        self._closed = False
        self._again = False
        """Whether what is sent next was sent before."""
        self.received_at = 0.0
        """When the last bytes came from a node (monotonic)."""
        self.is_given_up = False
        self.missing = ""
        """What of the output is lost and why, in words; empty as a rule."""
        self.error = ""
        """Why nothing can be written now; nodes get no acknowledgement meanwhile, and wait."""

    @property
    def total(self) -> int:
        return self._stored.total

    @property
    def is_pending(self) -> bool:
        """Whether the daemon does not have all of it that it is to have."""
        return self.acknowledged < self.total and not self.is_given_up

    def kept_bytes(self, node: int) -> int:
        """Bytes of a node's stream that are kept, and may be forgotten by who sent them."""
        return self._stored.received[node]

    def _known(self, node: int) -> int:
        """The same, with what is held back."""
        return self.kept_bytes(node) + len(self._held[node])

    def recover(self) -> None:
        """Read from the files how far things had come, whatever state they are in."""
        self._stored.recover()
        if self._stored.torn:
            self._lose(f"up to {self._stored.torn} bytes: files below {self._folder} were damaged")

    # From the nodes

    def accept_stream(self, node: int, start: int) -> int:
        """A node that has its stream from ``start`` on is there (again); where it is to go on."""
        self._held[node] = b""
        lost = start - self.kept_bytes(node)
        if lost > 0:
            self._stored.skip_bytes(node, lost)
            self._lose(f"{lost} bytes of node {node}: they are not in {self._folder} any more")
        return self.kept_bytes(node)

    def add_bytes(self, node: int, offset: int, data: bytes) -> int:
        """Add a piece of a node's stream; returns how far that stream may be forgotten by its sender."""
        known = self._known(node)
        if offset <= known < offset + len(data):
            self.received_at = self._clock.monotonic()
            self._held[node] += data[known - offset :]
            self._keep(node, whole=self._own == 1)
        return self.kept_bytes(node)

    def copy_unsent(
        self, node: int, unsent: Iterable[tuple[int, Path]], total: int | None, left: Callable[[int, Path, int], bytes]
    ) -> None:
        """Take what a runner that has written ``total`` bytes saved in files, up to the first gap.

        The files stay: the runner may come back and send the rest. Parameters are those of ``take_over``.
        """
        for start, path in unsent:
            if start > self._known(node):
                break
            try:
                self.add_bytes(node, start, left(node, path, MAX_UNSENT))
            except (OSError, ValueError):
                break
        if self._known(node) == total:
            self.finish_node(node)

    def recover_unsent(
        self, node: int, unsent: Iterable[tuple[int, Path]], total: int | None, left: Callable[[int, Path, int], bytes]
    ) -> None:
        """A node is gone that has written ``total`` bytes, or nobody knows how many: take what it left in files, which
        are known by the places in its stream where they begin. ``left`` says what is in one, if it is that node's."""
        for start, path in unsent:
            try:
                data = left(node, path, MAX_UNSENT)
            except OSError:
                continue
            except ValueError:  # a program's, or its key is lost; the result's total or a missing result tells that
                _remove(path)
                continue
            if start > self._known(node):
                self.finish_node(node)
                self.accept_stream(node, start)
            self.add_bytes(node, start, data)
            if not self.error:
                _remove(path)
        if total is not None and total > self._known(node) and not self.error:
            self._lose(f"{total - self._known(node)} bytes of node {node}: it ended before it had sent them")

    def note_killed_runner(self, node: int) -> None:
        """Say that what a node's runner had not handed over was lost with it; nothing tells how much that was."""
        self._lose(f"possibly the end of what node {node} wrote: its runner was killed")

    def retry_write(self, node: int) -> int:
        """Try again to keep what could not be written; as ``take``."""
        self._keep(node, whole=self._own == 1)
        return self.kept_bytes(node)

    def finish_node(self, node: int) -> bool:
        """No more will come from that node: its last line need not end. False while there is no room for that."""
        return self._keep(node, whole=True)

    def close(self) -> None:
        for node, held in enumerate(self._held):
            if held and not self.finish_node(node):
                self._lose(f"{len(self._held[node])} bytes of node {node}: {self.error}")
        self._held = [b""] * self._own
        spilled = 0 if self._closed else sum(map(_size, self._folder.glob("output.*.*")))
        if spilled:
            self._lose(f"more than {spilled} bytes that its runners could not hand over")
        self._closed = True

    def append_line(self, line: bytes) -> None:
        """A line of our own, after the last of the nodes'."""
        try:
            self._stored.append_bytes(self._own, line)
        except OSError as error:
            self._failed(error)

    def _keep(self, node: int, *, whole: bool) -> bool:
        held, before = self._held[node], self.kept_bytes(node)
        size = len(held) if whole or len(held) > MAX_PARTIAL_LINE else held.rfind(b"\n") + 1
        try:
            self._stored.append_bytes(node, held[:size])
            self.error = ""
        except OSError as error:
            self._failed(error)
        self._held[node] = held[self.kept_bytes(node) - before :]
        self._drop()
        return not self.error

    def _failed(self, error: OSError) -> None:
        self.error = f"cannot write below {self._folder}: {error.strerror or error}"

    def _lose(self, what: str) -> None:
        self.missing = f"{self.missing}; {what}" if self.missing else what

    # To the daemon

    def next_piece(self) -> Piece | None:
        if self.sent >= self.total or self.sent - self.acknowledged >= MAX_UNACKNOWLEDGED:
            return None
        if self.sent == self.acknowledged and not self._again:
            self.progress_at = self.tried_at = self._clock.monotonic()
        at, size = self.sent, CHUNK_SIZE
        if at < self._head:
            size = min(size, self._head - at)
        else:
            at = max(at, self.total - self._tail)
        offset, data = self._stored.read_bytes(at, size)
        piece = Piece(offset, data, offset - self._floor)
        self.sent = self._floor = offset + len(data)
        return piece

    def rewind(self) -> None:
        """Send again what was not acknowledged; before that there is nothing any more."""
        self.sent, self._floor, self._again = self.acknowledged, 0, True
        self.tried_at = self._clock.monotonic()

    def restart_sending(self) -> None:
        """There is another connection, on which nothing was sent yet."""
        self.rewind()
        self.progress_at = self.tried_at

    def acknowledge_to(self, offset: int) -> None:
        """The daemon has all before ``offset``, or knows that it will not come."""
        if offset > self.total:
            lost = offset - self.total
            self._stored.skip_bytes(self._own, lost)
            self._lose(f"up to {lost} bytes: the daemon has had more than there is in {self._folder}")
        if offset > self.acknowledged:
            self.acknowledged, self._again = offset, False
            self.progress_at = self.tried_at = self._clock.monotonic()
        self.sent = max(self.sent, self.acknowledged)
        self._stored.forget_before(self.acknowledged)
        self._drop()

    def give_up(self, reason: str) -> None:
        self._lose(f"the last {self.total - self.acknowledged} bytes: {reason}")
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
    """One that stays is known when it is found again, by its place in the stream."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("a file of a runner's cannot be removed", action="left-file-not-removed", reason=str(error))
