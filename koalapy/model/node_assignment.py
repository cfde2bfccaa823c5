"""Assign the idle nodes of a cluster, by class, to components that may get different nodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from koalapy.model.cluster import NodeClass
from koalapy.model.node_requirement import NodeFilter


def count_admitted(classes: Iterable[NodeClass], nodes: NodeFilter) -> int:
    """Return the number of nodes, idle or not, that a filter admits.

    Of several components, those with the fewest get their nodes first, and of these the largest.
    """
    return sum(max(node_class.total, node_class.idle) for node_class in classes if nodes.admits(node_class))


class NodeAssignment:
    """The idle nodes of a cluster that several components get, by class.

    Placement and claiming both decide with it whether the components fit. A component takes nodes of one class if that
    has enough, otherwise of the first classes. Components that had taken these nodes move to other classes.
    """

    def __init__(self, classes: Sequence[NodeClass]) -> None:
        self._classes = classes
        self._left = [node_class.idle for node_class in classes]
        self._components: dict[int, tuple[NodeFilter, list[int]]] = {}
        """The nodes that each component may get, and how many it gets of each class, by its key."""

    def add(self, key: int, nodes: NodeFilter, size: int) -> bool:
        """Assign nodes to a component. Return False, and assign none, if there are too few."""
        counts = [0] * len(self._classes)
        self._components[key] = nodes, counts
        lacking = size
        while lacking and (assigned := self._assign_some(nodes, lacking)):
            lacking -= assigned
        if lacking:
            del self._components[key]
            self._left = [remaining + count for remaining, count in zip(self._left, counts, strict=True)]
        return not lacking

    def _assign_some(self, nodes: NodeFilter, lacking: int) -> int:
        """Assign up to ``lacking`` nodes to the last component; return how many, 0 if none is left.

        Search the shortest chain of components that can each move to a class given up by the next.
        """
        admitted = [index for index in range(len(self._classes)) if self._admits(nodes, index)]
        admitted.sort(key=lambda index: self._left[index] < lacking)
        _, last = next(reversed(self._components.values()))
        reached: dict[int, tuple[list[int], int | None]] = dict.fromkeys(admitted, (last, None))
        for index in (waiting := list(admitted)):
            if self._left[index]:
                return self._move(index, reached, lacking)
            for movable, counts in self._components.values():
                if counts[index]:
                    reachable = [i for i in range(len(self._classes)) if i not in reached and self._admits(movable, i)]
                    reached |= dict.fromkeys(reachable, (counts, index))
                    waiting += reachable
        return 0

    def _admits(self, nodes: NodeFilter, index: int) -> bool:
        return nodes.admits(self._classes[index])

    def _move(self, index: int, reached: Mapping[int, tuple[list[int], int | None]], lacking: int) -> int:
        """Take nodes of a class that has some left, along the chain of components that ``reached`` it."""
        chain, end = list[tuple[list[int], int, int | None]](), index
        while True:
            counts, given_up = reached[end]
            chain.append((counts, end, given_up))
            if given_up is None:
                break
            end = given_up
        count = min(lacking, self._left[index], *(counts[old] for counts, _, old in chain if old is not None))
        self._left[index] -= count
        for counts, new, old in chain:
            counts[new] += count
            if old is not None:
                counts[old] -= count
        return count

    @property
    def remaining(self) -> tuple[NodeClass, ...]:
        """Return the classes with the nodes that no component has."""
        return tuple(
            node_class if idle == node_class.idle else replace(node_class, idle=idle)
            for node_class, idle in zip(self._classes, self._left, strict=True)
        )

    def exclusive_class(self, key: int) -> str:
        """Return the class that a component must request, so that it leaves the others their nodes.

        Return an empty text if it may take any of its nodes, or has nodes of several classes.
        """
        nodes, counts = self._components[key]
        names = {node_class.name for node_class, count in zip(self._classes, counts, strict=True) if count}
        filters = {node_filter for node_filter, _ in self._components.values()} - {nodes}
        admitted = [node_class for node_class in self._classes if nodes.admits(node_class)]
        is_contested = any(node_filter.admits(node_class) for node_class in admitted for node_filter in filters)
        return names.pop() if is_contested and len(names) == 1 else ""
