"""Ties, equal values and limits, which few drawn grids have."""

from dataclasses import replace

import pytest

from koalapy.model.cluster import ClusterState, GridView, Link
from koalapy.model.placement import PlacedComponent, Placement
from koalapy.model.request import ComponentRequest, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.policies.adaptive import Adaptive, count_startable
from koalapy.policies.close_to_files import closest_site
from koalapy.policies.communication_aware import CommunicationAware
from koalapy.policies.constraints import Constraints, cap_components, grid_parts, part_with
from koalapy.policies.flexible import ClusterMinimization
from koalapy.policies.network import estimate_transfer
from koalapy.policies.policy import not_usable, reason_for
from koalapy.policies.splitting import explain_options
from tests.policies.grids import grid, nonfixed, sites, with_links, with_speeds, with_state

FILE, OTHER = InputFile("file", 100), InputFile("other", 100)


def with_replicas(view: GridView, **clusters: tuple[str, ...]) -> GridView:
    return replace(view, replicas=clusters)


def names_of(view: GridView) -> set[str]:
    return {cluster.name for cluster in view}


def test_closest_site_accepts_a_transfer_that_takes_all_of_the_time() -> None:
    view = with_replicas(with_links(grid(east=1, north=0), {"north east": Link(bandwidth=10.0)}), file=("north",))
    found = closest_site(1, (FILE,), view, within=10.0)
    assert found is not None
    assert (found[0], found[1].seconds) == ("east", 10.0)
    assert closest_site(1, (FILE,), view, within=9.9) is None


def test_transfer_with_equally_fast_sources_uses_the_first_by_name() -> None:
    links = {"east south": Link(bandwidth=10.0), "north south": Link(bandwidth=10.0)}
    view = with_replicas(with_links(grid(east=0, north=0, south=1), links), file=("north", "east"))
    transfer = estimate_transfer("south", (FILE,), view)
    assert transfer is not None
    assert transfer.sources == ("east",)
    away = estimate_transfer(
        "south", (FILE,), replace(with_state(view, "east", ClusterState.UNREACHABLE), replicas=view.replicas)
    )
    assert away is not None
    assert away.sources == ("north",), "an unreachable cluster sends nothing"


def test_group_includes_links_of_exactly_its_latency() -> None:
    view = with_links(grid(east=2, north=2), {"east north": Link(latency=0.005)})
    policy = CommunicationAware().configured({"group_latency": "5ms"})
    assert {site for _, site in sites(policy.place(FlexibleRequest(4), view))} == {"east", "north"}
    narrower = CommunicationAware().configured({"group_latency": "4.9ms"})
    assert not isinstance(narrower.place(FlexibleRequest(4), view), Placement)


@pytest.mark.parametrize(("own", "at_most", "expected"), [(2, 3, 2), (5, 3, 3), (None, 3, 3)])
def test_cap_of_components_is_the_lower_limit(own: int | None, at_most: int, expected: int) -> None:
    assert cap_components(FlexibleRequest(8, max_components=own), at_most).max_components == expected


def test_part_with_a_cluster_has_the_similar_ones_with_most_idle_nodes() -> None:
    view = with_speeds(grid(east=1, fast=10, slow=1, snail=1), east=1.0, fast=2.0, slow=0.5, snail=0.5)
    east = view.get("east")
    assert east is not None
    request = nonfixed(1, 1, 1)
    assert names_of(part_with(east, request, view, Constraints(speed_ratio=0.5))) == {"east", "fast"}
    assert names_of(part_with(east, request, view, Constraints(at_most=2))) == {"east", "fast"}
    assert names_of(part_with(east, request, view, Constraints(at_most=1))) == {"east"}


def test_parts_with_as_many_used_nodes_are_ordered_by_idle_nodes() -> None:
    view = with_speeds(grid(east=5, north=9, south=2), east=1.0, north=2.0, south=4.0)
    answer = Placement(tuple(PlacedComponent(1, name) for name in ("east", "north", "south")), "")
    parts = grid_parts(nonfixed(1, 1, 1), answer, view, Constraints(speed_ratio=0.9))
    assert [names_of(part) for _, part in parts] == [{"north"}, {"east"}, {"south"}]


def test_first_set_of_clusters_has_the_shortest_of_the_slowest_transfers() -> None:
    links = {"east north": Link(bandwidth=1.0), "east south": Link(bandwidth=10.0), "north south": Link(bandwidth=10.0)}
    view = with_replicas(with_links(grid(east=9, north=9, south=2), links), file=("east",), other=("north",))
    request = NonFixedRequest((ComponentRequest(1, inputs=(FILE,)), ComponentRequest(1, inputs=(OTHER,))))
    answer = Placement((PlacedComponent(1, "east", 0), PlacedComponent(1, "north", 1)), "")
    first = next(grid_parts(request, answer, view, Constraints(at_most=1)))
    assert names_of(first[1]) == {"south"}, "10 s for each file; the others wait 100 s for one"


@pytest.mark.parametrize(
    ("waiting", "idle", "expected"),
    [
        ((nonfixed(1, 4),), {"east": 4, "north": 1}, 1),  # the largest component first
        ((nonfixed(3, 2), FlexibleRequest(4)), {"east": 4, "north": 1}, 1),  # a failed request leaves its nodes
        ((FlexibleRequest(4), FlexibleRequest(1)), {"east": 4}, 1),
        ((FlexibleRequest(2), FlexibleRequest(4)), {"east": 4, "north": 2}, 2),  # the fullest that holds it
    ],
)
def test_count_of_startable_jobs(waiting: tuple[FlexibleRequest, ...], idle: dict[str, int], expected: int) -> None:
    assert count_startable(waiting, idle) == expected


def test_adaptive_uses_the_faster_cluster_when_as_many_jobs_can_start_beside() -> None:
    view = replace(with_speeds(grid(east=4, north=2), east=2.0, north=1.0), waiting=(FlexibleRequest(1),))
    answer = Adaptive().place(nonfixed(2), view)
    assert sites(answer) == [(2, "east")]
    assert isinstance(answer, Placement)
    assert answer.reason.startswith("fastest-one: ")


def test_reason_counts_missing_nodes_up_to_the_whole_cluster() -> None:
    east = grid(east=(2, 5)).clusters[0]
    assert [reason_for(east, "needs", sufficient).missing for sufficient in (2, 3, 5, 6, None)] == [
        None,
        1,
        3,
        None,
        None,
    ]


def test_unusable_cluster_is_described_by_state_and_note() -> None:
    def describe(state: ClusterState, note: str) -> str:
        return not_usable(with_state(grid(east=1), "east", state, note).clusters[0])

    assert describe(ClusterState.USABLE, "") == ""
    assert describe(ClusterState.DRAINED, "by ann: disks") == "drained by ann: disks"
    assert describe(ClusterState.UNREACHABLE, "no agent") == "unreachable: no agent"
    assert describe(ClusterState.UNREACHABLE, "") == "unreachable"


def test_split_options_are_tried_in_their_order_and_explained_by_the_smallest() -> None:
    request = FlexibleRequest(4, split_options=((3, 1), (2, 2)))
    assert sites(ClusterMinimization().place(request, grid(east=3, north=2))) == [(3, "east"), (1, "north")]
    (east, _) = explain_options(request, grid(east=(1, 4), north=(1, 4)))
    assert "needs 2 or more for its largest component" in east.reason


def test_missing_nodes_of_flexible_request_count_only_clusters_that_may_be_used_beside() -> None:
    def missing(request: FlexibleRequest, view: GridView) -> dict[str, int | None]:
        return {reason.cluster: reason.missing for reason in ClusterMinimization().explain(request, view)}

    view = grid(east=(2, 9), north=(1, 9), south=(3, 9))
    assert missing(FlexibleRequest(8, max_components=2), view)["east"] == 3, "beside south only"
    assert missing(FlexibleRequest(8, min_component_size=2), view)["east"] == 3, "north is too small"
