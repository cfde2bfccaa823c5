"""What is wrong in itself: the field, the message and the way out; and what is held against a submission at all."""

import inspect
import re

import pytest

from koalapy.model.errors import UsageError
from koalapy.model.job import JobSpec, Launcher
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest
from koalapy.policies.registry import builtin_policies
from koalapy.runner import settings as runtime_settings
from koalapy.runner.plan import Plan
from koalapy.validation import submission
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.request import RESERVED_VARIABLES
from tests.policies.grids import fixed, nonfixed
from tests.validation.submissions import GRID, POLICIES, UNKNOWN, Another, check, one, refusal, spec, split

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
    (
        spec(FlexibleRequest(2), policy="resource-matching", memory=0),
        "memory",
        0,
        " is 0",
        "give at least 1 byte, or leave it out",
    ),
    (
        spec(one(), memory=2 * 10**9),
        "memory",
        2 * 10**9,
        " is 2 GB, and policy worst-fit does not go by what nodes have",
        "leave it out, or use policy resource-matching",
    ),
    (
        spec(FlexibleRequest(2), policy="auto", memory=10**9),
        "memory",
        10**9,
        " is 1 GB, and policy auto does not go by what nodes have",
        "leave it out, or use policy resource-matching",
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


@pytest.mark.parametrize(
    ("wrong", "field", "value", "problem", "hint"), WRONG_OPTIONS + WRONG_COMPONENTS + WRONG_BOUNDS
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


class Alone(Another):
    """A policy of another package that declares what it can do."""

    name = "alone"
    combines_clusters = False
    fits_empty_grid = staticmethod(lambda sizes, idle: len(sizes) < 3)  # type: ignore[assignment]


def test_what_a_policy_of_another_package_declares_counts_as_that_of_one_that_ships() -> None:
    policies = builtin_policies()
    policies.register(Alone())
    limits = Limits(GRID, policies)
    submission.check_submission(spec(nonfixed(2, 2), policy="alone"), limits)
    with pytest.raises(UsageError) as refused:
        submission.check_submission(spec(nonfixed(1, 1, 1), policy="alone"), limits)
    assert "of 1+1+1 nodes never fit together by alone, even on the empty grid" in refused.value.message
    with pytest.raises(UsageError) as refused:
        submission.check_submission(spec(nonfixed(3, 2), policy="alone"), limits)
    assert refused.value.message.endswith("is 5, but policy alone takes one cluster, and none has more than 4 nodes")


def test_the_policy_is_checked_last() -> None:
    assert refusal(spec(one(), policy="nope")).message == "there is no policy nope"
    assert refusal(spec(nonfixed(9), policy="nope")).field == "request.components[0].size"
    assert refusal(spec(FlexibleRequest(1), policy="worst-fit")).field == "policy"


def test_what_is_larger_than_the_operator_allows_is_refused_first() -> None:
    with pytest.raises(UsageError) as refused:
        submission.check_submission(spec(nonfixed(1, 9, 1), policy="nope"), Limits(GRID, POLICIES, max_components=2))
    assert refused.value.message == "request.components has 3 components, more than max_components_per_job, 2"


@pytest.mark.parametrize(
    ("large", "field"),
    [
        ({"environment": tuple((f"V{n}", "x" * 1000) for n in range(10))}, "environment"),
        ({"command": ("true", "ä" * 4000)}, "command"),
        ({"collect": tuple(f"{n}*" for n in range(2000))}, "collect"),
        ({"request": NonFixedRequest((ComponentRequest(1, environment=(("A", "x" * 8000),)),))}, "request"),
    ],
)
def test_check_with_more_bytes_than_a_job_may_have_names_largest_field_and_setting(
    large: dict[str, object], field: str
) -> None:
    job = spec(**{"request": nonfixed(1), **large})  # type: ignore[arg-type]
    submission.check_submission(job, Limits(GRID, POLICIES, max_bytes=20_000))
    with pytest.raises(UsageError, match="more than max_bytes_per_job, 5000") as refused:
        submission.check_submission(job, Limits(GRID, POLICIES, max_bytes=5000))
    assert refused.value.field == field
    assert "rules.max_bytes_per_job" in refused.value.hint


def test_check_with_as_many_bytes_as_a_job_may_have_accepts_it() -> None:
    job = spec(nonfixed(1), ("x" * 1000,))
    size = next(n for n in range(1000, 2000) if _is_accepted(job, n))
    assert 1000 < size < 1100
    assert not _is_accepted(job, size - 1)


def _is_accepted(job: JobSpec, most: int) -> bool:
    try:
        submission.check_submission(job, Limits(GRID, POLICIES, max_bytes=most))
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(RESERVED_VARIABLES))
def test_variable_that_runner_sets_is_refused(name: str) -> None:
    refused = refusal(spec(one(), environment=((name, "5"),)))
    assert (refused.field, refused.message) == (
        f"environment.{name}",
        f"environment.{name} is set by koalapy on each node",
    )
    component = ComponentRequest(1, environment=((name, "5"),))
    assert refusal(spec(NonFixedRequest((component,)))).field == f"request.components[0].environment.{name}"
    check(spec(one(), environment=((f"{name}_OF_MINE", "5"),)), GRID)


def test_reserved_variables_are_those_of_the_runner() -> None:
    source = inspect.getsource(Plan.environment) + inspect.getsource(runtime_settings)
    named = set(re.findall(r"\bKOALA_[A-Z_]+", source))
    assert {name for name in named if not name.startswith("KOALA_MPI_")} == RESERVED_VARIABLES


def test_several_processes_per_node_without_mpi_are_refused() -> None:
    refused = refusal(spec(one(), launcher=Launcher.PROCESSES, processes_per_node=2))
    assert (refused.field, refused.hint) == ("processes_per_node", "leave it out, or use the launcher openmpi")
    check(spec(one(), launcher=Launcher.PROCESSES, processes_per_node=1), GRID)


@pytest.mark.parametrize("output", ["slurm-%j.out", "/home/ada/%4j", "%A_%a.out"])
def test_output_with_number_pattern_of_slurm_is_refused(output: str) -> None:
    refused = refusal(spec(one(), output=output))
    assert (refused.field, refused.hint) == ("output", "write {job} in its place")
    check(spec(one(), output="run-{job}-100%.out"), GRID)


def test_relative_working_directory_is_refused() -> None:
    assert refusal(spec(one(), workdir="relative")).field == "workdir"
    check(spec(one(), workdir="/absolute"), GRID)
