"""What is kept of a record."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from koalapy.model.measurement import Finite


@dataclass(frozen=True, slots=True)
class Recording:
    """What is kept of what the scheduler was told, to be replayed; the section ``record``."""

    enabled: bool = True
    """Whether anything is."""
    keep: Annotated[Finite, Ge(60)] = 7 * 86400.0
    """Seconds for which the record of a daemon that has ended is kept; that of this one is kept whole."""
    size: Annotated[int, Ge(1024**2)] = 1024**3
    """Bytes of all: the oldest go first. When this daemon's alone is larger, no more of it is recorded."""
