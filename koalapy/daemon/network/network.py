"""Measure the links between clusters by jobs of low priority, and report them to the scheduler (semantics 11)."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import structlog

from koalapy.daemon.engine.database import query, run_in_database
from koalapy.daemon.engine.engine import RETRY_INTERVAL_S, Engine, WorkItem
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.jobs.output import OutputText
from koalapy.daemon.network.links import LinkMeasurements, LinkState, LinkTable
from koalapy.model.application import NO_APPLICATION
from koalapy.model.cluster import (
    ClusterPair,
    ClusterState,
    GridView,
    Link,
    LinkPath,
    RelayedSince,
    check_cluster,
    pair_of,
)
from koalapy.model.errors import KoalaError, LeaseLost, StoreUnavailable, UsageError
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.model.measurement import Measurement, MeasurementKind, MeasurementSettings
from koalapy.model.request import ClusterName, ComponentRequest, FixedRequest
from koalapy.runner.preflight import CANNOT_REACH
from koalapy.scheduler.events import LinkMeasured
from koalapy.store.service_tables import MeasurementStore
from koalapy.system.event_loop import BackgroundTasks

log = structlog.get_logger()

OWNER = "koala"
ITSELF = Identity(OWNER, Role.ADMIN, "the daemon itself")
NAME = "network"
WALLTIME = 120.0
"""Seconds that a ping-pong may take on the slowest link."""
START_AND_END_GRACE = 60.0
"""Seconds beyond ``WALLTIME`` for starting and ending the job."""
MAX_LATENCY, MAX_BANDWIDTH = 3600.0, 1e15
"""Seconds, and bytes per second; results beyond these, or below 1 byte/s, are rejected."""
MAX_OUTPUT_SIZE = 64 * 1024
CONNECT_TIMEOUT = 20.0
"""Seconds after the daemon's start in which a request to measure waits for agents to connect."""
DUE_CHECK_INTERVAL = 30.0
"""Seconds between checks for links that are due to be measured."""
NOT_OVERSUBSCRIBED = (("OMPI_MCA_mpi_yield_when_idle", "0"),)
"""Each process has its own node. If it yielded while waiting, it would measure the node's operating system."""


@dataclass(slots=True)
class PendingMeasurement:
    """A measurement that has not ended; it has no job while it is queued."""

    job: JobId | None = None


@dataclass(frozen=True, slots=True)
class MeasureReply:
    """The answer to a request to measure a link; ``reason`` is empty unless the link cannot be measured now."""

    pair: ClusterPair
    job: JobId | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """A link as users see it; ``link`` holds the values that policies use."""

    pair: ClusterPair
    state: LinkState
    link: Link
    measurements: LinkMeasurements
    under_way: PendingMeasurement | None
    is_relayed: bool
    """Whether MPI messages between its clusters go over relays now, or did until direct connections are tried again."""
    relayed: RelayedSince | None = None
    """Why they do; None if the nodes reach each other, or without a hub."""


class Network:
    """A service that measures links on request or periodically, and reports them to the scheduler."""

    def __init__(
        self, engine: Engine, jobs: Jobs, store: MeasurementStore, links: LinkTable, settings: MeasurementSettings
    ) -> None:
        self._engine, self._queries, self._jobs = engine, engine.queries, jobs
        self._store, self._links, self._settings = store, links, settings
        self._turns = asyncio.Semaphore(settings.parallel)
        self._under_way: dict[ClusterPair, PendingMeasurement] = {}
        self._tasks = BackgroundTasks()
        self._connect_deadline = 0.0

    def start(self) -> None:
        """Resume the measurements of the previous daemon run."""
        self._connect_deadline = asyncio.get_running_loop().time() + CONNECT_TIMEOUT
        for job in self._queries.jobs():
            pair = _measured_link(job, self._settings.command, self._job_owner)
            if pair is None:
                continue
            if pair in self._under_way or pair not in self._links.list_pairs():
                self._tasks.spawn(self._cancel_job(job.id, "measured by another job"))
            else:
                self._begin_measurement(pair, PendingMeasurement(job.id))

    async def stop(self) -> None:
        """Stop following measurements; their jobs go on, and the next daemon run resumes them."""
        self._tasks.cancel()
        await self._tasks.wait()

    async def measure_due_links(self) -> None:
        """Measure each link that was not measured within the interval."""
        interval, now = self._settings.interval, self._engine.clock()
        if interval is None:
            return
        for pair in self._links.list_pairs():
            tried_at = self._links[pair].tried_at
            # A time in the future means that the clock was set back since.
            if tried_at is None or not 0 <= now - tried_at < interval:
                self._request_measurement(pair)

    def list_known_links(self) -> list[LinkRecord]:
        """Return the links that are configured, were measured, or are being measured, sorted by their pairs."""
        return self.list_links(sorted(self._links.known_pairs | self._under_way.keys()))

    def list_links(self, pairs: Iterable[ClusterPair] | None = None) -> list[LinkRecord]:
        """Return the links of pairs of clusters, within one and between two; by default of all, sorted."""
        now, stale_after, view = self._engine.clock(), self._settings.stale_after, self._queries.grid.view()
        has_relays = bool(view.relays)
        return [
            LinkRecord(
                pair,
                (measurements := self._links[pair]).state_at(now, stale_after),
                measurements.link,
                measurements,
                self._under_way.get(pair),
                has_relays and _is_relayed(view, pair),
                self._queries.relayed_since(pair) if has_relays and pair[0] != pair[1] else None,
            )
            for pair in (self._links.list_pairs() if pairs is None else pairs)
        ]

    @property
    def stale_after(self) -> float:
        return self._settings.stale_after

    def current_time(self) -> float:
        """Return the time after which measurements requested now are stored."""
        return self._engine.clock()

    async def wait_for_agents(self) -> None:
        """Wait until all agents have connected, or ``CONNECT_TIMEOUT`` after the daemon's start."""
        time = asyncio.get_running_loop().time
        clusters = self._queries.grid.clusters()
        # Polling suffices: this happens a few times per daemon run, in its first seconds.
        while time() < self._connect_deadline and not all(cluster.contact.connected for cluster in clusters):  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def measure_links(
        self, clusters: Sequence[ClusterName] | None = None, pairs: Sequence[ClusterPair] | None = None
    ) -> list[MeasureReply]:
        """Start to measure the links between some clusters, or of some pairs, or all; ``UsageError`` for bad ones."""
        return [self._request_measurement(pair) for pair in self._select_pairs(clusters, pairs)]

    async def read_history(self, first: ClusterName, second: ClusterName, limit: int) -> list[Measurement]:
        """Return the measurements between two clusters, newest first."""
        for name in (first, second):
            check_cluster(name, self.cluster_names)
        return await query(self._store.history, *pair_of(first, second), limit)

    def record_transfer(self, source: ClusterName, target: ClusterName, size: int, seconds: float) -> None:
        """Learn from a finished transfer of ``size`` bytes from one cluster to another."""
        measurement = self._links.learn_transfer((source, target), size, seconds, self._engine.clock())
        if measurement is not None:
            self._tasks.spawn(self._store_and_report(measurement))

    def _select_pairs(
        self, clusters: Sequence[ClusterName] | None, pairs: Sequence[ClusterPair] | None
    ) -> list[ClusterPair]:
        """Return the links to measure: ``pairs``, those between ``clusters``, or all.

        Raise ``UsageError`` if invalid.
        """
        if clusters is not None and pairs is not None:
            raise UsageError("clusters and pairs cannot be given together", field="pairs", hint="give only one of them")
        if clusters == [] or pairs == []:
            field = "clusters" if pairs is None else "pairs"
            raise UsageError(f"{field} is empty", field=field, value=[], hint="leave it out to measure all links")
        cluster_names = self.cluster_names
        for index, name in enumerate(clusters or ()):
            check_cluster(name, cluster_names, f"clusters[{index}]")
        for index, pair in enumerate(pairs or ()):
            for position, name in enumerate(pair):
                check_cluster(name, cluster_names, f"pairs[{index}][{position}]")
        if pairs is not None:
            return list(dict.fromkeys(pair_of(*pair) for pair in pairs))
        return [p for p in self._links.list_pairs() if clusters is None or (p[0] in clusters and p[1] in clusters)]

    @property
    def cluster_names(self) -> list[ClusterName]:
        return self._links.clusters

    def _request_measurement(self, pair: ClusterPair) -> MeasureReply:
        """Begin to measure a link. Return the job that does so already, or why the link cannot be measured."""
        if pair in self._under_way:
            return MeasureReply(pair, self._under_way[pair].job)
        if reason := self.rejection_reason(pair):
            return MeasureReply(pair, reason=reason)
        self._begin_measurement(pair, PendingMeasurement())
        return MeasureReply(pair)

    def rejection_reason(self, pair: ClusterPair) -> str:
        """Return why a link cannot be measured now; empty if it can."""
        for name in dict.fromkeys(pair):
            if reason := self._queries.accounts.rejection_reason(self._job_owner(pair), name):
                return reason
            cluster = self._queries.grid[name]
            if cluster.state not in (ClusterState.USABLE, ClusterState.PROBATION):
                return f"{name} is {cluster.state}: {cluster.state_reason}"
        if pair[0] == pair[1] and self._queries.grid[pair[0]].last_report.total == 1:
            return f"{pair[0]} has 1 node; measuring within a cluster needs 2"
        return ""

    def _job_owner(self, pair: ClusterPair) -> str:
        """Return the owner of the measuring job: the owner of a user's cluster, since other jobs may not run there."""
        owners = {owner for name in pair if (owner := self._queries.accounts.owner_of(name))}
        return owners.pop() if len(owners) == 1 else OWNER

    def _begin_measurement(self, pair: ClusterPair, under_way: PendingMeasurement) -> None:
        self._under_way[pair] = under_way
        self._tasks.spawn(self._measure_link(pair, under_way))

    async def _measure_link(self, pair: ClusterPair, under_way: PendingMeasurement) -> None:
        """Wait for a free turn, measure a link by a job, and store the result."""
        try:
            async with self._turns:
                measurement = None if self._engine.draining else await self._run_job(pair, under_way)
                if measurement is not None:
                    self._links.add_measurement(measurement)
                    await self._store_and_report(measurement)
        finally:
            del self._under_way[pair]

    async def _run_job(self, pair: ClusterPair, under_way: PendingMeasurement) -> Measurement | None:
        """Submit the measuring job, and return its result; None if the daemon shuts down first."""
        try:
            if under_way.job is None:
                spec = measurement_spec(pair, self._settings.command, self._job_owner(pair))
                under_way.job = (await self._jobs.submit(spec, ITSELF))[0].job.id
            reason = await self._wait_for_job(under_way.job)
            job = (await self._jobs.get(under_way.job)).job
            if not reason and not job.state.is_final:
                return None
            output = b""
            if not reason:
                async for part in self._jobs.follow_output(job.id, follow=False):
                    if isinstance(part, OutputText):
                        output = (output + part.data)[-MAX_OUTPUT_SIZE:]
        except KoalaError as error:
            log.error("could not measure a link", action="measurement-failed", clusters=pair, error=error.message)
            return self._make_inconclusive(pair, under_way.job, error.message)
        if reason:
            return self._make_inconclusive(pair, job.id, reason)
        return parse_result(pair, job, output, self._engine.clock())

    def _make_inconclusive(self, pair: ClusterPair, job: JobId | None, reason: str) -> Measurement:
        return Measurement(*pair, MeasurementKind.INCONCLUSIVE, self._engine.clock(), job=job, error=reason)

    async def _wait_for_job(self, job: JobId) -> str:
        """Wait until a job ends or the daemon shuts down. Cancel one that takes too long, and return the reason."""
        record = await self._jobs.wait_until_final(job, self._settings.patience)
        if record.job.state in (JobState.STARTING, JobState.RUNNING):
            record = await self._jobs.wait_until_final(job, WALLTIME + START_AND_END_GRACE)
            reason = f"the job did not end within {WALLTIME + START_AND_END_GRACE:g} s of its start"
        else:
            reason = f"no nodes for {self._settings.patience:g} s: {record.reason or record.job.state}"
        if record.job.state.is_final or self._engine.draining:
            return ""
        await self._cancel_job(job, reason)
        return reason

    async def _cancel_job(self, job: JobId, reason: str) -> None:
        try:
            await self._jobs.cancel(job, ITSELF, reason)
        except KoalaError as error:  # The job has just ended.
            log.info("could not cancel a measurement", action="measurement-not-cancelled", job=job, error=error.message)

    async def _store_and_report(self, measurement: Measurement) -> None:
        """Store a measurement, retrying until the database takes it, and then report it to the scheduler."""
        while True:
            try:
                await run_in_database(self._store.add, measurement)
                break
            except StoreUnavailable as error:
                log.error("could not store a measurement, retrying", action="measurement-not-kept", error=str(error))
                await asyncio.sleep(RETRY_INTERVAL_S)
            except LeaseLost as error:
                log.error("could not store a measurement", action="measurement-not-kept", error=str(error))
                return
        pair = pair_of(measurement.one, measurement.other)
        if measurement.kind is not MeasurementKind.INCONCLUSIVE and pair in self._links.list_pairs():
            forward, back = self._links[pair].link, self._links[pair].link_back
            if measurement.kind is MeasurementKind.TRANSFER:  # It says nothing about the compute nodes.
                forward, back = replace(forward, direct=False), replace(back, direct=False)
            events = LinkMeasured(*pair, forward), LinkMeasured(*pair[::-1], back)
            self._engine.post(WorkItem(events=events[:1] if pair[0] == pair[1] else events))


def _is_relayed(view: GridView, pair: ClusterPair) -> bool:
    path = view.path_between(*pair)
    return path is LinkPath.RELAYED or (path is LinkPath.UNKNOWN and view.link_between(*pair).relayed)


def measurement_spec(pair: ClusterPair, command: Sequence[str], owner: str = OWNER) -> JobSpec:
    """Return the job that measures a link: on one node of each cluster, or on two nodes within a cluster."""
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


def _measured_link(job: Job, command: Sequence[str], owner: Callable[[ClusterPair], str]) -> ClusterPair | None:
    """Return the link that a job measures; None if the job is not a measurement of this daemon.

    The name alone is not a proof, since a user may give it to any job.
    """
    request = job.spec.request
    if not isinstance(request, FixedRequest) or len(request.components) > 2 or not job.spec.internal:
        return None
    names = [component.cluster or "" for component in request.components]
    pair = pair_of(names[0], names[-1])
    expected = (owner(pair), f"{NAME} {pair[0]}-{pair[1]}", tuple(command))
    return pair if (job.spec.owner, job.spec.name, job.spec.command) == expected else None


def parse_result(pair: ClusterPair, job: Job, output: bytes, now: float) -> Measurement:
    """Return the measurement of a job that has ended, by its output or its error."""
    lines = output.decode(errors="replace").splitlines()
    if job.state is JobState.SUCCEEDED:
        result = next((result for line in lines if (result := _parse_line(line))), None)
        if result is not None:
            latency, forward, back = result
            if job.attempt is not None and job.attempt.head.cluster != pair[0]:
                forward, back = back, forward
            is_relayed = job.attempt is not None and pair in job.attempt.relayed
            kind = MeasurementKind.RELAYED if is_relayed else MeasurementKind.PINGPONG
            return Measurement(*pair, kind, now, latency, forward, job=job.id, back=back)
        return Measurement(*pair, MeasurementKind.INCONCLUSIVE, now, job=job.id, error="the program printed no result")
    errors = [component.error for component in job.attempt.components] if job.attempt else []
    if error := next((error for error in (*errors, job.reason) if CANNOT_REACH in error), ""):
        return Measurement(*pair, MeasurementKind.PINGPONG, now, job=job.id, error=error)
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    reason = f"{job.reason or job.state}" + (f" ({last[:200]})" if last else "")
    return Measurement(*pair, MeasurementKind.INCONCLUSIVE, now, job=job.id, error=reason)


def _parse_line(line: str) -> tuple[float, float, float] | None:
    """Parse latency and the bandwidths from and to the first process; None if the line holds no plausible ones."""
    try:
        report: Any = json.loads(line)
        pair = report["pairs"][0]
        bandwidths = [direction["bandwidth"] for direction in pair.get("ways", ())] or [pair["bandwidth"]]
        latency, forward, back = float(pair["latency"]), float(bandwidths[0]), float(bandwidths[-1])
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    if 0 < latency <= MAX_LATENCY and 1 <= forward <= MAX_BANDWIDTH and 1 <= back <= MAX_BANDWIDTH:
        return latency, forward, back
    return None
