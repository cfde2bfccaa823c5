"""Distribute the ranks of one program over the nodes of a job, and the processors of a node over its ranks."""

from __future__ import annotations

import os

from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from typing import Any

    from koalapy.runner.plan import Plan
    from koalapy.runner.settings import Settings


def distribute_ranks(job: Plan, request: dict[str, Any]) -> list[int]:
    """Return the ranks on each node of a job, as a call of ``mpirun`` requests them.

    Without a number all slots get a rank, the first nodes first. Raise ``Failure`` for missing nodes or too many ranks.
    """
    hosts, per_node, ranks = request["hosts"] or {}, request["per_node"], request["ranks"]
    chosen = request.get("indices") or _choose_nodes(job, request["hosts"], request["clusters"])
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


TASKSET = ("/usr/bin/taskset", "/bin/taskset")
TOPOLOGY = "/sys/devices/system/cpu/cpu{processor}/topology/{name}"


def check_processors(plan: Plan, settings: Settings) -> None:
    """Raise ``Failure`` if this node has fewer processors than its ranks request."""
    requested = plan.message.get("cpus_per_rank")
    ranks, available = plan.me["slots"], len(os.sched_getaffinity(0))
    if plan.message["launcher"] == "processes":
        ranks = 1
    if requested is None or ranks * requested <= available:
        return
    each = f"{ranks} ranks with {requested} processors each" if ranks > 1 else f"a rank with {requested} processors"
    raise Failure(
        f"node {settings.name} has {available} processors for this job, too few for {each}: "
        "ask for fewer with --cpus-per-rank or --ppn, or for larger nodes with --cores",
        2,
    )


def binding_lines(plan: Plan, settings: Settings) -> list[str]:
    """Return lines of the rank script that bind a rank to its processors; none if ranks are not bound.

    Nodes of embedded clusters share the processors of a machine, so their ranks are not bound. Those of a job that
    shares nodes are not bound either if its resource manager has not bound this process to the job's processors.
    """
    count, ranks = plan.message.get("cpus_per_rank"), plan.me["slots"]
    taskset = next((path for path in TASKSET if os.access(path, os.X_OK)), None)
    processors = sort_by_core(os.sched_getaffinity(0))
    if count is None or taskset is None or settings.shares_processors or ranks * count > len(processors):
        return []
    if plan.message.get("share") and len(processors) == os.cpu_count() and ranks * count < len(processors):
        return []
    cases = " ".join(
        f"{rank}) processors={','.join(map(str, processors[rank * count : (rank + 1) * count]))};;"
        for rank in range(ranks)
    )
    return [
        f'processors=; case "${{OMPI_COMM_WORLD_LOCAL_RANK-}}" in {cases} esac',
        f'[ -z "$processors" ] || {taskset} -pc "$processors" "$$" >/dev/null',
    ]


def sort_by_core(processors: Iterable[int]) -> Sequence[int]:
    """Return processors in order of socket and core, so that a rank gets all hardware threads of its cores."""
    return sorted(processors, key=lambda processor: (*_place(processor), processor))


def _place(processor: int) -> list[int]:
    """Return the socket and core of a processor; none if the kernel does not say."""
    try:
        place = []
        for name in ("physical_package_id", "core_id"):
            with open(TOPOLOGY.format(processor=processor, name=name), encoding="ascii") as file:
                place.append(int(file.read()))
    except (OSError, ValueError):
        return [0, 0]
    return place
