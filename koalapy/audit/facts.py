"""Facts that sources state about jobs. Each fact names its source, which says how exact its times are.

All times are seconds since 1970. A source is whatever wrote something by itself: the database, an agent's journal, a
resource manager's accounting, the record of events, or the marks of ranks.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

FAR_FUTURE = 253_402_300_799.0
"""The last moment of the year 9999."""
CLOCK_OFFSET_S = 5.0
"""Seconds by which the clocks of two machines may differ, unless a source states another bound."""


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of facts."""

    name: str
    clock: str = "daemon"
    """The machine whose clock stamped its times. Clocks of equal names are compared without an offset."""
    lateness_s: float = 0.0
    """Seconds after an end within which the source notes it, such as a polling interval."""
    resolution_s: float = 0.0
    """Seconds by which its times are rounded."""
    offset_s: float = CLOCK_OFFSET_S
    """Seconds by which its clock may differ from that of another machine."""
    since: float = 0.0
    """It knows nothing of what began before."""
    removed_to: int = 0
    """Highest id of a job that it has removed by age, with others of lower ids; 0: none."""
    skipped: tuple[tuple[int, int], ...] = ()
    """Ranges of ids, first and last, of which it has removed no job: it never had one."""
    read_at: float = FAR_FUTURE
    """When it was read: an interval without an end lasts at least until then."""

    def tolerance_to(self, other: "Source") -> float:
        """Return the seconds by which an end by this source may be after a beginning by another without a violation."""
        offset = 0.0 if self.clock == other.clock else max(self.offset_s, other.offset_s)
        return self.lateness_s + self.resolution_s + other.resolution_s + offset

    def covers(self, run: "Run") -> bool:
        """Return whether the source was written from the beginning to the end of a run."""
        return self.since <= (run.begin or FAR_FUTURE) and (run.end or FAR_FUTURE) <= self.read_at


class RunKind(StrEnum):
    CLAIM = "claim"
    """The daemon counts nodes as held by a component."""
    HELD = "held"
    """A resource manager gave nodes to a component's job."""
    PROGRAM = "program"
    """The program ran on the nodes of a component, or as one rank."""


@dataclass(frozen=True, slots=True)
class Run:
    """An interval in which a component of an attempt, or one rank, had nodes or ran."""

    source: Source
    kind: RunKind
    job: int
    """The job's id; 0 or less for a job of a local user."""
    attempt: int
    part: str
    """The index of the component as text, or ``rank N`` from a source that knows ranks."""
    cluster: str
    begin: float | None
    """None: unknown."""
    end: float | None = None
    """None: it had not ended, or ``has_ended`` and the time is unknown."""
    has_ended: bool = True
    nodes: tuple[str, ...] = ()
    size: int = 0
    """Nodes of the component, or ranks of the program; 0: unknown."""
    exit_code: int | None = None
    """Exit code of the program; None: unknown. A resource manager knows that of the runner only, which is not this."""
    nonce: str = ""
    """The random part of the component's token; empty: unknown."""
    run_id: str = ""
    """Distinguishes two starts: the job number of the resource manager, or a process id; empty: unknown.

    A manager that uses numbers again needs a unique text here."""
    superseded: bool = False
    """Of a claim: whether another component has replaced it."""
    unknown_since: float | None = None
    """Of a claim that was given up while its cluster was out of reach: since when. Its end was not reported."""
    lease_over_at: float | None = None
    """Of a claim that counted as lost: when its lease or walltime was certainly over."""

    @property
    def last_moment(self) -> float | None:
        """Return the end, or the time until which it certainly lasted; None if that is unknown."""
        return self.end if self.has_ended else self.source.read_at

    def __str__(self) -> str:
        verb = {RunKind.CLAIM: "claimed", RunKind.HELD: "held", RunKind.PROGRAM: "ran on"}[self.kind]
        nodes = ",".join(self.nodes) or f"{self.size or 'unknown'} nodes"
        end = format_moment(self.end) if self.has_ended else "now"
        code = "" if self.exit_code is None else f", exit code {self.exit_code}"
        part = self.part if " " in self.part else f"component {self.part}"
        text = f"{self.source.name}: {self.job}.{self.attempt} {part} {verb} {nodes} of {self.cluster} from"
        return f"{text} {format_moment(self.begin)} to {end}{code}{f', id {self.run_id}' if self.run_id else ''}"


@dataclass(frozen=True, slots=True)
class ArrayCounts:
    """The indices of an array as (first, last, step), and the numbers of its tasks by state."""

    size: int
    ranges: tuple[tuple[int, int, int], ...] = ()
    """Empty: indices from 0."""
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0

    def has_index(self, index: int) -> bool:
        ranges = self.ranges or ((0, self.size - 1, 1),)
        return any(first <= index <= last and (index - first) % step == 0 for first, last, step in ranges)


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as the database holds it."""

    source: Source
    job: int
    state: str
    attempt: int = 0
    """Its last attempt."""
    exit_code: int | None = None
    reason: str = ""
    submitted_at: float = 0.0
    ended_at: float | None = None
    shares: bool = False
    """Whether it accepts part of a node that other jobs use, too."""
    has_one_code: bool = True
    """Whether the exit code of one component is that of the whole program, as with Open MPI."""
    after: tuple[tuple[tuple[int, str], ...], ...] = ()
    """Its dependencies: clauses of alternatives, each a job and how it must end."""
    array: ArrayCounts | None = None
    task_of: int | None = None
    """The array that it is a task of."""
    index: int | None = None
    placed_line: int | None = None
    """The first line of the timeline that places it. Lines are numbered in the order in which they were stored."""
    ended_line: int | None = None
    """The line of the timeline that ends it."""

    @property
    def is_final(self) -> bool:
        return self.state in FINAL_STATES

    def __str__(self) -> str:
        code = "" if self.exit_code is None else f" with exit code {self.exit_code}"
        end = "" if self.ended_at is None else f" at {format_moment(self.ended_at)}"
        return f"{self.source.name}: job {self.job} {self.state}{code}{end}, attempt {self.attempt}"


FINAL_STATES = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class Submission:
    """A submission with a key that was acknowledged with a job."""

    source: Source
    key: str
    job: int

    def __str__(self) -> str:
        return f"{self.source.name}: submission {self.key} is job {self.job}"


@dataclass(frozen=True, slots=True)
class Output:
    """The output of one component of an attempt, as a source knows it."""

    source: Source
    job: int
    attempt: int
    part: str
    written: int | None = None
    """Bytes that the program wrote, by a source at the program."""
    stored: int | None = None
    """Bytes up to which the daemon stored them."""
    gap_announced: bool = False
    """Whether the timeline or the output itself says that some of it is missing."""

    def __str__(self) -> str:
        counts = {"written": self.written, "stored": self.stored}
        texts = [f"{count} bytes {verb}" for verb, count in counts.items() if count is not None]
        texts += ["a gap was announced"] * self.gap_announced
        return f"{self.source.name}: output of {self.job}.{self.attempt} component {self.part}: {', '.join(texts)}"


@dataclass(frozen=True, slots=True)
class MissingRow:
    """A row that the database lacks, though its other rows show that it was written."""

    source: Source
    job: int
    attempt: int
    missing: str


Fact = Run | JobRecord | Submission | Output | MissingRow


def format_moment(timestamp: float | None) -> str:
    """Return a time in UTC with milliseconds; ``an unknown time`` for None."""
    if timestamp is None or not 0 <= timestamp < FAR_FUTURE:
        return "an unknown time"
    return datetime.fromtimestamp(timestamp, UTC).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
