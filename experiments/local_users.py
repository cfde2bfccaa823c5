"""Simulate local users, who submit to the resource manager of their cluster (background load of sonmez-2010 VI-B)."""

from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from random import Random

from koalapy.model.request import ClusterName
from koalapy.simulation.jobs import LocalUser


def generate_local_users(
    clusters: Mapping[ClusterName, int],
    utilisation: float,
    *,
    duration: float,
    sizes: Sequence[int] = (1,),
    lasts: float = 60.0,
    seed: int = 0,
) -> Iterator[LocalUser]:
    """Yield local jobs by a Poisson process on each cluster, in the order of their arrival.

    They use the fraction ``utilisation`` of the cluster's nodes on average; sizes are drawn uniformly, run times from
    an exponential distribution with the mean ``lasts``. A size that exceeds a cluster is cut to it.
    """
    streams = [
        _generate_cluster_users(name, nodes, utilisation, duration, sizes, lasts, seed)
        for name, nodes in clusters.items()
    ]
    return merge(*streams, key=lambda user: user.at)


def _generate_cluster_users(
    cluster: ClusterName, nodes: int, utilisation: float, duration: float, sizes: Sequence[int], lasts: float, seed: int
) -> Iterator[LocalUser]:
    if utilisation <= 0:
        return
    draws = Random(f"{seed}/local users/{cluster}")
    fitting = [min(size, nodes) for size in sizes]
    rate = utilisation * nodes / (sum(fitting) / len(fitting) * lasts)
    arrival = draws.expovariate(rate)
    while arrival < duration:
        yield LocalUser(arrival, cluster, draws.choice(fitting), draws.expovariate(1 / lasts))
        arrival += draws.expovariate(rate)
