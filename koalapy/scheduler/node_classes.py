"""The node classes of one cluster, and the nodes of each class that are promised to components."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from koalapy.model.cluster import NodeClass, NodeClassPart, count_idle, resize_classes, take_nodes
from koalapy.model.job import Token
from koalapy.model.node_assignment import count_admitted
from koalapy.model.node_requirement import ANY_NODE, NodeFilter
from koalapy.model.reports import NodeClassReport

UNKNOWN_NODES = (NodeClass("", 0),)


@dataclass(slots=True, eq=False)
class NodeClasses:
    """The node classes of a cluster as reported by its agent; empty if all nodes are equal."""

    reported: tuple[NodeClass, ...] = ()
    """The classes with the nodes that the agent reports as idle."""
    _parts: tuple[NodeClass, ...] = ()
    """The reported nodes of which other jobs use a part."""
    _filters: dict[Token, NodeFilter] = field(default_factory=dict)
    """The nodes that each component may get, if these are not all."""
    kept: NodeFilter = ANY_NODE
    """The nodes that the job with reserved nodes may get."""

    def report(self, classes: tuple[NodeClassReport, ...], speed: float) -> None:
        """Store the reported classes; ``speed`` is the power of classes without a reported power."""
        unique = {
            node_class.name: node_class for node_class in classes
        }.values()  # an agent may report a name twice: keep the last report
        self.reported = tuple(
            NodeClass(
                node_class.name,
                min(node_class.idle, node_class.total),
                node_class.power or speed,
                node_class.memory,
                node_class.total,
                node_class.cores,
                node_class.gpus,
                node_class.features,
                node_class.partitions,
            )
            for node_class in unique
        )
        parts: list[NodeClass] = []
        for node_class, report in zip(unique, self.reported, strict=True):
            remaining = report.total - report.idle
            for part in node_class.parts:
                nodes = min(part.nodes, remaining)
                remaining -= nodes
                properties = part.memory, 0, part.cores, part.gpus, report.features, report.partitions
                parts.append(NodeClassPart(report.name, nodes, report.power, *properties, report.memory_per_core))
        self._parts = tuple(parts)

    def parts(self, awaiting: Mapping[Token, int]) -> tuple[NodeClass, ...]:
        """Return the partly used nodes that remain if components in ``awaiting`` get their nodes.

        Such a component may get any node that it accepts, so its size is subtracted from all classes that it accepts.
        """
        parts = self._parts
        if parts:
            for token, nodes in self._filters.items():
                if nodes.shares and (size := awaiting.get(token, 0)):
                    parts = tuple(
                        replace(part, idle=max(0, part.idle - size)) if nodes.admits(part) else part for part in parts
                    )
        return parts

    def promise(self, token: Token, nodes: NodeFilter) -> None:
        """Record which nodes a component may get."""
        if nodes is not ANY_NODE and not nodes.admits_all:
            self._filters[token] = nodes

    def release(self, token: Token) -> None:
        """Remove a component that has ended."""
        self._filters.pop(token, None)

    def filter_of(self, token: Token) -> NodeFilter:
        """Return which nodes a component may get."""
        return self._filters.get(token, ANY_NODE)

    def reported_idle(self, nodes: NodeFilter) -> int:
        return count_idle(self.reported, nodes)

    def admits_all(self, nodes: NodeFilter) -> bool:
        """Return whether a filter admits the nodes of all classes, or unknown nodes if there are no classes."""
        return nodes.admits_all or all(map(nodes.admits, self.reported or UNKNOWN_NODES))

    def idle(
        self,
        idle: int,
        awaiting: Mapping[Token, int],
        doubted: tuple[NodeFilter, int] | None = None,
        available: int | None = None,
    ) -> tuple[NodeClass, ...]:
        """Return the classes of ``idle`` nodes, less those promised or ``doubted``.

        A component gets the nodes that resource managers allocate first of those that it may get; those with the
        smallest choice come first. Of ``available`` nodes, those that are not idle are kept for the job with reserved
        nodes.
        """
        if not self.reported:
            return ()
        promised = dict[NodeFilter, int]((doubted,) if doubted else ())
        for token, nodes in self._filters.items():
            if size := awaiting.get(token, 0):
                promised[nodes] = promised.get(nodes, 0) + size
        remaining = self.reported
        for nodes in sorted(promised, key=partial(count_admitted, self.reported)) if len(promised) > 1 else promised:
            if not nodes.admits_all:
                remaining = take_nodes(remaining, nodes, promised[nodes])
        if available is not None and available > idle and not self.kept.admits_all:
            remaining = take_nodes(resize_classes(remaining, available), self.kept, available - idle)
        return resize_classes(remaining, idle)


def has_more_nodes(now: tuple[NodeClass, ...], previous: tuple[NodeClass, ...]) -> bool:
    """Return whether some class has more nodes than before, or is new."""
    previous_idle = {replace(node_class, idle=0, total=0): node_class.idle for node_class in previous}
    return any(node_class.idle > previous_idle.get(replace(node_class, idle=0, total=0), 0) for node_class in now)
