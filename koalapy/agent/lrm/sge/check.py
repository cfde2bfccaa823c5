"""What an operator should know of a Grid Engine before the first job."""

import os
import socket
from collections.abc import Sequence

from koalapy.agent.lrm.port import Finding
from koalapy.agent.lrm.sge.commands import FORCED_DELETE_HINT, SgeCommands, parallel_environment, read_layout
from koalapy.agent.lrm.sge.qstat import read_listing
from koalapy.agent.lrm.sge.states import queue_state
from koalapy.model.errors import SiteError


async def findings(commands: SgeCommands, environment: str, queue: str | None) -> Sequence[Finding]:
    """Everything looked at, in order; what rests on something broken is left out."""
    found: list[Finding] = []
    try:
        await commands.find()
        found.append(_root())
        found.append(await _master(commands))
        found.append(await _submit_host(commands))
        found.append(await _slaves(commands, environment))
        found.append(await _forced_delete(commands))
        found += await _nodes(commands, environment, queue)
    except SiteError as error:
        found.append(Finding("Grid Engine", False, error.message, error.hint or "see that sge_qmaster runs"))
    return found


def _root() -> Finding:
    root, cell = os.environ.get("SGE_ROOT", ""), os.environ.get("SGE_CELL", "default")
    if os.path.exists(f"{root}/{cell}/common/bootstrap"):
        return Finding("SGE_ROOT", True, f"{root}, cell {cell}")
    wrong = f"there is no cell {root}/{cell}" if root else "not set"
    return Finding("SGE_ROOT", False, wrong, "set SGE_ROOT (Debian: /var/lib/gridengine) and SGE_CELL for the agent")


async def _master(commands: SgeCommands) -> Finding:
    await commands.ask("qconf", "-sql")
    return Finding("master", True, f"answers; {await commands.version()}")


async def _submit_host(commands: SgeCommands) -> Finding:
    hosts = (await commands.ask("qconf", "-ss")).decode(errors="replace").split()
    own = socket.gethostname()
    if own.partition(".")[0] in {host.partition(".")[0] for host in hosts}:
        return Finding("submit host", True, f"{own} is one")
    return Finding("submit host", False, f"{own} is none of {', '.join(hosts) or 'none'}", f"qconf -as {own}")


async def _slaves(commands: SgeCommands, environment: str) -> Finding:
    attributes = await parallel_environment(commands, environment)
    slots, rule = attributes.get("slots", "?"), attributes.get("allocation_rule", "?")
    found = f"{environment}: {slots} slots, {rule} on each node"
    if attributes.get("control_slaves", "").upper() == "TRUE":
        return Finding("parallel environment", True, found)
    hint = f"set control_slaves TRUE (qconf -mp {environment})"
    return Finding("parallel environment", False, f"{environment} cannot start anything on further nodes", hint)


async def _forced_delete(commands: SgeCommands) -> Finding:
    if await commands.may_delete_by_force():
        return Finding("qdel -f", True, "allowed for jobs that a restarted master keeps")
    problem = "not allowed: jobs that a restarted master keeps hold their nodes"
    return Finding("qdel -f", False, problem, FORCED_DELETE_HINT)


async def _nodes(commands: SgeCommands, environment: str, queue: str | None) -> Sequence[Finding]:
    layout = await read_layout(commands, environment, queue)
    queues = sorted({name for name, _ in layout.instances})
    found = [Finding("queues", True, ", ".join(queues))]
    listing = read_listing(await commands.ask("qstat", "-f", "-u", "nobody", "-xml"))
    instances = [each for each in listing.instances if (each.queue, each.host) in layout.instances]
    if odd := [each for each in instances if each.total != layout.slots]:
        example = f"{odd[0].queue}@{odd[0].host} has {odd[0].total} slots, jobs take {layout.slots}"
        hint = f"give them {layout.slots} slots, or a parallel environment of their own"
        found.append(Finding("whole nodes", False, f"{len(odd)} queue instances would be shared: {example}", hint))
    else:
        found.append(Finding("whole nodes", True, f"{layout.slots} slots each"))
    down = {each.host: each.states for each in instances if queue_state(each.states) == "down"}
    words = ", ".join(f"{host} ({states})" for host, states in sorted(down.items())[:5])
    total = len(layout.hosts)
    state = f"{total}, of which {len(down)} are down: {words}" if down else f"{total}, all up"
    found.append(Finding("nodes", len(down) < total, state, "see qstat -f -explain acE" if down else ""))
    return found
