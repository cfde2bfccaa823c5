"""The output of components: stored as agents send it, and read by users."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar
from weakref import WeakSet

import structlog

from koalapy.daemon.engine.database import query
from koalapy.daemon.engine.engine import Engine
from koalapy.model.job import Component, Job, JobId, JobState, Token, parse_token
from koalapy.model.job_spec import OutputStream
from koalapy.model.request import ClusterName
from koalapy.runner.output_streams import StreamSplitter, mark_stream, split_lines
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.queries import Queries
from koalapy.store.output import OutputStore
from koalapy.store.records import OutputPiece
from koalapy.store.sql import JobStore

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger()

MIN_TAIL_BYTES, MAX_TAIL_BYTES = 64 * 1024, 8 * 1024 * 1024
"""Bytes that are first searched for the last lines, and at most; longer lines are cut."""
MAX_MARK_BYTES = 256 * 1024
"""Bytes before a position that show in which stream it is; runners mark shorter parts."""
MAX_REMEMBERED_COMPONENTS = 10_000
"""Components of ended attempts that are remembered to be on their cluster."""

_threads = ThreadPoolExecutor(8, "output")
"""Separate threads, so that a hanging disk does not block those of other work."""


async def run_in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: work(*args, **kwargs))


@dataclass(frozen=True, slots=True)
class OutputTail:
    """The end of one component's output, with the number of bytes that precede it."""

    component: int
    cluster: ClusterName
    data: bytes
    skipped_bytes: int


@dataclass(frozen=True, slots=True)
class OutputText:
    """A part of a component's output, as the reader sees it."""

    attempt: int
    """Generation of the attempt."""
    component: int
    offset: int
    """Number of bytes of the component's output up to the end of this part. Reading may continue there."""
    missing: int
    """Number of bytes before this part that are not stored, and that a line of ``data`` replaces."""
    data: bytes


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """The end of an output that was read up to the end of its job, or up to now unless it is followed."""

    state: JobState
    is_complete: bool
    """False: the job has ended, and a part of its output did not reach the daemon."""


class Outputs:
    """The stored output of all jobs."""

    def __init__(self, engine: Engine, queries: Queries, store: JobStore, output_store: OutputStore) -> None:
        self._engine, self._queries, self._store, self._output_store = engine, queries, store, output_store
        self._remembered: dict[tuple[ClusterName, Token], None] = {}
        self._readings: WeakSet[Reading] = WeakSet()
        self._is_failing = False

    async def store_pieces(self, cluster: ClusterName, token: Token, pieces: Sequence[OutputPiece]) -> int | None:
        """Store the pieces that an agent sent. Return the offset up to which output is stored.

        Return 0 if the disk takes nothing now: the agent keeps its output. Return None if the component is not on the
        agent's cluster: the agent gives its output up.
        """
        if not await self._is_on(cluster, token):
            return None
        try:
            end = await run_in_thread(self._output_store.append, token, pieces)
        except OSError as error:
            if not self._is_failing:
                log.error("cannot store output: agents send it again", action="output-not-kept", error=str(error))
            self._is_failing = True
            return 0
        if self._is_failing:
            log.info("output is stored again", action="output-kept-again")
        self._is_failing = False
        for reading in self._readings:
            reading.mark_unread(token)
        self._engine.wake_watchers(parse_token(token).job)
        return end

    async def _is_on(self, cluster: ClusterName, token: Token) -> bool:
        """Return whether a component of the current or an earlier attempt is on that cluster."""
        if component_entry := self._queries.find(token):
            return component_entry[1].cluster == cluster
        if (cluster, token) in self._remembered:
            return True
        try:
            job, generation, index, nonce = parse_token(token)
        except ValueError:
            return False
        attempts = await query(self._store.attempts, job)
        components = (c for a in attempts if (a.generation, a.nonce) == (generation, nonce) for c in a.components)
        if not any((c.index, c.cluster) == (index, cluster) for c in components):
            return False
        self._remembered[cluster, token] = None
        if len(self._remembered) > MAX_REMEMBERED_COMPONENTS:
            del self._remembered[next(iter(self._remembered))]
        return True

    async def remove_output(self, jobs: Collection[JobId]) -> None:
        """Delete the output of jobs. Once the store does not know a job, no output of it is stored."""
        for key in [key for key in self._remembered if parse_token(key[1]).job in jobs]:
            del self._remembered[key]
        await run_in_thread(self._output_store.remove, jobs)

    async def read_tails(self, job: Job, max_bytes: int) -> Sequence[OutputTail]:
        """Return the ends of the output of the last attempt's components, ``max_bytes`` in total."""
        components = job.attempt.components if job.attempt else ()
        share = max_bytes // max(1, len(components))

        def read_tail(component: Component) -> OutputTail:
            token = job.token(component.index)
            start = max(0, self._output_store.size(token) - share)
            data = b"".join(piece.data for piece in self._output_store.read(token, start, to_the_end=False))
            if job.spec.separates_streams(component.request_index):
                data = b"".join(text for _, text in StreamSplitter().split(data))
            return OutputTail(component.index, component.cluster, data, start)

        return [await run_in_thread(read_tail, component) for component in components]

    def start_reading(
        self, job: Job, stream: OutputStream | None = None, offsets: Mapping[int, int] | None = None
    ) -> "Reading":
        """Start to read the output of a job's current attempt, or one of its two streams.

        ``offsets``: where to begin in the output of each component; by default at its first byte.
        """
        reading = Reading(self._output_store, self._queries.grid, job.generation, stream, offsets or {})
        self._readings.add(reading)
        return reading


class Reading:
    """A reader's position in the output of one attempt."""

    def __init__(
        self,
        output_store: OutputStore,
        grid: GridStatus,
        generation: int,
        stream: OutputStream | None,
        beginnings: Mapping[int, int],
    ) -> None:
        self._output_store, self._grid, self._stream = output_store, grid, stream
        self.generation, self._beginnings = generation, beginnings
        self._offsets: dict[Token, int] = {}
        self._unread: dict[Token, bool] = {}
        """Whether a component may have new output. Reading takes a thread, and mostly one component has changed."""
        self._is_in_line: dict[Token, bool] = {}
        """Whether the last text of a component did not end a line."""
        self._splitters: dict[Token, StreamSplitter] = {}

    def mark_unread(self, token: Token) -> None:
        """Note that a component, of any job, has new output."""
        if token in self._unread:
            self._unread[token] = True

    async def skip_to_last_lines(self, job: Job, index: int | None, count: int) -> AsyncIterator[OutputText]:
        """Skip all but the last lines of the component with that index, or of each component; yield the positions.

        Components with a given beginning are not changed.
        """
        for component in job.attempt.components if job.attempt else ():
            if index in (None, component.index) and component.index not in self._beginnings:
                offset = await run_in_thread(self._find_last_lines, job, component, count)
                self._offsets[job.token(component.index)] = offset
                yield OutputText(self.generation, component.index, offset, 0, b"")

    def _continue_at(self, job: Job, component: Component, offset: int) -> None:
        """Continue at an offset, in the stream and the line of the bytes before it."""
        token, start, data = job.token(component.index), max(0, offset - MAX_MARK_BYTES), b""
        for piece in self._output_store.read(token, start, to_the_end=False):
            earlier = piece.data[: max(0, offset - piece.offset)]
            data = earlier if piece.missing else data + earlier
        if start:
            data = data[data.find(b"\n") + 1 :]
        self._offsets[token], self._splitters[token] = offset, StreamSplitter()
        text = self._select(job, component, self._splitters[token], data)
        self._is_in_line[token] = bool(text) and not text.endswith(b"\n")

    def _find_last_lines(self, job: Job, component: Component, count: int) -> int:
        """Return the offset of the last ``count`` lines of a component."""
        token = job.token(component.index)
        end, size = self._output_store.size(token), MIN_TAIL_BYTES
        while True:
            position = start = max(0, end - size)
            data = b""
            while pieces := self._output_store.read(token, position, to_the_end=False):
                for piece in pieces:
                    data = piece.data if piece.missing else data + piece.data
                    position = piece.offset + len(piece.data)
            lines = split_lines(data)
            first = position - len(data)
            is_whole = first > start or not start
            offset, remaining = position, count
            if not is_whole and (len(lines) > 1 or size < MAX_TAIL_BYTES):
                del lines[:1]  # it may be cut
            for line in reversed(lines):
                remaining -= bool(self._select(job, component, StreamSplitter(), line))
                if remaining < 0:
                    return offset
                offset -= len(line)
            if is_whole or size >= MAX_TAIL_BYTES:
                return offset
            size *= 4

    async def read_new(self, job: Job, index: int | None, *, to_the_end: bool) -> AsyncIterator[OutputText]:
        """Yield the unread output of the component with that index, or of all components."""
        for component in job.attempt.components if job.attempt else ():
            if index not in (None, component.index):
                continue
            token = job.token(component.index)
            if not self._unread.get(token, True) and not to_the_end:
                continue
            self._unread[token] = False
            if token not in self._offsets and (beginning := self._beginnings.get(component.index)):
                await run_in_thread(self._continue_at, job, component, beginning)
            while pieces := await run_in_thread(
                self._output_store.read, token, self._offsets.get(token, 0), to_the_end=to_the_end
            ):
                for piece in pieces:
                    text = self._format_piece(job, component, piece)
                    yield OutputText(self.generation, component.index, self._offsets[token], piece.missing, text)

    def _format_piece(self, job: Job, component: Component, piece: OutputPiece) -> bytes:
        """Return a piece of output, after a line of text if output before it is missing. Advance the position."""
        token = job.token(component.index)
        note = self._note_missing(job, component, piece) if piece.missing else b""
        note = b"\n" + note if note and self._is_in_line.get(token) else note
        note = mark_stream(note, is_error=True) if self._stream is OutputStream.MARKED else note
        self._offsets[token] = piece.offset + len(piece.data)
        if piece.missing or token not in self._splitters:
            self._splitters[token] = StreamSplitter()
        text = note + self._select(job, component, self._splitters[token], piece.data)
        if text:
            self._is_in_line[token] = not text.endswith(b"\n")
        return text

    def _select(self, job: Job, component: Component, splitter: StreamSplitter, data: bytes) -> bytes:
        """Return what belongs to the stream that is read. An undivided output has no error stream."""
        is_divided = job.spec.separates_streams(component.request_index)
        parts = splitter.split(data) if is_divided else [(False, data)]
        if self._stream is OutputStream.MARKED:  # each piece is complete by itself, as components alternate
            return b"".join(mark_stream(text, is_error=is_error) for is_error, text in parts)
        selected = None if self._stream is None else self._stream is OutputStream.ERROR
        return b"".join(text for is_error, text in parts if selected in (None, is_error))

    def _note_missing(self, job: Job, component: Component, piece: OutputPiece) -> bytes:
        """Return the line that replaces missing bytes."""
        if piece.offset - piece.missing < self._output_store.head:
            return f"koala: {piece.missing} bytes are missing here: they did not reach the daemon\n".encode()
        file, _ = job.spec.output_files(component.request_index)
        if file and component.cluster in self._grid:
            file = self._grid[component.cluster].profile.map_output_file(
                file, component.cluster, job.output_values(component.cluster)
            )
        remedy = f"all of it is in {file} on its nodes" if file else "a file given with --output would have all of it"
        limit = f"output_limit is {self._output_store.limit}"
        return f"koala: {piece.missing} bytes are left out here ({limit}); {remedy}\n".encode()
