"""Measure resource matching of a job on half of all nodes, with different speeds and saturated links."""

import random
from collections.abc import Callable
from statistics import median
from time import process_time

from experiments.matching_by_highs import match_by_highs
from koalapy.policies.matching import Kind, Matching, Problem, Site, find_matching

GRIDS = ((16, 8), (100, 100))
"""Number of clusters, and of nodes of each."""
MAX_NODES_FOR_HIGHS = 128


def make_problem(clusters: int, nodes: int, seed: int) -> Problem:
    draws = random.Random(seed)
    sites = []
    for number in range(clusters):
        kinds = tuple(Kind(f"n{node}", 1 / draws.uniform(0.2, 1.0), 1) for node in range(nodes))
        capacity = draws.uniform(0.5, 1.0) * 12.5e6 * nodes
        sites.append(Site(f"c{number:02}", kinds, capacity, draws.uniform(0.0, 0.4) * capacity))
    return Problem(clusters * nodes // 2, tuple(sites), 0.6, 0.4, bandwidth=25e6)


def matching_ms(rounds: int, scale: float) -> dict[str, dict[str, float]]:
    """Return the median milliseconds over ``rounds`` problems, by grid and solver."""
    medians: dict[str, dict[str, float]] = {}
    for clusters, size in GRIDS:
        clusters = max(2, round(clusters * scale))
        problems = [make_problem(clusters, size, seed) for seed in range(rounds)]
        times = {"exact": [_measure_ms(find_matching, problem) for problem in problems]}
        if clusters * size <= MAX_NODES_FOR_HIGHS:
            times["highs"] = [_measure_ms(match_by_highs, problem) for problem in problems]
        name = f"{clusters * size} nodes in {clusters} clusters"
        medians[name] = {solver: median(solver_ms) for solver, solver_ms in times.items()}
        solver_times = ", ".join(f"{solver} {solver_ms:.3f} ms" for solver, solver_ms in medians[name].items())
        print(f"  {name}: {solver_times}", flush=True)
    return medians


def _measure_ms(solve: Callable[[Problem], Matching | None], problem: Problem) -> float:
    """Return the milliseconds of processor time of a solution."""
    began = process_time()
    matching = solve(problem)
    took = process_time() - began
    assert matching is not None
    return 1000 * took
