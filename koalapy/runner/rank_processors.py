"""Divide the processors of a node among its ranks."""

from __future__ import annotations

import os

from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from koalapy.runner.plan import Plan
    from koalapy.runner.settings import Settings

TASKSET = ("/usr/bin/taskset", "/bin/taskset")
TOPOLOGY = "/sys/devices/system/cpu/cpu{processor}/topology/{name}"


def check_processors(plan: Plan, settings: Settings) -> None:
    """Raise ``Failure`` if this node has fewer processors than its ranks request."""
    requested = plan.cpus_per_rank
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

    Nodes of embedded clusters share the processors of a machine, so their ranks are not bound.
    """
    count, ranks = plan.cpus_per_rank, plan.me["slots"]
    taskset = next((path for path in TASKSET if os.access(path, os.X_OK)), None)
    processors = sort_by_core(os.sched_getaffinity(0))
    if count is None or taskset is None or settings.shares_processors or ranks * count > len(processors):
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


def _place(processor: int) -> tuple[int, int]:
    """Return the socket and core of a processor; equal ones if the kernel does not say."""
    try:
        return _read(processor, "physical_package_id"), _read(processor, "core_id")
    except (OSError, ValueError):
        return 0, 0


def _read(processor: int, name: str) -> int:
    with open(TOPOLOGY.format(processor=processor, name=name), encoding="ascii") as file:
        return int(file.read())
