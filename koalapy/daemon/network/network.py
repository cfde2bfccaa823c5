"""The information service of the network (semantics 11): links are measured by jobs of the scheduler itself."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from koalapy.daemon.engine.database import in_database, query
from koalapy.daemon.engine.engine import RETRY_PAUSE, Engine, WorkItem
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.network.links import Knowledge, LinkState, LinkTable
from koalapy.model.application import NO_APPLICATION
from koalapy.model.cluster import ClusterPair, ClusterState, Link, check_cluster, pair_of
from koalapy.model.errors import KoalaError, LeaseLost, StoreUnavailable, UsageError
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job, JobId, JobSpec, JobState, Launcher, Priority
from koalapy.model.measurement import Measurement, MeasurementKind, MeasurementSettings
from koalapy.model.request import ClusterName, ComponentRequest, FixedRequest
from koalapy.ports import MeasurementStore
from koalapy.runner.preflight import CANNOT_REACH
from koalapy.scheduler.events import LinkMeasured
from koalapy.scheduler.queries import Queries

log = structlog.get_logger()

OWNER = "koala"
ITSELF = Identity(OWNER, Role.ADMIN, "the daemon itself")
NAME = "network"
WALLTIME = 120.0
"""Seconds that a ping-pong may take, on the slowest of links."""
START_AND_END_GRACE = 60.0
"""Seconds that it may take beside, to be started and ended."""
MAX_LATENCY, MAX_BANDWIDTH = 3600.0, 1e15
"""Seconds, and bytes per second: what a measurement tells beyond is none. Of bandwidth there is a byte at least."""
MAX_OUTPUT_SIZE = 64 * 1024
CONNECT_TIMEOUT = 20.0
"""Seconds from the daemon's start for which who asks waits for agents that have not connected."""
DUE_CHECK_INTERVAL = 30.0
"""Seconds between two looks at whether a link is due to be measured."""
NOT_OVERSUBSCRIBED = (("OMPI_MCA_mpi_yield_when_idle", "0"),)
"""Each process has a node of its own: one that yields while it waits would measure the node's scheduler."""


@dataclass(slots=True)
class UnderWay:
    """A measurement that is not over; without a job it waits for its turn."""

    job: JobId | None = None


@dataclass(frozen=True, slots=True)
class MeasureReply:
    """What became of a wish to have a link measured; ``reason`` says why it is not, and is empty when it is."""

    pair: ClusterPair
    job: JobId | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """A link as it is told to people; ``link`` is what policies go by."""

    pair: ClusterPair
    state: LinkState
    link: Link
    known: Knowledge
    under_way: UnderWay | None


class Network:
    """Measures links when asked or when it is time, and tells the scheduler what they are."""

    def __init__(
        self,
        engine: Engine,
        queries: Queries,
        jobs: Jobs,
        store: MeasurementStore,
        links: LinkTable,
        how: MeasurementSettings,
    ) -> None:
        self._engine, self._queries, self._jobs = engine, queries, jobs
        self._store, self._links, self._how = store, links, how
        self._turns = asyncio.Semaphore(how.parallel)
        self._under_way: dict[ClusterPair, UnderWay] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._chance_until = 0.0

    # Its life

    def start(self) -> None:
        """Take up the measurements that a daemon before this one began."""
        self._chance_until = asyncio.get_running_loop().time() + CONNECT_TIMEOUT
        for job in self._queries.jobs():
            pair = _measured_by(job, self._how.command, self._owner)
            if pair is None:
                continue
            if pair in self._under_way or pair not in self._links.pairs():
                self._spawn(self._cancel(job.id, "measured by another job"))
            else:
                self._begin(pair, UnderWay(job.id))

    async def stop(self) -> None:
        """Leave the jobs that measure to the next daemon."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def measure_what_is_due(self) -> None:
        """Measure every link that was last tried more than the interval ago."""
        interval, now = self._how.interval, self._engine.clock()
        if interval is None:
            return
        for pair in self._links.pairs():
            tried_at = self._links[pair].tried_at
            # What was tried later than now was tried before the clock was set back.
            if tried_at is None or not 0 <= now - tried_at < interval:
                self._ask(pair)

    # What may be asked

    def links(self) -> list[LinkRecord]:
        """All pairs of clusters, within one and between two."""
        return [self._record(pair) for pair in self._links.pairs()]

    def _record(self, pair: ClusterPair) -> LinkRecord:
        known = self._links[pair]
        state = known.state(self._engine.clock(), self._how.stale_after)
        return LinkRecord(pair, state, known.link, known, self._under_way.get(pair))

    @property
    def stale_after(self) -> float:
        return self._how.stale_after

    def now(self) -> float:
        """The moment after which what was asked for just now is written down."""
        return self._engine.clock()

    async def agents_had_their_chance(self) -> None:
        """Until all agents have connected, or have had the time for it since the daemon's start."""
        time = asyncio.get_running_loop().time
        clusters = self._queries.grid.clusters()
        # It is asked for a few times in a daemon's life at most, in its first seconds: that is worth no event.
        while time() < self._chance_until and not all(cluster.contact.connected for cluster in clusters):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def measure(
        self, clusters: Sequence[ClusterName] | None = None, pairs: Sequence[ClusterPair] | None = None
    ) -> list[MeasureReply]:
        """Have links measured one after the other: all those among clusters, or certain pairs, or all there are."""
        return [self._ask(pair) for pair in self._wanted(clusters, pairs)]

    async def history(self, one: ClusterName, other: ClusterName, limit: int) -> list[Measurement]:
        """What was measured between two clusters, newest first."""
        for name in (one, other):
            check_cluster(name, self._clusters())
        return await query(self._store.history, *pair_of(one, other), limit)

    def transferred(self, one: ClusterName, other: ClusterName, size: int, seconds: float) -> None:
        """Learn from a transfer from one cluster to another that is over; bytes."""
        found = self._links.moved((one, other), size, seconds, self._engine.clock())
        if found is not None:
            self._spawn(self._write_down(found))

    def _wanted(self, clusters: Sequence[ClusterName] | None, pairs: Sequence[ClusterPair] | None) -> list[ClusterPair]:
        if clusters is not None and pairs is not None:
            raise UsageError("both clusters and pairs are given", field="pairs", hint="leave one of them out")
        if clusters == [] or pairs == []:
            field = "clusters" if pairs is None else "pairs"
            raise UsageError(f"{field} is empty", field=field, value=[], hint="leave it out to measure all links")
        known = self._clusters()
        for index, name in enumerate(clusters or ()):
            check_cluster(name, known, f"clusters[{index}]")
        for index, pair in enumerate(pairs or ()):
            for place, name in enumerate(pair):
                check_cluster(name, known, f"pairs[{index}][{place}]")
        if pairs is not None:
            return list(dict.fromkeys(pair_of(*pair) for pair in pairs))
        return [p for p in self._links.pairs() if clusters is None or (p[0] in clusters and p[1] in clusters)]

    def _clusters(self) -> list[ClusterName]:
        return [one for one, other in self._links.pairs() if one == other]

    # Measuring

    def _ask(self, pair: ClusterPair) -> MeasureReply:
        if pair in self._under_way:
            return MeasureReply(pair, self._under_way[pair].job)
        if reason := self.why_not_now(pair):
            return MeasureReply(pair, reason=reason)
        self._begin(pair, UnderWay())
        return MeasureReply(pair)

    def why_not_now(self, pair: ClusterPair) -> str:
        for name in dict.fromkeys(pair):
            if why := self._queries.accounts.rejection_reason(self._owner(pair), name):
                return why
            cluster = self._queries.grid[name]
            if cluster.state not in (ClusterState.USABLE, ClusterState.PROBATION):
                return f"{name} is {cluster.state}: {cluster.why}"
        if pair[0] == pair[1] and self._queries.grid[pair[0]].total == 1:
            return f"{pair[0]} has 1 node, and it takes 2 to measure within a cluster"
        return ""

    def _owner(self, pair: ClusterPair) -> str:
        """Whose job measures a link: somebody's whose own clusters these are, for only theirs run there."""
        owners = {owner for name in pair if (owner := self._queries.accounts.owner_of(name))}
        return owners.pop() if len(owners) == 1 else OWNER

    def _begin(self, pair: ClusterPair, under_way: UnderWay) -> None:
        self._under_way[pair] = under_way
        self._spawn(self._measure(pair, under_way))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _measure(self, pair: ClusterPair, under_way: UnderWay) -> None:
        try:
            async with self._turns:
                found = None if self._engine.draining else await self._result(pair, under_way)
                if found is not None:
                    self._links.learn(found)
                    await self._write_down(found)
        finally:
            del self._under_way[pair]

    async def _result(self, pair: ClusterPair, under_way: UnderWay) -> Measurement | None:
        """What the measurement's job found; None when this daemon ends before that."""
        try:
            if under_way.job is None:
                spec = spec_of(pair, self._how.command, self._owner(pair))
                under_way.job = (await self._jobs.submit(spec, ITSELF))[0].job.id
            reason = await self._follow(under_way.job)
            job = (await self._jobs.get(under_way.job)).job
            if not reason and not job.state.is_final:
                return None
            output = b"" if reason else await self._output(job.id)
        except KoalaError as error:
            log.error("a link was not measured", action="measurement-failed", clusters=pair, error=error.message)
            return self._inconclusive(pair, under_way.job, error.message)
        if reason:
            return self._inconclusive(pair, job.id, reason)
        return result_of(pair, job, output, self._engine.clock())

    def _inconclusive(self, pair: ClusterPair, job: JobId | None, reason: str) -> Measurement:
        return Measurement(*pair, MeasurementKind.INCONCLUSIVE, self._engine.clock(), job=job, error=reason)

    async def _follow(self, job: JobId) -> str:
        """Until it is over, or this daemon ends; why it was given up, if it was."""
        record = await self._jobs.wait(job, self._how.patience)
        if record.job.state in (JobState.STARTING, JobState.RUNNING):
            record = await self._jobs.wait(job, WALLTIME + START_AND_END_GRACE)
            reason = "it was started and did not end"
        else:
            reason = f"no nodes for {self._how.patience:g} s: {record.reason or record.job.state}"
        if record.job.state.is_final or self._engine.draining:
            return ""
        await self._cancel(job, reason)
        return reason

    async def _cancel(self, job: JobId, reason: str) -> None:
        try:
            await self._jobs.cancel(job, ITSELF, reason)
        except KoalaError as error:  # it has just ended
            log.info("not cancelled", action="measurement-not-cancelled", job=job, error=error.message)

    async def _output(self, job: JobId) -> bytes:
        found = b""
        async for piece in self._jobs.output(job, follow=False):
            found = (found + piece)[-MAX_OUTPUT_SIZE:]
        return found

    async def _write_down(self, found: Measurement) -> None:
        """Keep what was found, and then tell the scheduler."""
        while True:
            try:
                await in_database(self._store.add, found)
                break
            except StoreUnavailable as error:
                log.error("a measurement was not written", action="measurement-not-kept", error=str(error))
                await asyncio.sleep(RETRY_PAUSE)
            except LeaseLost as error:
                log.error("a measurement is not kept", action="measurement-not-kept", error=str(error))
                return
        pair = pair_of(found.one, found.other)
        if found.kind is not MeasurementKind.INCONCLUSIVE and pair in self._links.pairs():
            known = self._links[pair]
            there = LinkMeasured(*pair, known.link)
            back = LinkMeasured(*pair[::-1], known.link_back)
            self._engine.post(WorkItem(events=(there,) if pair[0] == pair[1] else (there, back)))


def spec_of(pair: ClusterPair, command: Sequence[str], owner: str = OWNER) -> JobSpec:
    """One node in each of two clusters, or two nodes of one."""
    sizes = {pair[0]: 2} if pair[0] == pair[1] else dict.fromkeys(pair, 1)
    return JobSpec(
        FixedRequest(tuple(ComponentRequest(size, name) for name, size in sizes.items())),
        tuple(command),
        name=f"{NAME} {pair[0]}-{pair[1]}",
        owner=owner,
        environment=NOT_OVERSUBSCRIBED,
        priority=Priority.LOW,
        application=NO_APPLICATION,
        launcher=Launcher.OPENMPI,
        processes_per_node=1,
        walltime=WALLTIME,
        max_restarts=0,
        internal=True,
    )


def _measured_by(job: Job, command: Sequence[str], owner: Callable[[ClusterPair], str]) -> ClusterPair | None:
    """The link that a job measures, if it is one of ours: anybody may call a job of theirs as we call ours."""
    request = job.spec.request
    if not isinstance(request, FixedRequest) or len(request.components) > 2 or not job.spec.internal:
        return None
    names = [component.cluster or "" for component in request.components]
    pair = pair_of(names[0], names[-1])
    ours = (owner(pair), f"{NAME} {pair[0]}-{pair[1]}", tuple(command))
    return pair if (job.spec.owner, job.spec.name, job.spec.command) == ours else None


def result_of(pair: ClusterPair, job: Job, output: bytes, now: float) -> Measurement:
    """What a job that is over has found of a link."""
    lines = output.decode(errors="replace").splitlines()
    if job.state is JobState.SUCCEEDED:
        found = next((found for line in lines if (found := _told(line))), None)
        if found is not None:
            latency, there, back = found
            if job.attempt is not None and job.attempt.head.cluster != pair[0]:
                there, back = back, there
            return Measurement(*pair, MeasurementKind.PINGPONG, now, latency, there, job=job.id, back=back)
        return Measurement(*pair, MeasurementKind.INCONCLUSIVE, now, job=job.id, error="the program told no result")
    errors = [c.error for c in job.attempt.components] if job.attempt else []
    if unreached := next((e for e in (*errors, job.reason) if CANNOT_REACH in e), ""):
        return Measurement(*pair, MeasurementKind.PINGPONG, now, job=job.id, error=unreached)
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    reason = f"{job.reason or job.state}" + (f" ({last[:200]})" if last else "")
    return Measurement(*pair, MeasurementKind.INCONCLUSIVE, now, job=job.id, error=reason)


def _told(line: str) -> tuple[float, float, float] | None:
    """Latency and the bandwidths from the first process and back, if a line of output tells them."""
    try:
        told: Any = json.loads(line)
        pair = told["pairs"][0]
        ways = [way["bandwidth"] for way in pair.get("ways", ())] or [pair["bandwidth"]]
        found = float(pair["latency"]), float(ways[0]), float(ways[-1])
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    latency, *bandwidths = found
    possible = 0 < latency <= MAX_LATENCY and all(1 <= value <= MAX_BANDWIDTH for value in bandwidths)
    return found if possible else None
