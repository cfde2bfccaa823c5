"""The parameters of the scheduler, with the defaults of the live world (semantics 4 to 6). Times in seconds."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_args

from annotated_types import Le

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
"""No larger body is read of a request."""
MIN_SECONDS = 0.001
"""Far shorter spans vanish when added to a time of today, and what comes again after one never ends."""
MIN_FACTOR = 0.01
"""Of what is left until the start: with less, claims would be tried thousands of times before it."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a parameter must be, in words, and whether a value is that."""

    words: str
    holds: Callable[[Any], bool]


FINITE = Requirement("finite", lambda value: value != float("inf"))
NOT_NEGATIVE = Requirement("at least 0", lambda value: value >= 0)
Seconds = Annotated[float, Requirement(f"at least {MIN_SECONDS:g}", lambda value: value >= MIN_SECONDS)]
Count = Annotated[int, Requirement("at least 1", lambda value: value >= 1)]
Factor = Annotated[float, Requirement(f"at least {MIN_FACTOR:g} and below 1", lambda value: MIN_FACTOR <= value < 1)]


class OutOfRange(UsageError, ValueError):
    """Parameters that cannot be. The first is told of; ``faults`` are all of them, in order."""

    def __init__(self, faults: Sequence[UsageError]) -> None:
        super().__init__(faults[0].message, field=faults[0].field, value=faults[0].value)
        self.faults = faults


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
    speed_threshold: Annotated[float, NOT_NEGATIVE, FINITE] = 0.0
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
    max_restarts: Annotated[int, Requirement("at least 0, or left out for no limit", NOT_NEGATIVE.holds)] | None = 10
    """After so many failures of the infrastructure a job fails, unless it says otherwise itself."""
    restart_pause: Annotated[float, NOT_NEGATIVE, FINITE] = 1.0
    """Before a job's second restart; each further one doubles it, up to ``restart_pause_max``. 0 is none."""
    restart_pause_max: Annotated[float, NOT_NEGATIVE, FINITE] = 60.0
    """The longest of these pauses."""
    claiming: ClaimingMode = ClaimingMode.ATOMIC
    """All of a job's components at once, or those that can be had, unless the job says otherwise itself."""
    claim_threshold: Annotated[float, Requirement("from 0 to 1", lambda value: 0 <= value <= 1)] = 0.0
    """T of incremental claiming: the fraction of components that must be startable for a claim to start any."""
    claim_factor: Factor = 0.75
    """L: how much of the time left until the job start time passes before the next claiming try."""
    claim_factor_step: Annotated[float, Requirement("at least 0 and below 1", lambda value: 0 <= value < 1)] = 0.125
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
    assumed_bandwidth: Annotated[float, Requirement("greater than 0", lambda value: value > 0)] = 100e6
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
        if faults := list(self._faults()):
            raise OutOfRange(faults)

    def _faults(self) -> Iterator[UsageError]:
        for field in fields(self):
            value = getattr(self, field.name)
            for requirement in _REQUIREMENTS[field.name]:
                if value is not None and not requirement.holds(value):
                    yield _out_of_range(field.name, value, requirement.words)
        if self.claim_factor_min > self.claim_factor:
            yield _out_of_range("claim_factor_min", self.claim_factor_min, f"at most claim_factor, {self.claim_factor}")


def _out_of_range(name: str, value: object, requirement: str) -> UsageError:
    return UsageError(f"{name} is {value}, but must be {requirement}", field=name, value=value)


def _requirements(kind: Any) -> list[Requirement]:
    """Those of a parameter's type, which may be left out."""
    found = [each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Requirement)]
    return found or [requirement for part in get_args(kind) for requirement in _requirements(part)]


_REQUIREMENTS = {field.name: _requirements(field.type) for field in fields(Rules)}
