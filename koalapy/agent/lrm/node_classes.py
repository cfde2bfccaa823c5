"""Group a cluster's nodes that are alike into classes, and expand_host_list lists of their names. Pure.

Nodes of a configured class are of that one; the others are alike if their resource manager says that they have the same
features and about the same memory.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.model.reports import NodeClassReport
from koalapy.model.wording import format_bytes, parse_bytes

MAX_CLASSES = 64
"""Beyond so many that nobody has configured, nodes are not told apart."""


MAX_NAME_LENGTH = 100
"""Characters, of a class that nobody has named."""
_PART = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]+\])+")
_LIST = re.compile(rf"{_PART.pattern}(?:,{_PART.pattern})*")
_PIECE = re.compile(r"\[([^\[\]]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_MAX_NAMES = 100_000
"""Names beyond which the text is no list of a cluster's nodes."""


def expand_host_list(text: str) -> list[str]:
    """Return all names of a host list in Slurm's short form, ``n[1-3,07],m1``. Raise ``ValueError`` for other text."""
    if not text:
        return []
    if not _LIST.fullmatch(text):
        raise _no_host_list(text)
    names: list[str] = []
    for part in _PART.findall(text):
        names += _names_of_part(part)
        if len(names) > _MAX_NAMES:
            raise _no_host_list(text)
    return names


def _names_of_part(part: str) -> list[str]:
    names = [""]
    for numbers, plain in _PIECE.findall(part):
        endings = _numbers(numbers) if numbers else [plain]
        if len(names) * len(endings) > _MAX_NAMES:
            raise _no_host_list(part)
        names = [name + ending for name in names for ending in endings]
    return names


def _numbers(text: str) -> list[str]:
    """Return each number of ``1-3,07``; leading zeros give the width."""
    found: list[str] = []
    for each in text.split(","):
        matched = _RANGE.fullmatch(each)
        if matched is None:
            raise _no_host_list(text)
        first, last = matched.group(1), matched.group(2) or matched.group(1)
        if not 0 <= int(last) - int(first) < _MAX_NAMES:
            raise _no_host_list(text)
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _no_host_list(text: str) -> ValueError:
    return ValueError(f"{text[:80]!r} is no list of host names")


def _host_list(text: str) -> str:
    expand_host_list(text)
    return text


@dataclass(frozen=True, kw_only=True)
class NodeClassSettings:
    """Nodes of a cluster that are alike, under ``clusters.NAME.node_classes.CLASS``: which ones, and what they are."""

    nodes: Annotated[int, Field(ge=1)] | None = None
    """Of the kind ``local``: so many of its nodes, those that no class before this one has, by their numbers."""
    feature: Annotated[str, Field(pattern=r"^[^\s&|,()*\[\]]*$", max_length=1000)] = ""
    """Slurm: those with this feature."""
    hosts: Annotated[str, AfterValidator(_host_list)] = ""
    """Slurm, Grid Engine: these, as ``node[01-16],big1``."""
    power: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """What a node can do as against nodes of other clusters; by default the cluster's ``speed``."""
    memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, le=2**53)] | None = None
    """Bytes of a node, or with a unit (``64GB``); by default what the resource manager says."""

    def __post_init__(self) -> None:
        if [self.nodes is not None, self.feature != "", self.hosts != ""].count(True) != 1:
            raise ValueError("give nodes, feature or hosts: which nodes are of this class")


class KnownNode(NamedTuple):
    """A node, and what a resource manager says of it."""

    name: str
    memory: int | None = None
    features: frozenset[str] = frozenset()
    weight: int = 0
    """Those that weigh less are given away first."""


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The nodes of one class."""

    name: str
    nodes: frozenset[str]
    power: float | None = None
    memory: int | None = None
    feature: str = ""
    """Which they have, and no others, if it was by that that they were chosen."""


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """All nodes of a cluster by class, in the order in which they are given to who asks for none."""

    groups: tuple[NodeGroup, ...] = ()
    notices: tuple[str, ...] = ()
    """What is wrong with what is configured."""

    def report(self, idle: Callable[[frozenset[str]], int]) -> tuple[NodeClassReport, ...]:
        """What there is to tell of them; ``idle`` says how many of some nodes one job could have now."""
        return tuple(
            NodeClassReport(each.name, len(each.nodes), idle(each.nodes), each.power, each.memory)
            for each in self.groups
        )

    def select_class(self, name: str, size: int) -> NodeGroup:
        """The class of which a job asks for so many nodes; ``SiteRejected`` where there are not so many."""
        group = next((each for each in self.groups if each.name == name), None)
        if group is None or size > len(group.nodes):
            has = f"has {len(group.nodes)}" if group else "there is none"
            raise SiteRejected(
                f"{size} nodes of the class {name} asked for, and {has}",
                field="node_class",
                value=name,
                hint="it was another when the job was placed: it is placed again",
                fault=SiteFault.LIMIT,
            )
        return group


def group_nodes(nodes: Sequence[KnownNode], configured: Mapping[str, NodeClassSettings]) -> NodeGroups:
    """The nodes by class; no groups where nothing is known of them that would tell them from others."""
    groups, left, notices = list[tuple[int, NodeGroup]](), list(nodes), list[str]()
    for name, wanted in configured.items():
        chosen = _chosen(left, wanted)
        if chosen:
            names = _names(chosen)
            left = [node for node in left if node.name not in names]
            alone = names == {node.name for node in nodes if wanted.feature in node.features}
            memory = wanted.memory or _least(chosen)
            group = NodeGroup(name, names, wanted.power, memory, wanted.feature if alone else "")
            groups.append((_weight(chosen), group))
        if not chosen or (wanted.nodes is not None and len(chosen) < wanted.nodes):
            notices.append(f"of the class {name} it has {len(chosen)} nodes: see the cluster's node_classes")
    said = tuple(notices)
    alike: dict[tuple[frozenset[str], int | None], list[KnownNode]] = {}
    for node in left:
        about = None if node.memory is None else _about(node.memory)
        alike.setdefault((node.features, about), []).append(node)
    if len(alike) > MAX_CLASSES:
        alike = {(frozenset(), None): left}
    taken = {group.name for _, group in groups}
    for (features, _), found in sorted(alike.items(), key=lambda each: (sorted(each[0][0]), each[0][1] or 0)):
        if len(alike) == 1 and not groups:
            if (memory := _least(found)) is None:
                return NodeGroups(notices=said)
            return NodeGroups((NodeGroup("", _names(found), memory=memory),), said)
        name = _name(features, _least(found), taken)
        taken.add(name)
        groups.append((_weight(found), NodeGroup(name, _names(found), memory=_least(found))))
    return NodeGroups(tuple(group for _, group in sorted(groups, key=lambda each: each[0])), said)


def _chosen(nodes: Sequence[KnownNode], wanted: NodeClassSettings) -> list[KnownNode]:
    if wanted.nodes is not None:
        return list(nodes[: wanted.nodes])
    hosts = set(expand_host_list(wanted.hosts)) if wanted.hosts else set()
    return [n for n in nodes if n.name in hosts or n.name.partition(".")[0] in hosts or wanted.feature in n.features]


def _names(nodes: Iterable[KnownNode]) -> frozenset[str]:
    return frozenset(node.name for node in nodes)


def _least(nodes: Iterable[KnownNode]) -> int | None:
    return min((node.memory for node in nodes if node.memory is not None), default=None)


def _weight(nodes: Iterable[KnownNode]) -> int:
    return min(node.weight for node in nodes)


def _about(memory: int) -> int:
    """To an eighth: what firmware keeps for itself differs between nodes that are alike."""
    step = 1 << max(0, memory.bit_length() - 3)
    return memory // step * step


def _name(features: frozenset[str], memory: int | None, taken: set[str]) -> str:
    """What nodes are called that nobody has given a name, as ``haswell+ib-64GB``: the same in each life of an agent."""
    words = ["+".join(sorted(features)), "" if memory is None else format_bytes(memory).replace(" ", "")]
    name = "-".join(word for word in words if word)[:MAX_NAME_LENGTH] or "other"
    numbers = (f"{name}-{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(each for each in numbers if each not in taken)
