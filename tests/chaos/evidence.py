"""The evidence of a run: submissions, marks of ranks, reports of the daemon, remains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from koalapy.audit.facts import Fact
from tests.chaos.marks import Mark
from tests.chaos.workload import OUTPUT_LIMIT, PlannedJob

FINAL_STATES = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class Cancellation:
    """An acknowledged cancellation: its monotonic time, and the job's attempt and state."""

    time_s: float
    generation: int
    state: str


@dataclass(frozen=True)
class Submission:
    """A planned job and the ids with which it was acknowledged."""

    planned: PlannedJob
    ids: tuple[int, ...]
    cancelled: Cancellation | None = None
    cancel_tried: bool = False
    """Whether a cancellation was sent, acknowledged or not."""


@dataclass(frozen=True)
class ReportedJob:
    """A job as the daemon reports it at the end."""

    id: int
    name: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    generation: int = 0
    restarts: int = 0
    max_restarts: int = 0
    attempts: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Number of nodes by attempt and cluster."""
    output: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """Output by component of the last attempt."""
    joined_output: bytes = field(default=b"", repr=False)
    """Output of all components in one answer."""
    results: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Collected files by name, without the component's folder."""
    missing: frozenset[str] = frozenset()
    """Clusters of the last attempt with missing output according to the timeline."""


@dataclass(frozen=True)
class ClusterReport:
    """The node counts of a cluster, as the daemon reported them."""

    time_s: float
    cluster: str
    state: str
    total: int
    idle: int
    used: int
    background: int
    down: int


@dataclass(frozen=True)
class Evidence:
    submissions: Sequence[Submission]
    jobs: Sequence[ReportedJob]
    marks: Sequence[Mark]
    reports: Sequence[ClusterReport]
    final_reports: Sequence[ClusterReport]
    """The reports after all jobs had ended."""
    remains: Sequence[str] = ()
    """Processes, folders, files and rows that were left after the end of the daemon."""
    troubles: Sequence[str] = ()
    """Unexpected events, such as a daemon that ended by itself."""
    facts: Sequence[Fact] = ()
    """What the database, agents, resource managers and the record of events tell."""
    output_limit: int = OUTPUT_LIMIT
    """Bytes that the daemon keeps of each component's output."""
    was_power_lost: bool = False


@dataclass(frozen=True, order=True)
class Violation:
    rule: str
    job: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {f'job {self.job}: ' if self.job else ''}{self.text}"
