"""What is known when a run is over: what was asked, what the ranks marked, what the daemon says, what is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.marks import Mark
from tests.chaos.workload import OUTPUT_LIMIT, Planned

FINAL = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True)
class Cancellation:
    """That a cancellation was acknowledged, at a time of the monotonic clock, of a job in its so many-th attempt."""

    at: float
    generation: int
    state: str


@dataclass(frozen=True)
class Submission:
    """One planned job, and every id by which it was acknowledged."""

    planned: Planned
    ids: tuple[int, ...]
    cancelled: Cancellation | None = None
    cancel_tried: bool = False
    """Whether it was tried to cancel it, acknowledged or not."""


@dataclass(frozen=True)
class Told:
    """A job as the daemon tells it in the end."""

    id: int
    name: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    generation: int = 0
    restarts: int = 0
    max_restarts: int = 0
    attempts: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Nodes by cluster, of each attempt."""
    output: Mapping[int, bytes] = field(default_factory=dict, repr=False)
    """Of each component of the last attempt."""
    whole_output: bytes = field(default=b"", repr=False)
    """Of all of them, in one answer."""
    results: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """The files that it brought back, by their names without the component's folder."""
    missing: frozenset[str] = frozenset()
    """Clusters of the last attempt of which the timeline says that output is missing."""


@dataclass(frozen=True)
class Look:
    """The nodes of one cluster, as the daemon told them at one moment."""

    at: float
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
    jobs: Sequence[Told]
    marks: Sequence[Mark]
    looks: Sequence[Look]
    last_looks: Sequence[Look]
    """When everything was over."""
    left: Sequence[str] = ()
    """What was still there after the daemon's end: processes, folders, files, rows."""
    troubles: Sequence[str] = ()
    """What the harness met on its way, such as a daemon that ended by itself."""
    output_limit: int = OUTPUT_LIMIT
    """Bytes that the daemon keeps of each component's output."""


@dataclass(frozen=True, order=True)
class Violation:
    rule: str
    job: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {f'job {self.job}: ' if self.job else ''}{self.text}"
