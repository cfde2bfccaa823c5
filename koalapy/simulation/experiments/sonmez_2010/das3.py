"""The DAS-3 and its applications: what ``das3.toml`` tells."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import combinations
from statistics import fmean
from typing import Any

from koalapy.model.cluster import ClusterPair, Link, pair_of
from koalapy.model.request import ClusterName
from koalapy.simulation.grid import SimulatedCluster, SimulatedGrid
from koalapy.simulation.jobs import PlannedJob
from koalapy.simulation.run_times import Gang, RunTime, by_number_of_clusters, communicating

DELFT, LEIDEN = "delft", "leiden"
"""One of them is left out in each experiment: nothing is known of the network between them."""


@cache
def _told() -> Mapping[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("das3.toml").read_text(encoding="utf-8"))


def grid(without: ClusterName, startup: float = 0.0) -> SimulatedGrid:
    """Four of its five clusters, and what is measured between them."""
    told = _told()
    clusters = {name: SimulatedCluster(nodes) for name, nodes in told["nodes"].items() if name != without}
    return SimulatedGrid(clusters, links(), startup)


def links() -> dict[ClusterPair, Link]:
    found = {}
    for names, (milliseconds, megabytes) in _told()["links"].items():
        one, other = names.split("-")
        found[pair_of(one, other)] = Link(milliseconds / 1e3, megabytes * 1e6)
    return found


def seconds(application: str) -> Sequence[float]:
    """How long an application runs on 1, 2, … clusters."""
    curve: Sequence[float] = _told()["seconds"][application]
    return curve


def synthetic(ccr: float) -> tuple[float, RunTime]:
    """How long the synthetic application runs on one cluster, and what more of them do to it."""
    told = _told()["synthetic"]
    return told["seconds"], communicating(ccr, told["slowdown"])


def by_latency(curve: Sequence[float]) -> RunTime:
    """What a curve adds for 2, 3, … clusters is for the mean latency of so many without Delft; others add more or less
    in proportion to theirs. Where Delft takes part, all communicate by its slower network."""
    by_number, usual = by_number_of_clusters(curve), _usual_latencies()

    def factor(job: PlannedJob, gang: Gang) -> float:
        if len(gang) == 1:
            return 1.0
        return 1.0 + (by_number(job, gang) - 1.0) * _latency([name for name, _ in gang]) / usual[len(gang)]

    return factor


@cache
def _usual_latencies() -> dict[int, float]:
    names = [name for name in _told()["nodes"] if name != DELFT]
    return {count: fmean(map(_latency, combinations(names, count))) for count in range(2, len(names) + 1)}


def _latency(names: Sequence[ClusterName]) -> float:
    """The mean over all pairs; of those of Delft, if it is among them."""
    known = _links()
    pairs = [pair for pair in combinations(names, 2) if DELFT not in names or DELFT in pair]
    latencies = [known[pair_of(*pair)].latency for pair in pairs]
    return fmean(each for each in latencies if each is not None)


_links = cache(links)
