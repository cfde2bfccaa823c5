"""Distribute the ranks of one program over the nodes of a job."""

from __future__ import annotations

from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from koalapy.runner.plan import Plan


def distribute_ranks(job: Plan, request: dict[str, Any]) -> list[int]:
    """Return the ranks on each node of a job, as a call of ``mpirun`` requests them.

    Without a number all slots get a rank, the first nodes first. Raise ``Failure`` if the job lacks what is requested.
    """
    hosts, per_node, ranks = request["hosts"] or {}, request["per_node"], request["ranks"]
    chosen = _choose_nodes(job, request["hosts"], request["clusters"])
    room: dict[int, int] = {}
    for index in chosen:
        host, slots = job.nodes[index]["host"], job.nodes[index]["slots"]
        room[index] = next(count for count in (per_node, hosts.get(host), slots) if count is not None)
        if room[index] > slots and not request["oversubscribe"]:
            raise Failure(f"mpirun asks for {room[index]} ranks on {host}, which has {slots} slots: {ASK_LESS}", 2)
    total = sum(room.values())
    if not total:
        raise Failure("mpirun asks for no node: name hosts of KOALA_NODELIST, or leave the option out", 2)
    ranks = total if ranks is None else ranks
    rounds, remaining = divmod(ranks, total)
    if ranks > total and not request["oversubscribe"]:
        raise Failure(f"mpirun asks for {ranks} ranks, but its nodes have {total} slots: {ASK_LESS}", 2)
    counts = [0] * len(job.nodes)
    for index, count in room.items():
        added = min(count, remaining)
        counts[index] = count * rounds + added
        remaining -= added
    if max(counts) > MAX_SLOTS:
        raise Failure(f"mpirun asks for {max(counts)} ranks on one node: ask for at most {MAX_SLOTS}", 2)
    return counts


MAX_SLOTS = 8192
"""Maximum ranks on a node."""
ASK_LESS = "ask for fewer, submit the job with more nodes or --ppn, or add --oversubscribe"


def _choose_nodes(job: Plan, hosts: Collection[str] | None, clusters: Collection[str] | None) -> list[int]:
    """Return the indices of the requested nodes; all without a request. Raise ``Failure`` for one of another job."""
    by_host: dict[str, list[int]] = {}
    for index, node in enumerate(job.nodes):
        by_host.setdefault(node["host"], []).append(index)
    for host in hosts or ():
        if host not in by_host:
            raise Failure(
                f"mpirun asks for host {host[:100]}, which is not a node of this job: name hosts of KOALA_NODELIST", 2
            )
    known = {node["cluster"] for node in job.nodes}
    for cluster in clusters or ():
        if cluster not in known:
            raise Failure(
                f"mpirun asks for cluster {cluster[:100]}, where this job has no nodes: "
                f"name one of {', '.join(sorted(known))}",
                2,
            )
    wanted = {index for host in hosts or () for index in by_host[host]}
    return [
        index
        for index, node in enumerate(job.nodes)
        if (hosts is None or index in wanted) and (clusters is None or node["cluster"] in clusters)
    ]
