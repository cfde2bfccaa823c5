"""The workload of mohamed-2005 4.2, scaled to two clusters of 16 nodes and to seconds; the same numbers in every world.

A sixth of the processors: jobs of 6 and 12 nodes for 36 and 72, in 3, 4, 6 or 8 components as equal as can be, those of
6 in 3 or 4. A sixtieth of the time: programs of 0.5 to 3.2 seconds for 30 to 192. Each component of a job reads the
same file of 4 or 8 GB, which is on one of the two clusters, as it was on two of four.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from koalapy.model.job import Priority
from koalapy.model.request import InputFile

CLUSTERS = {"north": 16, "south": 16}
BANDWIDTH = 5e9
"""Bytes per second between the two: 0.8 or 1.6 s a file."""
QUEUE_LIMIT = 100
SPLITS = {6: (3, 4), 12: (3, 4, 6, 8)}
"""In how many components a job of a size may be."""


@dataclass(frozen=True)
class PlannedJob:
    """One job; times in seconds, ``arrives`` from the beginning."""

    arrives: float
    priority: Priority
    sizes: tuple[int, ...]
    lasts: float
    file: InputFile


@dataclass(frozen=True)
class LocalUser:
    """One job of somebody who goes straight to a cluster."""

    arrives: float
    cluster: str
    nodes: int
    lasts: float


@dataclass(frozen=True)
class Workload:
    jobs: tuple[PlannedJob, ...]
    local_users: tuple[LocalUser, ...]


def workload(jobs: int = 500, *, every: float = 1.2, scale: float = 1.0, seed: int = 2005) -> Workload:
    """Jobs arrive ``every`` so many seconds on average (Poisson), each cluster's local users every 5 s times ``scale``.

    ``scale`` also multiplies how long everybody's programs run.
    """
    draws = random.Random(seed)
    planned = tuple(_job(draws, arrives, scale) for arrives in _arrivals(draws, every, jobs))
    users: list[LocalUser] = []
    for cluster in CLUSTERS:
        number = int(planned[-1].arrives / (5.0 * scale))
        arrivals = _arrivals(draws, 5.0 * scale, number)
        users += [LocalUser(at, cluster, draws.randint(1, 6), scale * draws.uniform(2.0, 6.0)) for at in arrivals]
    return Workload(planned, tuple(sorted(users, key=lambda user: user.arrives)))


def _arrivals(draws: random.Random, every: float, number: int) -> Iterator[float]:
    at = 0.0
    for _ in range(number):
        at += draws.expovariate(1 / every)
        yield at


def _job(draws: random.Random, arrives: float, scale: float) -> PlannedJob:
    total = draws.choice(list(SPLITS))
    parts = draws.choice(SPLITS[total])
    sizes = tuple(total // parts + (part < total % parts) for part in range(parts))
    gigabytes = draws.choice((4, 8))
    file = InputFile(f"file-{draws.randint(1, 50)}", gigabytes * 10**9, (draws.choice(list(CLUSTERS)),))
    return PlannedJob(arrives, draws.choice(list(Priority)), sizes, scale * draws.uniform(0.5, 3.2), file)


# What came of it


@dataclass(frozen=True)
class Outcome:
    """How one job fared; times in seconds. Placement is the last one: a job that is placed again waits anew."""

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
    """One run of the workload; ``ours`` and ``local``: the fraction of all nodes that each had from begin to end."""

    threshold: float
    outcomes: Sequence[Outcome]
    ours: float
    local: float
    lasted: float
    wall: float

    def of(self, priority: Priority) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.priority is priority]

    def mean_of(self, priority: Priority, figure: str) -> float:
        return mean(float(getattr(outcome, figure)) for outcome in self.of(priority))


MEANS = ("placement_time", "start_delay", "wait_time", "response_time", "placement_tries", "claiming_tries", "restarts")


def table(runs: Iterable[Run]) -> str:
    """One line per run and priority: means per job."""
    heads = ["T", "priority", "jobs", "succeeded", *(name.replace("_", " ") for name in MEANS)]
    heads += ["util. ours", "util. local", "lasted", "wall"]
    lines = [heads]
    for run in runs:
        for priority in Priority:
            jobs = run.of(priority)
            means = [f"{run.mean_of(priority, name):.2f}" if jobs else "-" for name in MEANS]
            whole = [f"{run.ours:.0%}", f"{run.local:.0%}", f"{run.lasted:.0f} s", f"{run.wall:.0f} s"]
            done = sum(job.succeeded for job in jobs)
            lines.append([f"{run.threshold:g}", priority, str(len(jobs)), str(done), *means, *whole])
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
