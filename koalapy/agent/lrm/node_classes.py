"""Group a cluster's nodes into classes of equal nodes, and expand host lists. Pure.

Nodes of a configured class belong to it. The others are equal if their resource manager reports the same features and
about the same memory.
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
"""Classes beyond which nodes outside of configured classes form only one."""
MAX_NAME_LENGTH = 100
_PART = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]+\])+")
_LIST = re.compile(rf"{_PART.pattern}(?:,{_PART.pattern})*")
_PIECE = re.compile(r"\[([^\[\]]+)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_MAX_HOSTS = 100_000


def expand_host_list(text: str) -> list[str]:
    """Return all names of a host list in Slurm's short form, ``n[1-3,07],m1``. Raise ``ValueError`` for other text."""
    if not text:
        return []
    if not _LIST.fullmatch(text):
        raise _no_host_list(text)
    hosts: list[str] = []
    for part in _PART.findall(text):
        names = [""]
        for numbers, plain in _PIECE.findall(part):
            endings = _expand_numbers(numbers) if numbers else [plain]
            if len(names) * len(endings) > _MAX_HOSTS:
                raise _no_host_list(part)
            names = [name + ending for name in names for ending in endings]
        hosts += names
        if len(hosts) > _MAX_HOSTS:
            raise _no_host_list(text)
    return hosts


def _expand_numbers(text: str) -> list[str]:
    """Return each number of ``1-3,07``; leading zeros set the width."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _no_host_list(text)
        first, last = match.group(1), match.group(2) or match.group(1)
        if not 0 <= int(last) - int(first) < _MAX_HOSTS:
            raise _no_host_list(text)
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _no_host_list(text: str) -> ValueError:
    return ValueError(f"{text[:80]!r} is not a list of host names")


def _validate_host_list(text: str) -> str:
    expand_host_list(text)
    return text


@dataclass(frozen=True, kw_only=True)
class NodeClassSettings:
    """A class of equal nodes, under ``clusters.NAME.node_classes.CLASS``: which nodes, and their properties."""

    nodes: Annotated[int, Field(ge=1)] | None = None
    """Kind ``local``: so many nodes, in order of their numbers, after those of earlier classes."""
    feature: Annotated[str, Field(pattern=r"^[^\s&|,()*\[\]]*$", max_length=1000)] = ""
    """Slurm: the nodes with this feature."""
    hosts: Annotated[str, AfterValidator(_validate_host_list)] = ""
    """Slurm, Grid Engine: these nodes, as ``node[01-16],big1``."""
    power: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Speed of a node relative to nodes of other clusters; by default the cluster's ``speed``."""
    memory: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0, le=2**53)] | None = None
    """Bytes of a node, or with a unit (``64GB``); by default as the resource manager reports."""

    def __post_init__(self) -> None:
        if [self.nodes is not None, self.feature != "", self.hosts != ""].count(True) != 1:
            raise ValueError("give one of nodes, feature and hosts, to select the nodes of this class")

    def select_nodes(self, nodes: Sequence["KnownNode"]) -> list["KnownNode"]:
        """Return those of ``nodes`` that belong to this class."""
        if self.nodes is not None:
            return list(nodes[: self.nodes])
        hosts = set(expand_host_list(self.hosts))
        return [n for n in nodes if not hosts.isdisjoint((n.name, n.short_name)) or self.feature in n.features]


class KnownNode(NamedTuple):
    """A node as its resource manager describes it."""

    name: str
    memory: int | None = None
    """Bytes."""
    features: frozenset[str] = frozenset()
    weight: int = 0
    """Nodes of lower weight are allocated first."""

    @property
    def short_name(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The nodes of one class."""

    name: str
    nodes: frozenset[str]
    power: float | None = None
    memory: int | None = None
    feature: str = ""
    """The feature that exactly these nodes have, if the class is configured by it."""


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """All nodes of a cluster by class, in the order of allocation to jobs that request no class."""

    groups: tuple[NodeGroup, ...] = ()
    notices: tuple[str, ...] = ()
    """Problems of the configured classes."""

    def report(self, count_idle: Callable[[frozenset[str]], int]) -> tuple[NodeClassReport, ...]:
        """Return a report for each class; ``count_idle`` returns how many of these nodes one job could have now."""
        return tuple(
            NodeClassReport(group.name, len(group.nodes), count_idle(group.nodes), group.power, group.memory)
            for group in self.groups
        )

    def select_class(self, name: str, size: int) -> NodeGroup:
        """Return the class of this name. Raise ``SiteRejected`` if it has fewer than ``size`` nodes."""
        group = next((group for group in self.groups if group.name == name), None)
        if group is None or size > len(group.nodes):
            problem = f"it has {len(group.nodes)}" if group else "there is no such class"
            raise SiteRejected(
                f"{size} nodes of the class {name} requested, but {problem}",
                field="node_class",
                value=name,
                hint="the classes have changed since the job was placed; it is placed again",
                fault=SiteFault.LIMIT,
            )
        return group


def group_nodes(nodes: Sequence[KnownNode], configured: Mapping[str, NodeClassSettings]) -> NodeGroups:
    """Return the nodes by class; no groups if all nodes are equal and nothing is known of them."""
    groups, remaining, notices = list[tuple[int, NodeGroup]](), list(nodes), list[str]()
    for name, settings in configured.items():
        members = settings.select_nodes(remaining)
        if members:
            names = _names(members)
            remaining = [node for node in remaining if node.name not in names]
            is_exact = names == {node.name for node in nodes if settings.feature in node.features}
            memory = settings.memory or _min_memory(members)
            group = NodeGroup(name, names, settings.power, memory, settings.feature if is_exact else "")
            groups.append((_min_weight(members), group))
        if not members or (settings.nodes is not None and len(members) < settings.nodes):
            notices.append(f"of the class {name} it has {len(members)} nodes: see the cluster's node_classes")
    by_properties: dict[tuple[frozenset[str], int | None], list[KnownNode]] = {}
    for node in remaining:
        rounded = None
        if node.memory is not None:
            # Round down to an eighth: firmware reserves different amounts on equal nodes.
            step = 1 << max(0, node.memory.bit_length() - 3)
            rounded = node.memory // step * step
        by_properties.setdefault((node.features, rounded), []).append(node)
    if len(by_properties) > MAX_CLASSES:
        by_properties = {(frozenset(), None): remaining}
    used_names = {group.name for _, group in groups}
    for (features, _), members in sorted(by_properties.items(), key=lambda item: (sorted(item[0][0]), item[0][1] or 0)):
        memory = _min_memory(members)
        if len(by_properties) == 1 and not groups:
            unnamed = () if memory is None else (NodeGroup("", _names(members), memory=memory),)
            return NodeGroups(unnamed, tuple(notices))
        name = _make_name(features, memory, used_names)
        used_names.add(name)
        groups.append((_min_weight(members), NodeGroup(name, _names(members), memory=memory)))
    return NodeGroups(tuple(group for _, group in sorted(groups, key=lambda item: item[0])), tuple(notices))


def _names(nodes: Iterable[KnownNode]) -> frozenset[str]:
    return frozenset(node.name for node in nodes)


def _min_memory(nodes: Iterable[KnownNode]) -> int | None:
    return min((node.memory for node in nodes if node.memory is not None), default=None)


def _min_weight(nodes: Iterable[KnownNode]) -> int:
    return min(node.weight for node in nodes)


def _make_name(features: frozenset[str], memory: int | None, used_names: set[str]) -> str:
    """Return an unused name, as ``haswell+ib-64GB``; the same after each restart of the agent."""
    parts = ["+".join(sorted(features)), "" if memory is None else format_bytes(memory).replace(" ", "")]
    name = "-".join(part for part in parts if part)[:MAX_NAME_LENGTH] or "other"
    numbered = (f"{name}-{number}" for number in range(2, len(used_names) + 3))
    return name if name not in used_names else next(candidate for candidate in numbered if candidate not in used_names)
