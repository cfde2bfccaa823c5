"""Group a cluster's nodes into classes of equal nodes. Pure.

Nodes of a configured class belong to it. The others are equal if their resource manager reports the same features,
cores, GPUs and partitions, and about the same memory.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from koalapy.agent.lrm.port import LrmJob, LrmSnapshot
from koalapy.model.errors import SiteFault, SiteRejected
from koalapy.model.node_requirement import (
    MAX_CORES,
    MAX_EXCLUDED_NODES,
    MAX_FEATURES,
    MAX_GPUS,
    WORD,
    Gpus,
    NodeRequirement,
    count_hosts,
    divide_memory,
    expand_host_list,
)
from koalapy.model.reports import MAX_LINES, ListedNode, ListedState, NodeClassReport, NodePartReport
from koalapy.model.wording import format_bytes, parse_memory

MAX_CLASSES = 64
"""Classes beyond which nodes outside of configured classes form only one."""
MAX_NAME_LENGTH = 100
NO_ALIASES: Mapping[str, str] = {}
NO_PARTS: Mapping[str, "NodePart"] = {}


def _validate_host_list(text: str) -> str:
    expand_host_list(text)
    return text


PropertyName = Annotated[str, Field(pattern=f"^(?:{WORD.pattern})$")]


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
    memory: Annotated[int, BeforeValidator(parse_memory), Field(gt=0, le=2**53)] | None = None
    """Memory of a node (``64GB``); by default as the resource manager reports."""
    cores: Annotated[int, Field(ge=1, le=MAX_CORES)] | None = None
    """Cores of a node; by default as the resource manager reports."""
    gpus: Annotated[dict[PropertyName, Annotated[int, Field(ge=1, le=MAX_GPUS)]], Field(max_length=MAX_FEATURES)] = (
        field(default_factory=dict)
    )
    """GPUs of a node by type (``{a100: 4}``), in addition to those that the resource manager reports."""
    features: Annotated[list[PropertyName], Field(max_length=MAX_FEATURES)] = field(default_factory=list)
    """Features of a node that jobs may require, in addition to those that the resource manager reports."""

    def __post_init__(self) -> None:
        if [self.nodes is not None, self.feature != "", self.hosts != ""].count(True) != 1:
            raise ValueError("give one of nodes, feature and hosts, to select the nodes of this class")

    def select_nodes(self, nodes: Sequence["KnownNode"]) -> list["KnownNode"]:
        """Return those of ``nodes`` that belong to this class."""
        if self.nodes is not None:
            return list(nodes[: self.nodes])
        hosts = set(expand_host_list(self.hosts))
        return [n for n in nodes if not hosts.isdisjoint((n.name, n.short_name)) or self.feature in n.features]

    def apply_to(self, group: "NodeGroup") -> "NodeGroup":
        """Return the class with the configured properties."""
        gpus = {entry.type: entry.count for entry in group.gpus} | self.gpus
        return replace(
            group,
            power=self.power,
            memory=self.memory or group.memory,
            cores=self.cores or group.cores,
            gpus=tuple(Gpus(count, gpu_type) for gpu_type, count in sorted(gpus.items())),
            features=tuple(sorted({*group.features, *self.features})),
        )


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node as its resource manager describes it."""

    name: str
    memory: int | None = None
    """Bytes; None: unknown."""
    features: frozenset[str] = frozenset()
    weight: int = 0
    """Nodes of lower weight are allocated first."""
    cores: int | None = None
    """None: unknown."""
    gpus: tuple[Gpus, ...] = ()
    partitions: frozenset[str] = frozenset()
    """The cluster's partitions or queues that have the node."""

    @property
    def short_name(self) -> str:
        return self.name.partition(".")[0]

    @property
    def order(self) -> tuple[object, ...]:
        """A sort key by properties, so that classes get the same names after each restart of the agent."""
        gpus = [(gpus.type, gpus.count) for gpus in self.gpus]
        return sorted(self.features), self.memory or 0, self.cores or 0, gpus, sorted(self.partitions)


@dataclass(frozen=True, slots=True)
class NodeGroup(NodeClassReport):
    """The nodes of one class, with the report of them without idle ones."""

    nodes: frozenset[str] = frozenset()
    feature: str = ""
    """The feature that exactly these nodes have, if the class is configured by it."""

    @property
    def is_part(self) -> bool:
        return False

    @property
    def memory_per_core(self) -> int | None:
        return divide_memory(self.memory, self.cores)

    def report_parts(self, used: Mapping[str, "NodePart"]) -> tuple[NodePartReport, ...]:
        """Group the partly used nodes by the free part of each. ``used``: by node; others are not partly used.

        Of more parts than a report may have, return the largest.
        """
        if self.cores is None:
            return ()
        counts = Counter(
            NodePart(
                self.cores - part.cores,
                None if self.memory is None else max(0, self.memory - (part.memory or 0)),
                subtract_gpus(self.gpus, part.gpus),
            )
            for name, part in used.items()
            if name in self.nodes
        )
        parts = sorted((part for part in counts if part.cores > 0 and part.memory != 0), key=repr)
        if len(parts) > MAX_LINES:
            parts = sorted(parts, key=lambda part: (part.cores, part.memory or 0), reverse=True)[:MAX_LINES]
        return tuple(NodePartReport(counts[part], part.cores, part.memory, part.gpus) for part in parts)


class NodePart(NamedTuple):
    """A part of a node: what the jobs on it use, or leave."""

    cores: int
    memory: int | None = None
    """Bytes; None: not limited."""
    gpus: tuple[Gpus, ...] = ()


def subtract_gpus(gpus: Iterable[Gpus], used: Iterable[Gpus]) -> tuple[Gpus, ...]:
    """Return the remaining GPUs by type. Used ones of unknown type may be of each type."""
    counts = {entry.type: entry.count for entry in used}
    remaining = {e.type: e.count - counts.get(e.type, 0) - (counts.get("", 0) if e.type else 0) for e in gpus}
    return tuple(Gpus(count, gpu_type) for gpu_type, count in remaining.items() if count > 0)


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """All nodes of a cluster by class, in the order of allocation to jobs that request no class."""

    groups: tuple[NodeGroup, ...] = ()
    notices: tuple[str, ...] = ()
    """Problems of the configured classes."""

    def report(
        self, count_idle: Callable[[frozenset[str]], int], used: Mapping[str, NodePart] = NO_PARTS
    ) -> tuple[NodeClassReport, ...]:
        """Return a report for each class; ``count_idle`` returns how many of these nodes one job could have now.

        ``used``: the used part of each node that further jobs may share.
        """
        names = [field.name for field in fields(NodeClassReport)]
        return tuple(
            replace(
                NodeClassReport(**{name: getattr(group, name) for name in names}),
                idle=count_idle(group.nodes),
                parts=group.report_parts(used) if used else (),
            )
            for group in self.groups
        )

    def list_nodes(self, states: Mapping[str, ListedState], reasons: Mapping[str, str]) -> tuple[ListedNode, ...]:
        """Return the nodes one by one, with their classes and the reasons of those that have one."""
        classes = {node: group.name for group in self.groups for node in group.nodes}
        return tuple(
            ListedNode(name, state, classes.get(name, ""), reasons.get(name, "")) for name, state in states.items()
        )

    def make_snapshot(
        self,
        states: Mapping[str, ListedState],
        reasons: Mapping[str, str],
        jobs: tuple[LrmJob, ...],
        used: Mapping[str, NodePart] = NO_PARTS,
    ) -> LrmSnapshot:
        """Return a snapshot of a cluster that gives all idle nodes to one job; see ``report`` and ``list_nodes``."""
        counts = Counter(states.values())
        return LrmSnapshot(
            len(states),
            counts["idle"],
            counts["local"],
            counts["down"],
            jobs,
            notices=self.notices,
            node_classes=self.report(lambda names: sum(states.get(name) == "idle" for name in names), used),
            nodes=self.list_nodes(states, reasons),
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

    def admitted_nodes(
        self,
        node_class: str,
        requirement: NodeRequirement,
        size: int,
        nodes: Iterable[str],
        aliases: Mapping[str, str] = NO_ALIASES,
    ) -> frozenset[str] | None:
        """Return which of a cluster's ``nodes`` a job of ``size`` nodes may get; None if it may get all.

        They are of its class, meet its requirement and are not excluded by their names or ``aliases``. Raise
        ``SiteRejected`` if they are too few.
        """
        if not node_class and requirement.matching_part is None:
            return None
        admitted = self.select_class(node_class, size).nodes if node_class else frozenset(nodes)
        if (of_nodes := requirement.of_nodes) is not None:
            groups = self.groups or (NodeGroup("", len(admitted), 0, nodes=admitted),)
            matching = [group.nodes for group in groups if of_nodes.is_met_by(group)]
            admitted &= frozenset().union(*matching)
        try:
            if sum(map(count_hosts, requirement.exclude)) > MAX_EXCLUDED_NODES:
                raise ValueError(f"it stands for more than {MAX_EXCLUDED_NODES} nodes")
            excluded = {host for text in requirement.exclude for host in expand_host_list(text)}
        except ValueError as error:
            raise SiteRejected(f"exclude cannot be understood: {error}", field="exclude", fault=SiteFault.JOB) from None
        admitted = frozenset(
            name for name in admitted if excluded.isdisjoint((name, aliases.get(name, name.partition(".")[0])))
        )
        if len(admitted) < size:
            suffix = f" with {requirement}" if of_nodes is not None else " that are not excluded"
            raise SiteRejected(
                f"{size} nodes{suffix} requested, but it has {len(admitted)}",
                field="nodes",
                value=size,
                hint="the nodes have changed since the job was placed, or it excludes too many; it is placed again",
                fault=SiteFault.LIMIT,
            )
        return admitted


NO_GROUPS = NodeGroups()


def group_nodes(nodes: Sequence[KnownNode], configured: Mapping[str, NodeClassSettings]) -> NodeGroups:
    """Return the nodes by class; no groups if all nodes are equal and nothing is known of them."""
    groups, remaining, notices = list[tuple[int, NodeGroup]](), list(nodes), list[str]()
    for name, settings in configured.items():
        members = settings.select_nodes(remaining)
        if members:
            names = {node.name for node in members}
            remaining = [node for node in remaining if node.name not in names]
            is_exact = names == {node.name for node in nodes if settings.feature in node.features}
            group = settings.apply_to(_make_group(name, members, settings.feature if is_exact else ""))
            groups.append((min(node.weight for node in members), group))
        if not members or (settings.nodes is not None and len(members) < settings.nodes):
            notices.append(f"of the class {name} it has {len(members)} nodes: see the cluster's node_classes")
    by_properties: dict[KnownNode, list[KnownNode]] = {}
    for node in remaining:
        rounded = None
        if node.memory is not None:
            # Round down to an eighth: firmware reserves different amounts on equal nodes.
            step = 1 << max(0, node.memory.bit_length() - 3)
            rounded = node.memory // step * step
        key = KnownNode("", rounded, node.features, 0, node.cores, node.gpus, node.partitions)
        by_properties.setdefault(key, []).append(node)
    if len(by_properties) > MAX_CLASSES:
        by_properties = {KnownNode(""): remaining}
    used_names = {group.name for _, group in groups}
    for key, members in sorted(by_properties.items(), key=lambda item: item[0].order):
        if len(by_properties) == 1 and not groups:
            group = _make_group("", members)
            is_known = group != NodeGroup("", group.total, 0, nodes=group.nodes)
            return NodeGroups((group,) if is_known else (), tuple(notices))
        group = _make_group("", members)
        name = _make_name(key.features, group, used_names)
        used_names.add(name)
        groups.append((min(node.weight for node in members), replace(group, name=name)))
    return NodeGroups(tuple(group for _, group in sorted(groups, key=lambda item: item[0])), tuple(notices))


def _make_group(name: str, members: Sequence[KnownNode], feature: str = "") -> NodeGroup:
    """Return a class with the properties that all members have."""
    return NodeGroup(
        name,
        len(members),
        0,
        nodes=frozenset(node.name for node in members),
        memory=min((node.memory for node in members if node.memory is not None), default=None),
        feature=feature,
        cores=min((node.cores for node in members if node.cores is not None), default=None),
        gpus=_shared_gpus([node.gpus for node in members]),
        features=_shared_words([node.features for node in members]),
        partitions=_shared_words([node.partitions for node in members]),
    )


def _shared_words(word_sets: Sequence[frozenset[str]]) -> tuple[str, ...]:
    """Return the names that all sets contain, without those that jobs cannot request."""
    shared = frozenset.intersection(*word_sets)
    return tuple(sorted(word for word in shared if WORD.fullmatch(word)))[:MAX_FEATURES]


def _shared_gpus(gpus: Sequence[tuple[Gpus, ...]]) -> tuple[Gpus, ...]:
    """Return the GPUs that each node has at least, by type."""
    counts = [{entry.type: entry.count for entry in entries} for entries in gpus]
    types = set(counts[0]).intersection(*counts[1:])
    shared = [Gpus(min(count[gpu_type] for count in counts), gpu_type) for gpu_type in sorted(types)]
    return tuple(entry for entry in shared if entry.count > 0)[:MAX_FEATURES]


def _make_name(features: frozenset[str], group: NodeGroup, used_names: set[str]) -> str:
    """Return an unused name, as ``haswell+ib-2xa100-64GB``; the same after each restart of the agent."""
    memory = "" if group.memory is None else format_bytes(group.memory).replace(" ", "")
    gpus = "+".join(f"{entry.count}x{entry.type or 'gpu'}" for entry in group.gpus)
    name = "-".join(filter(None, ("+".join(sorted(features)), gpus, memory)))[:MAX_NAME_LENGTH] or "other"
    numbered = (f"{name}-{number}" for number in range(2, len(used_names) + 3))
    return name if name not in used_names else next(candidate for candidate in numbered if candidate not in used_names)
