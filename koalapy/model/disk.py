"""Free disk space, and the limits below which it is too low."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from koalapy.model.bounds import Label, ShortText, Space
from koalapy.model.wording import format_bytes

LOW_FRACTION, MIN_FRACTION = 0.05, 0.01
"""Fractions of a small disk that replace the bytes of ``DiskLimits``."""
LOW_FILES, MIN_FILES = 1000, 50
"""Number of files that can still be created: a disk with free space may have no free inode."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of a directory: bytes, and the number of files that can still be created (None: no limit)."""

    what: Label
    """The purpose of the directory, such as ``spool``."""
    path: ShortText
    free: Space
    size: Space
    files: Space | None = None

    def __str__(self) -> str:
        free = "room for few files"
        if self.files is None or self.files > LOW_FILES:
            free = f"{format_bytes(float(f'{self.free:.2g}'))} left"  # two digits, so that the text seldom changes
        return f"the disk of its {self.what} ({self.path}) has {free}"


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """The limits of free space on the disks of the daemon and of agents; 0 disables a limit."""

    low: Annotated[int, Ge(0)] = 1024**3
    """Bytes below which low space is reported, or 5 % of a small disk if that is less."""
    least: Annotated[int, Ge(0)] = 64 * 1024**2
    """Bytes below which nothing starts that needs the disk, or 1 % of a small disk if that is less."""

    def is_low(self, disk: Disk) -> bool:
        return _below(disk, min(self.low, int(disk.size * LOW_FRACTION)), LOW_FILES if self.low else 0)

    def is_full(self, disk: Disk) -> bool:
        return _below(disk, min(self.least, int(disk.size * MIN_FRACTION)), MIN_FILES if self.least else 0)


def _below(disk: Disk, size: int, files: int) -> bool:
    return disk.free < size or (disk.files is not None and disk.files < files)
