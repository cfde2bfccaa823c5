"""Jobs as a trace in the Standard Workload Format of the Parallel Workloads Archive."""

from collections.abc import Sequence
from datetime import UTC, datetime

from koalapy import __version__
from koalapy.model.history import EndedJob
from koalapy.model.job import JobState, Priority
from koalapy.model.request import ClusterName

STATUS = {JobState.FAILED: 0, JobState.SUCCEEDED: 1, JobState.CANCELLED: 5}
QUEUES = {Priority.HIGH: 1, Priority.LOW: 2}
UNKNOWN = -1
Numbers = dict[str, dict[str, int]]
"""What names have become: numbers from 1 on, by kind, in the order in which they were met."""
LAST_MOMENT = datetime.max.replace(microsecond=0, tzinfo=UTC).timestamp()
"""Of the calendar."""


def header(start: float, end: float, sizes: Sequence[tuple[int, ClusterName, int]]) -> str:
    """``sizes``: of clusters, by days; the last counts."""
    newest = {cluster: nodes for _, cluster, nodes in sizes}
    lines = {
        "Version": "2.2",
        "Computer": f"koalapy {__version__}",
        "UnixStartTime": "0",
        "TimeZoneString": "UTC",
        "StartTime": _moment(start),
        "EndTime": _moment(end),
        "MaxNodes": str(sum(newest.values())),
        "MaxProcs": str(sum(newest.values())),
        "Queues": "1 high priority, 2 low priority",
        "Note": "jobs by their end in this span; processors are nodes; partition 0 is several clusters at once",
    }
    partitions = [f"; Partition: {number} {name}" for number, name in enumerate(sorted(newest), 1)]
    return "\n".join([*(f"; {name}: {text}" for name, text in lines.items()), *partitions]) + "\n"


def _moment(at: float) -> str:
    return datetime.fromtimestamp(min(at, LAST_MOMENT), UTC).strftime("%a %b %d %H:%M:%S %Y")


def lines(jobs: Sequence[EndedJob], numbers: Numbers, user: str | None) -> str:
    """``user``: of others' jobs neither who nor what they were is told; None tells all."""
    return "".join(_line(job, numbers, user) for job in jobs)


def _line(job: EndedJob, numbers: Numbers, user: str | None) -> str:
    theirs = user in (None, job.owner)
    began = job.started_at
    places = (
        job.id,
        round(job.submitted_at),
        UNKNOWN if began is None else max(0, round(began - job.submitted_at)),
        UNKNOWN if began is None else max(0, round(job.ended_at - began)),
        UNKNOWN if began is None else job.nodes,
        UNKNOWN,
        UNKNOWN,
        job.nodes or UNKNOWN,
        UNKNOWN if job.walltime is None else round(job.walltime),
        UNKNOWN,
        STATUS.get(job.state, UNKNOWN),
        _number(numbers, "user", job.owner) if theirs else UNKNOWN,
        UNKNOWN,
        _number(numbers, "application", job.application) if theirs and job.application else UNKNOWN,
        QUEUES.get(job.priority, UNKNOWN),
        _number(numbers, "cluster", job.clusters[0]) if len(job.clusters) == 1 else UNKNOWN if began is None else 0,
        UNKNOWN,
        UNKNOWN,
    )
    return " ".join(map(str, places)) + "\n"


def _number(numbers: Numbers, kind: str, name: str) -> int:
    known = numbers[kind]
    return known.setdefault(name, len(known) + 1)
