"""Close-to-files, compared with a search over all sites and with examples."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterState, GridView, Link
from koalapy.model.placement import PlacedComponent, Placement, Refusal
from koalapy.model.request import ComponentRequest, FixedRequest, InputFile, NonFixedRequest
from koalapy.policies.close_to_files import CloseToFiles, closest_site
from koalapy.policies.network import Transfer, estimate_transfer
from tests.policies.grids import (
    explained,
    files,
    grid,
    grids,
    linked,
    nonfixed,
    requests_with_inputs,
    summary,
    with_links,
    with_state,
)

policy = CloseToFiles()
DATA = InputFile("data", 600, ("north",))
LINKS = {"north south": Link(bandwidth=100.0), "north west": Link(bandwidth=50.0)}


def with_input(*drawn: tuple[int, InputFile | None]) -> NonFixedRequest:
    return with_inputs(*((size, (file,) if file else ()) for size, file in drawn))


def with_inputs(*drawn: tuple[int, tuple[InputFile, ...]]) -> NonFixedRequest:
    return NonFixedRequest(tuple(ComponentRequest(size, inputs=files) for size, files in drawn))


def expected_placement(request: NonFixedRequest, view: GridView) -> list[tuple[str, Transfer]] | None:
    """Compute the placement by the documented rule; None if it does not fit."""
    remaining = {c.name: c.idle for c in view if c.state is ClusterState.USABLE}
    placed: dict[int, tuple[str, Transfer]] = {}
    for index, component in sorted(enumerate(request.components), key=lambda pair: -pair[1].size):
        choices = []
        for name, idle in remaining.items():
            transfer = estimate_transfer(name, component.inputs, view)
            if transfer is not None and idle >= component.size:
                choices.append((transfer.seconds, -idle, name, transfer))
        if not choices:
            return None
        _, _, name, transfer = min(choices, key=lambda choice: choice[:3])
        remaining[name] -= component.size
        placed[index] = (name, transfer)
    return [placed[index] for index in range(len(request.components))]


@given(requests_with_inputs, linked(grids()))
def test_close_to_files_places_at_the_shortest_transfer(request: NonFixedRequest, view: GridView) -> None:
    answer, expected = policy.place(request, view), expected_placement(request, view)
    if expected is None:
        assert isinstance(answer, Refusal)
        assert [r.cluster for r in policy.explain(request, view)] == [c.name for c in view]
        return
    assert isinstance(answer, Placement)
    assert answer.components == tuple(
        PlacedComponent(component.size, name, index, transfer.sources, transfer.seconds)
        for index, (component, (name, transfer)) in enumerate(zip(request.components, expected, strict=True))
    )
    assert policy.explain(request, view) == ()


@given(st.integers(1, 6), files, linked(grids()), st.none() | st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_closest_site_has_the_shortest_transfer(
    size: int, drawn: tuple[InputFile, ...], view: GridView, within: float | None
) -> None:
    expected = expected_placement(with_inputs((size, drawn)), view)
    closest = closest_site(size, drawn, view, within)
    if expected is None or (within is not None and expected[0][1].seconds > within):
        assert closest is None
    else:
        assert closest == expected[0]


def test_close_to_files_places_larger_components_first() -> None:
    view = with_links(grid(north=4, south=6, west=8), LINKS)
    answer = policy.place(with_input((2, DATA), (4, DATA), (3, None)), view)
    assert isinstance(answer, Placement)
    assert answer.components == (
        PlacedComponent(2, "south", 0, ("north",), 6.0),
        PlacedComponent(4, "north", 1, ("north",), 0.0),
        PlacedComponent(3, "west", 2, (), 0.0),
    )
    assert answer.reason == ("south gets that of component 0 from north in 6 s, north has the input of component 1")


def test_close_to_files_fixed_request_chooses_only_file_sites() -> None:
    file = replace(DATA, sites=("north", "west"))
    view = with_links(grid(north=4, south=6, west=8), {**LINKS, "south west": Link(bandwidth=200.0)})
    request = FixedRequest((ComponentRequest(2, "south", inputs=(file,)), ComponentRequest(1, "north")))
    answer = policy.place(request, view)
    assert isinstance(answer, Placement)
    assert answer.components == (PlacedComponent(2, "south", 0, ("west",), 3.0), PlacedComponent(1, "north", 1))
    assert answer.reason == (
        "the request names its clusters: south (2), north (1); south gets that of component 0 from west in 3 s"
    )
    assert policy.explain(request, view) == ()


def test_close_to_files_fixed_request_without_link_is_refused() -> None:
    view = grid(north=4, south=6)
    request = FixedRequest((ComponentRequest(2, "south", inputs=(DATA,)),))
    problem = "component 0: no known bandwidth from north, which has data, to south"
    assert summary(policy.place(request, view)) == problem
    assert explained(policy, request, view) == [("south", problem, None)]
    too_large = FixedRequest((ComponentRequest(9, "north"),))
    assert summary(policy.place(too_large, view)) == "needs 9 nodes on north; 4 are idle"


def test_close_to_files_refusal_names_what_is_missing() -> None:
    view = with_links(grid(east=9, north=(1, 4), south=(2, 6)), LINKS)
    request = with_input((3, DATA))
    assert summary(policy.place(request, view)) == (
        "no cluster that data can be brought to has 3 idle nodes for component 0 (east 9, south 2, north 1)"
    )
    assert explained(policy, request, view) == [
        ("east", "component 0: no known bandwidth from north, which has data, to east", None),
        ("north", "1 of 4 nodes idle, component 0 needs 3", 2),
        ("south", "2 of 6 nodes idle, component 0 needs 3", 1),
    ]
    assert summary(policy.place(with_input((1, replace(DATA, sites=()))), view)) == (
        "component 0: no cluster has data, so it cannot be brought to any usable cluster (east 9, south 2, north 1)"
    )
    assert summary(policy.place(nonfixed(9, 1, 3), view)) == "needs 13 nodes; 12 are idle (east 9, south 2, north 1)"
    assert summary(policy.place(nonfixed(9, 3), view)) == (
        "no cluster has 3 idle nodes left for component 1 (east 9, south 2, north 1)"
    )
    assert summary(policy.place(nonfixed(1), with_state(grid(north=1), "north", ClusterState.DRAINED))) == (
        "no cluster is usable (north drained)"
    )
