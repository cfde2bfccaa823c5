"""Settings of the record."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from koalapy.model.measurement import Finite


@dataclass(frozen=True, slots=True)
class Recording:
    """The record of the scheduler's inputs, which can be replayed."""

    enabled: bool = True
    """Whether the daemon records."""
    keep: Annotated[Finite, Ge(60)] = 7 * 86400.0
    """Seconds for which the record of an ended daemon run is stored. The record of the current run is stored
    completely."""
    size: Annotated[int, Ge(1024**2)] = 1024**3
    """Maximum bytes of all records; the oldest are deleted first. If the current run alone exceeds it, recording
    stops."""
