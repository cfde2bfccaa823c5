"""Determine the daemon's health: its database, lease, engine, disks and clusters."""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import structlog

from koalapy import __version__
from koalapy.daemon.engine.engine import Engine
from koalapy.model.cluster import ClusterState
from koalapy.model.disk import Disk, DiskLimits
from koalapy.model.request import ClusterName
from koalapy.scheduler.clusters import NO_REPORT_YET, ClusterStatus
from koalapy.scheduler.queries import Queries
from koalapy.system.files import file_identity, measure_disks

log = structlog.get_logger()

DISK_INTERVAL = 2.0
"""Seconds between two checks of the disks."""
DISK_TIMEOUT = 2.0
"""Seconds within which the disks must report their free space and accept a file."""
ROUND_TIMEOUT = 3.0
"""Seconds after which an engine cycle is reported as hanging."""
LEASE_OVERDUE = 10.0
"""Seconds since the last renewal after which another daemon may soon take the lease."""
PROBE = bytes(16384)
FOR_USERS = "send a token to see the reason"

CheckName = Literal["database", "lease", "engine", "disk", "agent", "resource manager"]


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one health check."""

    name: CheckName
    ok: bool
    reason: str = ""
    """The present or impending problem; empty if there is none."""
    needed: bool = True
    """Whether readiness depends on it: true for checks of the daemon, false for those of a cluster."""
    cluster: ClusterName | None = None


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the daemon accepts jobs and actions, and the checks by which that is decided."""

    ready: bool
    checks: Sequence[Check]

    @property
    def reasons(self) -> list[str]:
        """Return the reasons of the daemon's failed checks or, if there are none, those of the clusters."""
        faults = [check for check in self.checks if not check.ok]
        daemon_reasons = [check.reason for check in faults if check.needed]
        return daemon_reasons or [f"{check.name} of {check.cluster}: {check.reason}" for check in faults]

    def for_strangers(self) -> "Readiness":
        """Return the readiness for unauthenticated callers, without reasons, which name paths and hosts."""
        return Readiness(self.ready, [replace(c, reason=FOR_USERS) if c.reason else c for c in self.checks])

    @property
    def status(self) -> str:
        """Return the readiness and its reasons in one line of text."""
        reasons = "; ".join(self.reasons)
        return "; ".join(filter(None, ("ready" if self.ready else "not ready", reasons)))


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The daemon's health, with its own problems and the numbers of stored queued and active jobs."""

    status: Literal["ok", "degraded"]
    ready: bool
    """Whether the daemon accepts jobs and actions."""
    problems: Sequence[str]
    disks: Sequence[Disk]
    version: str
    epoch: int
    queued: int
    active: int
    clusters: Mapping[ClusterName, str]

    def for_strangers(self) -> "HealthReport":
        """Return the report for unauthenticated callers: whether the daemon is healthy and ready, and nothing else."""
        problems = [FOR_USERS] if self.problems else []
        return HealthReport(self.status, self.ready, problems, (), "", 0, 0, 0, {})


class HealthMonitor:
    """The daemon's health; the state of the disks is that of the last check."""

    def __init__(self, engine: Engine, queries: Queries, folders: Mapping[str, Path], limits: DiskLimits) -> None:
        """``folders``: the folders that the daemon writes to, by the name of their content."""
        self._engine, self._queries, self._folders, self._limits = engine, queries, folders, limits
        self._identities: dict[Path, tuple[int, int]] = {}
        """Device and inode of each folder when it was first seen."""
        self._disks: Sequence[Disk] = ()
        self._disk_problems: Sequence[str] = ()
        """One line for each disk that is low or full."""
        self._disk_fault = ""
        """Why nothing can be written; empty if the disks accept files."""

    async def check_disks(self) -> None:
        """Check the disks and update their state.

        Disks that do not answer within ``DISK_TIMEOUT`` are reported as a fault; the check still waits for them.
        """
        looking = asyncio.ensure_future(asyncio.to_thread(self._measure_disks))
        await asyncio.wait({looking}, timeout=DISK_TIMEOUT)
        if not looking.done():
            self._update_disk_state((), fault=f"the daemon's disks have not answered for {DISK_TIMEOUT:g} s")
        try:
            self._disks, fault = await looking
        except OSError as error:
            self._update_disk_state((), fault=f"the daemon's disks cannot be looked at: {error.strerror or error}")
            return
        low = [str(disk) for disk in self._disks if self._limits.is_low(disk)]
        full = [str(disk) for disk in self._disks if self._limits.is_full(disk)]
        self._update_disk_state(low, "; ".join(full) or fault)

    def _measure_disks(self) -> tuple[Sequence[Disk], str]:
        """Return the disks, and why one accepts no file despite free space (empty if all do). Raise ``OSError``."""
        disks = measure_disks(self._folders)
        for content, folder in self._folders.items():
            if fault := self._folder_fault(folder):
                return disks, f"its {content} ({folder}) {fault}"
        for disk in disks:
            try:
                _try_to_write(Path(disk.path))
            except OSError as error:
                return disks, f"the disk of its {disk.what} ({disk.path}) takes no file: {error.strerror or error}"
        return disks, ""

    def _folder_fault(self, folder: Path) -> str:
        """Return how a folder was removed or replaced; empty if it was not, or has never existed."""
        try:
            identity = file_identity(folder)
        except FileNotFoundError:
            return "was removed while the daemon uses it" if folder in self._identities else ""
        first_identity = self._identities.setdefault(folder, identity)
        return "" if identity == first_identity else "was replaced while the daemon uses it"

    def _update_disk_state(self, low: Sequence[str], fault: str) -> None:
        """Record the disk problems of the last test, and log when they begin or end.

        ``low`` describes disks with little space. ``fault`` is why a test file could not be written, empty if it was.
        """
        previous_problems, previous_fault = self._disk_problems, self._disk_fault
        self._disk_fault = fault
        self._disk_problems = low or ([fault] if fault else [])
        if fault and not previous_fault:
            log.error("nothing can be kept on a disk", action="disk-full", reason=fault)
        elif self._disk_problems and not previous_problems:
            log.error("a disk is low", action="disk-low", reason="; ".join(self._disk_problems))
        elif previous_problems and not self._disk_problems:
            log.info("there is room again", action="disk-back")

    def check_readiness(self, *, of_clusters: bool = False) -> Readiness:
        """Return the daemon's readiness; with ``of_clusters``, agents and resource managers are needed as well."""
        checks = list(self._run_checks())
        return Readiness(all(check.ok or not (check.needed or of_clusters) for check in checks), checks)

    def _run_checks(self) -> Iterator[Check]:
        """Yield the checks of a readiness report: the daemon's own, then two for each cluster."""
        database, disk = self._engine.database.problem, self._disk_fault or "; ".join(self._disk_problems)
        yield Check("database", not database, database)
        lease_fault, engine_fault = self._lease_fault(), self._engine_fault()
        yield Check("lease", not lease_fault, lease_fault)
        yield Check("engine", not engine_fault, engine_fault)
        yield Check("disk", not self._disk_fault, disk)
        for cluster in self._queries.grid.clusters():
            yield _cluster_check("agent", cluster, cluster.absence)
            yield _cluster_check("resource manager", cluster, _lrm_fault(cluster))

    def _lease_fault(self) -> str:
        """Return why this daemon may lose its sole right to write to the database; empty if it may not."""
        database = self._engine.database
        if database.lease_lost:
            return "another daemon has taken over"
        if database.lease_age < LEASE_OVERDUE:
            return ""
        return f"the lease was renewed {database.lease_age:.0f} s ago: another daemon may take over"

    def _engine_fault(self) -> str:
        """Return why the engine makes no progress; empty if it does."""
        engine = self._engine
        if engine.draining:
            return "the daemon is ending"
        if engine.cycle_started_at is None or (lasts := time.monotonic() - engine.cycle_started_at) < ROUND_TIMEOUT:
            return ""
        problem = "waits for the database" if engine.database.problem else "does not end"
        return f"a round of the engine {problem} since {lasts:.0f} s"

    @property
    def disks(self) -> Sequence[Disk]:
        """Return the disks that the daemon writes to."""
        return self._disks

    def make_report(self) -> HealthReport:
        """Return the health of the daemon and its clusters, for ``/health``."""
        engine = self._engine
        states = {cluster.name: cluster.state for cluster in self._queries.grid.clusters()}
        database = engine.database.problem
        # While the database rejects writes, faults of lease and engine only follow from that.
        faults = [database] if database else [self._lease_fault(), self._engine_fault()]
        problems = [*filter(None, faults), *self._disk_problems]
        is_well = not problems and set(states.values()) <= {ClusterState.USABLE, ClusterState.DRAINED}
        return HealthReport(
            status="ok" if is_well else "degraded",
            ready=self.check_readiness().ready,
            problems=problems,
            disks=self._disks,
            version=__version__,
            epoch=engine.epoch,
            queued=engine.stored_queued,
            active=engine.stored_active,
            clusters={name: str(state) for name, state in states.items()},
        )


def _try_to_write(folder: Path) -> None:
    """Write a temporary file. Raise ``OSError`` if the disk is full for this account or read-only."""
    while not folder.exists():
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(PROBE)
        file.flush()


def _cluster_check(name: CheckName, cluster: ClusterStatus, fault: str) -> Check:
    return Check(name, not fault, fault, needed=False, cluster=cluster.name)


def _lrm_fault(cluster: ClusterStatus) -> str:
    """Return the fault of a resource manager, empty if there is none; an unknown state counts as a fault."""
    if not cluster.has_agent:
        return "nothing is known of it while the agent is away"
    return cluster.last_report.problem or (
        "" if cluster.contact.connected and cluster.nodes.reported else NO_REPORT_YET
    )
