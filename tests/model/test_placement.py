"""Placements, refusals and the words they share."""

import pytest

from koalapy.model.placement import PlacedComponent, Placement, Refusal
from koalapy.model.wording import are_idle, known_names, listed, nodes


def test_a_placement_counts_its_nodes() -> None:
    placement = Placement((PlacedComponent(2, "north"), PlacedComponent(3, "south"), PlacedComponent(1, "north")))
    assert placement.total_size == 6
    assert [placement.nodes_on(name) for name in ("north", "south", "east")] == [3, 3, 0]


def test_a_refusal_reads_as_its_summary() -> None:
    assert str(Refusal("needs 6 nodes; 5 are idle")) == "needs 6 nodes; 5 are idle"


@pytest.mark.parametrize(
    ("texts", "count", "line"),
    [
        ([], None, ""),
        (["a"], None, "a"),
        (["a", "b", "c", "d"], None, "a, b, c, d"),
        (["a", "b", "c", "d", "e", "f"], None, "a, b, c, d and 2 more"),
        (["a", "b", "c", "d"], 100, "a, b, c, d and 96 more"),
    ],
)
def test_long_lists_are_cut(texts: list[str], count: int | None, line: str) -> None:
    assert listed(texts, count) == line


def test_numbers_agree_with_their_nouns() -> None:
    assert [nodes(0), nodes(1), nodes(2, "idle")] == ["0 nodes", "1 node", "2 idle nodes"]
    assert [are_idle(1), are_idle(2)] == ["1 is idle", "2 are idle"]


def test_a_wrong_name_brings_the_known_ones() -> None:
    assert known_names("nroth", ["south", "north"]) == "did you mean north? known: north, south"
    assert known_names("x", []) == "known: none"
