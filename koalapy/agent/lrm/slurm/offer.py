"""What Slurm offers to jobs with our options (partitions, their limits, a reservation's nodes), and the check of it."""

import re
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from koalapy.agent.lrm.node_classes import expand_host_list
from koalapy.agent.lrm.port import Finding
from koalapy.agent.lrm.slurm.answers import SlurmNode, read_count
from koalapy.agent.lrm.slurm.commands import SlurmCommands
from koalapy.agent.lrm.slurm.states import NodeState
from koalapy.model.errors import SiteError, SiteFault, SiteRejected
from koalapy.model.wording import format_list

_AVAILABLE = {"up": "UP", "down": "DOWN", "drain": "DRAIN", "inact": "INACTIVE"}
"""What sinfo says of a partition, as ``scontrol`` and ``slurm.conf`` call it."""
_MIN_RELEASE = (21, 8)
"""The first release with ``sinfo --json``."""
_WORD = re.compile(r"[^\s&|,()*]+|[&|,()]|\*\d*")
"""Of sbatch's ``--constraint``."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A job may have from ``min_nodes`` to ``max_nodes`` nodes there, the latter None without limit."""

    name: str
    state: str = "UP"
    default: bool = False
    max_nodes: int | None = None
    min_nodes: int = 1

    @property
    def up(self) -> bool:
        return self.state == "UP"


@dataclass(frozen=True, slots=True)
class Reservation:
    """``begins`` in Slurm's own words; ``flexible``: its jobs may have other nodes as well."""

    name: str
    active: bool
    nodes: frozenset[str]
    begins: str = ""
    flexible: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """Our jobs go to any one of ``partitions``; to ``reservations`` if there are any configured; and only to nodes that
    have the features of ``constraint`` and are not ``excluded``."""

    partitions: tuple[Partition, ...]
    reservations: tuple[Reservation, ...] = ()
    constraint: str = ""
    excluded: frozenset[str] = frozenset()
    error: str = ""
    """Why no job of ours would start whatever is idle; empty when one would."""

    @property
    def where(self) -> str:
        names = ",".join(each.name for each in self.partitions)
        what = f"partition {names}" if len(self.partitions) == 1 else f"partitions {names}"
        within = ",".join(each.name for each in self.reservations)
        what = f"{what} with {self.constraint}" if self.constraint else what
        return f"reservation {within} in {what}" if within else what

    def reserves(self, node: str) -> bool:
        """Whether it is kept for us."""
        return any(each.active and node in each.nodes for each in self.reservations)

    def ours(self, found: Sequence[SlurmNode]) -> list[SlurmNode]:
        """Those that a job of ours may ever get."""
        found = [node for node in found if node.features is None or may_have(node.features, self.constraint)]
        found = [node for node in found if node.name not in self.excluded]
        if not self.reservations or any(each.flexible for each in self.reservations):
            return found
        inside: frozenset[str] = frozenset().union(*(each.nodes for each in self.reservations))
        return [node for node in found if node.name in inside]

    def largest(self, found: Collection[SlurmNode]) -> int:
        """Nodes that one job could have of these: it runs in one partition, within its limits."""
        largest = 0
        for each in self._up:
            count = sum(each.name in node.partitions for node in found)
            if each.max_nodes is not None:
                count = min(count, each.max_nodes)
            if count >= each.min_nodes:
                largest = max(largest, count)
        return largest

    @property
    def smallest(self) -> int:
        """Nodes that a job has to ask for at least, in one partition or another."""
        return min((each.min_nodes for each in self._up), default=1)

    def next_size(self, nodes: int) -> int:
        """Return the number of nodes that a job may ask for by the limits of a partition: this one, or the next larger.

        Where no partition takes more, it is the number itself.
        """
        if any(each.min_nodes <= nodes and nodes <= (each.max_nodes or nodes) for each in self._up):
            return nodes
        return min((each.min_nodes for each in self._up if each.min_nodes > nodes), default=nodes)

    @property
    def _up(self) -> list[Partition]:
        return [each for each in self.partitions if each.up]


async def read_offer(commands: SlurmCommands, wanted: str | None, options: Sequence[str]) -> Offer:
    """What there is now; ``wanted`` are partitions with commas between, or else the default one. ``SiteError``."""
    known = await partitions(commands)
    names = split(wanted) if wanted else [each.name for each in known.values() if each.default]
    if not names:
        raise SiteRejected("Slurm has no default partition", hint="set the cluster's partition", fault=SiteFault.SITE)
    # One that is not listed may be hidden from us all the same.
    found = tuple(known.get(name, Partition(name)) for name in names)
    reserved = option(options, "--reservation")
    reservations, missing = await _reservations(commands, split(reserved)) if reserved else ((), "")
    excluded, wrong = _excluded(option(options, "--exclude", "-x") or "")
    constraint = option(options, "--constraint", "-C") or ""
    return Offer(found, reservations, constraint, excluded, missing or wrong or _error(found, reservations))


async def partitions(commands: SlurmCommands) -> dict[str, Partition]:
    """By name. ``SiteError``."""
    answer = await commands.run_checked("sinfo", "--all", "--noheader", "--noconvert", "--format=%P|%a|%s")
    return read_partitions(answer.text)


def read_partitions(text: str) -> dict[str, Partition]:
    """From sinfo's lines of name, availability and job size."""
    found = {}
    for line in text.splitlines():
        name, state, size, *_ = [*(word.strip() for word in line.split("|")), "", ""]
        if name:
            known = Partition(
                name.rstrip("*"),
                _AVAILABLE.get(state, state.upper()),
                name.endswith("*"),
                read_count(size.rpartition("-")[2]),
                read_count(size.partition("-")[0]) or 1,
            )
            found[known.name] = known
    return found


def read_reservations(text: str, wanted: Collection[str]) -> dict[str, Reservation]:
    """Read those of some names from the lines of ``scontrol show reservation --oneliner``."""
    found = {}
    for line in text.splitlines():
        fields = dict(re.findall(r"(\w+)=(\S*)", line))
        if (name := fields.get("ReservationName", "")) in wanted:
            hosts = fields.get("Nodes", "(null)")
            found[name] = Reservation(
                name,
                fields.get("State") == "ACTIVE",
                frozenset(() if hosts == "(null)" else expand_host_list(hosts)),
                fields.get("StartTime", ""),
                "FLEX" in fields.get("Flags", "").split(","),
            )
    return found


def option(options: Sequence[str], name: str, short: str = "") -> str | None:
    """The value of one of sbatch's options, written any way; the last one counts, as it does for sbatch."""
    value = None
    for index, word in enumerate(options):
        if word in (name, short):
            value = options[index + 1] if index + 1 < len(options) else None
        elif word.startswith(f"{name}="):
            value = word.partition("=")[2]
        elif short and word.startswith(short) and not word.startswith("--"):
            value = word.removeprefix(short)
    return value


def split(names: str) -> list[str]:
    """Names with commas between them, each once."""
    return list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))


def _excluded(hosts: str) -> tuple[frozenset[str], str]:
    """The nodes of ``--exclude``, and what is wrong with it."""
    try:
        return frozenset(expand_host_list(hosts)) if hosts else frozenset(), ""
    except ValueError as error:
        return frozenset(), f"--exclude cannot be understood: {error}"


async def _reservations(commands: SlurmCommands, names: Sequence[str]) -> tuple[tuple[Reservation, ...], str]:
    """Those of these names, and what is wrong with the others."""
    answer = await commands.run_checked("scontrol", "show", "reservation", "--oneliner")
    try:
        known = read_reservations(answer.text, names)
    except ValueError as error:
        return (), f"scontrol answered what cannot be understood: {error}"
    missing = [name for name in names if name not in known]
    wrong = f"there is no reservation {format_list(missing)}" if missing else ""
    return tuple(known[name] for name in names if name in known), wrong


def _error(found: Sequence[Partition], reservations: Sequence[Reservation]) -> str:
    if not any(each.up for each in found):
        return "; ".join(f"partition {each.name} is {each.state}" for each in found)
    if reservations and not any(each.active for each in reservations):
        return "; ".join(f"reservation {each.name} begins at {each.begins}" for each in reservations)
    return ""


def may_have(features: Collection[str], constraint: str) -> bool:
    """Whether a node with these features may be given to a job with that constraint.

    Where the constraint counts nodes, as in ``[a*1&b*2]``, a node need only be one of those that it speaks of; and of
    ``[a|b]``, by which all nodes are of one kind, either will do.
    """
    words = _WORD.findall(constraint.replace("[", "(").replace("]", ")"))
    counts = any(word.startswith("*") for word in words)
    found = _either([word for word in words if not word.startswith("*")], features, any if counts else all)
    return found or not words


def _either(words: list[str], features: Collection[str], join: Callable[[Iterable[bool]], bool]) -> bool:
    """Takes a constraint up to its end, or that of its parenthesis, from the words: ``&`` binds stronger than ``|``."""
    found, parts = False, list[bool]()
    while words and (word := words.pop(0)) != ")":
        if word == "(":
            parts.append(_either(words, features, join))
        elif word == "|":
            found, parts = found or (bool(parts) and join(parts)), []
        elif word not in ("&", ","):
            parts.append(word in features)
    return found or (bool(parts) and join(parts))


async def check_version(commands: SlurmCommands) -> Finding:
    """Whether Slurm is new enough."""
    try:
        told = await commands.read_version()
    except SiteError as error:
        return Finding("Slurm", False, error.message, error.hint or "try sinfo --version by hand")
    found = re.search(r"(\d+)\.(\d+)", told)
    if found is None or (int(found[1]), int(found[2])) < _MIN_RELEASE:
        return Finding("Slurm", False, f"{told[:80]}: sinfo --json needs 21.08", "upgrade Slurm to 21.08 or later")
    return Finding("Slurm", True, told)


async def check_partition(commands: SlurmCommands, wanted: str | None) -> AsyncIterator[Finding]:
    """Whether the controller answers, and whether it has the partition, or one of several that is up."""
    try:
        found = await partitions(commands)
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
