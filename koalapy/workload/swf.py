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
"""Statuses of lines that tell of a part of a job, from one checkpoint to the next; another line tells of all of it."""
ZERO = "of run time 0"
WAIT = 2
"""Of no use here: how long a job waits is found anew."""
MAX_DIGITS = 9
"""Of the processors that a header tells of; no machine has more."""
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
    """One line; times in seconds, -1 where unknown."""

    number: int
    submitted: float
    ran: float
    processors: int
    """Requested, or else allocated ones."""
    status: int
    requested_time: float = -1.0
    user: int = -1
    queue: int = -1


@dataclass(slots=True)
class Trace:
    """The jobs in the order of their submission, and what the header says (``MaxProcs: 128``)."""

    jobs: list[TraceJob] = field(default_factory=list)
    header: dict[str, str] = field(default_factory=dict)
    malformed: list[str] = field(default_factory=list)
    """Of each line that tells of no job: what is wrong with it."""

    @property
    def processors(self) -> int:
        """Of the machine; where the header does not say, as many as the widest job has."""
        for name in ("MaxProcs", "MaxNodes"):
            text = _without_commas(self.header.get(name, "").split(" ")[0])
            if text.isdecimal() and len(text) <= MAX_DIGITS and int(text) > 0:
                return int(text)
        return max((job.processors for job in self.jobs), default=1)


def read(path: Path, *, lenient: bool = False) -> Trace:
    """A trace, also packed as ``.gz`` or ``.xz``; ``UsageError`` that says what is wrong in which line.

    ``lenient``: lines that are no jobs are left out, and listed.
    """
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8", errors="replace") as file:  # type: ignore[operator]
            return parse(file, str(path), lenient=lenient)
    except OSError as error:
        problem = error.strerror or str(error)
    except (EOFError, lzma.LZMAError, zlib.error) as error:
        problem = f"it is damaged: {error}"
    raise UsageError(f"cannot read {path}: {problem}", field="--swf", hint="give a file in SWF, plain, .gz or .xz")


def parse(text: Iterable[str], name: str, *, lenient: bool = False) -> Trace:
    """The same of lines; ``name`` is for messages."""
    trace = Trace()
    for number, line in enumerate(text, 1):
        line = line.removeprefix("\ufeff")  # as editors leave it at the begin of a file
        words = line.split()
        if not words:
            continue
        if words[0].startswith((";", "#")):
            key, colon, value = line.lstrip(";# \t").partition(":")
            if colon:
                trace.header.setdefault(key.strip(), value.strip())
            continue
        try:
            trace.jobs.append(_job(words, f"{name} line {number}"))
        except UsageError as error:
            if not lenient:
                raise
            trace.malformed.append(error.message)
    if not trace.jobs:
        raise UsageError(f"{name} contains no jobs", field="--swf", hint="give a file in SWF, plain, .gz or .xz")
    trace.jobs.sort(key=lambda job: (job.submitted, job.number))
    return trace


def _job(words: list[str], where: str) -> TraceJob:
    if len(words) != FIELDS:
        hint = f"each job is one line of {FIELDS} numbers; see the Parallel Workloads Archive"
        raise UsageError(f"{where} has {len(words)} fields, not {FIELDS}", field="--swf", hint=hint)
    number, submitted, ran, allocated, requested, requested_time, status, user, queue = (
        _number(words, place, where) for place in NAMES if place != WAIT
    )
    processors = requested if requested > 0 else allocated
    return TraceJob(int(number), submitted, ran, int(processors), int(status), requested_time, int(user), int(queue))


def _without_commas(text: str) -> str:
    """Return a number that is written as ``1,024`` without its commas, and any other text as it is."""
    return text.replace(",", "") if re.fullmatch(r"-?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]*)?", text) else text


def _number(words: list[str], place: int, where: str) -> float:
    try:
        value = float(_without_commas(words[place]))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(
            f"{where}: field {place + 1}, the {NAMES[place]}, is {words[place]!r}",
            field="--swf",
            hint="give a number, or -1 where it is not known",
        )
    return value


@dataclass(slots=True)
class Sorted:
    """The jobs of a trace that a workload may be made of, and how many others there are, by why they are left out."""

    usable: list[TraceJob] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


def sort(jobs: Iterable[TraceJob], status: int | None = None, *, keep_zero: bool = False) -> Sorted:
    """Usable are those of which is known how wide they were and how long they ran; ``status`` 1 are the completed ones.

    Of a run time of 0 many were, that ended within their first second or failed at once: ``keep_zero``.
    """
    found = Sorted()
    for job in jobs:
        if why := _why_not(job, status, keep_zero):
            found.left_out[why] = found.left_out.get(why, 0) + 1
        else:
            found.usable.append(job)
    return found


def _why_not(job: TraceJob, status: int | None, keep_zero: bool) -> str:
    if job.status in PARTS if status is None else job.status != status:
        return "parts of jobs" if status is None else "of another status"
    if job.processors <= 0:
        return "of no known size"
    if job.ran < 0 or job.submitted < 0:
        return "of no known time"
    return ZERO if job.ran == 0 and not keep_zero else ""
