"""Placements and refusals."""

from koalapy.model.placement import PlacedComponent, Placement, Refusal


def test_placement_counts_nodes_by_cluster() -> None:
    placement = Placement((PlacedComponent(2, "north"), PlacedComponent(3, "south"), PlacedComponent(1, "north")))
    assert placement.total_size == 6
    assert [placement.nodes_on(name) for name in ("north", "south", "east")] == [3, 3, 0]


def test_refusal_text_is_its_summary() -> None:
    assert str(Refusal("needs 6 nodes; 5 are idle")) == "needs 6 nodes; 5 are idle"
