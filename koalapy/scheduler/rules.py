"""The parameters of the scheduler, with the defaults for live use (semantics 4 to 6). Times are in seconds."""

from dataclasses import dataclass, fields
from math import inf
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt

from koalapy.model.corrections import describe_bounds
from koalapy.model.errors import UsageError
from koalapy.model.job import ClaimingMode
from koalapy.model.request import MAX_COMPONENTS
from koalapy.model.sharing import SharingMode

QueueMode = Literal["scan", "head", "fcfs"]
QueueOrder = Literal["fcfs", "narrowest-first"]
Preemption = Literal["never", "claiming", "placement"]
PreemptionOrder = Literal["least-harm", "jst"]
ReclaimedPosition = Literal["place", "front"]

MAX_JOB_BYTES = 1024 * 1024
"""The largest request body that is read."""
MIN_SECONDS = 0.001
"""Shorter intervals vanish when added to a current timestamp, and a repeated timer would never advance."""
MIN_FACTOR = 0.01
"""The lowest claim factor: with less, a job would have thousands of claiming tries before its start."""

FINITE = Lt(inf)
Seconds = Annotated[float, Ge(MIN_SECONDS)]
Count = Annotated[int, Ge(1)]
Factor = Annotated[float, Ge(MIN_FACTOR), Lt(1)]


class OutOfRange(UsageError, ValueError):
    """A parameter is outside its allowed range."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Parameters of scheduling and claiming; the section ``rules`` of the configuration. Times in seconds."""

    queue: QueueMode = "scan"
    """How a scan goes through a queue: past jobs that do not fit (``scan``), or no further than the first of them."""
    queue_order: QueueOrder = "fcfs"
    """By age, or small jobs first."""
    sharing: SharingMode = "ordinary"
    """One queue for all (``ordinary``), or one for each home site: its jobs run nowhere else (``independent``), or it
    takes back its nodes for them (``feasible``)."""
    speed_threshold: Annotated[float, Ge(0), FINITE] = 0.0
    """Of the speed of its home site: clusters that have less are not for a job."""
    reclaimed_position: ReclaimedPosition = "place"
    """Where a job waits whose nodes were taken back: in its own place, or before all others of its home site."""
    high_scans_per_low: Count = 2
    """S: how often the high queue is scanned for each scan of the low one."""
    scan_interval: Seconds = 30.0
    """Between two regular scans."""
    event_driven: bool = True
    """Scan also when nodes become free, a job arrives or a cluster comes back."""
    step_budget: Annotated[Seconds, FINITE] = 0.05
    """How long jobs are placed in one go, before messages and requests have their turn again."""
    placement_queue_limit: Count = 100_000
    """Jobs that may wait; beyond it submissions are refused for the time being."""
    max_components_per_job: Annotated[Count, Le(MAX_COMPONENTS)] = 1000
    """Each of them is told of all."""
    max_bytes_per_job: Annotated[Count, Le(MAX_JOB_BYTES)] = 256 * 1024
    """Bytes of all texts that a job is submitted with, such as its command and variables; they stay in memory until the
    job has ended."""
    max_placement_tries: Count | None = None
    """After so many tries to place it a job fails, unless it says otherwise itself."""
    claim_grace: Seconds = 10.0
    """How long a runner may stay queued in its LRM before its claim has timed out: local users got the nodes first."""
    barrier_timeout: Seconds = 120.0
    """From placement until every node has reported, and from the open barrier until the program is launched."""
    unreachable_after: Seconds = 5.0
    """Without a word from a cluster's agent its components count as unknown."""
    error_threshold: Count = 3
    """After so many errors of the infrastructure in a row a cluster is ``unusable``."""
    max_restarts: Annotated[int, Ge(0)] | None = 10
    """After so many failures of the infrastructure a job fails, unless it says otherwise itself."""
    restart_pause: Annotated[float, Ge(0), FINITE] = 1.0
    """Before a job's second restart; each further one doubles it, up to ``restart_pause_max``. 0 is none."""
    restart_pause_max: Annotated[float, Ge(0), FINITE] = 60.0
    """The longest of these pauses."""
    claiming: ClaimingMode = ClaimingMode.ATOMIC
    """All of a job's components at once, or those that can be had, unless the job says otherwise itself."""
    claim_threshold: Annotated[float, Ge(0), Le(1)] = 0.0
    """T of incremental claiming: the fraction of components that must be startable for a claim to start any."""
    claim_factor: Factor = 0.75
    """L: how much of the time left until the job start time passes before the next claiming try."""
    claim_factor_step: Annotated[float, Ge(0), Lt(1)] = 0.125
    """What L is lowered by after a claim that failed in the end."""
    claim_factor_min: Factor = 0.25
    """How far L is lowered at most."""
    claim_epsilon: Annotated[Seconds, FINITE] = 1.0
    """So near to the job start time, it counts as reached."""
    max_claiming_tries: Count | None = None
    """After so many claims in vain a job fails, unless it says otherwise itself."""
    preemption: Preemption = "placement"
    """Whether high-priority jobs preempt low ones: never, only while claiming (as in M05), or already to be placed."""
    preemption_order: PreemptionOrder = "least-harm"
    """Which low jobs are preempted: those with which the least work is lost, or in descending order of their JST, as in
    M05."""
    warning_max: Annotated[Seconds, FINITE] = 600.0
    """The longest grace that a job may ask for between its warning and its stop."""
    assumed_bandwidth: Annotated[float, Gt(0)] = 100e6
    """Bytes per second that a transfer is estimated by where the link has not been measured."""
    aging: bool = True
    """Whether a job that failed ``aging_tries`` scans keeps low-priority jobs from delaying it further."""
    aging_tries: Count = 20
    """In how many scans a job must have failed to be one that nothing may delay further."""
    low_patience: Annotated[Seconds, FINITE] | None = 14_400.0
    """So long a job of low priority may wait until it is promised its turn: none of high priority delays it further."""
    probation: bool = True
    """Whether an unusable cluster is tried again, one component at a time, after a growing pause."""
    probation_pause: Annotated[Seconds, FINITE] = 60.0
    """The first pause; each failed trial doubles it, up to ``probation_pause_max``."""
    probation_pause_max: Annotated[Seconds, FINITE] = 3600.0
    """The longest of these pauses."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for constraint in _CONSTRAINTS[field.name]:
                if value is not None and (broken := list(describe_bounds(constraint, value))):
                    raise _out_of_range(field.name, value, " and ".join(broken))
        if self.claim_factor_min > self.claim_factor:
            raise _out_of_range("claim_factor_min", self.claim_factor_min, f"at most claim_factor, {self.claim_factor}")


def _out_of_range(name: str, value: object, requirement: str) -> OutOfRange:
    return OutOfRange(f"{name} is {value}, but must be {requirement}", field=name, value=value)


def _constraints(kind: Any) -> list[Any]:
    """Return the constraints of a parameter's type, which may be optional."""
    return list(getattr(kind, "__metadata__", ())) or [each for part in get_args(kind) for each in _constraints(part)]


_CONSTRAINTS = {field.name: _constraints(field.type) for field in fields(Rules)}
