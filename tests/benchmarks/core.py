"""Measure the scheduler alone, without store and network and in virtual time.

    python -m tests.benchmarks.core                          # all parts
    python -m tests.benchmarks.core whole_life job_end       # some parts
    python -m tests.benchmarks.core placements --policy auto --scale 0.1 --rounds 1

Figures are medians by CPU time. The last line is JSON, in which figures that were not measured are null. With
``--store``, each figure is compared with that in ``core.json``, and replaces it.
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
from statistics import fmean, median
from time import process_time

from koalapy.model.job import JobState
from koalapy.scheduler.events import Event, PeriodicScan
from koalapy.scheduler.scheduler import Scheduler
from tests.benchmarks import trace
from tests.benchmarks.figures import calibrate, compare_and_store
from tests.benchmarks.job_end import FullGrid
from tests.benchmarks.matching import matching_ms
from tests.benchmarks.placing import POLICIES, placements_per_s
from tests.benchmarks.planned import saturated_step_times, saturated_steps, wide_scan_times
from tests.benchmarks.waiting_jobs import CLUSTERS, IDLE, empty_scheduler, fill, report, specs
from tests.benchmarks.what_if import what_if_s
from tests.benchmarks.whole_life import SimulatedGrid, Step, create_workload, replay

MULTI_SHARE = 0.3
"""The fraction of jobs with several components in workloads of both kinds."""

Figures = dict[str, object]


@dataclass(frozen=True)
class Options:
    rounds: int
    scale: float
    """Factor of all numbers of jobs; only figures with 1 are comparable."""
    policies: Sequence[str]

    def jobs(self, number: int) -> int:
        return max(1, round(number * self.scale))


def whole_life(options: Options) -> Figures:
    return {"whole_life_jobs_per_s": _measure_job_rate(options, options.jobs(3000), 0.0)}


def whole_life_multi(options: Options) -> Figures:
    return {"whole_life_multi_jobs_per_s": _measure_job_rate(options, options.jobs(2000), MULTI_SHARE)}


def _measure_job_rate(options: Options, jobs: int, multi_share: float) -> float:
    """Measure jobs from submission to end, with clusters and agents, and print their share of the time."""
    arrivals, steps = create_workload(jobs, multi_share), list[Step]()
    world = SimulatedGrid(arrivals, steps)
    world.run()
    assert list(world.states.values()) == [JobState.SUCCEEDED] * jobs
    longest = max(scheduler.queries.queued for scheduler in replay(steps))
    run_times, scheduler_times = [], []
    for _ in range(options.rounds):
        run_times.append(_measure_cpu_s(SimulatedGrid(arrivals).run))
        scheduler_times.append(_measure_cpu_s(lambda: deque(replay(steps), maxlen=0)))
    share = 1 - median(scheduler_times) / median(run_times)
    step_counts = (
        f"{len(steps) / jobs:.1f} steps a job, at most {longest} waiting, clusters and agents take {share:.1%}"
    )
    print(f"  {step_counts}; the scheduler alone: {jobs / median(scheduler_times):.0f} jobs/s", flush=True)
    return jobs / median(run_times)


def placements(options: Options) -> Figures:
    rates: dict[str, float] = {}
    for policy in options.policies:
        rates[policy] = median(placements_per_s(policy, options.jobs(10_000)) for _ in range(options.rounds))
        print(f"  {policy}: {rates[policy]:.0f}", flush=True)
    return {"placements_per_s": rates}


def matching(options: Options) -> Figures:
    """Measure exact resource matching with a different speed of each node, and HiGHS where it is fast enough."""
    return {"matching_ms": matching_ms(options.rounds, options.scale)}


def job_end(options: Options) -> Figures:
    """Measure the end of a job with 16,000 live components and a waiting job of high priority."""
    grid = FullGrid(options.jobs(16_000))
    return {"job_end_ms": 1000 * grid.seconds_per_end(4 * options.rounds)}


def waiting(options: Options) -> Figures:
    """Measure periodic scans of both queues, and the report of one more idle node, while many jobs wait.

    The figures are those of 100,000 jobs of 200 shapes on scattered idle nodes.
    """
    figures: Figures = {}
    for jobs, number in ((10_000, 10_000), (100_000, 200)):
        for grid, idle in IDLE.items():
            scheduler, many = empty_scheduler(idle), options.jobs(jobs)
            fill(scheduler, specs(many, min(number, many)))
            name = CLUSTERS[0]
            scans = _measure_step_ms(scheduler, 4 * options.rounds, None, PeriodicScan())
            wakeups = _measure_step_ms(scheduler, 4 * options.rounds, report(name, 0), report(name, 1))
            print(
                f"  {many} jobs of {number} shapes, {grid}: scan {scans:.3f} ms, wake-up {wakeups:.3f} ms", flush=True
            )
            assert scheduler.queries.queued == many
            figures = {"scan_ms": scans, "wakeup_ms": wakeups}
    return figures


def _measure_step_ms(scheduler: Scheduler, rounds: int, preceding_event: Event | None, timed_event: Event) -> float:
    """Return the median time of steps with the timed event, each after a step with the preceding one."""
    times, now = [], count(10)
    gc.collect()
    gc.freeze()
    try:
        for _ in range(rounds):
            if preceding_event is not None:
                scheduler.step([preceding_event], next(now))
            times.append(_measure_cpu_s(lambda: scheduler.step([timed_event], next(now)), collect=False))
    finally:
        gc.unfreeze()
    return 1000 * median(times)


def planned(options: Options) -> Figures:
    """Measure scans of 1,000 clusters, and steps on a saturated grid, while the start of a job is planned."""
    scans = {}
    for shapes in (200, 1000):
        times = wide_scan_times(options.jobs(100_000), min(shapes, options.jobs(100_000)), 4 * options.rounds)
        scans[f"{shapes} shapes"] = 1000 * median(times)
    steps = saturated_steps(options.jobs(4000))
    means = [fmean(saturated_step_times(steps)) for _ in range(options.rounds)]
    return {"planned_scan_ms": scans, "saturated_step_ms": 1000 * median(means)}


def memory(options: Options) -> Figures:
    """Measure the memory of a waiting job, among 50,000 of 200 shapes."""
    jobs = options.jobs(50_000)
    scheduler = empty_scheduler(IDLE["scattered"])
    gc.collect()
    tracemalloc.start()
    try:
        bytes_before = tracemalloc.get_traced_memory()[0]
        fill(scheduler, specs(jobs, min(200, jobs)))
        gc.collect()
        bytes_after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert scheduler.queries.queued == jobs
    return {"bytes_per_queued_job": (bytes_after - bytes_before) / jobs}


def whole_trace(options: Options) -> Figures:
    """Measure the simulation of the trace of huang-2007, if that is available."""
    if not trace.TRACES.has(trace.TRACE):
        return {}
    jobs = trace.load_jobs()
    jobs = jobs[: options.jobs(len(jobs))]
    took = median(_measure_cpu_s(lambda: trace.simulate(jobs)) for _ in range(options.rounds))
    return {"trace_jobs_per_s": len(jobs) / took}


def trace_memory(options: Options) -> Figures:
    """Measure the memory of a process that simulates 200,000 jobs."""
    if not trace.TRACES.has(trace.TRACE):
        return {}
    command = [sys.executable, "-m", "tests.benchmarks.trace", str(options.jobs(trace.MEMORY_JOB_COUNT))]
    return {"trace_mb": float(subprocess.check_output(command, text=True))}


def what_if(options: Options) -> Figures:
    """Measure a what-if question once, in real time, since it uses all processors."""
    return {"what_if_s": what_if_s(options.jobs(10_000))}


def _measure_cpu_s(act: Callable[[], object], *, collect: bool = True) -> float:
    """Return the CPU seconds of a call."""
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
    "planned": (planned, ("planned_scan_ms", "saturated_step_ms")),
    "memory": (memory, ("bytes_per_queued_job",)),
    "trace": (whole_trace, ("trace_jobs_per_s",)),
    "trace_memory": (trace_memory, ("trace_mb",)),
    "what_if": (what_if, ("what_if_s",)),
}
"""The parts by name, in the order in which they run, and the figures that each has."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all, or some of: {', '.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=5, help="number of repetitions, of which the median is printed")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all numbers of jobs")
    parser.add_argument("--store", action="store_true", help="print ratios to the stored figures, and store these")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="of placements; may be given repeatedly")
    options = parser.parse_args()
    if unknown := set(options.parts) - PARTS.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if options.store and options.scale != 1:
        parser.error("--store needs --scale 1: only such figures are comparable")
    measurement = Options(max(1, options.rounds), options.scale, options.policy or POLICIES)
    calibration_s = calibrate()
    figures: Figures = {name: None for _, names in PARTS.values() for name in names}
    for name, (measure, names) in PARTS.items():
        if name in options.parts or not options.parts:
            print(name, flush=True)
            figures |= measure(measurement)
            print("".join(f"  {figure}: {_round_figures(figures[figure])}\n" for figure in names), end="", flush=True)
    rounded = {name: _round_figures(value) for name, value in figures.items()}
    if options.store:
        # The machine may be busier at the end; its least time is the one without other programs.
        lines = compare_and_store(rounded, min(calibration_s, calibrate()))
        print("relative to the stored figures, at equal speed of the machine:", *lines, sep="\n")
    print(json.dumps(rounded))


def _round_figures(value: object) -> object:
    if isinstance(value, dict):
        return {name: _round_figures(item) for name, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
