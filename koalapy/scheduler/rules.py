"""The parameters of the scheduler, with the defaults for live use (semantics 4 to 6). Times are in seconds."""

from dataclasses import dataclass, fields
from math import inf
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge, Gt, Le, Lt

from koalapy.model.array import MAX_ARRAY_SIZE, MAX_INDEX
from koalapy.model.errors import UsageError, describe_bounds
from koalapy.model.job_spec import ClaimingMode
from koalapy.model.request import MAX_COMPONENTS
from koalapy.model.users import SharingMode

QueueMode = Literal["scan", "head", "fcfs"]
QueueOrder = Literal["fcfs", "narrowest-first", "fair-share"]
Preemption = Literal["never", "claiming", "placement"]
PreemptionOrder = Literal["least-harm", "jst"]
ReclaimedPosition = Literal["place", "front"]

MAX_JOB_BYTES = 1024 * 1024
"""Maximum size in bytes of a request body."""
MIN_SECONDS = 0.001
"""Minimum interval. Shorter ones vanish when added to a current timestamp, and a repeated timer would never advance."""
MIN_FACTOR = 0.01
"""The lowest claim factor: with less, a job would have thousands of claiming tries before its start."""
UNKNOWN_RUN_TIME_S = 86400.0
"""The expected run time of a job of which nothing is known. Nothing ends a job at this time."""

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
    """How a scan handles a job that does not fit: continue past it (``scan``), or stop there."""
    queue_order: QueueOrder = "fcfs"
    """Order of each queue: by age, small jobs first, or first the jobs of users who have used least for their
    weight."""
    sharing: SharingMode = "ordinary"
    """One queue for all (``ordinary``), or one for each home site: its jobs run nowhere else (``independent``), or it
    takes back its nodes for them (``feasible``)."""
    speed_threshold: Annotated[float, Ge(0), FINITE] = 0.0
    """Minimum speed of a cluster for a job, as a fraction of the speed of its home site."""
    reclaimed_position: ReclaimedPosition = "place"
    """Queue position of a job that lost its nodes to a home site: its own place, or before all others of its home
    site."""
    high_scans_per_low: Count = 2
    """S: number of scans of the high queue for each scan of the low one."""
    scan_interval: Seconds = 30.0
    """Time between two regular scans."""
    event_driven: bool = True
    """Scan also when nodes become free, a job arrives or a cluster comes back."""
    step_budget: Annotated[Seconds, FINITE] = 0.05
    """Maximum time for placing jobs in one cycle, before messages and requests are handled again."""
    placement_queue_limit: Count = 100_000
    """Maximum number of waiting jobs. Further submissions are rejected until jobs leave the queue."""
    max_components_per_job: Annotated[Count, Le(MAX_COMPONENTS)] = 1000
    """Maximum number of components of a job. Every component receives the list of all components."""
    max_bytes_per_job: Annotated[Count, Le(MAX_JOB_BYTES)] = 256 * 1024
    """Maximum size in bytes of all texts of a submission, such as command and variables. They stay in memory until the
    job has ended."""
    max_array_size: Annotated[Count, Le(MAX_INDEX)] = MAX_ARRAY_SIZE
    """Maximum number of tasks of an array. Waiting tasks use no memory, and an array counts as one waiting job."""
    max_placement_tries: Count | None = None
    """Tries to place a job before it fails; None is unlimited. A job may set its own number."""
    claim_grace: Seconds = 10.0
    """Time that a runner may stay queued in its LRM before its claim times out: local users got the nodes first."""
    barrier_timeout: Seconds = 120.0
    """Limit from placement until every node has reported, and from the open barrier until the launch of the program."""
    unreachable_after: Seconds = 5.0
    """Time without a message from a cluster's agent after which its components count as unknown."""
    error_threshold: Count = 3
    """Consecutive infrastructure errors after which a cluster is ``unusable``. Each job counts once. After as many
    errors of one job, that job avoids the cluster."""
    max_restarts: Annotated[int, Ge(0)] | None = 10
    """Restarts after infrastructure failures before a job fails; None is unlimited. A job may set its own number."""
    restart_pause: Annotated[float, Ge(0), FINITE] = 1.0
    """Pause before a job's second restart. Each further restart doubles it, up to ``restart_pause_max``. 0
    disables it."""
    restart_pause_max: Annotated[float, Ge(0), FINITE] = 60.0
    """The longest of these pauses."""
    claiming: ClaimingMode = ClaimingMode.ATOMIC
    """Claim all components of a job together, or those that are available. A job may set its own mode."""
    claim_threshold: Annotated[float, Ge(0), Le(1)] = 0.0
    """T of incremental claiming: the fraction of components that must be startable for a claim to start any."""
    claim_factor: Factor = 0.75
    """L: fraction of the time until the job start time after which claiming is tried again."""
    claim_factor_step: Annotated[float, Ge(0), Lt(1)] = 0.125
    """Amount by which L decreases after a failed claim."""
    claim_factor_min: Factor = 0.25
    """Minimum of L."""
    claim_epsilon: Annotated[Seconds, FINITE] = 1.0
    """Time before the job start time from which on it counts as reached."""
    max_claiming_tries: Count | None = None
    """Failed claims before a job fails; None is unlimited. A job may set its own number."""
    preemption: Preemption = "placement"
    """When high-priority jobs preempt low ones: never, only while claiming (as in M05), or already for placement."""
    preemption_order: PreemptionOrder = "least-harm"
    """Order in which low jobs are preempted: least lost work first, or by descending JST, as in M05."""
    warning_max: Annotated[Seconds, FINITE] = 600.0
    """Maximum grace that a job may request between its warning and its stop."""
    assumed_bandwidth: Annotated[float, Gt(0)] = 100e6
    """Bandwidth in bytes per second for estimates of transfers over links that have not been measured."""
    plan_after: Annotated[float, Ge(0), FINITE] | None = 3600.0
    """Waiting time after which the start of the longest waiting job is planned: others use its nodes only if they end
    in time. None disables it."""
    default_walltime: Annotated[Seconds, FINITE] | None = None
    """Expected run time of jobs without a walltime; it ends none. None: the known run time of such jobs, or a day."""
    keeps_for_restart: bool = True
    """Whether the nodes of a job with a failed attempt are kept from low-priority jobs until it is placed again."""
    probation: bool = True
    """Whether an unusable cluster is tried again, one component at a time, after a growing pause."""
    probation_pause: Annotated[Seconds, FINITE] = 60.0
    """The first pause; each failed trial doubles it, up to ``probation_pause_max``."""
    probation_pause_max: Annotated[Seconds, FINITE] = 3600.0
    """The longest of these pauses."""

    @property
    def plans_starts(self) -> bool:
        """Return whether starts are planned. A plan of the job that has waited longest contradicts the narrowest
        first, unless that job has waited for some time."""
        return self.plan_after is not None and (self.plan_after > 0 or self.queue_order != "narrowest-first")

    def __post_init__(self) -> None:
        """Raise ``OutOfRange`` for the first parameter outside its bounds."""
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
    return list(getattr(kind, "__metadata__", ())) or [
        constraint for part in get_args(kind) for constraint in _constraints(part)
    ]


_CONSTRAINTS = {field.name: _constraints(field.type) for field in fields(Rules)}
