"""Model the DAS-3 and its applications from the data in ``das3.toml``."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import combinations
from typing import Any

from experiments.run_times import by_communication
from koalapy.model.cluster import ClusterPair, Link, pair_of
from koalapy.model.request import ClusterName
from koalapy.simulation.jobs import Gang, PlannedJob, RunTime
from koalapy.simulation.site import SimulatedCluster, SimulatedGrid

Weigh = Callable[[Sequence[float]], float]
DELFT, LEIDEN = "delft", "leiden"
"""One of these is left out in each experiment, because their network is unknown."""


@cache
def _load_data() -> Mapping[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("das3.toml").read_text(encoding="utf-8"))


def build_grid(without: ClusterName, startup: float = 0.0) -> SimulatedGrid:
    """Build a grid of four of the five clusters, with their measured links."""
    data = _load_data()
    clusters = {name: SimulatedCluster(nodes) for name, nodes in data["nodes"].items() if name != without}
    return SimulatedGrid(clusters, build_links(), startup)


def build_links() -> dict[ClusterPair, Link]:
    links = {}
    for names, (milliseconds, megabytes) in _load_data()["links"].items():
        first, second = names.split("-")
        links[pair_of(first, second)] = Link(milliseconds / 1e3, megabytes * 1e6)
    return links


def run_times_of(application: str) -> Sequence[float]:
    """Return the run time of an application on 1, 2, … clusters."""
    curve: Sequence[float] = _load_data()["seconds"][application]
    return curve


def build_synthetic(ccr: float) -> tuple[float, RunTime]:
    """Return the run time of the synthetic application on one cluster, and its model on several."""
    data = _load_data()["synthetic"]
    return data["seconds"], by_communication(ccr, data["slowdown"])


def by_latency(curve: Sequence[float], weigh: Weigh = max, *, by_number: bool = True) -> RunTime:
    """Model run times that grow with the latency between clusters.

    Each additional cluster adds time in proportion to the longest latency between the clusters of a job. The last value
    of ``curve`` is that of the four clusters without Delft. If Delft takes part, all clusters communicate by its
    network.

    ``weigh`` reduces the latencies of all pairs to one number. Without ``by_number`` the number of clusters has no
    effect.
    """
    four = [name for name in _load_data()["nodes"] if name != DELFT]
    increase = (curve[len(four) - 1] / curve[0] - 1.0) / (
        _count_additional(four, by_number) * weigh(_list_latencies(four))
    )

    def factor(job: PlannedJob, gang: Gang) -> float:
        if len(gang) == 1:
            return 1.0
        return 1.0 + increase * _count_additional(gang, by_number) * weigh(_list_latencies([name for name, _ in gang]))

    return factor


def _count_additional(clusters: Sequence[object], by_number: bool) -> int:
    """Return the factor on the time that an additional cluster adds."""
    return len(clusters) - 1 if by_number else 1


def _list_latencies(names: Sequence[ClusterName]) -> list[float]:
    """Return the latencies of all pairs, or of those with Delft if it is among the clusters."""
    pairs = [pair_of(*pair) for pair in combinations(names, 2) if DELFT not in names or DELFT in pair]
    return [link.latency for pair in pairs if (link := _links()[pair]).latency is not None]


_links = cache(build_links)
