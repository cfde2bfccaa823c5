"""Watches the room on an agent's disks: what is low is told, and where there is none nothing is started."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import structlog

from koalapy.agent.core.reporter import Reporter
from koalapy.model.disk import Disk, DiskLimits
from koalapy.system.limits import disks_of

log = structlog.get_logger()

CHECK_INTERVAL = 5.0
"""Seconds."""
CHECK_TIMEOUT = 10.0
"""Seconds that a disk may take to say how much room it has."""


class DiskWatch:
    """Tells the reporter; ``changed`` is called when more or less may be started than before."""

    def __init__(
        self, reporter: Reporter, folders: Mapping[str, Path], limits: DiskLimits, changed: Callable[[], None]
    ) -> None:
        self._reporter, self._folders, self._limits, self._changed = reporter, folders, limits, changed

    async def watch(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(CHECK_INTERVAL)

    async def look(self) -> None:
        looking = asyncio.ensure_future(asyncio.to_thread(disks_of, self._folders))
        await asyncio.wait({looking}, timeout=CHECK_TIMEOUT)
        places = " and ".join(map(str, self._folders.values()))
        if not looking.done():
            self._tell([], [], f"the disk of {places} has not answered for {CHECK_TIMEOUT:g} s")
        try:
            disks = await looking
        except OSError as error:
            self._tell([], [], f"the disk of {places} cannot be looked at: {error.strerror or error}")
            return
        full = [str(disk) for disk in disks if self._limits.is_full(disk)]
        low = [str(disk) for disk in disks if self._limits.is_low(disk) and not self._limits.is_full(disk)]
        self._tell(disks, low, "; ".join(full))

    def _tell(self, disks: list[Disk], low: list[str], full: str) -> None:
        reporter = self._reporter
        before = reporter.full, reporter.low
        reporter.disks, reporter.low, reporter.full = disks, low, full
        if bool(full) != bool(before[0]):
            if full:
                log.error("a disk is full", action="disk-full", reason=full)
            else:
                log.info("there is room again", action="disk-back")
        elif low and not before[1]:
            log.warning("a disk is low", action="disk-low", reason="; ".join(low))
        if (full, low) != before:
            self._changed()
