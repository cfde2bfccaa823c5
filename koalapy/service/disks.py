"""Watches the room on the daemon's own disks: its database, and what it keeps beside."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import structlog

from koalapy.disks import look
from koalapy.model.disk import Disk, DiskLimits

log = structlog.get_logger()

LOOK_EVERY = 10.0
"""Seconds."""


class DiskWatch:
    """What there was when it last looked."""

    def __init__(self, folders: Mapping[str, Path], limits: DiskLimits) -> None:
        self._folders, self._limits = folders, limits
        self.disks: Sequence[Disk] = ()
        self.problems: Sequence[str] = ()
        """Of disks that are low or full, one line each."""

    async def look(self) -> None:
        before = self.problems
        try:
            self.disks = await asyncio.to_thread(look, self._folders)
            self.problems = [str(disk) for disk in self.disks if self._limits.is_low(disk)]
        except OSError as error:
            self.problems = [f"the daemon's disks cannot be looked at: {error.strerror or error}"]
        if self.problems and not before:
            log.error("a disk is low", action="disk", reason="; ".join(self.problems))
        elif before and not self.problems:
            log.info("there is room again", action="disk")
