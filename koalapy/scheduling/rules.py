"""The parameters of the scheduler, with the defaults of the live world (semantics 4 to 6). Times in seconds."""

from dataclasses import dataclass, fields
from typing import Literal

from koalapy.model.errors import UsageError

QueueMode = Literal["scan", "head", "fcfs"]
QueueOrder = Literal["fcfs", "narrowest-first"]


@dataclass(frozen=True, slots=True)
class Rules:
    queue: QueueMode = "scan"
    queue_order: QueueOrder = "fcfs"
    high_scans_per_low: int = 2
    """S: how often the high queue is scanned for each scan of the low one."""
    scan_interval: float = 30.0
    event_driven: bool = True
    """Scan also when nodes become free, a job arrives or a cluster comes back."""
    placement_queue_limit: int = 100_000
    max_placement_tries: int | None = None
    claim_grace: float = 10.0
    """How long a runner may stay queued in its LRM before local users count as having overtaken it."""
    barrier_timeout: float = 120.0
    """From placement until every node has reported, and from the open barrier until the program is launched."""
    unreachable_after: float = 5.0
    lost_after: float = 600.0
    error_threshold: int = 3
    max_restarts: int | None = 10

    def __post_init__(self) -> None:
        positive = ("scan_interval", "claim_grace", "barrier_timeout", "unreachable_after", "lost_after")
        at_least_one = ("high_scans_per_low", "placement_queue_limit", "error_threshold", "max_placement_tries")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in positive and not value > 0:
                raise _out_of_range(field.name, value, "greater than 0")
            if field.name in at_least_one and value is not None and value < 1:
                raise _out_of_range(field.name, value, "at least 1")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise _out_of_range("max_restarts", self.max_restarts, "at least 0, or left out for no limit")


def _out_of_range(name: str, value: object, bound: str) -> UsageError:
    return UsageError(f"{name} is {value}, but must be {bound}", field=name, value=value)
