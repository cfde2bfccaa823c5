"""Traces in the Standard Workload Format of the Parallel Workloads Archive."""

import gzip
import lzma
import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from koalapy.model.errors import UsageError

FIELDS = 18
PARTS = (2, 3, 4)
"""Statuses of lines that describe a part of a job between two checkpoints; another line describes the whole job."""
ZERO = "of run time 0"
WAIT = 2
"""Index of the wait time, which is ignored, since the scheduler determines it."""
MAX_DIGITS = 9
"""Maximum number of digits of the processors in a header."""
NAMES = {
    0: "job number",
    1: "submit time",
    2: "wait time",
    3: "run time",
    4: "allocated processors",
    7: "requested processors",
    8: "requested time",
    10: "status",
    11: "user",
    14: "queue",
}


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One line of a trace. Times are in seconds; -1 if unknown."""

    number: int
    submitted: float
    ran: float
    processors: int
    """Requested processors; the allocated ones if these are unknown."""
    status: int
    requested_time: float = -1.0
    user: int = -1
    queue: int = -1


@dataclass(slots=True)
class Trace:
    """A trace: jobs in the order of their submission, and header fields such as ``MaxProcs: 128``."""

    jobs: list[TraceJob] = field(default_factory=list)
    header: dict[str, str] = field(default_factory=dict)
    malformed: list[str] = field(default_factory=list)
    """Errors of lines that are not jobs."""

    @property
    def processors(self) -> int:
        """Return the number of processors of the machine; that of the widest job if the header lacks it."""
        for name in ("MaxProcs", "MaxNodes"):
            text = _without_commas(self.header.get(name, "").split(" ")[0])
            if text.isdecimal() and len(text) <= MAX_DIGITS and int(text) > 0:
                return int(text)
        return max((job.processors for job in self.jobs), default=1)


def read_trace(path: Path, *, lenient: bool = False) -> Trace:
    """Read a trace, plain or compressed as ``.gz`` or ``.xz``; raise ``UsageError`` that names the invalid line.

    ``lenient``: list invalid lines in ``malformed`` instead.
    """
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:  # type: ignore[operator]
            return parse_trace(file, str(path), lenient=lenient)
    except OSError as error:
        problem = error.strerror or str(error)
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        problem = f"it is damaged: {error}"
    raise UsageError(f"cannot read {path}: {problem}", field="--swf", hint="give a file in SWF, plain, .gz or .xz")


def parse_trace(text: Iterable[str], name: str, *, lenient: bool = False) -> Trace:
    """Parse the lines of a trace; ``name`` is used in messages. Errors are those of ``read_trace``."""
    trace = Trace()
    for number, line in enumerate(text, 1):
        line = line.removeprefix("\ufeff")  # Some editors write a byte order mark at the beginning of a file.
        fields = line.split()
        if not fields:
            continue
        if fields[0].startswith((";", "#")):
            key, colon, value = line.lstrip(";# \t").partition(":")
            if colon:
                trace.header.setdefault(key.strip(), value.strip())
            continue
        try:
            trace.jobs.append(_parse_job(fields, f"{name} line {number}"))
        except UsageError as error:
            if not lenient:
                raise
            trace.malformed.append(error.message)
    if not trace.jobs:
        raise UsageError(f"{name} contains no jobs", field="--swf", hint="give a file in SWF, plain, .gz or .xz")
    trace.jobs.sort(key=lambda job: (job.submitted, job.number))
    return trace


def _parse_job(fields: list[str], location: str) -> TraceJob:
    """Return the job of a line. Raise ``UsageError``, which names the location, if the line is invalid."""
    if len(fields) != FIELDS:
        hint = f"each job is one line of {FIELDS} numbers; see the Parallel Workloads Archive"
        raise UsageError(f"{location} has {len(fields)} fields, not {FIELDS}", field="--swf", hint=hint)
    number, submitted, ran, allocated, requested, requested_time, status, user, queue = (
        _parse_number(fields, place, location) for place in NAMES if place != WAIT
    )
    processors = requested if requested > 0 else allocated
    return TraceJob(int(number), submitted, ran, int(processors), int(status), requested_time, int(user), int(queue))


def _without_commas(text: str) -> str:
    """Return a number that is written as ``1,024`` without its commas, and any other text as it is."""
    return text.replace(",", "") if re.fullmatch(r"-?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?", text) else text


def _parse_number(fields: list[str], index: int, location: str) -> float:
    """Return the number in a field. Raise ``UsageError``, which names the location and the field, for other text."""
    try:
        value = float(_without_commas(fields[index]))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(
            f"{location}: field {index + 1}, the {NAMES[index]}, is {fields[index]!r}",
            field="--swf",
            hint="give a number, or -1 where it is not known",
        )
    return value


@dataclass(slots=True)
class JobSelection:
    """The usable jobs of a trace, and the number of other jobs by the reason why they are left out."""

    usable: list[TraceJob] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


def select_jobs(jobs: Iterable[TraceJob], status: int | None = None, *, keep_zero: bool = False) -> JobSelection:
    """Select the jobs with known size and run time; ``status`` 1 selects completed ones.

    Jobs of run time 0 ended within their first second or failed at once; ``keep_zero`` keeps them.
    """
    selection = JobSelection()
    for job in jobs:
        if reason := _exclusion_reason(job, status, keep_zero):
            selection.left_out[reason] = selection.left_out.get(reason, 0) + 1
        else:
            selection.usable.append(job)
    return selection


def _exclusion_reason(job: TraceJob, status: int | None, keep_zero: bool) -> str:
    """Return why a job of a trace is left out; empty if it is used. The arguments are those of ``select_jobs``."""
    if job.status in PARTS if status is None else job.status != status:
        return "parts of jobs" if status is None else "of another status"
    if job.processors <= 0:
        return "of no known size"
    if job.ran < 0 or job.submitted < 0:
        return "of no known time"
    return ZERO if job.ran == 0 and not keep_zero else ""
