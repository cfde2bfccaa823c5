"""Resource matching: a job of half of all nodes, each of a speed of its own, over links that it saturates."""

import random
from collections.abc import Callable
from statistics import median
from time import process_time

from experiments.matching_by_highs import match_by_highs
from koalapy.policies.matching.exact import find_matching
from koalapy.policies.matching.problem import Kind, Matching, Problem, Site

GRIDS = ((16, 8), (100, 100))
"""Clusters, and nodes of each."""
MAX_NODES_FOR_HIGHS = 128


def problem(clusters: int, nodes: int, seed: int) -> Problem:
    draws = random.Random(seed)
    sites = []
    for number in range(clusters):
        kinds = tuple(Kind(f"n{node}", 1 / draws.uniform(0.2, 1.0), 1) for node in range(nodes))
        capacity = draws.uniform(0.5, 1.0) * 12.5e6 * nodes
        sites.append(Site(f"c{number:02}", kinds, capacity, draws.uniform(0.0, 0.4) * capacity))
    return Problem(clusters * nodes // 2, tuple(sites), 0.6, 0.4, bandwidth=25e6)


def matching_ms(rounds: int, scale: float) -> dict[str, dict[str, float]]:
    """Medians over as many problems as there are rounds, by grid and solver."""
    found: dict[str, dict[str, float]] = {}
    for clusters, size in GRIDS:
        clusters = max(2, round(clusters * scale))
        problems = [problem(clusters, size, seed) for seed in range(rounds)]
        times = {"exact": [_took(find_matching, each) for each in problems]}
        if clusters * size <= MAX_NODES_FOR_HIGHS:
            times["highs"] = [_took(match_by_highs, each) for each in problems]
        name = f"{clusters * size} nodes in {clusters} clusters"
        found[name] = {solver: median(took) for solver, took in times.items()}
        told = ", ".join(f"{solver} {took:.3f} ms" for solver, took in found[name].items())
        print(f"  {name}: {told}", flush=True)
    return found


def _took(solve: Callable[[Problem], Matching | None], each: Problem) -> float:
    """Milliseconds of processor time."""
    began = process_time()
    found = solve(each)
    took = process_time() - began
    assert found is not None
    return 1000 * took
