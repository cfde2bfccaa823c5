"""What an operator should know of a Slurm cluster before the first job."""

import re
from collections.abc import AsyncIterator, Sequence

from koalapy.agent.accounts.accounts import RunAs
from koalapy.agent.lrm.port import Finding
from koalapy.agent.lrm.slurm.answers import SlurmNode
from koalapy.agent.lrm.slurm.commands import ask
from koalapy.agent.lrm.slurm.offer import partitions, split
from koalapy.agent.lrm.slurm.states import NodeState
from koalapy.model.errors import SiteError

_MIN_RELEASE = (21, 8)
"""The first release with ``sinfo --json``."""


async def version(run_as: RunAs) -> str:
    """As Slurm says it itself; ``SiteError``."""
    return (await ask(run_as, "sinfo", "--version")).output.decode(errors="replace").strip()


async def check_version(run_as: RunAs) -> Finding:
    """Whether Slurm is new enough."""
    try:
        told = await version(run_as)
    except SiteError as error:
        return Finding("Slurm", False, error.message, error.hint or "try sinfo --version by hand")
    found = re.search(r"(\d+)\.(\d+)", told)
    if found is None or (int(found[1]), int(found[2])) < _MIN_RELEASE:
        return Finding("Slurm", False, f"{told[:80]}: sinfo --json needs 21.08", "upgrade Slurm to 21.08 or later")
    return Finding("Slurm", True, told)


async def check_partition(run_as: RunAs, wanted: str | None) -> AsyncIterator[Finding]:
    """Whether the controller answers, and whether it has the partition, or one of several that is up."""
    try:
        found = await partitions(run_as)
    except SiteError as error:
        hint = error.hint or "see that slurmctld runs and that slurm.conf names it"
        yield Finding("controller", False, error.message, hint)
        return
    yield Finding("controller", True, "answers")
    names = split(wanted) if wanted else [each.name for each in found.values() if each.default]
    missing = [name for name in names if name not in found]
    hint = f"set the cluster's partition to one of: {', '.join(found) or 'none there'}"
    if not names:
        yield Finding("partition", False, "no partition is set, and Slurm has no default one", hint)
    elif missing:
        yield Finding("partition", False, f"there is no partition {', '.join(missing)}", hint)
    elif not any(found[name].up for name in names):
        hint = f"scontrol update PartitionName={names[0]} State=UP"
        yield Finding("partition", False, f"{', '.join(names)} is not up", hint)
    else:
        closed = [name for name in names if not found[name].up]
        others = f" ({', '.join(closed)} not up)" if closed else ""
        yield Finding("partition", True, f"{', '.join(names)}{others}")


def check_nodes(nodes: Sequence[SlurmNode], node_states: Sequence[NodeState]) -> Finding:
    """How many there are, and what keeps some from working."""
    down = [node for node, state in zip(nodes, node_states, strict=True) if state == "down"]
    idle = node_states.count("idle")
    if not down:
        return Finding("nodes", bool(nodes), f"{len(nodes)}, {idle} idle", "" if nodes else "the partition has none")
    first = down[0]
    why = first.reason or "no reason given"
    found = f"{len(nodes)}, {idle} idle, {len(down)} down: {first.name} is {'+'.join(sorted(first.words))} ({why})"
    # A few broken nodes are a cluster's daily life; only when nothing is left is it no use.
    hint = f"scontrol show node {first.name}; then scontrol update NodeName={first.name} State=RESUME"
    return Finding("nodes", len(down) < len(nodes), found, hint)
