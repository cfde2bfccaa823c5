"""Jobs, their attempts and components, and the state machine of jobs (semantics 13)."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from koalapy.model.array import ArrayFail, Positions, format_task
from koalapy.model.bounds import MAX_NODES
from koalapy.model.cluster import ClusterPair
from koalapy.model.construction import fast_constructor
from koalapy.model.dependency import NO_DEPENDENCIES, Clause, Dependencies
from koalapy.model.job_sizes import NOTHING_BARRED, Barred, BarredSizes
from koalapy.model.job_spec import JobSpec
from koalapy.model.job_state import ACTIVE_STATES as ACTIVE_STATES
from koalapy.model.job_state import FINAL_STATES as FINAL_STATES
from koalapy.model.job_state import WAITING_STATES as WAITING_STATES
from koalapy.model.job_state import JobState as JobState
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_list, format_nodes, format_utc

JobId = int
Token = str
"""Identifies one component of one attempt: ``job.generation.index.nonce``."""
Nonce = str
"""A random text that distinguishes an attempt from all others, including those of a restored copy of the database.

Lower-case letters and digits, so that it is valid in file names and in job names of every resource manager. It cannot
be guessed. Attempts of versions without nonces have an empty one, which their tokens omit.
"""


END_TEXTS = {JobState.SUCCEEDED: "succeeded", JobState.FAILED: "failed", JobState.CANCELLED: "was cancelled"}
"""How a job ended, as a verb."""
_ENDS = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
_BACK_OR_END = frozenset({JobState.UNKNOWN, JobState.QUEUED}) | _ENDS
TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.PLACED, JobState.HELD, JobState.FAILED, JobState.CANCELLED}),
    JobState.HELD: frozenset({JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.PLACED: frozenset({JobState.CLAIMING, JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.CLAIMING: frozenset({JobState.STARTING}) | _BACK_OR_END,
    JobState.STARTING: frozenset({JobState.RUNNING}) | _BACK_OR_END,
    JobState.RUNNING: _BACK_OR_END,
    JobState.UNKNOWN: frozenset({JobState.CLAIMING, JobState.STARTING, JobState.RUNNING, JobState.QUEUED}) | _ENDS,
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}
"""The allowed next states, by state. A return to ``queued`` has a reason (claim-failed, preempted,
infrastructure-failure)."""
ARRAY_TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.HELD, JobState.RUNNING}) | _ENDS,
    JobState.HELD: frozenset({JobState.QUEUED, JobState.RUNNING}) | _ENDS,
    JobState.RUNNING: _ENDS,
    **dict.fromkeys(_ENDS, frozenset()),
}
"""The allowed next states of an array. It is queued or held while tasks wait, and running while only others remain."""


class ComponentState(StrEnum):
    """The state of a component.

    All states but ``placed``, ``delivering`` and ``ended`` may hold nodes of its cluster.
    """

    PLACED = "placed"
    """It has an execution site; the resource manager has not received anything yet."""
    SUBMITTED = "submitted"
    """The resource manager has received its runner, or is about to."""
    WAITING = "waiting"
    """The resource manager has queued its runner."""
    CLAIMED = "claimed"
    """All of its nodes have reported and wait at the barrier."""
    RUNNING = "running"
    STOPPING = "stopping"
    """It was ordered to end. Its nodes count as held until the cluster reports them as free."""
    DELIVERING = "delivering"
    """Its nodes are released; its results or the end of its output are being transferred."""
    ENDED = "ended"


@fast_constructor
@dataclass(frozen=True, slots=True)
class Component:
    """One component of one attempt: a number of nodes on one cluster.

    ``index`` identifies it within its attempt; ``rank`` is its position among the components of the placement.
    """

    index: int
    cluster: ClusterName
    size: int
    state: ComponentState = ComponentState.PLACED
    request_index: int | None = None
    hosts: tuple[str, ...] = ()
    lrm_job: str | None = None
    exit_code: int | None = None
    error: str = ""
    infrastructure: bool = False
    """Whether ``error`` is a fault of the infrastructure, not of the program (semantics 6)."""
    unknown_since: float | None = None
    """Time of the last message from its cluster, while that is unreachable; kept if its end was never reported."""
    lease: float | None = None
    """Seconds of the daemon's silence after which its runners end it; None: silence does not end it."""
    lost_at: float | None = None
    """Time at which it has certainly ended and counts as lost, unless its cluster reports before.

    None while its cluster is reachable, and where only the agent or an operator can declare it lost. Kept once lost.
    """
    submitted_at: float | None = None
    claimed_at: float | None = None
    warned_at: float | None = None
    """Time at which its program received the warning signal."""
    ended_at: float | None = None
    sources: tuple[ClusterName, ...] = ()
    """File site of each of its inputs, in their order."""
    transfer_time: float = 0.0
    """Estimated seconds from the placement until its inputs are at its cluster."""
    staging_since: float | None = None
    """Time at which the transfer of its files to its cluster was ordered; None if it needs no files before its
    start."""
    stage_size: int = 0
    """Total bytes to transfer, as far as known."""
    staged: int = 0
    """Bytes of these that are transferred."""
    staged_at: float | None = None
    """Time at which all files were transferred and their checksums verified."""
    replaces: int | None = None
    """Rank of the component that it replaces; None for an original component."""
    superseded: bool = False
    """Whether its claim failed and another component of the attempt replaces it."""
    node_class: str = ""
    """Class of the nodes that it gets on its cluster; empty: any nodes."""
    node_part: float = 1.0
    """The part of each node that fair share charges: that of its processors, if the job shares nodes."""
    measured_nodes: int = 0
    """Number of nodes of which the use of processors and memory is known; the next fields are over these."""
    cpu_time: float | None = None
    """Processor seconds of the program; None: unknown."""
    cpu_available: float | None = None
    """Processor seconds that these nodes had while the program ran."""
    peak_memory: int | None = None
    """Largest memory of the program on one node, in bytes."""

    @property
    def staging(self) -> bool:
        """Return whether files must be transferred to its cluster before it can start."""
        return self.staging_since is not None

    @property
    def has_ended(self) -> bool:
        """Return whether its nodes are released."""
        return self.state in (ComponentState.DELIVERING, ComponentState.ENDED)

    @property
    def rank(self) -> int:
        return self.index if self.replaces is None else self.replaces

    @property
    def file_site(self) -> ClusterName | None:
        """Return the file site of its first input that is not at its cluster; its cluster if all are; None without
        inputs."""
        return next((source for source in self.sources if source != self.cluster), next(iter(self.sources), None))

    @property
    def awaits_files(self) -> bool:
        return self.staging and self.staged_at is None


@fast_constructor
@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to run a job: a placement and its outcome.

    ``generation`` numbers the attempts of a job, so that reports on earlier attempts are ignored. ``components`` only
    grows. A component that did not get its nodes is superseded: another with a new index replaces it. So reports on the
    old component are never taken for the new one.
    """

    generation: int
    components: tuple[Component, ...]
    placed_at: float
    start_estimate: float | None = None
    """JST: the estimated time at which all transfers are finished."""
    claim_at: float | None = None
    """JCT: the time of the last or next claiming try."""
    barrier_at: float | None = None
    launched_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    """The program's exit code; None until the head component has reported it."""
    end_reason: str = ""
    nonce: Nonce = ""
    streams: int = 0
    """Streams over the hub of the relays that are reserved for it."""
    relayed: tuple[ClusterPair, ...] = ()
    """The pairs of clusters, sorted by name, between which its MPI messages go over relays."""

    @property
    def gang(self) -> tuple[Component, ...]:
        """Return the components that are not superseded, in the order of the placement."""
        components = self.components
        for component in components:
            if component.superseded:
                break
        else:
            return components
        current = [component for component in components if not component.superseded]
        return tuple(sorted(current, key=lambda component: component.rank))

    @property
    def head(self) -> Component:
        """Return the component that starts the program on its first node: the largest, or the first of several."""
        gang = self.gang
        return gang[0] if len(gang) == 1 else max(gang, key=_size)


_size = attrgetter("size")


class RefusalCause(StrEnum):
    """Why a job may not be placed on a cluster."""

    REJECTED = "rejected"
    """Its resource manager has rejected the job with a message."""
    CLAIM = "claim"
    """It lacked nodes for the claim in the cycle of the placement."""
    FAILURE = "failure"
    """The job has failed there by the infrastructure. The tasks of an array count together."""


@dataclass(frozen=True, slots=True)
class ClusterRefusal:
    """A cluster, or sizes of components there, that a job may not be placed on."""

    cluster: ClusterName
    words: str
    until: float | None
    """Time at which the job may be tried there again; None: never, since the message says that the cluster cannot run
    it."""
    times: int = 1
    """How often in a row it happened there."""
    cause: RefusalCause = RefusalCause.REJECTED
    """Only rejections fail a job."""
    least: int = 1
    most: int = MAX_NODES
    """The sizes of components that are barred: all, up to some size, or from some size on."""

    @property
    def kind(self) -> tuple[ClusterName, RefusalCause, bool, bool, bool]:
        """Return the kind of the refusal; a job has at most one of each kind.

        The cluster, the cause, whether it is for good, and whether it bars only from or up to one size.
        """
        return self.cluster, self.cause, self.until is None, self.least > 1, self.most < MAX_NODES

    @property
    def sizes(self) -> BarredSizes:
        """Return the cluster with the barred sizes."""
        return BarredSizes(self.cluster, self.least, self.most)

    def covers(self, other: "ClusterRefusal") -> bool:
        """Return whether it bars for good all that another refusal bars."""
        is_wider = self.least <= other.least and other.most <= self.most
        return self.until is None and self.cluster == other.cluster and is_wider

    @property
    def refused(self) -> str:
        """Return the rejected sizes as text: ``it``, or ``2 nodes or more``."""
        if self.least > 1:
            return f"{format_nodes(self.least)} or more"
        return "it" if self.most == MAX_NODES else f"{format_nodes(self.most)} or fewer"

    def bars(self, now: float) -> bool:
        """Return whether the job may not be placed there with these sizes."""
        return self.until is None or now < self.until


def add_refusal(refusals: Iterable[ClusterRefusal], refusal: ClusterRefusal) -> tuple[ClusterRefusal, ...]:
    """Return refusals with another one added, which replaces the one of its kind and all that it covers."""
    remaining = (entry for entry in refusals if entry.kind != refusal.kind and not refusal.covers(entry))
    return tuple(sorted((*remaining, refusal), key=lambda entry: entry.kind))


ON_TIME_S = 60.0
"""Seconds after a planned start within which a start is on time: nodes are claimed and report."""


@dataclass(frozen=True, slots=True)
class PlannedStart:
    """The planned start of a waiting job as users see it, which includes the ``delay`` learned on its clusters."""

    made_at: float
    first: float
    """The start as planned first."""
    at: float | None
    """The start as planned now; None if none is planned any more."""
    clusters: tuple[ClusterName, ...]
    """The clusters of the first plan, by name."""
    is_certain: bool
    """Whether the plan rests on walltimes alone, not on expected run times."""
    delay: float
    """Seconds from the start of the scheduler's plan to the one that users see."""
    earlier_starts: int = 0
    earlier_on_time: int = 0
    """The number of earlier planned starts on these clusters, and of those that were on time."""
    moved_because: str = ""
    """Why the start is later than ``first``; empty if it is not."""
    late: float | None = None
    """Seconds from the start of the scheduler's first plan to the real one; None before that."""

    @property
    def is_kept(self) -> bool:
        """Return whether the job started on time."""
        return self.late is not None and self.late <= self.delay + ON_TIME_S

    def describe(self, now: float) -> str:
        """Return it as text: ``starts by 14:20 UTC, if no local user comes first``."""
        if self.at is None:
            return f"no start is planned any more: {self.moved_because}"
        verb = "starts" if self.is_certain else "is expected to start"
        text = f"{verb} by {format_utc(max(self.at, now), now)}, if no local user comes first"
        if self.moved_because:
            text += f" (first planned for {format_utc(self.first, now)}: {self.moved_because})"
        if self.earlier_starts:
            share = f"{self.earlier_on_time} of {self.earlier_starts} such starts"
            text += f"; {share} on {format_list(self.clusters)} were on time"
        return text

    def moved_back(self, now: float) -> "PlannedStart":
        """Return it as if made ``now`` at the latest, since the clock may have been set back."""
        ahead = max(0.0, self.made_at - now)
        start = None if self.at is None else self.at - ahead
        return replace(self, made_at=self.made_at - ahead, first=self.first - ahead, at=start)


@fast_constructor
@dataclass(frozen=True, slots=True)
class ArrayTasks:
    """The record of an array's tasks: the positions of those that wait, and the numbers of all others by state."""

    size: int
    pending: tuple[Positions, ...]
    """Positions of the tasks that were never started, in order."""
    waits_since: float
    """Time since which the next task waits: the submission, or the start of the previous task."""
    live: int = 0
    """Tasks that were started and have not ended; those that are retried included."""
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0

    @property
    def waiting(self) -> int:
        """Return the number of tasks that were never started."""
        return sum(last - first + 1 for first, last in self.pending)

    @property
    def is_over(self) -> bool:
        """Return whether all tasks have ended."""
        return not self.pending and not self.live

    def is_pending(self, position: int) -> bool:
        return any(first <= position <= last for first, last in self.pending)

    def __str__(self) -> str:
        counts = (
            (self.live, "running"),
            (self.waiting, "waiting"),
            (self.succeeded, "succeeded"),
            (self.failed, "failed"),
            (self.cancelled, "cancelled"),
        )
        return ", ".join(f"{count} {state}" for count, state in counts if count)


@dataclass(frozen=True, slots=True)
class Job:
    """A job and its state. Times are seconds since the epoch, in simulated time in a simulation."""

    id: JobId
    spec: JobSpec
    submitted_at: float
    state: JobState = JobState.QUEUED
    reason: str = ""
    generation: int = 0
    attempt: Attempt | None = None
    restarts: int = 0
    placement_tries: int = 0
    """Number of placement tries; of a waiting job, as of the scan ``counted_scan``."""
    claiming_tries: int = 0
    counted_scan: int = 0
    """Number of the last scan of its placement queue that ``placement_tries`` includes."""
    placed_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    ending: JobState | None = None
    """State that the job gets when its components have ended; set when its attempt is over."""
    queue_seq: int = 0
    """Position in its placement queue, smallest first. It is the same for all attempts."""
    claim_factor: float | None = None
    """L, as lowered by failed claims; None while it has its initial value."""
    first_start_estimate: float | None = None
    """JST of the first attempt. The start delay is the JST of the last attempt minus this one."""
    retry_at: float | None = None
    """Time at which a job with failing attempts returns to its placement queue; None while it is in the queue."""
    refusals: tuple[ClusterRefusal, ...] = ()
    """Clusters that rejected the job for a reason that does not apply to every cluster, by name."""
    tasks: ArrayTasks | None = None
    """The tasks of an array; None for any other job. An array has no attempts: each started task is a job."""
    array_job: JobId | None = None
    """The array that the job is a task of; None for any other job."""
    array_index: int | None = None
    """The task's index."""
    awaits: Dependencies = NO_DEPENDENCIES
    """The clauses of ``spec.after`` that do not hold yet, without jobs that have ended in another way."""
    eligible_at: float | None = None
    """Time at which its dependencies and its begin allowed its start; None before, and for a job without any."""
    planned_start: PlannedStart | None = None
    """The start that was planned last; None if none was, or if the job has been held or changed since."""

    @property
    def is_deferred(self) -> bool:
        """Return whether the job still waits for other jobs or its begin, outside its placement queue."""
        return self.eligible_at is None and (bool(self.spec.after) or self.spec.begin is not None)

    @property
    def is_in_queue(self) -> bool:
        """Return whether the job is in its placement queue."""
        may_start = self.state is JobState.QUEUED and self.retry_at is None and not self.is_deferred
        return may_start and (self.tasks is None or self.may_start_task)

    @property
    def is_placed(self) -> bool:
        """Return whether the job has a live attempt."""
        return self.state.is_active and self.tasks is None

    @property
    def waits_since(self) -> float:
        """Return the time since which the job, or the next task of an array, waits for its first placement.

        The time for which it was deferred does not count.
        """
        if self.tasks is not None:
            return self.tasks.waits_since
        return self.submitted_at if self.eligible_at is None else self.eligible_at

    # Arrays

    @property
    def array_size(self) -> int:
        """Return the number of an array's tasks; 0 for any other job."""
        return 0 if self.tasks is None else self.tasks.size

    @property
    def last_number(self) -> JobId:
        """Return the last job number that the job uses: that of an array's last task."""
        return self.id + self.array_size

    @property
    def may_start_task(self) -> bool:
        """Return whether a task of the array waits and the limit of tasks at once allows another."""
        if self.tasks is None or not self.tasks.pending:
            return False
        limit = self.spec.array.limit if self.spec.array else None
        return limit is None or self.tasks.live < limit

    @property
    def display_name(self) -> str:
        """Return the name of the job for users: its number, or ``7[3]`` for a task."""
        if self.array_job is None or self.array_index is None:
            return str(self.id)
        return format_task(self.array_job, self.array_index)

    def output_values(self, cluster: ClusterName) -> dict[str, str]:
        """Return the texts that replace patterns in the names of output files on a cluster, by their letter.

        Outside of arrays, the job's id replaces those of arrays.
        """
        return {
            "j": str(self.id),
            "A": str(self.id if self.array_job is None else self.array_job),
            "a": str(self.id if self.array_index is None else self.array_index),
            "c": cluster,
            "x": self.spec.name or f"job-{self.id}",
        }

    def barred_sizes(self, now: float) -> Barred:
        """Return the sizes that clusters have rejected and that may not be placed there now."""
        if not self.refusals:
            return NOTHING_BARRED
        return frozenset(refusal.sizes for refusal in self.refusals if refusal.bars(now))

    def token(self, index: int) -> Token:
        return format_token(self.id, self.generation, index, self.attempt.nonce if self.attempt else "")

    def stage_token(self, component: Component) -> Token:
        """Return the token of a component's file folder on its cluster; a replacement has the folder of the
        original."""
        return self.token(component.rank)

    def staged_component_of(self, token: Token) -> Component | None:
        """Return the component of the current attempt with the stage that a token names; None if there is none."""
        if self.attempt is None or not self.state.is_active:
            return None
        rank = parse_token(token).component
        if token != self.token(rank):
            return None
        return next((c for c in self.attempt.gang if c.rank == rank and c.staging), None)


class TokenParts(NamedTuple):
    """The parts of a token."""

    job: JobId
    generation: int
    component: int
    """Index of the component, or its rank if the token names a stage."""
    nonce: Nonce


_TOKEN = re.compile(r"(\d{1,18})\.(\d{1,9})\.(\d{1,9})(?:\.([0-9a-z]{1,32}))?", re.ASCII)


def format_token(job: JobId, generation: int, index: int, nonce: Nonce) -> Token:
    attempt_token = f"{job}.{generation}.{index}"
    return f"{attempt_token}.{nonce}" if nonce else attempt_token


def parse_token(token: Token) -> TokenParts:
    """Return the parts of a token. Raise ``ValueError`` for another text. The token's attempt may have ended."""
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise ValueError(f"{token[:60]!r} is not a token")
    job, generation, index, nonce = match.groups()
    return TokenParts(int(job), int(generation), int(index), nonce or "")


def is_token(text: str) -> bool:
    """Return whether a text has the form of a token of a component or a stage."""
    return _TOKEN.fullmatch(text) is not None


def is_same_attempt(token: Token, other_token: Token) -> bool:
    """Return whether two tokens name components of the same attempt; False if either is not a token."""
    try:
        first, second = parse_token(token), parse_token(other_token)
    except ValueError:
        return False
    return first._replace(component=0) == second._replace(component=0)


@fast_constructor
@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One line of a job's history; ``state`` is the job's state after it."""

    job: JobId
    at: float
    event: str
    state: JobState
    reason: str = ""
    generation: int = 0
    component: int | None = None
    cluster: ClusterName | None = None
    actor: str = ""
    """User that caused it; empty if no user did."""


DEFAULT_LEASE = 2400.0
"""Seconds; the default of HTCondor's JobLeaseDuration."""
NO_LEASE = 0.0
"""The lease of a job that silence does not end."""
CLOCK_RATE_MARGIN = 0.01
"""Maximum relative difference in rate of the clocks of daemon and node; slewed clocks differ by at most 0.1 %."""
END_MARGIN = 30.0
"""Seconds that runner, agent and resource manager have to end the processes after lease and grace."""
WALLTIME_ALLOWANCE = 60.0
"""Seconds beyond the walltime after which runner and resource manager end a program that the daemon has not ended."""


def lease_of(job: float | None, cluster: float | None) -> float | None:
    """Return the lease of a job's component on a cluster in seconds; None if silence does not end it.

    The job's lease has precedence over the cluster's lease, and that over the default.
    """
    lease = next((lease for lease in (job, cluster) if lease is not None), DEFAULT_LEASE)
    return None if lease == NO_LEASE else lease


def with_margin(seconds: float) -> float:
    """Return the seconds of the daemon's clock until a node has counted ``seconds`` and ended its processes."""
    return seconds * (1 + CLOCK_RATE_MARGIN) + END_MARGIN


def new_job(number: JobId, spec: JobSpec, now: float, awaits: tuple[Clause, ...] = ()) -> Job:
    """Return a new job. The tasks of an array get the numbers after its own, by position.

    ``awaits``: the clauses of its dependencies that do not hold yet.
    """
    tasks = None if spec.array is None else ArrayTasks(spec.array.size, ((0, spec.array.size - 1),), now)
    return Job(number, spec, now, tasks=tasks, awaits=awaits)


def task_of(array: Job, position: int, spec: JobSpec) -> Job:
    """Return the task at a position of an array, before it is placed. ``spec``: ``task_spec_of`` the array."""
    assert array.spec.array is not None
    return Job(
        array.id + 1 + position,
        spec,
        array.waits_since,
        JobState.HELD if array.state is JobState.HELD else JobState.QUEUED,
        queue_seq=array.queue_seq - 1,  # a task that returns to the queue is tried before the rest of its array
        refusals=array.refusals,
        array_job=array.id,
        array_index=array.spec.array.index_at(position),
    )


def task_spec_of(spec: JobSpec) -> JobSpec:
    """Return the specification of the tasks of an array.

    Notifications, dependencies and begin are those of the whole array only.
    """
    spec = replace(spec, array=None, each_line=(), array_fail=ArrayFail.CONTINUE, after=(), begin=None)
    return replace(spec, mail_type=(), mail_user="", webhook="")
