"""Requests that cannot fit on the empty grid, or not within the job's constraints."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.errors import UsageError
from koalapy.model.job_spec import JobSpec
from koalapy.model.placement import Placement
from koalapy.model.request import FlexibleRequest
from koalapy.policies.registry import builtin_policies
from koalapy.validation.limits import ClusterLimits
from tests.policies.grids import NAMES, can_be_assigned, fixed, nonfixed, splits
from tests.validation.submissions import UNKNOWN, check_rejection, check_spec, make_spec, make_split, rejection_of

TOO_LARGE = [
    (
        make_spec(FlexibleRequest(5), coallocation=1),
        "coallocation is 1, but no cluster has room for the whole request (north 4, south 3)",
        "allow more clusters, or ask for fewer nodes",
    ),
    (
        make_spec(nonfixed(2, 2, 1), coallocation=1),
        "coallocation is 1, but no cluster has room for the whole request (north 4, south 3)",
        "allow more clusters, or ask for fewer nodes",
    ),
    (
        make_spec(FlexibleRequest(5), policy="best-fit"),
        "request.total_size is 5, but policy best-fit takes one cluster, and none has more than 4 nodes",
        "ask for at most 4, or use another policy",
    ),
    (
        make_spec(fixed((1, "south"), (1, "north")), coallocation=1),
        "coallocation is 1, but the request names 2 clusters (north, south)",
        "allow 2, or name fewer clusters",
    ),
    (
        make_spec(fixed((5, "north"))),
        "request.components[0].size is 5, but north has 4 nodes",
        "ask for at most 4 on north",
    ),
    (
        make_spec(fixed((2, "south"), (1, "north"), (2, "south"))),
        "request.components[2].size is 2, but south has 3 nodes and the components there need 4",
        "ask for at most 3 on south",
    ),
    (
        make_spec(nonfixed(1, 5)),
        "request.components[1].size is 5, but no cluster has more than 4 nodes",
        "split it, or make the request flexible",
    ),
    (
        make_spec(nonfixed(3, 3, 2)),
        "request.components need 8 nodes, but the whole grid has 7 nodes (north 4, south 3)",
        "ask for at most 7 in all",
    ),
    (
        make_spec(nonfixed(2, 3, 2)),
        "request.components of 2+3+2 nodes never fit together by worst-fit, even on the empty grid (north 4, south 3)",
        "use smaller components, or make the request flexible",
    ),
    (make_split(8), "request.total_size is 8, but the whole grid has 7 nodes (north 4, south 3)", "ask for at most 7"),
    (
        make_split(7, min_size=4),
        "request.min_component_size is 4, but the clusters with at least that many have 4 nodes (north 4, south 3)",
        "lower it, or ask for fewer nodes in all",
    ),
    (
        make_split(5, max_count=1),
        "request.max_components is 1, but that many clusters have at most 4 nodes (north 4, south 3)",
        "allow more, or ask for fewer nodes in all",
    ),
    (
        make_split(5, min_size=3),
        "request.min_component_size is 3, but 5 nodes need 2 clusters (north 4, south 3), too many for that",
        "lower it to 2 or less",
    ),
    (
        make_split(6, (6,), (5, 1)),
        "request.split_options fit in none of the ways given, even on the empty grid (north 4, south 3)",
        "add one with smaller components",
    ),
]


@pytest.mark.parametrize(("wrong", "message", "hint"), TOO_LARGE)
def test_check_of_request_that_cannot_fit_is_rejected(wrong: JobSpec, message: str, hint: str) -> None:
    check_rejection(f"{message}; {hint}", wrong)


@pytest.mark.parametrize(
    "large", [make_spec(nonfixed(9)), make_spec(nonfixed(3, 3, 3)), make_split(9), make_split(9, (9,))]
)
@pytest.mark.parametrize("clusters", [(), UNKNOWN])
def test_check_with_unknown_cluster_size_accepts_any_size(large: JobSpec, clusters: tuple[ClusterLimits, ...]) -> None:
    rejection_of(large)
    check_spec(large, clusters)


def test_check_of_fixed_request_needs_only_its_clusters() -> None:
    check_spec(make_spec(fixed((9, "north"))), UNKNOWN)
    assert rejection_of(make_spec(fixed((9, "south"))), UNKNOWN).value == 9
    assert rejection_of(make_spec(fixed((1, "north"))), ()).hint == "known: none"


def test_check_with_too_many_components_of_a_size_is_rejected() -> None:
    error = rejection_of(
        make_spec(nonfixed(2, 3, 2)), (ClusterLimits("north", 5), ClusterLimits("south", 1), ClusterLimits("w", 1))
    )
    assert (error.field, error.value) == ("request.components", [2, 3, 2])
    assert error.message == (
        "request.components are 3 of at least 2 nodes, but the empty grid has room for 2 such (north 5, south 1, w 1)"
    )
    assert error.hint == "use smaller components, or make the request flexible"


def test_message_for_large_grid_names_largest_clusters() -> None:
    many = tuple(ClusterLimits(f"c{index}", index) for index in range(1, 8))
    assert rejection_of(make_split(29), many).message == (
        "request.total_size is 29, but the whole grid has 28 nodes (c7 7, c6 6, c5 5, c4 4 and 3 more)"
    )


limits_drawn = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(
    lambda totals: tuple(ClusterLimits(name, total) for name, total in zip(NAMES, totals, strict=False))
)
sizes_drawn = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def is_accepted(job_spec: JobSpec, limits: tuple[ClusterLimits, ...]) -> bool:
    try:
        check_spec(job_spec, limits)
    except UsageError:
        return False
    return True


def is_placeable(job_spec: JobSpec, limits: tuple[ClusterLimits, ...]) -> bool:
    """Return whether the request's policy places it while every node is idle."""
    grid = GridView(tuple(ClusterView(c.name, c.total or 0, c.total or 0) for c in limits))
    return isinstance(
        builtin_policies().resolve(job_spec.policy, job_spec.request).place(job_spec.request, grid), Placement
    )


@given(sizes_drawn, limits_drawn)
def test_check_accepts_components_that_can_be_placed(sizes: list[int], limits: tuple[ClusterLimits, ...]) -> None:
    if can_be_assigned(sizes, [c.total or 0 for c in limits]):
        check_spec(make_spec(nonfixed(*sizes), policy="another"), limits)


@given(st.lists(sizes_drawn, min_size=1, max_size=3), limits_drawn)
def test_check_agrees_with_worst_fit_on_empty_grid(options: list[list[int]], limits: tuple[ClusterLimits, ...]) -> None:
    for sizes in options:
        job_spec = make_spec(nonfixed(*sizes))
        assert (
            is_accepted(job_spec, limits)
            == is_accepted(replace(job_spec, policy="worst-fit"), limits)
            == is_placeable(job_spec, limits)
        )
    total = sum(options[0])
    job_spec = make_split(total, *(tuple(option) for option in options if sum(option) == total))
    assert is_accepted(job_spec, limits) == is_placeable(job_spec, limits)


@given(sizes_drawn, limits_drawn)
def test_check_of_one_component_needs_a_large_cluster(sizes: list[int], limits: tuple[ClusterLimits, ...]) -> None:
    for size in sizes:
        assert is_accepted(make_spec(nonfixed(size)), limits) == any(size <= (c.total or 0) for c in limits)


@given(st.integers(1, 20), st.integers(1, 6), st.none() | st.integers(1, 4), limits_drawn)
def test_check_of_flexible_request_agrees_with_empty_grid(
    total: int, min_size: int, max_count: int | None, limits: tuple[ClusterLimits, ...]
) -> None:
    job_spec = make_split(total, min_size=min_size, max_count=max_count)
    ways = splits(total, [c.total or 0 for c in limits], min_size, len(limits) if max_count is None else max_count)
    fits = next(ways, None) is not None
    assert is_accepted(job_spec, limits) == is_placeable(job_spec, limits) == fits


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(NAMES)), min_size=1, max_size=4), limits_drawn)
def test_check_of_fixed_request_agrees_with_empty_grid(
    components: list[tuple[int, str]], limits: tuple[ClusterLimits, ...]
) -> None:
    job_spec = make_spec(fixed(*components))
    names = {limit.name for limit in limits}
    assert is_accepted(job_spec, limits) == is_placeable(job_spec, limits)
    assert is_accepted(job_spec, limits) or rejection_of(job_spec, limits).field.endswith(
        ".size" if all(name in names for _, name in components) else ".cluster"
    )


FAST_AND_SLOW = (ClusterLimits("north", 4, speed=2.0), ClusterLimits("south", 3), ClusterLimits("west", 1, speed=1.8))


def test_check_with_speed_ratio_counts_similar_clusters_only() -> None:
    error = rejection_of(make_spec(FlexibleRequest(6), speed_ratio_min=0.9), FAST_AND_SLOW)
    assert (error.field, error.value, error.hint) == ("speed_ratio_min", 0.9, "lower it, or ask for fewer nodes")
    assert error.message == (
        "speed_ratio_min is 0.9, but clusters with such speeds have no room for the request together "
        "(north 4 of speed 2, west 1 of speed 1.8, south 3 of speed 1)"
    )
    check_spec(make_spec(FlexibleRequest(5), speed_ratio_min=0.9), FAST_AND_SLOW)
    check_spec(make_spec(FlexibleRequest(8), speed_ratio_min=0.5), FAST_AND_SLOW)
    rejection = rejection_of(make_spec(fixed((1, "south"), (1, "north")), speed_ratio_min=0.9), FAST_AND_SLOW)
    assert rejection.message == "speed_ratio_min is 0.9, but south has speed 1 and north 2"
    assert (
        rejection_of(make_spec(FlexibleRequest(5), speed_ratio_min=0.9, coallocation=1), FAST_AND_SLOW).field
        == "coallocation"
    )


def test_check_of_split_with_unknown_sizes_is_accepted() -> None:
    check_spec(make_spec(FlexibleRequest(5), coallocation=1, speed_ratio_min=1.0), UNKNOWN)
    check_spec(make_spec(FlexibleRequest(9), policy="best-fit"), UNKNOWN)
