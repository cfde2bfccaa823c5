"""How well ``auto`` does where nothing is declared, against placing all in one cluster and placing over any.

The grid and the jobs of sonmez-2010 VI-C, in the virtual world around the real scheduler: 204 nodes in four clusters,
jobs of 8, 16 and 32 nodes that arrive as they like, and run 1 + CCR - 0.1 times as long on several clusters as on one.
Mean response times are never to be more than 3 % above the better of worst-fit and cluster-minimization.

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
ALONE = 180.0
"""Seconds that a job runs on one cluster, on average."""
POLICIES = ("worst-fit", "cluster-minimization", "auto")
CCRS = (0.1, 0.5, 1.0)
LOADS = (0.9, 0.8, 0.7, 0.6)
BAR = 1.03


@dataclass(frozen=True)
class Cell:
    """One run: what is the same for all policies but the policy itself."""

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
    """Seconds from submission to end, on average."""
    co_allocated: int


class Grid(World):
    """Programs run longer over several clusters."""

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


def arrivals(cell: Cell) -> Iterator[tuple[float, int, float, str]]:
    """When, nodes, seconds on one cluster: the same for every policy and CCR."""
    draws = random.Random(f"{cell.load} {cell.seed} {cell.spread}")
    rate = cell.load * sum(CLUSTERS.values()) / (fmean(SIZES) * ALONE)
    at = 0.0
    for _ in range(cell.jobs):
        at += draws.expovariate(rate)
        run_time = exp(draws.gauss(log(ALONE) - cell.spread**2 / 2, cell.spread)) if cell.spread else ALONE
        yield at, draws.choice(SIZES), run_time, f"synthetic-{draws.randrange(cell.applications)}"


@cache
def run(cell: Cell) -> Outcome:
    """One workload to its end."""
    grid = Grid(cell.ccr)
    for at, nodes, run_time, application in arrivals(cell):
        grid.advance(at - grid.now)
        request = nonfixed(nodes) if cell.policy == "worst-fit" else flexible(nodes)
        grid.submit(request, run_time=run_time, application=application, policy=cell.policy)
    while any(not job.state.is_final for job in grid.jobs.values()):
        grid.advance(600.0)
    assert all(job.state is JobState.SUCCEEDED for job in grid.jobs.values())
    return Outcome(
        cell, fmean((job.ended_at or 0.0) - job.submitted_at for job in grid.jobs.values()), len(grid.co_allocated)
    )


@dataclass(frozen=True)
class Compared:
    """Mean response times over all seeds, in seconds."""

    ccr: float
    load: float
    worst_fit: float
    minimization: float
    auto: float
    co_allocated: float
    """Jobs of a run of ``auto``, on average."""

    @property
    def ratio(self) -> float:
        return self.auto / min(self.worst_fit, self.minimization)


def compare(ccr: float, load: float, seeds: Sequence[int], jobs: int, spread: float = 0.0, kinds: int = 1) -> Compared:
    """One CCR and load under all three policies; worst-fit never co-allocates, whatever the CCR."""
    found = {
        policy: [
            run(Cell(policy, CCRS[0] if policy == "worst-fit" else ccr, load, seed, jobs, spread, kinds))
            for seed in seeds
        ]
        for policy in POLICIES
    }
    responses = [fmean(outcome.response for outcome in found[policy]) for policy in POLICIES]
    return Compared(ccr, load, *responses, fmean(outcome.co_allocated for outcome in found["auto"]))


def main() -> int:
    """Print a line for each CCR and load; 1 when one of them misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1000, help="of each run")
    parser.add_argument("--spread", type=float, default=0.0, help="standard deviation of the logarithms of run times")
    parser.add_argument("--applications", type=int, default=1, help="that the jobs belong to")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    found = []
    print("load  CCR  worst-fit  cluster-minimization    auto  ratio  co-allocated")
    for load, ccr in product(LOADS, CCRS):
        one = compare(ccr, load, range(1, given.seeds + 1), given.jobs, given.spread, given.applications)
        told = f"{one.worst_fit:9.1f}  {one.minimization:20.1f}  {one.auto:6.1f}  {one.ratio:5.3f}"
        print(f"{load:4}  {ccr:3}  {told}  {one.co_allocated:6.1f} of {given.jobs}", flush=True)
        found.append(one)
    if given.json:
        given.json.write_text(json.dumps([asdict(one) | {"ratio": one.ratio} for one in found], indent=1))
    worst = max(found, key=lambda one: one.ratio)
    print(
        f"At worst {worst.ratio:.3f} times the better policy, at load {worst.load} and CCR {worst.ccr}; wanted: {BAR}."
    )
    return int(worst.ratio > BAR)


if __name__ == "__main__":
    sys.exit(main())
