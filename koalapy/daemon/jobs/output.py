"""Components' output: taken in from agents, and told to people with a line in place of what is not kept."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar
from weakref import WeakSet

import structlog

from koalapy.daemon.engine.database import query
from koalapy.daemon.engine.engine import Engine
from koalapy.model.job import Component, Job, JobId, Token, parse_token
from koalapy.model.request import ClusterName
from koalapy.ports import OutputPiece, OutputStore, Store
from koalapy.scheduler.grid import GridStatus
from koalapy.scheduler.queries import Queries

P = ParamSpec("P")
T = TypeVar("T")

log = structlog.get_logger()

MAX_REMEMBERED_COMPONENTS = 10_000
"""Components of attempts that are over of which it is known that they were on their cluster."""

_threads = ThreadPoolExecutor(8, "output")
"""A disk that hangs keeps nobody else from a thread."""


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(_threads, lambda: work(*args, **kwargs))


@dataclass(frozen=True, slots=True)
class OutputTail:
    """The end of what one component wrote; ``before`` bytes of it came before that."""

    component: int
    cluster: ClusterName
    data: bytes
    before: int


class Outputs:
    """Between the agents that send output, the store that keeps it, and those who read it."""

    def __init__(self, engine: Engine, queries: Queries, store: Store, kept: OutputStore) -> None:
        self._engine, self._queries, self._store, self._kept = engine, queries, store, kept
        self._known: dict[tuple[ClusterName, Token], None] = {}
        self._readings: WeakSet[Reading] = WeakSet()
        self._no_room = False

    async def take(self, cluster: ClusterName, token: Token, pieces: Sequence[OutputPiece]) -> int | None:
        """Keep an agent's pieces; how far they are kept, None when nothing is: no room now, or no component of its."""
        if not await self._is_on(cluster, token):
            return None
        try:
            end = await in_thread(self._kept.append, token, pieces)
        except OSError as error:
            if not self._no_room:
                log.error("output cannot be kept: agents send it again", action="output-not-kept", error=str(error))
            self._no_room = True
            return None
        if self._no_room:
            log.info("output can be kept again", action="output-kept-again")
        self._no_room = False
        for reading in self._readings:
            reading.told(token)
        self._engine.wake_watchers(parse_token(token)[0])
        return end

    async def _is_on(self, cluster: ClusterName, token: Token) -> bool:
        """Whether a token names a component on that very cluster, of its job's present attempt or an earlier one."""
        if found := self._queries.find(token):
            return found[1].cluster == cluster
        if (cluster, token) in self._known:
            return True
        if not await self._is_of_an_earlier_attempt(cluster, token):
            return False
        self._known[cluster, token] = None
        if len(self._known) > MAX_REMEMBERED_COMPONENTS:
            del self._known[next(iter(self._known))]
        return True

    async def _is_of_an_earlier_attempt(self, cluster: ClusterName, token: Token) -> bool:
        try:
            job, generation, index, nonce = parse_token(token)
        except ValueError:
            return False
        attempts = await query(self._store.attempts, job)
        there = (c for a in attempts if (a.generation, a.nonce) == (generation, nonce) for c in a.components)
        return any((c.index, c.cluster) == (index, cluster) for c in there)

    async def remove(self, jobs: Collection[JobId]) -> None:
        """All that is kept of jobs; no more of them is taken in once the store knows them no longer."""
        for known in [known for known in self._known if parse_token(known[1]).job in jobs]:
            del self._known[known]
        await in_thread(self._kept.remove, jobs)

    async def tails(self, job: Job, most: int) -> Sequence[OutputTail]:
        """The ends of what the components of a job's last attempt wrote, in all at most so many bytes."""
        components = job.attempt.components if job.attempt else ()
        each = most // max(1, len(components))
        return [await in_thread(self._tail, job, component, each) for component in components]

    def _tail(self, job: Job, component: Component, most: int) -> OutputTail:
        token = job.token(component.index)
        start = max(0, self._kept.size(token) - most)
        data = b"".join(piece.data for piece in self._kept.read(token, start, to_the_end=False))
        return OutputTail(component.index, component.cluster, data, start)

    def read(self, job: Job) -> "Reading":
        """The output of a job's attempt as it is now, from its beginning."""
        reading = Reading(self._kept, self._queries.grid, job.generation)
        self._readings.add(reading)
        return reading


class Reading:
    """How far somebody has read the output of one attempt."""

    def __init__(self, kept: OutputStore, grid: GridStatus, generation: int) -> None:
        self._kept, self._grid = kept, grid
        self.generation = generation
        self._at: dict[Token, int] = {}
        self._unread: dict[Token, bool] = {}
        """Whether there may be more of a component: a look takes a thread, and mostly one component has changed."""
        self._in_line: dict[Token, bool] = {}
        """Whether the last that was read of a component did not end a line."""

    def told(self, token: Token) -> None:
        """More has come of a component, of whichever job."""
        if token in self._unread:
            self._unread[token] = True

    async def more(self, job: Job, only: int | None, *, to_the_end: bool) -> AsyncIterator[bytes]:
        """What is there now and was not read, of all components or of one."""
        for component in job.attempt.components if job.attempt else ():
            if only not in (None, component.index):
                continue
            token = job.token(component.index)
            if not self._unread.get(token, True) and not to_the_end:
                continue
            self._unread[token] = False
            while pieces := await in_thread(self._kept.read, token, self._at.get(token, 0), to_the_end=to_the_end):
                for piece in pieces:
                    yield self._text(job, component, piece)

    def _text(self, job: Job, component: Component, piece: OutputPiece) -> bytes:
        token = job.token(component.index)
        line = self._line(job, component, piece) if piece.missing else b""
        line = b"\n" + line if line and self._in_line.get(token) else line
        self._at[token] = piece.offset + len(piece.data)
        self._in_line[token] = not (line + piece.data).endswith(b"\n")
        return line + piece.data

    def _line(self, job: Job, component: Component, piece: OutputPiece) -> bytes:
        """What is said in place of bytes that are missing."""
        if piece.offset - piece.missing < self._kept.head:
            return f"koala: {piece.missing} bytes are missing here: they did not reach the daemon\n".encode()
        file = self._file(job, component)
        whole = f"all of it is in {file} on its nodes" if file else "a file given with --output would have all of it"
        limit = f"output_limit is {self._kept.limit}"
        return f"koala: {piece.missing} bytes are left out here ({limit}); {whole}\n".encode()

    def _file(self, job: Job, component: Component) -> str | None:
        """The file on the component's cluster that has the whole output, if the user wanted one."""
        own = job.spec.component(component.request_index)
        file, grid = (own and own.output) or job.spec.output, self._grid
        if file and component.cluster in grid:
            return grid[component.cluster].profile.map_path(file, component.cluster, job.id)
        return file
