"""What an operator should know of a Slurm cluster before the first job."""

import re
from collections.abc import AsyncIterator, Sequence

from koalapy.agents.lrm.port import Finding
from koalapy.agents.lrm.slurm_commands import ask
from koalapy.agents.lrm.slurm_json import SlurmNode
from koalapy.agents.lrm.slurm_states import node_standing
from koalapy.model.errors import SiteError

_OLDEST = (21, 8)
"""Release since which squeue and sinfo speak JSON."""


async def check_version() -> Finding:
    """Whether Slurm is new enough."""
    try:
        told = (await ask("sinfo", "--version")).output.decode(errors="replace").strip()
    except SiteError as error:
        return Finding("Slurm", False, error.message, error.hint or "try sinfo --version by hand")
    found = re.search(r"(\d+)\.(\d+)", told)
    if found is None or (int(found[1]), int(found[2])) < _OLDEST:
        return Finding("Slurm", False, f"{told[:80]}: squeue --json needs 21.08", "upgrade Slurm to 21.08 or later")
    return Finding("Slurm", True, told)


async def partitions() -> dict[str, tuple[bool, bool]]:
    """Of each partition by name whether it is up, and whether it is the default one. Raises ``SiteError``."""
    found: dict[str, tuple[bool, bool]] = {}
    for line in (await ask("sinfo", "--all", "--noheader", "--format=%P|%a")).output.decode(errors="replace").split():
        name, _, state = line.partition("|")
        found[name.rstrip("*")] = (state == "up", name.endswith("*"))
    return found


async def check_partition(wanted: str | None) -> AsyncIterator[Finding]:
    """Whether the controller answers, and whether it has the partition."""
    try:
        found = await partitions()
    except SiteError as error:
        hint = error.hint or "see that slurmctld runs and that slurm.conf names it"
        yield Finding("controller", False, error.message, hint)
        return
    yield Finding("controller", True, "answers")
    name = wanted or next((name for name, (_, default) in found.items() if default), None)
    hint = f"set the cluster's partition to one of: {', '.join(found) or 'none there'}"
    if name is None:
        yield Finding("partition", False, "no partition is set, and Slurm has no default one", hint)
    elif name not in found:
        yield Finding("partition", False, f"there is no partition {name}", hint)
    elif not found[name][0]:
        yield Finding("partition", False, f"{name} is not up", f"scontrol update PartitionName={name} State=UP")
    else:
        yield Finding("partition", True, name)


def check_nodes(nodes: Sequence[SlurmNode]) -> Finding:
    """How many there are, and what keeps some from working."""
    down = [node for node in nodes if node_standing(node.words) == "down"]
    idle = sum(node_standing(node.words) == "idle" for node in nodes)
    if not down:
        return Finding("nodes", bool(nodes), f"{len(nodes)}, {idle} idle", "" if nodes else "the partition has none")
    first = down[0]
    why = first.reason or "no reason given"
    found = f"{len(nodes)}, {idle} idle, {len(down)} down: {first.name} is {'+'.join(sorted(first.words))} ({why})"
    # A few broken nodes are a cluster's daily life; only when nothing is left is it no use.
    hint = f"scontrol show node {first.name}; then scontrol update NodeName={first.name} State=RESUME"
    return Finding("nodes", len(down) < len(nodes), found, hint)
