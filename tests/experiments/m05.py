"""The workload of mohamed-2005 4.2, scaled to two clusters of 16 nodes and to seconds, for real and virtual grids.

The jobs are those of ``koala workload generate --preset m05`` with a sixth of the processors (6 and 12 nodes for 36 and
72) and a sixtieth of the time (0.5 to 3.2 seconds for 30 to 192). Each component of a job reads the same file of 4 or 8
GB, which is on one of the two clusters; in the paper it was on two of four.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from koalapy.model.job_spec import Priority
from koalapy.model.request import InputFile
from koalapy.workload.generate import generate_workload
from koalapy.workload.recipe import PRESETS, GridSize

CLUSTERS = {"north": 16, "south": 16}
BANDWIDTH = 5e9
"""Bytes per second between the clusters: 0.8 or 1.6 s for each file."""
QUEUE_LIMIT = 100
NODES, TIMES = 1 / 6, 60.0
"""Factor on the paper's sizes, and divisor of its times."""
FILES = tuple(f"file-{number}" for number in range(1, 51))


@dataclass(frozen=True)
class PlannedJob:
    """A job to submit, its arrival in seconds from the beginning, and its input file."""

    arrives: float
    submission: dict[str, Any]
    file: InputFile

    @property
    def priority(self) -> Priority:
        return Priority(self.submission["priority"])

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(component["size"] for component in self.submission["request"]["components"])

    @property
    def lasts(self) -> float:
        return float(self.submission["command"][1])


@dataclass(frozen=True)
class LocalUser:
    """A job of a local user, submitted directly to a cluster."""

    arrives: float
    cluster: str
    nodes: int
    lasts: float


@dataclass(frozen=True)
class Workload:
    jobs: tuple[PlannedJob, ...]
    local_users: tuple[LocalUser, ...]


def workload(jobs: int = 500, *, every: float = 1.2, scale: float = 1.0, seed: int = 2005) -> Workload:
    """Generate the workload: jobs at Poisson arrivals with a mean gap of ``every`` seconds, and local users.

    Local users of each cluster arrive every 5 s times ``scale`` on average. ``scale`` also multiplies the run times of
    all programs.
    """
    recipe = replace(PRESETS["m05"], jobs=jobs, rate=1 / every, scale=NODES, compress=TIMES / scale, inputs=FILES)
    files = _files(random.Random(f"{seed}/files"))
    planned = [
        PlannedJob(arrival.arrives_at, {**arrival.job, "inputs": []}, files[arrival.job["inputs"][0]["file"]])
        for arrival in generate_workload(recipe, GridSize(CLUSTERS), seed).jobs
    ]
    draws = random.Random(f"{seed}/local users")
    users: list[LocalUser] = []
    for cluster in CLUSTERS:
        pause = 5.0 * scale
        number = int(planned[-1].arrives / pause)
        arrivals = _arrivals(draws, pause, number)
        users += [LocalUser(at, cluster, draws.randint(1, 6), scale * draws.uniform(2.0, 6.0)) for at in arrivals]
    return Workload(tuple(planned), tuple(sorted(users, key=lambda user: user.arrives)))


def _files(draws: random.Random) -> dict[str, InputFile]:
    return {name: InputFile(name, draws.choice((4, 8)) * 10**9, (draws.choice(list(CLUSTERS)),)) for name in FILES}


def _arrivals(draws: random.Random, every: float, number: int) -> Iterator[float]:
    at = 0.0
    for _ in range(number):
        at += draws.expovariate(1 / every)
        yield at


# Results


@dataclass(frozen=True)
class Outcome:
    """The result of one job; times in seconds. After a restart the placement time is that of the last placement."""

    priority: Priority
    succeeded: bool
    placement_time: float
    start_delay: float
    wait_time: float
    response_time: float
    placement_tries: int
    claiming_tries: int
    restarts: int


@dataclass
class Run:
    """The result of one run; ``ours`` and ``local`` are the fractions of all nodes used by jobs and by local users."""

    label: str
    """The parameter value that distinguishes this run."""
    outcomes: Sequence[Outcome]
    ours: float
    local: float
    lasted: float
    wall: float
    before_start: float
    """Node-seconds spent at barriers until the job started."""
    without_start: float
    """Node-seconds spent at barriers by nodes that were released without a start."""

    def of(self, priority: Priority) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.priority is priority]

    def mean_of(self, priority: Priority, figure: str) -> float:
        return mean(float(getattr(outcome, figure)) for outcome in self.of(priority))


MEANS = ("placement_time", "start_delay", "wait_time", "response_time", "placement_tries", "claiming_tries", "restarts")


def table(runs: Iterable[Run]) -> str:
    """Return a table with one line per run and priority and the means of its jobs."""
    heads = ["claiming", "priority", "jobs", "succeeded", *(name.replace("_", " ") for name in MEANS)]
    heads += ["util. ours", "util. local", "lasted", "wall", "at barriers", "for nothing"]
    lines = [heads]
    for run in runs:
        for priority in Priority:
            jobs = run.of(priority)
            means = [f"{run.mean_of(priority, name):.2f}" if jobs else "-" for name in MEANS]
            whole = [f"{run.ours:.0%}", f"{run.local:.0%}", f"{run.lasted:.0f} s", f"{run.wall:.0f} s"]
            whole += [f"{run.before_start + run.without_start:.0f}", f"{run.without_start:.0f}"]
            done = sum(job.succeeded for job in jobs)
            lines.append([run.label, priority, str(len(jobs)), str(done), *means, *whole])
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
