"""Room on a disk, and when there is too little of it."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from koalapy.model.bounds import Name, Path, Space
from koalapy.model.wording import format_bytes

LOW_FRACTION, MIN_FRACTION = 0.05, 0.01
"""Of a small disk these count instead of the bytes of ``DiskLimits``."""
LOW_FILES, MIN_FILES = 1000, 50
"""How many more files may be made there: a disk may have room and take no file."""


@dataclass(frozen=True, slots=True)
class Disk:
    """What there is of the disk below a folder; bytes, and how many files more (None where that has no limit)."""

    what: Name
    """What we have there."""
    path: Path
    free: Space
    size: Space
    files: Space | None = None

    def __str__(self) -> str:
        left = "room for few files"
        if self.files is None or self.files > LOW_FILES:
            left = f"{format_bytes(float(f'{self.free:.2g}'))} left"  # in two digits: it does not change all the time
        return f"the disk of its {self.what} ({self.path}) has {left}"


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """When a disk of the daemon's or an agent's has too little room; 0 is never."""

    low: Annotated[int, Ge(0)] = 1024**3
    """Bytes below which that is told; of a small disk 5 % if that is less."""
    least: Annotated[int, Ge(0)] = 64 * 1024**2
    """Bytes below which nothing is begun that needs it; of a small disk 1 % if that is less."""

    def is_low(self, disk: Disk) -> bool:
        return _below(disk, min(self.low, int(disk.size * LOW_FRACTION)), LOW_FILES if self.low else 0)

    def is_full(self, disk: Disk) -> bool:
        return _below(disk, min(self.least, int(disk.size * MIN_FRACTION)), MIN_FILES if self.least else 0)


def _below(disk: Disk, size: int, files: int) -> bool:
    return disk.free < size or (disk.files is not None and disk.files < files)
