"""The time that a program has between its warning and its stop; it passes while no agent runs, too."""

import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Grace:
    """What a program is told, the seconds that it has from then on, and when they are over.

    The end is counted from the boot of the machine: a step of its clock changes nothing, and neither does a new agent.
    """

    signal: str
    seconds: float
    until: float

    @classmethod
    def begin(cls, signal: str, seconds: float) -> "Grace | None":
        """From now on; None where there is none."""
        return cls(signal, seconds, _since_boot() + seconds) if signal and seconds > 0 else None

    @classmethod
    def recall(cls, noted: dict[str, Any] | None) -> "Grace | None":
        return cls(**noted) if noted else None

    @property
    def left(self) -> float:
        """Seconds; no more than there were, whatever the clock says."""
        return max(0.0, min(self.seconds, self.until - _since_boot()))

    def noted(self) -> dict[str, Any]:
        """As it is written down."""
        return asdict(self)


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
