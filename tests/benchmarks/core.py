"""What the scheduler alone takes: no store, no network, virtual time; and beside it what AccaSim takes.

    python -m tests.benchmarks.core                          # all of it
    python -m tests.benchmarks.core whole_life job_end       # some of it
    python -m tests.benchmarks.core placements --policy auto --scale 0.1 --rounds 1

Figures are medians by CPU time; the last line is one of JSON, in which what was not measured is null.
"""

import argparse
import gc
import json
import subprocess
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from time import process_time

from koalapy.model.job import JobState
from koalapy.scheduler.events import Event, PeriodicScan
from koalapy.scheduler.scheduler import Scheduler
from tests.benchmarks import accasim, trace
from tests.benchmarks.job_end import FullGrid
from tests.benchmarks.matching import matching_ms
from tests.benchmarks.placing import POLICIES, placements_per_s
from tests.benchmarks.waiting_jobs import CLUSTERS, IDLE, empty_scheduler, fill, report, specs
from tests.benchmarks.what_if import what_if_s
from tests.benchmarks.whole_life import Arrival, Step, World, replay, workload

SEVERAL = 0.3
"""The fraction of jobs of several components where there are such."""

Figures = dict[str, object]


@dataclass(frozen=True)
class Options:
    rounds: int
    scale: float
    """By which all numbers of jobs are multiplied: 1 for figures that can be compared with others."""
    policies: Sequence[str]

    def jobs(self, number: int) -> int:
        return max(1, round(number * self.scale))


def whole_life(options: Options) -> Figures:
    return {"whole_life_jobs_per_s": _lives_per_s(options, options.jobs(3000), 0.0)}


def whole_life_multi(options: Options) -> Figures:
    return {"whole_life_multi_jobs_per_s": _lives_per_s(options, options.jobs(2000), SEVERAL)}


def _lives_per_s(options: Options, jobs: int, several: float) -> float:
    """Whole lives, clusters and agents included; how much of the time is theirs is told beside."""
    arrivals, steps = workload(jobs, several), list[Step]()
    world = World(arrivals, steps)
    world.run()
    assert list(world.states.values()) == [JobState.SUCCEEDED] * jobs
    longest = max(scheduler.queries.queued for scheduler in replay(steps))
    lives, alone = [], []
    for _ in range(options.rounds):
        lives.append(_seconds(World(arrivals).run))
        alone.append(_seconds(lambda: deque(replay(steps), maxlen=0)))
    share = 1 - median(alone) / median(lives)
    told = f"{len(steps) / jobs:.1f} steps a job, at most {longest} waiting, clusters and agents take {share:.1%}"
    print(f"  {told}; the scheduler alone: {jobs / median(alone):.0f} jobs/s", flush=True)
    return jobs / median(lives)


def placements(options: Options) -> Figures:
    found: dict[str, float] = {}
    for policy in options.policies:
        found[policy] = median(placements_per_s(policy, options.jobs(10_000)) for _ in range(options.rounds))
        print(f"  {policy}: {found[policy]:.0f}", flush=True)
    return {"placements_per_s": found}


def matching(options: Options) -> Figures:
    """Exact resource matching where each node has a speed of its own; HiGHS beside it where that ends soon."""
    return {"matching_ms": matching_ms(options.rounds, options.scale)}


def job_end(options: Options) -> Figures:
    """With 16,000 live components, and a job of high priority that waits."""
    grid = FullGrid(options.jobs(16_000))
    return {"job_end_ms": 1000 * grid.seconds_per_end(4 * options.rounds)}


def waiting(options: Options) -> Figures:
    """Periodic scans of both queues, and one node that comes free and helps nobody, while very many jobs wait.

    The figures are those of 100,000 jobs of 200 shapes on scattered idle nodes.
    """
    figures: Figures = {}
    for jobs, number in ((10_000, 10_000), (100_000, 200)):
        for grid, idle in IDLE.items():
            scheduler, many = empty_scheduler(idle), options.jobs(jobs)
            fill(scheduler, specs(many, min(number, many)))
            name = CLUSTERS[0]
            scans = _step_ms(scheduler, 4 * options.rounds, None, PeriodicScan())
            wakeups = _step_ms(scheduler, 4 * options.rounds, report(name, 0), report(name, 1))
            print(
                f"  {many} jobs of {number} shapes, {grid}: scan {scans:.3f} ms, wake-up {wakeups:.3f} ms", flush=True
            )
            assert scheduler.queries.queued == many
            figures = {"scan_ms": scans, "wakeup_ms": wakeups}
    return figures


def _step_ms(scheduler: Scheduler, rounds: int, before: Event | None, timed: Event) -> float:
    """The median of steps with the second event, each after one with the first."""
    took, now = [], count(10)
    gc.collect()
    gc.freeze()
    try:
        for _ in range(rounds):
            if before is not None:
                scheduler.step([before], next(now))
            took.append(_seconds(lambda: scheduler.step([timed], next(now)), collect=False))
    finally:
        gc.unfreeze()
    return 1000 * median(took)


def memory(options: Options) -> Figures:
    """All that a job keeps alive while it waits, of 50,000 of 200 shapes."""
    jobs = options.jobs(50_000)
    scheduler = empty_scheduler(IDLE["scattered"])
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        fill(scheduler, specs(jobs, min(200, jobs)))
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert scheduler.queries.queued == jobs
    return {"bytes_per_queued_job": (after - before) / jobs}


def accasim_whole_life(options: Options) -> Figures:
    """AccaSim on the workload of ``whole_life``."""
    return {"accasim_jobs_per_s": accasim.jobs_per_s(workload(options.jobs(3000)), options.rounds)}


def whole_trace(options: Options) -> Figures:
    """The trace of huang-2007 through the simulation; null where it is not at hand."""
    if not trace.TRACES.has(trace.TRACE):
        return {}
    jobs = trace.jobs()
    jobs = jobs[: options.jobs(len(jobs))]
    took = median(_seconds(lambda: trace.simulate(jobs)) for _ in range(options.rounds))
    return {"trace_jobs_per_s": len(jobs) / took}


def trace_memory(options: Options) -> Figures:
    """Of a process that simulates 200,000 jobs."""
    if not trace.TRACES.has(trace.TRACE):
        return {}
    command = [sys.executable, "-m", "tests.benchmarks.trace", str(options.jobs(trace.MANY))]
    return {"trace_mb": float(subprocess.check_output(command, text=True))}


def accasim_trace(options: Options) -> Figures:
    """AccaSim on that trace and as many nodes: it knows no sites, and nothing makes its jobs longer."""
    if not trace.TRACES.has(trace.TRACE):
        return {}
    found = trace.TRACES.read(trace.TRACE).jobs
    arrivals = [Arrival(int(job.submitted), (job.processors,), max(1, int(job.ran))) for job in found]
    arrivals = arrivals[: options.jobs(len(arrivals))]
    system = sum(trace.NODES.values()), 1
    return {"accasim_trace_jobs_per_s": accasim.jobs_per_s(arrivals, min(options.rounds, 3), system)}


def what_if(options: Options) -> Figures:
    """On the clock, for it goes over all processors; once."""
    return {"what_if_s": what_if_s(options.jobs(10_000))}


def _seconds(act: Callable[[], object], *, collect: bool = True) -> float:
    """CPU seconds of this process."""
    if collect:
        gc.collect()
    began = process_time()
    act()
    return process_time() - began


PARTS: dict[str, tuple[Callable[[Options], Figures], tuple[str, ...]]] = {
    "whole_life": (whole_life, ("whole_life_jobs_per_s",)),
    "whole_life_multi": (whole_life_multi, ("whole_life_multi_jobs_per_s",)),
    "placements": (placements, ("placements_per_s",)),
    "matching": (matching, ("matching_ms",)),
    "job_end": (job_end, ("job_end_ms",)),
    "waiting": (waiting, ("scan_ms", "wakeup_ms")),
    "memory": (memory, ("bytes_per_queued_job",)),
    "accasim": (accasim_whole_life, ("accasim_jobs_per_s",)),
    "trace": (whole_trace, ("trace_jobs_per_s",)),
    "trace_memory": (trace_memory, ("trace_mb",)),
    "what_if": (what_if, ("what_if_s",)),
    "accasim_trace": (accasim_trace, ("accasim_trace_jobs_per_s",)),
}
"""The parts by name, in the order in which they run, and the figures that each has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all, or some of: {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median is told")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all numbers of jobs")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="of placements; may be given repeatedly")
    given = parser.parse_args()
    if unknown := set(given.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options = Options(max(1, given.rounds), given.scale, given.policy or POLICIES)
    figures: Figures = {name: None for _, names in PARTS.values() for name in names}
    for name, (measure, names) in PARTS.items():
        if name in given.parts or not given.parts:
            print(name, flush=True)
            figures |= measure(options)
            print("".join(f"  {each}: {_rounded(figures[each])}\n" for each in names), end="", flush=True)
    print(json.dumps(_rounded(figures)))


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
