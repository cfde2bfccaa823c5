"""The parameters of the scheduler, with the defaults of the live world (semantics 4 to 6). Times in seconds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from koalapy.model.errors import UsageError
from koalapy.model.job import ClaimingMode

QueueMode = Literal["scan", "head", "fcfs"]
QueueOrder = Literal["fcfs", "narrowest-first"]
Preemption = Literal["never", "claiming", "placement"]

SHORTEST = 0.001
"""Seconds; far shorter spans vanish when added to a time of today, and what comes again after one never ends."""
LEAST_FACTOR = 0.01
"""Of what is left until the start: with less, claims would be tried thousands of times before it."""


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
    max_components_per_job: int = 1000
    max_placement_tries: int | None = None
    claim_grace: float = 10.0
    """How long a runner may stay queued in its LRM before local users count as having overtaken it."""
    barrier_timeout: float = 120.0
    """From placement until every node has reported, and from the open barrier until the program is launched."""
    unreachable_after: float = 5.0
    lost_after: float = 600.0
    error_threshold: int = 3
    max_restarts: int | None = 10
    restart_pause: float = 1.0
    """Before a job's second restart; each further one doubles it, up to ``restart_pause_max``. 0 is none."""
    restart_pause_max: float = 60.0
    claiming: ClaimingMode = ClaimingMode.ATOMIC
    claim_threshold: float = 0.0
    """T of incremental claiming: the fraction of components that must be startable for a claim to start any."""
    claim_factor: float = 0.75
    """L: how much of the time left until the job start time passes before the next claiming try."""
    claim_factor_step: float = 0.125
    """What L is lowered by after a claim that failed in the end."""
    claim_factor_min: float = 0.25
    claim_epsilon: float = 1.0
    """So near to the job start time, it counts as reached."""
    max_claiming_tries: int | None = None
    preemption: Preemption = "placement"
    """Whether high-priority jobs preempt low ones: never, only while claiming (as in M05), or already to be placed."""
    assumed_bandwidth: float = 100e6
    """Bytes per second that a transfer is estimated by where the link has not been measured."""
    aging: bool = True
    """Whether a job that failed ``aging_tries`` scans keeps low-priority jobs from delaying it further."""
    aging_tries: int = 20
    probation: bool = True
    """Whether an unusable cluster is tried again, one component at a time, after a growing pause."""
    probation_pause: float = 60.0
    """The first pause; each failed trial doubles it, up to ``probation_pause_max``."""
    probation_pause_max: float = 3600.0

    def __post_init__(self) -> None:
        for fault in faults_of({field.name: getattr(self, field.name) for field in fields(self)}):
            raise fault


def faults_of(values: Mapping[str, Any]) -> Iterator[UsageError]:
    """What of the parameters' values cannot be, in order."""
    durations = (
        "scan_interval",
        "claim_grace",
        "barrier_timeout",
        "unreachable_after",
        "lost_after",
        "claim_epsilon",
        "probation_pause",
        "probation_pause_max",
    )
    finite = ("claim_epsilon", "restart_pause", "restart_pause_max", "probation_pause", "probation_pause_max")
    at_least_one = (
        "high_scans_per_low",
        "placement_queue_limit",
        "max_components_per_job",
        "error_threshold",
        "max_placement_tries",
        "max_claiming_tries",
        "aging_tries",
    )
    not_negative = ("restart_pause", "restart_pause_max")
    fractions = ("claim_factor", "claim_factor_min")
    for name, value in values.items():
        if name in durations and not value >= SHORTEST:
            yield _out_of_range(name, value, f"at least {SHORTEST:g}")
        if name in at_least_one and value is not None and value < 1:
            yield _out_of_range(name, value, "at least 1")
        if name in not_negative and not value >= 0:
            yield _out_of_range(name, value, "at least 0")
        if name in finite and value == float("inf"):
            yield _out_of_range(name, value, "finite")
        if name in fractions and not LEAST_FACTOR <= value < 1:
            yield _out_of_range(name, value, f"at least {LEAST_FACTOR:g} and below 1")
    if not values["assumed_bandwidth"] > 0:
        yield _out_of_range("assumed_bandwidth", values["assumed_bandwidth"], "greater than 0")
    if not 0 <= values["claim_threshold"] <= 1:
        yield _out_of_range("claim_threshold", values["claim_threshold"], "from 0 to 1")
    if not 0 <= values["claim_factor_step"] < 1:
        yield _out_of_range("claim_factor_step", values["claim_factor_step"], "at least 0 and below 1")
    if values["claim_factor_min"] > values["claim_factor"]:
        bound = f"at most claim_factor, {values['claim_factor']}"
        yield _out_of_range("claim_factor_min", values["claim_factor_min"], bound)
    if values["max_restarts"] is not None and values["max_restarts"] < 0:
        yield _out_of_range("max_restarts", values["max_restarts"], "at least 0, or left out for no limit")


def _out_of_range(name: str, value: object, bound: str) -> UsageError:
    return UsageError(f"{name} is {value}, but must be {bound}", field=name, value=value)
