"""Whether the daemon is well: its database, the room on its disks, and its clusters."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import structlog

from koalapy import __version__
from koalapy.model.cluster import ClusterState
from koalapy.model.disk import Disk, DiskLimits
from koalapy.model.request import ClusterName
from koalapy.resources import disks_of
from koalapy.service.engine import Engine

log = structlog.get_logger()

DISK_INTERVAL = 10.0
"""Seconds between two looks at the disks."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """``problems`` are those of the daemon itself; jobs are counted as they are stored."""

    status: Literal["ok", "degraded"]
    ready: bool
    """Whether jobs and actions are taken: not while the database takes nothing."""
    problems: Sequence[str]
    disks: Sequence[Disk]
    version: str
    epoch: int
    queued: int
    active: int
    clusters: Mapping[ClusterName, str]


class HealthMonitor:
    """Of the disks it is known what there was when they were last looked at."""

    def __init__(self, engine: Engine, folders: Mapping[str, Path], limits: DiskLimits) -> None:
        """``folders``: where the daemon writes, by what it has there."""
        self._engine, self._folders, self._limits = engine, folders, limits
        self._disks: Sequence[Disk] = ()
        self._disk_problems: Sequence[str] = ()
        """One line for each disk that is low or full."""

    async def look_at_disks(self) -> None:
        before = self._disk_problems
        try:
            self._disks = await asyncio.to_thread(disks_of, self._folders)
            self._disk_problems = [str(disk) for disk in self._disks if self._limits.is_low(disk)]
        except OSError as error:
            self._disk_problems = [f"the daemon's disks cannot be looked at: {error.strerror or error}"]
        if self._disk_problems and not before:
            log.error("a disk is low", action="disk", reason="; ".join(self._disk_problems))
        elif before and not self._disk_problems:
            log.info("there is room again", action="disk")

    def report(self) -> HealthReport:
        engine = self._engine
        states = {cluster.name: cluster.state for cluster in engine.queries.grid.clusters()}
        database = engine.database.problem
        problems = [*([database] if database else []), *self._disk_problems]
        is_well = not problems and set(states.values()) <= {ClusterState.USABLE, ClusterState.DRAINED}
        return HealthReport(
            status="ok" if is_well else "degraded",
            ready=not database,
            problems=problems,
            disks=self._disks,
            version=__version__,
            epoch=engine.epoch,
            queued=engine.stored_queued,
            active=engine.stored_active,
            clusters={name: str(state) for name, state in states.items()},
        )
