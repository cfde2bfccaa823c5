"""The assignment of a cluster's idle nodes to components, compared with Hall's theorem."""

from itertools import combinations
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import NodeClass
from koalapy.model.node_assignment import NodeAssignment
from koalapy.model.node_requirement import NodeFilter, NodeRequirement

FEATURES = ("a", "b", "c")
CLASSES = st.lists(st.tuples(st.integers(0, 4), st.sets(st.sampled_from(FEATURES))), min_size=1, max_size=4)
COMPONENTS = st.lists(st.tuples(st.integers(1, 4), st.sets(st.sampled_from(FEATURES))), min_size=1, max_size=5)


def make_classes(counts: Any) -> list[NodeClass]:
    return [
        NodeClass(f"k{index}", idle, total=idle, features=tuple(sorted(features)))
        for index, (idle, features) in enumerate(counts)
    ]


def make_filter(features: Any) -> NodeFilter:
    return NodeFilter(requirement=NodeRequirement(features=tuple(sorted(features))) if features else None)


def fits_by_hall(classes: list[NodeClass], components: list[tuple[int, NodeFilter]]) -> bool:
    """Return whether each set of components has enough nodes that one of them may get."""
    return all(
        sum(size for size, _ in chosen)
        <= sum(each.idle for each in classes if any(nodes.admits(each) for _, nodes in chosen))
        for count in range(1, len(components) + 1)
        for chosen in combinations(components, count)
    )


@given(counts=CLASSES, requested=COMPONENTS)
def test_assignment_adds_component_exactly_if_all_fit(counts: Any, requested: Any) -> None:
    classes = make_classes(counts)
    assignment, added = NodeAssignment(classes), list[tuple[int, NodeFilter]]()
    for key, (size, features) in enumerate(requested):
        nodes, before = make_filter(features), assignment.remaining
        fits = fits_by_hall(classes, [*added, (size, nodes)])
        assert assignment.add(key, nodes, size) is fits
        if fits:
            added.append((size, nodes))
        else:
            assert sum(each.idle for each in assignment.remaining) == sum(each.idle for each in before)
    remaining = assignment.remaining
    assert all(0 <= left.idle <= each.idle for left, each in zip(remaining, classes, strict=True))
    used = sum(each.idle for each in classes) - sum(left.idle for left in remaining)
    assert used == sum(size for size, _ in added)


def test_assignment_moves_component_to_another_class() -> None:
    assignment = NodeAssignment(make_classes([(1, "ab"), (1, "b")]))
    assert assignment.add(0, make_filter("b"), 1)
    assert assignment.add(1, make_filter("a"), 1), "the first component moves to the second class"
    assert [assignment.exclusive_class(key) for key in (0, 1)] == ["k1", "k0"]
    assert not assignment.add(2, make_filter("b"), 1)


def test_assignment_prefers_class_with_enough_nodes() -> None:
    assignment = NodeAssignment(make_classes([(1, "a"), (3, "a")]))
    assert assignment.add(0, make_filter("a"), 3)
    assert [each.idle for each in assignment.remaining] == [1, 0]


def test_exclusive_class_without_contest_is_empty() -> None:
    assignment = NodeAssignment(make_classes([(1, "a"), (1, "b")]))
    assert assignment.add(0, make_filter("a"), 1)
    assert assignment.add(1, make_filter("b"), 1)
    assert [assignment.exclusive_class(key) for key in (0, 1)] == ["", ""]


def test_exclusive_class_of_component_on_two_classes_is_empty() -> None:
    assignment = NodeAssignment(make_classes([(1, "a"), (1, "ab"), (1, "")]))
    assert assignment.add(0, make_filter("a"), 2)
    assert assignment.add(1, make_filter(""), 1)
    assert [assignment.exclusive_class(key) for key in (0, 1)] == ["", "k2"]
