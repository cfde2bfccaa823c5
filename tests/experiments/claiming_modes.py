"""Atomic, incremental and priced claiming side by side, on the workload of mohamed-2005 in the virtual world.

Local users come past the scheduler, which learns of them only when an agent looks (``--pause``): they overtake claims.
Inputs are on their way, so that there is a start time ahead, and starts fail. Each seed is another workload, the same
for all three; of the differences to atomic there are 95 % intervals over the seeds.

    python -m tests.experiments.claiming_modes --seeds 10
"""

import argparse
import sys
from collections.abc import Sequence
from statistics import fmean

from koalapy.model.job import ClaimingMode
from koalapy.simulation.experiments.intervals import mean_interval
from tests.experiments.m05 import Run
from tests.experiments.m05_virtual import FAILING, run, with_rules

FIGURES = {
    "response time, s": lambda done: fmean(job.response_time for job in done.outcomes),
    "restarts of a job": lambda done: fmean(job.restarts for job in done.outcomes),
    "claiming tries of a job": lambda done: fmean(job.claiming_tries for job in done.outcomes),
    "node-seconds at barriers": lambda done: done.before_start + done.without_start,
    "of these without a start": lambda done: done.without_start,
}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval."""
    mean, low, _ = mean_interval(values)
    return mean, mean - low if len(values) > 1 else float("inf")


def table(runs: dict[ClaimingMode, list[Run]]) -> str:
    """Means for each way of claiming, and how far the others are from atomic, seed by seed."""
    lines = [f"{'':26}" + "".join(f"{mode:>12}" for mode in runs) + "   difference to atomic (95 %)"]
    for name, figure in FIGURES.items():
        values = {mode: [figure(done) for done in found] for mode, found in runs.items()}
        base = values[ClaimingMode.ATOMIC]
        told = [f"{fmean(each):12.2f}" for each in values.values()]
        for mode, each in values.items():
            if mode is not ClaimingMode.ATOMIC:
                mean, half = interval([one - other for one, other in zip(each, base, strict=True)])
                told.append(f"   {mode} {mean:+.2f} ± {half:.2f}")
        lines.append(f"{name:26}" + "".join(told))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=200, help="of each run")
    parser.add_argument("--failures", type=float, default=FAILING, help="probability that a component's start fails")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two looks of an agent at its nodes")
    parser.add_argument("--load", type=float, default=1.0, help="times as many local users as in the paper")
    given = parser.parse_args()
    runs: dict[ClaimingMode, list[Run]] = {mode: [] for mode in ClaimingMode}
    for seed in range(1, given.seeds + 1):
        for mode, found in runs.items():
            rules = with_rules(claiming=mode, error_threshold=1000)
            options = {"jobs": given.jobs, "failing": given.failures, "pause": given.pause, "load": given.load}
            found.append(run(rules, seed=seed, **options)[0])
        print(f"after {seed} of {given.seeds}:\n{table(runs)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
