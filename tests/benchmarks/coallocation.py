"""Compare the policy ``auto`` with worst-fit and cluster-minimization for jobs without a declared preference.

The grid and the jobs are those of sonmez-2010 VI-C, simulated around the real scheduler: 204 nodes in four clusters,
jobs of 8, 16 and 32 nodes with Poisson arrivals, which run 1 + CCR - 0.1 times as long on several clusters as on one.
Mean response times must be at most 3 % above the better of worst-fit and cluster-minimization.

    python -m tests.benchmarks.coallocation --seeds 20
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean

from koalapy.model.job import JobId, JobState, Token, parse_token
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import flexible, nonfixed
from tests.scheduler.sites import Site
from tests.scheduler.world import Program, World

CLUSTERS = {"delft": 85, "leiden": 41, "amsterdam": 46, "utrecht": 32}
SIZES = (8, 16, 32)
SINGLE_CLUSTER_S = 180.0
"""Mean seconds that a job runs on one cluster."""
POLICIES = ("worst-fit", "cluster-minimization", "auto")
CCRS = (0.1, 0.5, 1.0)
LOADS = (0.9, 0.8, 0.7, 0.6)
MAX_RATIO = 1.03


@dataclass(frozen=True)
class Cell:
    """The parameters of one run."""

    policy: str
    ccr: float
    load: float
    seed: int
    jobs: int
    spread: float = 0.0
    """The standard deviation of the logarithms of run times."""
    applications: int = 1


@dataclass(frozen=True)
class Outcome:
    cell: Cell
    response: float
    """Mean seconds from submission to end."""
    co_allocated: int


class Grid(World):
    """A simulated grid on which programs run longer over several clusters."""

    def __init__(self, ccr: float, rules: Rules | None = None) -> None:
        self._slowdown = max(1.0, 1.0 + ccr - 0.1)
        self.co_allocated: set[JobId] = set()
        super().__init__(CLUSTERS, rules or Rules(placement_queue_limit=1_000_000), strict=False)

    def _start_program(self, site: Site, token: Token) -> None:
        ident = parse_token(token).job
        attempt = self.jobs[ident].attempt
        several = attempt is not None and len({c.cluster for c in attempt.gang}) > 1
        if several and ident not in self.co_allocated:
            self.co_allocated.add(ident)
            (run_time,) = self.programs[ident].run_time
            self.programs[ident] = Program((run_time * self._slowdown,))
        super()._start_program(site, token)


def draw_arrivals(cell: Cell) -> Iterator[tuple[float, int, float, str]]:
    """Yield submission time, nodes, run time on one cluster and application, equal for all policies and CCRs."""
    draws = random.Random(f"{cell.load} {cell.seed} {cell.spread}")
    rate = cell.load * sum(CLUSTERS.values()) / (fmean(SIZES) * SINGLE_CLUSTER_S)
    time_s = 0.0
    for _ in range(cell.jobs):
        time_s += draws.expovariate(rate)
        run_time = (
            exp(draws.gauss(log(SINGLE_CLUSTER_S) - cell.spread**2 / 2, cell.spread))
            if cell.spread
            else SINGLE_CLUSTER_S
        )
        yield time_s, draws.choice(SIZES), run_time, f"synthetic-{draws.randrange(cell.applications)}"


@cache
def run_cell(cell: Cell) -> Outcome:
    """Run one workload to its end."""
    grid = Grid(cell.ccr)
    for time_s, nodes, run_time, application in draw_arrivals(cell):
        grid.advance(time_s - grid.now)
        request = nonfixed(nodes) if cell.policy == "worst-fit" else flexible(nodes)
        grid.submit(request, run_time=run_time, application=application, policy=cell.policy)
    while any(not job.state.is_final for job in grid.jobs.values()):
        grid.advance(600.0)
    assert all(job.state is JobState.SUCCEEDED for job in grid.jobs.values())
    return Outcome(
        cell, fmean((job.ended_at or 0.0) - job.submitted_at for job in grid.jobs.values()), len(grid.co_allocated)
    )


@dataclass(frozen=True)
class Comparison:
    """Mean response times over all seeds, in seconds."""

    ccr: float
    load: float
    worst_fit: float
    minimization: float
    auto: float
    co_allocated: float
    """Mean number of co-allocated jobs in a run of ``auto``."""

    @property
    def ratio(self) -> float:
        return self.auto / min(self.worst_fit, self.minimization)


def compare(
    ccr: float, load: float, seeds: Sequence[int], jobs: int, spread: float = 0.0, kinds: int = 1
) -> Comparison:
    """Run one CCR and load under all three policies; worst-fit never co-allocates, so its CCR does not matter."""
    outcomes = {
        policy: [
            run_cell(Cell(policy, CCRS[0] if policy == "worst-fit" else ccr, load, seed, jobs, spread, kinds))
            for seed in seeds
        ]
        for policy in POLICIES
    }
    worst_fit, minimization, auto = (fmean(outcome.response for outcome in outcomes[policy]) for policy in POLICIES)
    co_allocated = fmean(outcome.co_allocated for outcome in outcomes["auto"])
    return Comparison(ccr, load, worst_fit, minimization, auto, co_allocated)


def main() -> int:
    """Print a line for each CCR and load, and return 1 if one exceeds the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1000, help="number of jobs of each run")
    parser.add_argument("--spread", type=float, default=0.0, help="standard deviation of the logarithms of run times")
    parser.add_argument("--applications", type=int, default=1, help="number of applications of the jobs")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    comparisons = []
    print("load  CCR  worst-fit  cluster-minimization    auto  ratio  co-allocated")
    for load, ccr in product(LOADS, CCRS):
        comparison = compare(ccr, load, range(1, options.seeds + 1), options.jobs, options.spread, options.applications)
        responses = f"{comparison.worst_fit:9.1f}  {comparison.minimization:20.1f}  {comparison.auto:6.1f}"
        print(
            f"{load:4}  {ccr:3}  {responses}  {comparison.ratio:5.3f}  "
            f"{comparison.co_allocated:6.1f} of {options.jobs}",
            flush=True,
        )
        comparisons.append(comparison)
    if options.json:
        options.json.write_text(
            json.dumps([asdict(comparison) | {"ratio": comparison.ratio} for comparison in comparisons], indent=1)
        )
    worst = max(comparisons, key=lambda comparison: comparison.ratio)
    print(
        f"At worst {worst.ratio:.3f} times the better policy, at load {worst.load} and CCR {worst.ccr};"
        f" the limit is {MAX_RATIO}."
    )
    return int(worst.ratio > MAX_RATIO)


if __name__ == "__main__":
    sys.exit(main())
