"""The DAS-3 and its applications: what ``das3.toml`` tells."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import combinations
from typing import Any

from experiments.run_times import communicating
from koalapy.model.cluster import ClusterPair, Link, pair_of
from koalapy.model.request import ClusterName
from koalapy.simulation.grid import SimulatedCluster, SimulatedGrid
from koalapy.simulation.jobs import Gang, PlannedJob, RunTime

Weigh = Callable[[Sequence[float]], float]
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


def by_latency(curve: Sequence[float], weigh: Weigh = max, *, by_number: bool = True) -> RunTime:
    """Each cluster more adds in proportion to the longest latency between those that are combined, so that a curve's
    last value is that of the four clusters without Delft. Where Delft takes part, all communicate by its network.

    ``weigh`` is what is taken of the latencies of all pairs; without ``by_number`` the number of clusters adds nothing
    of its own."""
    four = [name for name in _told()["nodes"] if name != DELFT]
    each = (curve[len(four) - 1] / curve[0] - 1.0) / (_more(four, by_number) * weigh(_latencies(four)))

    def factor(job: PlannedJob, gang: Gang) -> float:
        if len(gang) == 1:
            return 1.0
        return 1.0 + each * _more(gang, by_number) * weigh(_latencies([name for name, _ in gang]))

    return factor


def _more(clusters: Sequence[object], by_number: bool) -> int:
    """How many times what a cluster more adds is added."""
    return len(clusters) - 1 if by_number else 1


def _latencies(names: Sequence[ClusterName]) -> list[float]:
    """Of all pairs; of those with Delft, if it is among them."""
    pairs = [pair_of(*pair) for pair in combinations(names, 2) if DELFT not in names or DELFT in pair]
    return [known.latency for pair in pairs if (known := _links()[pair]).latency is not None]


_links = cache(links)
