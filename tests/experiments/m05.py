"""The workload of mohamed-2005 4.2, scaled to two clusters of 16 nodes and to seconds; the same numbers in every world.

The jobs are those of ``koala workload generate --preset m05``: a sixth of the processors, 6 and 12 nodes for 36 and 72,
and a sixtieth of the time, programs of 0.5 to 3.2 seconds for 30 to 192. Each component of a job reads the same file of
4 or 8 GB, which is on one of the two clusters, as it was on two of four.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from koalapy.model.job import Priority
from koalapy.model.request import InputFile
from koalapy.workload.generate import generate_workload
from koalapy.workload.recipe import PRESETS, GridSize

CLUSTERS = {"north": 16, "south": 16}
BANDWIDTH = 5e9
"""Bytes per second between the two: 0.8 or 1.6 s a file."""
QUEUE_LIMIT = 100
NODES, TIMES = 1 / 6, 60.0
"""What the paper's sizes are multiplied with, and how many times as fast everything goes."""
FILES = tuple(f"file-{number}" for number in range(1, 51))


@dataclass(frozen=True)
class PlannedJob:
    """One job: in how many seconds from the beginning it arrives, as it is submitted, and the file that it reads."""

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

    ``scale`` also multiplies how long all programs run.
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

    label: str
    """What sets it apart from the others."""
    outcomes: Sequence[Outcome]
    ours: float
    local: float
    lasted: float
    wall: float
    before_start: float
    """Node-seconds for which nodes waited at barriers until their job started."""
    without_start: float
    """Node-seconds for which nodes waited at barriers, and were given back without a start."""

    def of(self, priority: Priority) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.priority is priority]

    def mean_of(self, priority: Priority, figure: str) -> float:
        return mean(float(getattr(outcome, figure)) for outcome in self.of(priority))


MEANS = ("placement_time", "start_delay", "wait_time", "response_time", "placement_tries", "claiming_tries", "restarts")


def table(runs: Iterable[Run]) -> str:
    """One line per run and priority: means per job."""
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
