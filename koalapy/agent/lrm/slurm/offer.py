"""Read the partitions, limits and reserved nodes that Slurm offers to grid jobs, and check them."""

import re
from collections.abc import AsyncIterator, Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from koalapy.agent.lrm.port import Finding
from koalapy.agent.lrm.slurm.answers import SlurmNode, read_count
from koalapy.agent.lrm.slurm.commands import SlurmCommands, read_time
from koalapy.agent.lrm.slurm.limits import NO_LIMIT, AccountLimit, Reservation, read_reservations
from koalapy.agent.lrm.slurm.states import NodeState, is_partly_used, node_state
from koalapy.model.bounds import MAX_NODES
from koalapy.model.errors import SiteError, SiteFault, SiteRejected
from koalapy.model.job_sizes import JobSizes, SizeRanges
from koalapy.model.node_requirement import expand_host_list
from koalapy.model.reports import MAX_SIZE_RANGES
from koalapy.model.wording import format_list

_PARTITION_STATES = {"up": "UP", "down": "DOWN", "drain": "DRAIN", "inact": "INACTIVE"}
"""Availability in sinfo, and the same in ``scontrol`` and ``slurm.conf``."""
_MIN_RELEASE = (21, 8)
"""The first release with ``sinfo --json``."""
_SHOW_CONFIG = ("scontrol", "show", "config")
SHOW_RESERVATIONS = ("scontrol", "show", "reservation", "--oneliner")
_EXCLUSIVE = (("OverSubscribe", "EXCLUSIVE"), ("ExclusiveUser", "YES"))
"""Fields of a partition by which a node with a job takes none of another user."""
_CONSTRAINT_TOKEN = re.compile(r"[^\s&|,()*]+|[&|,()]|\*\d*")


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition; a job may have from ``min_nodes`` to ``max_nodes`` nodes there, None without limit."""

    name: str
    state: str = "UP"
    default: bool = False
    max_nodes: int | None = None
    min_nodes: int = 1
    default_walltime: float | None = None
    """Seconds that jobs without a walltime get; None: no limit."""

    @property
    def is_up(self) -> bool:
        return self.state == "UP"


@dataclass(frozen=True, slots=True)
class Offer:
    """What Slurm offers to grid jobs with the configured options.

    A job runs in one of ``partitions``, in one of ``reservations`` if any are configured, and only on nodes that meet
    ``constraint`` and are not ``excluded``.
    """

    partitions: tuple[Partition, ...]
    reservations: tuple[Reservation, ...] = ()
    constraint: str = ""
    excluded: frozenset[str] = frozenset()
    error: str = ""
    """Why no grid job would start, whatever is idle; empty if one would."""
    sharing: frozenset[str] = frozenset()
    """Those of the partitions in which jobs of several users may use one node; empty unless the site shares nodes."""
    exclusive_because: str = ""
    """Why no partition shares nodes, although the site would; empty if one does."""
    limit: AccountLimit = NO_LIMIT
    """The limits of the account of all grid jobs."""
    others: tuple[Reservation, ...] = ()
    """Reservations that grid jobs do not use."""

    @property
    def description(self) -> str:
        names = ",".join(partition.name for partition in self.partitions)
        text = f"partition {names}" if len(self.partitions) == 1 else f"partitions {names}"
        text = f"{text} with {self.constraint}" if self.constraint else text
        reservations = ",".join(reservation.name for reservation in self.reservations)
        return f"reservation {reservations} in {text}" if reservations else text

    def has_reserved(self, node: str) -> bool:
        """Return whether an active reservation of grid jobs has the node."""
        return any(reservation.active and node in reservation.nodes for reservation in self.reservations)

    def select_nodes(self, nodes: Sequence[SlurmNode]) -> list[SlurmNode]:
        """Return those that grid jobs may get."""
        nodes = [node for node in nodes if not node.has_features or may_match(node.features, self.constraint)]
        nodes = [node for node in nodes if node.name not in self.excluded]
        if not self.reservations or any(reservation.flexible for reservation in self.reservations):
            return nodes
        reserved: frozenset[str] = frozenset().union(*(reservation.nodes for reservation in self.reservations))
        return [node for node in nodes if node.name in reserved]

    def max_job_nodes(self, nodes: Collection[SlurmNode], cap: int = MAX_NODES) -> int:
        """Return how many of these nodes, at ``cap``, one job could have: it runs in one partition, within limits."""
        largest = 0
        for partition in self._up_partitions:
            count = sum(partition.name in node.partitions for node in nodes)
            count = min(
                count, cap, self.limit.max_job_nodes, MAX_NODES if partition.max_nodes is None else partition.max_nodes
            )
            if count >= partition.min_nodes:
                largest = max(largest, count)
        return largest

    @property
    def min_job_nodes(self) -> int:
        """The least number of nodes that a job may request in any partition."""
        return min((partition.min_nodes for partition in self._up_partitions), default=1)

    @property
    def job_sizes(self) -> SizeRanges:
        """The sizes that a job may have, by partition; empty: any."""
        sizes = []
        for partition in self._up_partitions[:MAX_SIZE_RANGES]:
            max_nodes = min(
                MAX_NODES, self.limit.max_job_nodes, MAX_NODES if partition.max_nodes is None else partition.max_nodes
            )
            sizes.append(JobSizes(min(max(1, partition.min_nodes), MAX_NODES), max(1, max_nodes), partition.name))
        return tuple(sizes) if any(size != JobSizes(partition=size.partition) for size in sizes) else ()

    @property
    def default_walltime(self) -> float | None:
        """The most seconds that a job without a walltime gets; None: no limit."""
        times = [partition.default_walltime for partition in self._up_partitions]
        return None if None in times else max(filter(None, times), default=None)

    def next_size(self, nodes: int, partition: str = "") -> int:
        """Return the smallest number of nodes, this one or a larger one, that the limits of a partition allow.

        If none allows more, return the number itself. ``partition``: the one that the job names.
        """
        partitions = [candidate for candidate in self._up_partitions if partition in ("", candidate.name)]
        if any(p.min_nodes <= nodes and nodes <= (p.max_nodes or nodes) for p in partitions):
            return nodes
        return min((p.min_nodes for p in partitions if p.min_nodes > nodes), default=nodes)

    def find_misfit(self, error: SiteRejected, nodes: int) -> Literal["", "few", "many"]:
        """Return whether a rejected number of nodes is too small or too large for one of several partitions.

        Slurm may be configured to demand that a job keeps within the limits of all that it names.
        """
        if "Node count specification invalid" not in error.message:
            return ""
        if any(partition.min_nodes > nodes for partition in self._up_partitions):
            return "few"
        return "many" if any((p.max_nodes or nodes) < nodes for p in self._up_partitions) else ""

    @property
    def shares(self) -> bool:
        """Return whether grid jobs may get parts of nodes."""
        return any(partition.name in self.sharing for partition in self._up_partitions)

    @property
    def _up_partitions(self) -> list[Partition]:
        return [partition for partition in self.partitions if partition.is_up]


def node_states(nodes: Sequence[SlurmNode], offer: Offer) -> list[NodeState]:
    """Return the state of each node for grid jobs."""
    up = {partition.name for partition in offer.partitions if partition.is_up}
    reserved = {name for reservation in offer.others if reservation.active for name in reservation.nodes}

    def state_of(node: SlurmNode) -> NodeState:
        state = node_state(node.words, reserved=offer.has_reserved(node.name))
        # Nodes that are reserved for maintenance are not broken.
        if state == "down" and node.name in reserved and node_state(node.words, reserved=True) != "down":
            return "busy"
        return state

    return [state_of(node) if node.partitions & up else "down" for node in nodes]


def partly_used_nodes(nodes: Sequence[SlurmNode], offer: Offer, excluded: Container[str]) -> list[SlurmNode]:
    """Return the nodes of which grid jobs could get the remaining part."""
    up = {partition.name for partition in offer.partitions if partition.is_up and partition.name in offer.sharing}
    return [
        node
        for node in nodes
        if node.partitions & up
        and node.name not in excluded
        and is_partly_used(node.words, reserved=offer.has_reserved(node.name))
    ]


async def read_offer(commands: SlurmCommands, partition_names: str | None, options: Sequence[str]) -> Offer:
    """Return the current offer. Raise ``SiteError``.

    ``partition_names`` are separated by commas; None: the default partition. ``options`` are the configured options.
    """
    partitions = await list_partitions(commands)
    if partition_names:
        names = split_names(partition_names)
    else:
        names = [partition.name for partition in partitions.values() if partition.default]
    if not names:
        raise SiteRejected("Slurm has no default partition", hint="set the cluster's partition", fault=SiteFault.SITE)
    # A partition that is not listed may be hidden from this account.
    offered = tuple(partitions.get(name, Partition(name)) for name in names)
    reservation_names = split_names(option_value(options, "--reservation") or "")
    error = ""
    by_name: dict[str, Reservation] = {}
    try:
        by_name = read_reservations((await commands.run_checked(*SHOW_RESERVATIONS)).text)
    except SiteError:
        if reservation_names:
            raise
    reservations = tuple(by_name[name] for name in reservation_names if name in by_name)
    other_reservations = tuple(reservation for name, reservation in by_name.items() if name not in reservation_names)
    if missing := [name for name in reservation_names if name not in by_name]:
        error = f"there is no reservation {format_list(missing)}"
    excluded: frozenset[str] = frozenset()
    try:
        excluded = frozenset(expand_host_list(option_value(options, "--exclude", "-x") or ""))
    except ValueError as problem:
        error = error or f"--exclude cannot be understood: {problem}"
    if not error and not any(partition.is_up for partition in offered):
        error = "; ".join(f"partition {partition.name} is {partition.state}" for partition in offered)
    elif not error and reservations and not any(reservation.active for reservation in reservations):
        error = "; ".join(f"reservation {r.name} begins at {r.begins}" for r in reservations)
    constraint = option_value(options, "--constraint", "-C") or ""
    return Offer(offered, reservations, constraint, excluded, error, others=other_reservations)


async def read_sharing(commands: SlurmCommands, offer: Offer) -> Offer:
    """Return the offer with the partitions that give parts of nodes, as Slurm is configured. Raise ``SiteError``."""
    select_type = re.search(r"^SelectType\s*=\s*(\S+)", (await commands.run_checked(*_SHOW_CONFIG)).text, re.MULTILINE)
    if select_type is not None and not select_type[1].startswith("select/cons_"):
        return replace(offer, exclusive_because=f"Slurm has SelectType={select_type[1]}")
    sharing, reasons = set[str](), list[str]()
    for line in (await commands.run_checked("scontrol", "show", "partition", "--all", "--oneliner")).text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        name = fields.get("PartitionName", "")
        if any(name == partition.name for partition in offer.partitions):
            excludes = [f"{key}={fields[key]}" for key, value in _EXCLUSIVE if fields.get(key) == value]
            if excludes:
                reasons.append(f"partition {name} has {excludes[0]}")
            else:
                sharing.add(name)
    because = "" if sharing else "; ".join(reasons) or f"{offer.description} is not shown by scontrol"
    return replace(offer, sharing=frozenset(sharing), exclusive_because=because)


async def list_partitions(commands: SlurmCommands) -> dict[str, Partition]:
    """Return all partitions by name. Raise ``SiteError``."""
    answer = await commands.run_checked("sinfo", "--all", "--noheader", "--noconvert", "--format=%P|%a|%s|%L|%l")
    return read_partitions(answer.text)


def read_partitions(text: str) -> dict[str, Partition]:
    """Read sinfo's lines of name, availability and job size."""
    partitions = {}
    for line in text.splitlines():
        name, *values = (cell.strip() for cell in line.split("|"))
        if name and values:
            state, size, *times = [*values, "", "", ""][:4]
            partition = Partition(
                name.rstrip("*"),
                _PARTITION_STATES.get(state, state.upper()),
                name.endswith("*"),
                read_count(size.rpartition("-")[2]),
                read_count(size.partition("-")[0]) or 1,
                next((seconds for text in times if (seconds := read_time(text)) is not None), None),
            )
            partitions[partition.name] = partition
    return partitions


def option_value(options: Sequence[str], name: str, short: str = "") -> str | None:
    """Return the value of an option of sbatch in any of its forms; the last one counts, as for sbatch."""
    value = None
    for index, option in enumerate(options):
        if option in (name, short):
            value = options[index + 1] if index + 1 < len(options) else None
        elif option.startswith(f"{name}="):
            value = option.partition("=")[2]
        elif short and option.startswith(short) and not option.startswith("--"):
            value = option.removeprefix(short)
    return value


def split_names(names: str) -> list[str]:
    """Return the names in a list with commas, each once."""
    return list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def may_match(features: Collection[str], constraint: str) -> bool:
    """Return whether a node with these features may be given to a job with this constraint.

    If the constraint counts nodes, as ``[a*1&b*2]``, a node needs only one of its features. For ``[a|b]``, by which all
    nodes have the same feature, any of them is enough.
    """
    tokens = _CONSTRAINT_TOKEN.findall(constraint.replace("[", "(").replace("]", ")"))
    counts_nodes = any(token.startswith("*") for token in tokens)
    tokens = [token for token in tokens if not token.startswith("*")]
    return not tokens or _match_alternatives(tokens, features, any if counts_nodes else all)


def _match_alternatives(tokens: list[str], features: Collection[str], join: Callable[[Iterable[bool]], bool]) -> bool:
    """Evaluate a constraint up to its end or closing parenthesis, and remove it from ``tokens``.

    ``&`` binds stronger than ``|``; ``join`` combines the parts between ``|``.
    """
    result, parts = False, list[bool]()
    while tokens and (token := tokens.pop(0)) != ")":
        if token == "(":
            parts.append(_match_alternatives(tokens, features, join))
        elif token == "|":
            result, parts = result or (bool(parts) and join(parts)), []
        elif token not in ("&", ","):
            parts.append(token in features)
    return result or (bool(parts) and join(parts))


async def check_version(commands: SlurmCommands) -> Finding:
    """Check that Slurm is new enough."""
    try:
        text = await commands.read_version()
    except SiteError as error:
        return Finding("Slurm", False, error.message, error.hint or "try sinfo --version by hand")
    release = re.search(r"(\d+)\.(\d+)", text)
    if release is None or (int(release[1]), int(release[2])) < _MIN_RELEASE:
        return Finding("Slurm", False, f"{text[:80]}: sinfo --json needs 21.08", "upgrade Slurm to 21.08 or later")
    return Finding("Slurm", True, text)


async def check_partition(commands: SlurmCommands, partition_names: str | None) -> AsyncIterator[Finding]:
    """Check that the controller answers and has the partitions, and that one of them is up."""
    try:
        partitions = await list_partitions(commands)
    except SiteError as error:
        hint = error.hint or "see that slurmctld runs and that slurm.conf names it"
        yield Finding("controller", False, error.message, hint)
        return
    yield Finding("controller", True, "answers")
    if partition_names:
        names = split_names(partition_names)
    else:
        names = [partition.name for partition in partitions.values() if partition.default]
    missing = [name for name in names if name not in partitions]
    hint = f"set the cluster's partition to one of: {', '.join(partitions) or 'none there'}"
    if not names:
        yield Finding("partition", False, "no partition is set, and Slurm has no default one", hint)
    elif missing:
        yield Finding("partition", False, f"there is no partition {', '.join(missing)}", hint)
    elif not any(partitions[name].is_up for name in names):
        hint = f"scontrol update PartitionName={names[0]} State=UP"
        yield Finding("partition", False, f"{', '.join(names)} is not up", hint)
    else:
        closed = [name for name in names if not partitions[name].is_up]
        suffix = f" ({', '.join(closed)} not up)" if closed else ""
        yield Finding("partition", True, f"{', '.join(names)}{suffix}")


def check_nodes(nodes: Sequence[SlurmNode], node_states: Sequence[NodeState]) -> Finding:
    """Count the nodes; fail only if all are down, since a few broken nodes are normal."""
    down = [node for node, state in zip(nodes, node_states, strict=True) if state == "down"]
    idle = node_states.count("idle")
    if not down:
        return Finding("nodes", bool(nodes), f"{len(nodes)}, {idle} idle", "" if nodes else "the partition has none")
    first = down[0]
    reason = first.reason or "no reason given"
    states = "+".join(sorted(first.words))
    result = f"{len(nodes)}, {idle} idle, {len(down)} down: {first.name} is {states} ({reason})"
    hint = f"scontrol show node {first.name}; then scontrol update NodeName={first.name} State=RESUME"
    return Finding("nodes", len(down) < len(nodes), result, hint)
