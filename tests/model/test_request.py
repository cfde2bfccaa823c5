"""Requests and their shapes."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest, Request, shape_of

component_drawn = st.builds(ComponentRequest, st.integers(1, 3), st.sampled_from([None, "north", "south"]))
components_drawn = st.lists(component_drawn, min_size=1, max_size=3).map(tuple)
requests_drawn: st.SearchStrategy[Request] = st.one_of(
    st.builds(FixedRequest, components_drawn),
    st.builds(NonFixedRequest, components_drawn),
    st.builds(
        FlexibleRequest,
        st.integers(1, 3),
        st.integers(1, 2),
        st.none() | st.integers(1, 2),
        st.sampled_from([(), ((1, 2),), ((1, 2), (3,))]),
    ),
)


@given(requests_drawn, requests_drawn)
def test_shape_of_equal_requests_is_equal(first: Request, second: Request) -> None:
    assert (shape_of(first) == shape_of(second)) == (first == second)
    assert hash(shape_of(first)) == hash(shape_of(replace(first)))


@given(components_drawn, st.sampled_from([FixedRequest, NonFixedRequest]))
def test_shape_of_request_ignores_programs(
    components: tuple[ComponentRequest, ...], kind: type[FixedRequest] | type[NonFixedRequest]
) -> None:
    dressed = tuple(replace(c, command=("hostname",), environment=(("A", "1"),), output="x") for c in components)
    assert shape_of(kind(dressed)) == shape_of(kind(components))


def test_request_has_type_and_total_size() -> None:
    components = (ComponentRequest(2, "north"), ComponentRequest(3, "south"))
    requests: list[Request] = [FixedRequest(components), NonFixedRequest(components), FlexibleRequest(5)]
    assert [request.type for request in requests] == ["fixed", "nonfixed", "flexible"]
    assert [request.total_size for request in requests] == [5, 5, 5]
