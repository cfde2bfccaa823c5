"""Constraints on the number and the speeds of clusters, for any policy."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import GridView, Link
from koalapy.model.errors import UsageError
from koalapy.model.job_spec import JobSpec
from koalapy.model.placement import ClusterReason, PlacedComponent, Placement, Refusal
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import ComponentRequest, FlexibleRequest, InputFile, NonFixedRequest, Request, RequestType
from koalapy.model.users import Accounts
from koalapy.policies.policy import Policy
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.queue.eligibility import Eligibility
from koalapy.scheduler.queue.policy_question import PolicyQuestion
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.submission import check_submission
from tests.policies.grids import (
    NAMES,
    fixed,
    grid,
    grids,
    linked,
    nonfixed,
    shuffled,
    sites,
    splits,
    summary,
    with_idle,
    with_links,
    with_speeds,
)

registry = builtin_policies()
eligibility = Eligibility(dict.fromkeys(NAMES, ClusterProfile()), Accounts())
FLEXIBLE = ("cluster-minimization", "larger-first", "faster-first", "adaptive", "communication-aware")
SPEEDS = with_speeds(grid(east=4, north=4, south=4, west=2), east=1, north=2, south=1.8, west=1)

at_most_drawn = st.none() | st.integers(1, 3)
ratio_drawn = st.none() | st.sampled_from([0.5, 0.7, 0.8, 1.0])


class Scattering:
    """A policy of another package: single nodes over all clusters in turn, by name."""

    name = "scattering"
    serves: frozenset[RequestType] = frozenset({"flexible"})

    def place(self, request: Request, grid: GridView) -> Placement | Refusal:
        assert isinstance(request, FlexibleRequest)
        if request.total_size > grid.usable_idle:
            return Refusal("no room")
        sizes = {cluster.name: 0 for cluster in grid.by_idle[: request.max_components]}
        remaining = request.total_size
        while remaining:
            earlier = remaining
            for cluster in sorted(grid.by_idle, key=lambda c: c.name):
                if remaining and cluster.name in sizes and sizes[cluster.name] < cluster.idle:
                    sizes[cluster.name] += 1
                    remaining -= 1
            if remaining == earlier:
                return Refusal("no room on so few")
        return Placement(tuple(PlacedComponent(size, name) for name, size in sizes.items() if size))

    def explain(self, request: Request, grid: GridView) -> tuple[ClusterReason, ...]:
        return ()


def make_spec(request: Request, at_most: int | None = None, ratio: float | None = None, policy: str = "") -> JobSpec:
    return JobSpec(request, ("true",), policy=policy, coallocation=at_most, speed_ratio_min=ratio)


def policy_of(job: JobSpec) -> Policy:
    return Scattering() if job.policy == "scattering" else registry.resolve(job.policy, job.request)


def place_spec(job: JobSpec, view: GridView) -> Placement | Refusal:
    return PolicyQuestion(policy_of(job), job, eligibility).place(view)


def explain_spec(job: JobSpec, view: GridView) -> list[tuple[str, str, int | None]]:
    return [(r.cluster, r.reason, r.missing) for r in PolicyQuestion(policy_of(job), job, eligibility).explain(view)]


def keeps_constraints(names: set[str], view: GridView, at_most: int | None, ratio: float | None) -> bool:
    speeds = [cluster.speed for cluster in view if cluster.name in names]
    return (at_most is None or len(names) <= at_most) and (ratio is None or min(speeds) >= max(speeds) * ratio)


def possible_sets(job: JobSpec, view: GridView) -> bool:
    """Return whether the request fits on any set of clusters within the job's constraints, by a search over all."""
    names = [cluster.name for cluster in view.by_idle]
    sets = [set(chosen_names) for count in range(1, len(names) + 1) for chosen_names in combinations(names, count)]
    for chosen in sets:
        if keeps_constraints(chosen, view, job.coallocation, job.speed_ratio_min):
            part = view.select_clusters(frozenset(chosen))
            if isinstance(job.request, FlexibleRequest):
                max_count = job.request.max_components or len(chosen)
                idle = [cluster.idle for cluster in part]
                if any(splits(job.request.total_size, idle, job.request.min_component_size, max_count)):
                    return True
            elif isinstance(policy_of(job).place(job.request, part), Placement):
                return True
    return False


@st.composite
def flexible(draw: st.DrawFn) -> FlexibleRequest:
    total = draw(st.integers(1, 14))
    return FlexibleRequest(total, draw(st.integers(1, min(total, 4))), draw(st.none() | st.integers(1, 4)))


@pytest.mark.parametrize("policy", [*FLEXIBLE, "scattering"])
@given(request=flexible(), view=linked(grids()), at_most=at_most_drawn, ratio=ratio_drawn)
def test_placement_keeps_constraints(
    policy: str, request: FlexibleRequest, view: GridView, at_most: int | None, ratio: float | None
) -> None:
    if policy == "scattering":
        request = FlexibleRequest(request.total_size)
    answer = place_spec(make_spec(request, at_most, ratio, policy), view)
    if isinstance(answer, Placement):
        assert keeps_constraints({component.cluster for component in answer.components}, view, at_most, ratio)


@pytest.mark.parametrize("policy", FLEXIBLE[:-1])
@given(request=flexible(), views=shuffled(linked(grids())), at_most=at_most_drawn, ratio=ratio_drawn)
def test_flexible_request_with_constraints_is_placed_if_possible(
    policy: str, request: FlexibleRequest, views: tuple[GridView, GridView], at_most: int | None, ratio: float | None
) -> None:
    job = make_spec(request, at_most, ratio, policy)
    answer = place_spec(job, views[0])
    assert isinstance(answer, Placement) == possible_sets(job, views[0])
    assert answer == place_spec(job, views[1])


sizes_drawn = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@given(sizes_drawn, linked(grids()), at_most_drawn, ratio_drawn)
def test_nonfixed_request_with_constraints_agrees_with_worst_fit(
    sizes: list[int], view: GridView, at_most: int | None, ratio: float | None
) -> None:
    job = make_spec(nonfixed(*sizes), at_most, ratio)
    answer = place_spec(job, view)
    assert isinstance(answer, Placement) == possible_sets(job, view)
    if isinstance(answer, Placement):
        assert keeps_constraints({component.cluster for component in answer.components}, view, at_most, ratio)


@pytest.mark.parametrize("policy", FLEXIBLE[:-1])
@given(request=flexible(), view=linked(grids()), at_most=at_most_drawn, ratio=ratio_drawn)
def test_explanation_with_constraints_names_sufficient_nodes(
    policy: str, request: FlexibleRequest, view: GridView, at_most: int | None, ratio: float | None
) -> None:
    check_missing(make_spec(request, at_most, ratio, policy), view)


@given(sizes_drawn, linked(grids()), at_most_drawn, ratio_drawn)
def test_explanation_of_worst_fit_names_sufficient_nodes(
    sizes: list[int], view: GridView, at_most: int | None, ratio: float | None
) -> None:
    check_missing(make_spec(nonfixed(*sizes), at_most, ratio), view)


def check_missing(job: JobSpec, view: GridView) -> None:
    reasons = PolicyQuestion(policy_of(job), job, eligibility).explain(view)
    placed = isinstance(place_spec(job, view), Placement)
    assert [reason.cluster for reason in reasons] == ([] if placed else sorted(c.name for c in view))
    for reason in reasons:
        if reason.missing is not None:
            cluster = view.get(reason.cluster)
            assert cluster is not None
            assert cluster.idle + reason.missing <= cluster.total
            with_more = with_idle(view, cluster.name, cluster.idle + reason.missing)
            assert isinstance(place_spec(job, with_more), Placement), reason


@given(
    st.one_of(flexible(), sizes_drawn.map(lambda sizes: nonfixed(*sizes))),
    linked(grids()),
    at_most_drawn,
    ratio_drawn,
    st.sampled_from(["", "best-fit", "fastest-one", "adaptive"]),
)
def test_submission_with_constraints_agrees_with_empty_grid(
    request: Request, view: GridView, at_most: int | None, ratio: float | None, policy: str
) -> None:
    job = make_spec(request, at_most, ratio, policy)
    try:
        policy_of(job)
    except UsageError:
        return
    empty = with_speeds(grid(**{c.name: c.total for c in view}), **{c.name: c.speed for c in view})
    limits = [ClusterLimits(c.name, c.total, speed=c.speed) for c in empty]
    placed = isinstance(place_spec(job, empty), Placement)
    try:
        check_submission(job, Limits(limits, registry))
        passes = True
    except UsageError:
        passes = False
    assert passes == placed or not limits


# Examples


def test_coallocation_of_one_places_on_one_cluster() -> None:
    view = grid(north=4, south=3)
    assert sites(place_spec(make_spec(FlexibleRequest(4), 1), view)) == [(4, "north")]
    assert sites(place_spec(make_spec(nonfixed(2, 2), 1), view)) == [(2, "north"), (2, "north")]
    assert sites(place_spec(make_spec(nonfixed(2, 2)), view)) == [(2, "north"), (2, "south")]
    assert sites(place_spec(make_spec(FlexibleRequest(4, split_options=((3, 1),)), 1), view)) == [
        (3, "north"),
        (1, "north"),
    ]
    assert summary(place_spec(make_spec(FlexibleRequest(6), 1), view)) == (
        "needs 6 nodes on one cluster; 4 are idle on the largest (north 4, south 3); "
        "coallocation is 1, and it fits only on 2 clusters together"
    )
    assert (
        summary(place_spec(make_spec(nonfixed(2, 3), 1), view))
        == "coallocation is 1, and it fits only on 2 clusters together"
    )
    assert summary(place_spec(make_spec(nonfixed(3, 1, 2, 3), 1), view)) == (
        "no cluster has 2 idle nodes left for component 2 (most: north with 1)"
    )


def test_coallocation_limits_the_number_of_clusters() -> None:
    view = grid(east=4, north=4, south=4, west=4)
    answer = place_spec(make_spec(nonfixed(2, 2, 2), 2), view)
    assert sites(answer) == [(2, "east"), (2, "north"), (2, "east")]
    assert sites(place_spec(make_spec(FlexibleRequest(8), 2), view)) == [(4, "east"), (4, "north")]
    assert "coallocation is 2" in summary(place_spec(make_spec(FlexibleRequest(9), 2), view))


def test_coallocation_of_one_takes_cluster_nearest_to_inputs() -> None:
    file = InputFile("data", 100, ("east",))
    near = with_links(
        grid(east=1, north=6, south=4), {"east south": Link(bandwidth=10), "east north": Link(bandwidth=5)}
    )
    request = NonFixedRequest((ComponentRequest(1, inputs=(file,)), ComponentRequest(2, inputs=(file,))))
    free = place_spec(make_spec(request, policy="close-to-files"), near)
    assert sites(free) == [(1, "east"), (2, "south")]
    never = place_spec(make_spec(request, 1, policy="close-to-files"), near)
    assert sites(never) == [(1, "south"), (2, "south")]
    assert isinstance(never, Placement)
    assert [component.transfer_time for component in never.components] == [10, 10]


def test_speed_ratio_excludes_clusters_of_different_speeds() -> None:
    assert sites(place_spec(make_spec(FlexibleRequest(6)), SPEEDS)) == [(4, "east"), (2, "north")]
    assert sites(place_spec(make_spec(FlexibleRequest(6), ratio=0.8), SPEEDS)) == [(4, "east"), (2, "west")]
    assert sites(place_spec(make_spec(FlexibleRequest(8), ratio=0.8), SPEEDS)) == [(4, "north"), (4, "south")]
    assert sites(place_spec(make_spec(nonfixed(3, 3), ratio=0.8), SPEEDS)) == [(3, "north"), (3, "south")]
    assert summary(place_spec(make_spec(FlexibleRequest(9), ratio=0.8), SPEEDS)) == (
        "needs 9 nodes; 8 are idle (north 4, south 4); speed_ratio_min is 0.8, and east has 0.5 of the speed of north"
    )


def test_speed_ratio_tries_preferred_speed_range_first() -> None:
    view = with_speeds(grid(east=3, north=4, south=2, west=4), east=2, north=1, south=2, west=1)
    assert sites(place_spec(make_spec(FlexibleRequest(5), policy="faster-first"), view)) == [(3, "east"), (2, "south")]
    assert sites(place_spec(make_spec(FlexibleRequest(5), ratio=1.0), view)) == [(4, "north"), (1, "west")]
    request = FlexibleRequest(6)
    assert sites(place_spec(make_spec(request, policy="faster-first"), view)) == [
        (3, "east"),
        (2, "south"),
        (1, "north"),
    ]
    assert sites(place_spec(make_spec(request, ratio=1.0, policy="faster-first"), view)) == [(4, "north"), (2, "west")]


def test_fixed_request_violating_constraints_is_refused() -> None:
    job = make_spec(fixed((1, "east"), (1, "north")), ratio=0.8)
    problem = "speed_ratio_min is 0.8, and east has 0.5 of the speed of north"
    assert summary(place_spec(job, SPEEDS)) == problem
    assert explain_spec(job, SPEEDS) == [("east", problem, None), ("north", problem, None)]
    together = replace(job, coallocation=1, speed_ratio_min=None)
    assert summary(place_spec(together, SPEEDS)) == "coallocation is 1, and it fits only on 2 clusters together"
    assert isinstance(place_spec(replace(job, speed_ratio_min=0.5), SPEEDS), Placement)


def test_constraints_explain_each_cluster() -> None:
    view = with_speeds(grid(east=(2, 8), north=(3, 9), south=(3, 3)), east=2)
    assert explain_spec(make_spec(FlexibleRequest(8), 1), view) == [
        ("east", "2 of 8 nodes idle, the request needs 8 in all; coallocation allows one cluster only", 6),
        ("north", "3 of 9 nodes idle, the request needs 8 in all; coallocation allows one cluster only", 5),
        ("south", "3 of 3 nodes idle, the request needs 8 in all; coallocation allows one cluster only", None),
    ]
    ruled_out = "speed_ratio_min of 0.8 rules out"
    assert explain_spec(make_spec(FlexibleRequest(7), ratio=0.8), view) == [
        ("east", f"2 of 8 nodes idle, the request needs 7 in all; {ruled_out} north, south beside it", 5),
        ("north", f"3 of 9 nodes idle, the request needs 7 in all; {ruled_out} east beside it", 1),
        ("south", f"3 of 3 nodes idle, the request needs 7 in all; {ruled_out} east beside it", None),
    ]


def test_job_without_constraints_has_none() -> None:
    assert eligibility.demands(make_spec(FlexibleRequest(1))) == ()
    jobs = [make_spec(FlexibleRequest(1), 1), make_spec(FlexibleRequest(1), ratio=0.5)]
    jobs.append(replace(make_spec(FlexibleRequest(1)), policy_options=(("metric", "latency"),)))
    assert len({eligibility.demands(job) for job in jobs}) == 3
