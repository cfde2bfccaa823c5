"""By which networks the nodes of a gang may meet, where the clusters' profiles do not say it."""

from __future__ import annotations

from itertools import islice, product

from koalapy.runtime.address import own_networks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from koalapy.runtime.plan import Plan

MOST = 6
"""How many ways to meet are tried: each takes seconds when it fails."""


def own_choices(plan: Plan, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """(network, address) of all this node may be known by; empty when there is nothing to choose.

    That is so where the profile says it, within one cluster, and on loopback.
    """
    host = plan.me["host"]
    several = len({node["cluster"] for node in plan.nodes}) > 1
    if environment.get("KOALA_MPI_INTERFACE") or host.startswith("127.") or not several:
        return []
    return own_networks()


def other_ways(plan: Plan, choices: Mapping[int, Sequence[Sequence[str]]]) -> list[tuple[list[str], list[str]]]:
    """Other ways to meet, as (networks, addresses of the plan's nodes): all nodes of a cluster by one network.

    ``choices`` are those of each node. Ways by one network that all have come first.
    """
    clusters: dict[str, list[int]] = {}
    for index, node in enumerate(plan.nodes):
        clusters.setdefault(node["cluster"], []).append(index)
    by_node = {index: {known[0]: known[1] for known in found} for index, found in choices.items()}
    common = {
        cluster: [n for n in by_node[nodes[0]] if all(n in by_node[index] for index in nodes)] or [""]
        for cluster, nodes in clusters.items()
    }
    ways = sorted(product(*common.values()), key=lambda networks: len({*networks}))
    found = (_hosts(plan, dict(zip(clusters, networks)), by_node) for networks in ways)
    current = [node["host"] for node in plan.nodes]
    return list(islice((way for way in found if way[1] != current), MOST))


def _hosts(
    plan: Plan, networks: Mapping[str, str], by_node: Mapping[int, Mapping[str, str]]
) -> tuple[list[str], list[str]]:
    """Where a cluster has no choice its nodes keep their addresses."""
    hosts = [by_node[index].get(networks[node["cluster"]], node["host"]) for index, node in enumerate(plan.nodes)]
    return sorted({*networks.values()} - {""}), hosts
