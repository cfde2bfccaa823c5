"""Every limit of a submission: the field, the message and the way out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.errors import UsageError
from koalapy.model.job import JobSpec, Launcher
from koalapy.model.placement import Placement
from koalapy.model.profile import ClusterProfile, Mpi
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.placement.registry import builtin
from koalapy.placement.worst_fit import WorstFit
from koalapy.validation import submission
from koalapy.validation.limits import ClusterLimits, Limits
from tests.placement.grids import NAMES, can_be_assigned, fixed, nonfixed, splits

GRID = (ClusterLimits("north", 4), ClusterLimits("south", 3))
UNKNOWN = (ClusterLimits("north", None), ClusterLimits("south", 3))
RUN = ("true",)


class Another(WorstFit):
    """One of which nothing is known."""

    name = "another"
    fits = None  # type: ignore[assignment]


POLICIES = builtin()
POLICIES.register(Another())


def check(spec: JobSpec, clusters: tuple[ClusterLimits, ...]) -> None:
    submission.check(spec, Limits(clusters, POLICIES))


def spec(request: Request, command: tuple[str, ...] = RUN, **options: object) -> JobSpec:
    return replace(JobSpec(request, command), **options)  # type: ignore[arg-type]


def one(**component: object) -> NonFixedRequest:
    return NonFixedRequest((ComponentRequest(**({"size": 1} | component)),))  # type: ignore[arg-type]


def split(total: int, *options: tuple[int, ...], least: int = 1, most: int | None = None) -> JobSpec:
    return spec(FlexibleRequest(total, least, most, options))


def refusal(spec: JobSpec, clusters: tuple[ClusterLimits, ...] = GRID) -> UsageError:
    with pytest.raises(UsageError) as refused:
        check(spec, clusters)
    return refused.value


WRONG_OPTIONS = [
    (
        spec(one(), processes_per_node=10_000),
        "processes_per_node",
        10_000,
        " is 10000, more than any node has processors",
        "give at most 8192, or leave it out",
    ),
    (spec(one(), processes_per_node=0), "processes_per_node", 0, " is 0", "give at least 1, or leave it out"),
    (spec(one(), max_restarts=-1), "max_restarts", -1, " is -1", "give at least 0, or leave it out"),
    (spec(one(), max_placement_tries=0), "max_placement_tries", 0, " is 0", "give at least 1, or leave it out"),
    (spec(one(), max_claiming_tries=0), "max_claiming_tries", 0, " is 0", "give at least 1, or leave it out"),
    (spec(one(), coallocation=0), "coallocation", 0, " is 0", "give at least 1, or leave it out"),
    (
        spec(one(), speed_ratio_min=0.0),
        "speed_ratio_min",
        0.0,
        " is 0",
        "give a fraction above 0 and up to 1, or leave it out",
    ),
    (
        spec(one(), speed_ratio_min=1.5),
        "speed_ratio_min",
        1.5,
        " is 1.5",
        "give a fraction above 0 and up to 1, or leave it out",
    ),
    (
        spec(one(), claim_threshold=1.01),
        "claim_threshold",
        1.01,
        " is 1.01",
        "give a fraction from 0 to 1, or leave it out",
    ),
    (
        spec(one(), claim_threshold=-0.1),
        "claim_threshold",
        -0.1,
        " is -0.1",
        "give a fraction from 0 to 1, or leave it out",
    ),
    (spec(one(), retry_on_exit=(1, 0)), "retry_on_exit[1]", 0, " is 0", "give exit codes from 1 to 255"),
    (spec(one(), retry_on_exit=(256,)), "retry_on_exit[0]", 256, " is 256", "give exit codes from 1 to 255"),
    (spec(one(), walltime=0.0), "walltime", 0.0, " is 0", "give more than 0 seconds, or leave it out"),
    (spec(one(), walltime=-1.5), "walltime", -1.5, " is -1.5", "give more than 0 seconds, or leave it out"),
    (
        spec(one(), walltime=float("inf")),
        "walltime",
        float("inf"),
        " is inf",
        "give more than 0 seconds, or leave it out",
    ),
    (spec(one(), ()), "command", [], " is empty, and component 0 has none of its own", "give the program to run"),
    (spec(FlexibleRequest(2), ()), "command", [], " is empty", "give the program to run and its arguments"),
    (spec(one(), ("", "x")), "command[0]", "", " is empty", "begin with the program to run"),
    (spec(one(), ("a", "b\0")), "command[1]", "b\0", " is 'b\\x00', with a NUL in it", "leave out the NUL"),
    (
        spec(one(), environment=(("A", "1"), ("", "2"))),
        "environment",
        "",
        " has a variable without a name",
        "name it, or leave it out",
    ),
    (
        spec(one(), environment=(("A=B", "1"),)),
        "environment",
        "A=B",
        " has a variable named 'A=B'",
        "use a name without '=' and NUL",
    ),
    (
        spec(one(), environment=(("A\0", "1"),)),
        "environment",
        "A\0",
        " has a variable named 'A\\x00'",
        "use a name without '=' and NUL",
    ),
    (
        spec(one(), environment=(("A", "\0"),)),
        "environment.A",
        "\0",
        " is '\\x00', with a NUL in it",
        "leave out the NUL",
    ),
]

WRONG_COMPONENTS = [
    (spec(NonFixedRequest(())), "request.components", [], " is empty", "give at least one component"),
    (spec(FixedRequest(())), "request.components", [], " is empty", "give at least one component"),
    (spec(nonfixed(1, 0)), "request.components[1].size", 0, " is 0", "ask for at least 1 node"),
    (
        spec(one(command=())),
        "request.components[0].command",
        [],
        " is empty",
        "leave it out to run the job's own command",
    ),
    (spec(one(command=("",))), "request.components[0].command[0]", "", " is empty", "begin with the program to run"),
    (
        spec(one(environment=(("", "1"),))),
        "request.components[0].environment",
        "",
        " has a variable without a name",
        "name it, or leave it out",
    ),
    (
        spec(one(cluster="north")),
        "request.components[0].cluster",
        "north",
        " is north, but the request is nonfixed",
        "leave it out, or make the request fixed",
    ),
    (
        spec(FixedRequest((ComponentRequest(1),))),
        "request.components[0].cluster",
        None,
        " is missing",
        "a fixed request names the cluster of each component",
    ),
    (
        spec(fixed((1, "south"), (1, "nroth"))),
        "request.components[1].cluster",
        "nroth",
        " is nroth, and there is no such cluster",
        "did you mean north? known: north, south",
    ),
    (
        spec(fixed((1, "x"))),
        "request.components[0].cluster",
        "x",
        " is x, and there is no such cluster",
        "known: north, south",
    ),
]

WRONG_BOUNDS = [
    (split(0), "request.total_size", 0, " is 0", "ask for at least 1 node"),
    (split(2, least=0), "request.min_component_size", 0, " is 0", "ask for at least 1 node"),
    (split(2, least=3), "request.min_component_size", 3, " is 3, more than the total_size of 2", "give at most 2"),
    (split(2, most=0), "request.max_components", 0, " is 0", "give at least 1, or leave it out"),
    (split(3, (2, 1), ()), "request.split_options[1]", [], " is empty", "give the sizes of its components"),
    (split(3, (3, 0)), "request.split_options[0][1]", 0, " is 0", "ask for at least 1 node"),
    (
        split(4, (2, 2), (2, 1)),
        "request.split_options[1]",
        [2, 1],
        " sums to 3, but total_size is 4",
        "make its sizes sum to the total_size",
    ),
    (
        split(4, (3, 1), least=2),
        "request.split_options[0]",
        [3, 1],
        " has a component of 1, but min_component_size is 2",
        "leave out one of the two",
    ),
    (
        split(4, (2, 1, 1), most=2),
        "request.split_options[0]",
        [2, 1, 1],
        " has 3 components, but max_components is 2",
        "leave out one of the two",
    ),
]

TOO_LARGE = [
    (
        spec(FlexibleRequest(5), coallocation=1),
        "coallocation",
        1,
        " is 1, but no cluster has room for the whole request (north 4, south 3)",
        "allow more clusters, or ask for fewer nodes",
    ),
    (
        spec(nonfixed(2, 2, 1), coallocation=1),
        "coallocation",
        1,
        " is 1, but no cluster has room for the whole request (north 4, south 3)",
        "allow more clusters, or ask for fewer nodes",
    ),
    (
        spec(FlexibleRequest(5), policy="best-fit"),
        "request.total_size",
        5,
        " is 5, but policy best-fit takes one cluster, and none has more than 4 nodes",
        "ask for at most 4, or use another policy",
    ),
    (
        spec(fixed((1, "south"), (1, "north")), coallocation=1),
        "coallocation",
        1,
        " is 1, but the request names 2 clusters (north, south)",
        "allow 2, or name fewer clusters",
    ),
    (
        spec(fixed((5, "north"))),
        "request.components[0].size",
        5,
        " is 5, but north has 4 nodes",
        "ask for at most 4 on north",
    ),
    (
        spec(fixed((2, "south"), (1, "north"), (2, "south"))),
        "request.components[2].size",
        2,
        " is 2, but south has 3 nodes and the components there need 4",
        "ask for at most 3 on south",
    ),
    (
        spec(nonfixed(1, 5)),
        "request.components[1].size",
        5,
        " is 5, but no cluster has more than 4 nodes",
        "split it, or make the request flexible",
    ),
    (
        spec(nonfixed(3, 3, 2)),
        "request.components",
        [3, 3, 2],
        " need 8 nodes, but the whole grid has 7 nodes (north 4, south 3)",
        "ask for at most 7 in all",
    ),
    (
        spec(nonfixed(2, 3, 2)),
        "request.components",
        [2, 3, 2],
        " of 2+3+2 nodes never fit together by worst-fit, even on the empty grid (north 4, south 3)",
        "use smaller components, or make the request flexible",
    ),
    (
        split(8),
        "request.total_size",
        8,
        " is 8, but the whole grid has 7 nodes (north 4, south 3)",
        "ask for at most 7",
    ),
    (
        split(7, least=4),
        "request.min_component_size",
        4,
        " is 4, but the clusters with at least that many have 4 nodes (north 4, south 3)",
        "lower it, or ask for fewer nodes in all",
    ),
    (
        split(5, most=1),
        "request.max_components",
        1,
        " is 1, but that many clusters have at most 4 nodes (north 4, south 3)",
        "allow more, or ask for fewer nodes in all",
    ),
    (
        split(5, least=3),
        "request.min_component_size",
        3,
        " is 3, but 5 nodes need 2 clusters (north 4, south 3), too many for that",
        "lower it to 2 or less",
    ),
    (
        split(6, (6,), (5, 1)),
        "request.split_options",
        [[6], [5, 1]],
        " fit in none of the ways given, even on the empty grid (north 4, south 3)",
        "add one with smaller components",
    ),
]


@pytest.mark.parametrize(
    ("wrong", "field", "value", "problem", "hint"), WRONG_OPTIONS + WRONG_COMPONENTS + WRONG_BOUNDS + TOO_LARGE
)
def test_refuses(wrong: JobSpec, field: str, value: object, problem: str, hint: str) -> None:
    error = refusal(wrong)
    assert (error.field, error.value, error.message, error.hint) == (field, value, field + problem, hint)


@pytest.mark.parametrize("wrong", [case[0] for case in WRONG_OPTIONS + WRONG_COMPONENTS + WRONG_BOUNDS])
@pytest.mark.parametrize("clusters", [(), UNKNOWN])
def test_what_is_wrong_in_itself_is_refused_before_any_cluster_is_known(
    wrong: JobSpec, clusters: tuple[ClusterLimits, ...]
) -> None:
    known = refusal(wrong)
    if known.field.endswith(".cluster") or (isinstance(wrong.request, FixedRequest) and not clusters):
        assert refusal(wrong, clusters).field.startswith("request.components")
    else:
        assert refusal(wrong, clusters).message == known.message


@pytest.mark.parametrize("large", [spec(nonfixed(9)), spec(nonfixed(3, 3, 3)), split(9), split(9, (9,))])
@pytest.mark.parametrize("clusters", [(), UNKNOWN])
def test_sizes_are_not_checked_before_those_of_all_clusters_are_known(
    large: JobSpec, clusters: tuple[ClusterLimits, ...]
) -> None:
    refusal(large)
    check(large, clusters)


def test_a_fixed_request_needs_only_its_own_clusters_to_be_known() -> None:
    check(spec(fixed((9, "north"))), UNKNOWN)
    assert refusal(spec(fixed((9, "south"))), UNKNOWN).value == 9
    assert refusal(spec(fixed((1, "north"))), ()).hint == "known: none"


def test_more_components_of_a_size_than_fit_are_refused() -> None:
    error = refusal(
        spec(nonfixed(2, 3, 2)), (ClusterLimits("north", 5), ClusterLimits("south", 1), ClusterLimits("w", 1))
    )
    assert (error.field, error.value) == ("request.components", [2, 3, 2])
    assert error.message == (
        "request.components are 3 of at least 2 nodes, but the empty grid has room for 2 such (north 5, south 1, w 1)"
    )
    assert error.hint == "use smaller components, or make the request flexible"


def test_a_large_grid_is_named_by_its_largest_clusters() -> None:
    many = tuple(ClusterLimits(f"c{index}", index) for index in range(1, 8))
    assert refusal(split(29), many).message == (
        "request.total_size is 29, but the whole grid has 28 nodes (c7 7, c6 6, c5 5, c4 4 and 3 more)"
    )


GOOD = [
    spec(one(), walltime=0.5, processes_per_node=1, max_restarts=0, max_placement_tries=1),
    spec(one(), ("sh", ""), environment=(("EMPTY", ""), ("A", "x=y"))),
    spec(one(command=("hostname",)), ()),
    spec(fixed((4, "north"), (1, "south"), (2, "south"))),
    spec(nonfixed(2, 2, 3), policy="another"),
    spec(nonfixed(4, 1, 2)),
    split(7),
    split(7, least=3, most=2),
    split(6, (6,), (3, 3)),
    split(4, (2, 2), least=2, most=2),
]


@pytest.mark.parametrize("good", GOOD)
@pytest.mark.parametrize("clusters", [GRID, UNKNOWN])
def test_accepts(good: JobSpec, clusters: tuple[ClusterLimits, ...]) -> None:
    check(good, clusters)


limits_drawn = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(
    lambda totals: tuple(ClusterLimits(name, total) for name, total in zip(NAMES, totals, strict=False))
)
sizes_drawn = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def accepts(wanted: JobSpec, limits: tuple[ClusterLimits, ...]) -> bool:
    try:
        check(wanted, limits)
    except UsageError:
        return False
    return True


def placeable(wanted: JobSpec, limits: tuple[ClusterLimits, ...]) -> bool:
    """Whether the request's policy places it while every node is idle."""
    grid = GridView(tuple(ClusterView(c.name, c.total or 0, c.total or 0) for c in limits))
    return isinstance(builtin().resolve(wanted.policy, wanted.request).place(wanted.request, grid), Placement)


@given(sizes_drawn, limits_drawn)
def test_refuses_no_components_that_could_be_placed(sizes: list[int], limits: tuple[ClusterLimits, ...]) -> None:
    if can_be_assigned(sizes, [c.total or 0 for c in limits]):
        check(spec(nonfixed(*sizes), policy="another"), limits)


@given(st.lists(sizes_drawn, min_size=1, max_size=3), limits_drawn)
def test_accepts_components_for_worst_fit_exactly_when_it_places_them_on_the_empty_grid(
    options: list[list[int]], limits: tuple[ClusterLimits, ...]
) -> None:
    for sizes in options:
        wanted = spec(nonfixed(*sizes))
        assert (
            accepts(wanted, limits) == accepts(replace(wanted, policy="worst-fit"), limits) == placeable(wanted, limits)
        )
    total = sum(options[0])
    wanted = split(total, *(tuple(option) for option in options if sum(option) == total))
    assert accepts(wanted, limits) == placeable(wanted, limits)


@given(sizes_drawn, limits_drawn)
def test_refuses_a_single_component_exactly_when_no_cluster_is_large_enough(
    sizes: list[int], limits: tuple[ClusterLimits, ...]
) -> None:
    for size in sizes:
        assert accepts(spec(nonfixed(size)), limits) == any(size <= (c.total or 0) for c in limits)


@given(st.integers(1, 20), st.integers(1, 6), st.none() | st.integers(1, 4), limits_drawn)
def test_accepts_a_flexible_request_exactly_when_it_fits_on_the_empty_grid(
    total: int, least: int, most: int | None, limits: tuple[ClusterLimits, ...]
) -> None:
    wanted = split(total, least=least, most=most)
    ways = splits(total, [c.total or 0 for c in limits], least, len(limits) if most is None else most)
    fits = next(ways, None) is not None
    assert accepts(wanted, limits) == placeable(wanted, limits) == fits


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(NAMES)), min_size=1, max_size=4), limits_drawn)
def test_accepts_a_fixed_request_exactly_when_it_fits_on_the_empty_grid(
    components: list[tuple[int, str]], limits: tuple[ClusterLimits, ...]
) -> None:
    wanted = spec(fixed(*components))
    known = {limit.name for limit in limits}
    assert accepts(wanted, limits) == placeable(wanted, limits)
    assert accepts(wanted, limits) or refusal(wanted, limits).field.endswith(
        ".size" if all(name in known for _, name in components) else ".cluster"
    )


# What clusters have to offer

MIXED = (
    ClusterLimits("east", 2, ClusterProfile(scratch="/s", home="/h")),
    ClusterLimits("north", 4, ClusterProfile(scratch="/s")),
    ClusterLimits("south", 3, ClusterProfile(mpi=Mpi(4))),
)
SERIES_HINT = "name clusters of one series, or use the launcher processes"


def folder_hint(folder: str) -> str:
    return f"set {folder} in the cluster's configuration, or write {{{{{folder}}}}} for the text itself"


WRONG_PLACES = [
    (
        spec(fixed((1, "north"), (1, "south"))),
        "request.components[1].cluster",
        "south",
        " is south, but north has Open MPI 5, south 4: a job runs under one series",
        SERIES_HINT,
    ),
    (
        spec(fixed((1, "north")), workdir="{home}/x"),
        "workdir",
        "{home}/x",
        " needs {home}, but cluster north has no home folder",
        folder_hint("home"),
    ),
    (
        spec(fixed((1, "north"), (1, "south")), ("a", "{scratch}"), launcher=Launcher.PROCESSES),
        "command[1]",
        "{scratch}",
        " needs {scratch}, but cluster south has no scratch folder",
        folder_hint("scratch"),
    ),
    (
        spec(FixedRequest((ComponentRequest(1, "south", output="{scratch}"),))),
        "request.components[0].output",
        "{scratch}",
        " needs {scratch}, but cluster south has no scratch folder",
        folder_hint("scratch"),
    ),
    (
        spec(FlexibleRequest(7)),
        "request.total_size",
        7,
        " fits on the grid, but not on clusters with one series of Open MPI"
        " (Open MPI 5: north 4, east 2; Open MPI 4: south 3)",
        "ask for less, or use the launcher processes",
    ),
    (
        spec(nonfixed(4, 3)),
        "request.components",
        [4, 3],
        " fits on the grid, but not on clusters with one series of Open MPI"
        " (Open MPI 5: north 4, east 2; Open MPI 4: south 3)",
        "ask for less, or use the launcher processes",
    ),
]


@pytest.mark.parametrize(("wrong", "field", "value", "problem", "hint"), WRONG_PLACES)
def test_refuses_what_no_cluster_can_run(wrong: JobSpec, field: str, value: object, problem: str, hint: str) -> None:
    error = refusal(wrong, MIXED)
    assert (error.field, error.value, error.message, error.hint) == (field, value, field + problem, hint)


def test_refuses_a_folder_that_no_cluster_has() -> None:
    for clusters in (GRID, UNKNOWN):
        error = refusal(spec(nonfixed(1), ("sh", "-c", "cd {scratch}")), clusters)
        assert (error.field, error.value) == ("command[2]", "cd {scratch}")
        assert error.message == "command[2] needs {scratch}, and no cluster has a scratch folder"


def test_what_does_not_fit_where_the_folders_are_says_so() -> None:
    error = refusal(spec(FlexibleRequest(7), ("{scratch}",)), MIXED)
    assert error.field == "request.total_size"
    assert error.message == (
        "request.total_size is 7, but the whole grid has 6 nodes (north 4, east 2); cluster south has no scratch folder"
    )


@pytest.mark.parametrize(
    "good",
    [
        spec(fixed((1, "north"), (1, "south")), launcher=Launcher.PROCESSES),
        spec(fixed((1, "north"), (1, "east")), ("{scratch}",)),
        spec(FlexibleRequest(6)),
        spec(FlexibleRequest(6), ("{scratch}",)),
        spec(FlexibleRequest(2), ("{home}",)),
        spec(FlexibleRequest(9), launcher=Launcher.PROCESSES),
        spec(FlexibleRequest(2), ("${scratch}", "{{home}}", "{cluster}")),
        spec(nonfixed(4, 2)),
        spec(nonfixed(3)),
    ],
)
def test_accepts_what_some_clusters_can_run(good: JobSpec) -> None:
    check(good, MIXED)


FAST_AND_SLOW = (ClusterLimits("north", 4, speed=2.0), ClusterLimits("south", 3), ClusterLimits("west", 1, speed=1.8))


def test_clusters_of_too_different_speeds_do_not_count_together() -> None:
    error = refusal(spec(FlexibleRequest(6), speed_ratio_min=0.9), FAST_AND_SLOW)
    assert (error.field, error.value, error.hint) == ("speed_ratio_min", 0.9, "lower it, or ask for fewer nodes")
    assert error.message == (
        "speed_ratio_min is 0.9, but clusters with such speeds have no room for the request together "
        "(north 4 of speed 2, west 1 of speed 1.8, south 3 of speed 1)"
    )
    check(spec(FlexibleRequest(5), speed_ratio_min=0.9), FAST_AND_SLOW)
    check(spec(FlexibleRequest(8), speed_ratio_min=0.5), FAST_AND_SLOW)
    named = refusal(spec(fixed((1, "south"), (1, "north")), speed_ratio_min=0.9), FAST_AND_SLOW)
    assert named.message == "speed_ratio_min is 0.9, but south has speed 1 and north 2"
    assert refusal(spec(FlexibleRequest(5), speed_ratio_min=0.9, coallocation=1), FAST_AND_SLOW).field == "coallocation"


def test_nothing_is_refused_for_sizes_while_they_are_not_known() -> None:
    check(spec(FlexibleRequest(5), coallocation=1, speed_ratio_min=1.0), UNKNOWN)
    check(spec(FlexibleRequest(9), policy="best-fit"), UNKNOWN)


class Alone(Another):
    """A policy of another package that declares what it can do."""

    name = "alone"
    combines_clusters = False
    fits = staticmethod(lambda sizes, idle: len(sizes) < 3)  # type: ignore[assignment]


def test_what_a_policy_of_another_package_declares_counts_as_that_of_one_that_ships() -> None:
    policies = builtin()
    policies.register(Alone())
    limits = Limits(GRID, policies)
    submission.check(spec(nonfixed(2, 2), policy="alone"), limits)
    with pytest.raises(UsageError) as refused:
        submission.check(spec(nonfixed(1, 1, 1), policy="alone"), limits)
    assert "of 1+1+1 nodes never fit together by alone, even on the empty grid" in refused.value.message
    with pytest.raises(UsageError) as refused:
        submission.check(spec(nonfixed(3, 2), policy="alone"), limits)
    assert refused.value.message.endswith("is 5, but policy alone takes one cluster, and none has more than 4 nodes")


def test_the_policy_is_checked_last() -> None:
    assert refusal(spec(one(), policy="nope")).message == "there is no policy nope"
    assert refusal(spec(nonfixed(9), policy="nope")).field == "request.components[0].size"
    assert refusal(spec(FlexibleRequest(1), policy="worst-fit")).field == "policy"
