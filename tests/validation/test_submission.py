"""Invalid fields of a submission, with field, message and hint, and the order of the checks."""

import inspect
import re

import pytest

from koalapy.agent import main as agent_main
from koalapy.daemon.agents import wire
from koalapy.model.errors import UsageError
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest
from koalapy.policies.registry import builtin_policies
from koalapy.runner import process_launcher
from koalapy.runner import settings as runtime_settings
from koalapy.runner.plan import Plan
from koalapy.runner.script import ScriptHead
from koalapy.validation import submission
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.request import RESERVED_VARIABLES
from tests.policies.grids import fixed, nonfixed
from tests.validation.submissions import (
    GRID,
    POLICIES,
    UNKNOWN,
    Another,
    check_rejection,
    check_spec,
    make_spec,
    make_split,
    one_component,
    rejection_of,
)

WRONG_OPTIONS = {
    "cpus_per_rank is 16, for 8192 processes on each node: more than any node has processors; give": make_spec(
        one_component(), processes_per_node=8192, cpus_per_rank=16
    ),
    "share is true, but the job does not say how many cores it needs of each node; give --cores": make_spec(
        one_component(), share=True
    ),
    "share is true, but two components of the job could get the same node; name another cluster for each": make_spec(
        NonFixedRequest((ComponentRequest(1), ComponentRequest(1))), share=True, cores=1
    ),
    "cpus_per_rank is 0; give at least 1, or leave it out": make_spec(one_component(), cpus_per_rank=0),
    "cores is 100000, more than any node has; give at most 65536, or leave it out": make_spec(
        one_component(), cores=100_000
    ),
    "processes_per_node is 10000, more than any node has processors; give at most 8192, or leave it out": make_spec(
        one_component(), processes_per_node=10_000
    ),
    "processes_per_node is 0; give at least 1, or leave it out": make_spec(one_component(), processes_per_node=0),
    "exclude[1] is 'n[3-1]', which is not a range of nodes; give numbers in ascending order, as n[1-3]": make_spec(
        one_component(), exclude=("n1", "n[3-1]")
    ),
    "exclude stands for 100003 nodes; at most 100000 can be excluded; name fewer nodes": make_spec(
        one_component(), exclude=("a[1-50000]", "b[1-50001]", "c", "d")
    ),
    "max_restarts is -1; give at least 0, or leave it out": make_spec(one_component(), max_restarts=-1),
    "max_placement_tries is 0; give at least 1, or leave it out": make_spec(one_component(), max_placement_tries=0),
    "max_claiming_tries is 0; give at least 1, or leave it out": make_spec(one_component(), max_claiming_tries=0),
    "coallocation is 0; give at least 1, or leave it out": make_spec(one_component(), coallocation=0),
    "speed_ratio_min is 0; give a fraction above 0 and up to 1, or leave it out": make_spec(
        one_component(), speed_ratio_min=0.0
    ),
    "speed_ratio_min is 1.5; give a fraction above 0 and up to 1, or leave it out": make_spec(
        one_component(), speed_ratio_min=1.5
    ),
    "claim_threshold is 1.01; give a fraction from 0 to 1, or leave it out": make_spec(
        one_component(), claim_threshold=1.01
    ),
    "claim_threshold is -0.1; give a fraction from 0 to 1, or leave it out": make_spec(
        one_component(), claim_threshold=-0.1
    ),
    "retry_on_exit[1] is 0; give exit codes from 1 to 255": make_spec(one_component(), retry_on_exit=(1, 0)),
    "retry_on_exit[0] is 256; give exit codes from 1 to 255": make_spec(one_component(), retry_on_exit=(256,)),
    "walltime is 0; give more than 0 seconds, or leave it out": make_spec(one_component(), walltime=0.0),
    "walltime is -1.5; give more than 0 seconds, or leave it out": make_spec(one_component(), walltime=-1.5),
    "walltime is inf; give more than 0 seconds, or leave it out": make_spec(one_component(), walltime=float("inf")),
    "command is empty, and component 0 has none of its own; give the program to run": make_spec(one_component(), ()),
    "command is empty; give the program to run and its arguments": make_spec(FlexibleRequest(2), ()),
    "command[0] is empty; begin with the program to run": make_spec(one_component(), ("", "x")),
    "command[1] is 'b\\x00', with a NUL in it; leave out the NUL": make_spec(one_component(), ("a", "b\0")),
    "environment has a variable without a name; name it, or leave it out": make_spec(
        one_component(), environment=(("A", "1"), ("", "2"))
    ),
    "environment has a variable named 'A=B'; use a name without '=' and NUL": make_spec(
        one_component(), environment=(("A=B", "1"),)
    ),
    "environment has a variable named 'A\\x00'; use a name without '=' and NUL": make_spec(
        one_component(), environment=(("A\0", "1"),)
    ),
    "environment.A is '\\x00', with a NUL in it; leave out the NUL": make_spec(
        one_component(), environment=(("A", "\0"),)
    ),
}

WRONG_COMPONENTS = {
    "request.components is empty; give at least one component": make_spec(NonFixedRequest(())),
    "request.components is empty; give at least": make_spec(FixedRequest(())),
    "request.components[1].size is 0; ask for at least 1 node": make_spec(nonfixed(1, 0)),
    "request.components[0].command is empty; leave it out to run the job's own command": make_spec(
        one_component(command=())
    ),
    "request.components[0].command[0] is empty; begin with the program to run": make_spec(one_component(command=("",))),
    "request.components[0].environment has a variable without a name; name it, or leave it out": make_spec(
        one_component(environment=(("", "1"),))
    ),
    "request.components[0].cluster is north, but the request is nonfixed; leave it out": make_spec(
        one_component(cluster="north")
    ),
    "request.components[0].cluster is missing; a fixed request names the cluster of each component": make_spec(
        FixedRequest((ComponentRequest(1),))
    ),
    "request.components[1].cluster is nroth, and there is no such cluster; did you mean north?": make_spec(
        fixed((1, "south"), (1, "nroth"))
    ),
    "request.components[0].cluster is x, and there is no such cluster; known: north, south": make_spec(fixed((1, "x"))),
}

WRONG_BOUNDS = {
    "request.total_size is 0; ask for at least 1 node": make_split(0),
    "request.min_component_size is 0; ask for at least 1 node": make_split(2, min_size=0),
    "request.min_component_size is 3, more than the total_size of 2; give at most 2": make_split(2, min_size=3),
    "request.max_components is 0; give at least 1, or leave it out": make_split(2, max_count=0),
    "request.split_options[1] is empty; give the sizes of its components": make_split(3, (2, 1), ()),
    "request.split_options[0][1] is 0; ask for at least 1 node": make_split(3, (3, 0)),
    "request.split_options[1] sums to 3, but total_size is 4; make its sizes sum to the total_size": make_split(
        4, (2, 2), (2, 1)
    ),
    "request.split_options[0] has a component of 1, but min_component_size is 2; leave out one of the two": make_split(
        4, (3, 1), min_size=2
    ),
    "request.split_options[0] has 3 components, but max_components is 2; leave out one of the two": make_split(
        4, (2, 1, 1), max_count=2
    ),
}


WRONG = WRONG_OPTIONS | WRONG_COMPONENTS | WRONG_BOUNDS
"""Submissions by the problem and hint of their rejection."""


@pytest.mark.parametrize("text", WRONG)
def test_check_submission_with_invalid_field_is_rejected(text: str) -> None:
    check_rejection(text, WRONG[text])


@pytest.mark.parametrize("wrong", WRONG.values())
@pytest.mark.parametrize("clusters", [(), UNKNOWN])
def test_check_submission_without_clusters_rejects_invalid_fields(
    wrong: JobSpec, clusters: tuple[ClusterLimits, ...]
) -> None:
    rejection = rejection_of(wrong)
    if rejection.field.endswith(".cluster") or (isinstance(wrong.request, FixedRequest) and not clusters):
        assert rejection_of(wrong, clusters).field.startswith("request.components")
    else:
        assert rejection_of(wrong, clusters).message == rejection.message


GOOD = [
    make_spec(one_component(), walltime=0.5, processes_per_node=1, max_restarts=0, max_placement_tries=1),
    make_spec(one_component(), ("sh", ""), environment=(("EMPTY", ""), ("A", "x=y"))),
    make_spec(one_component(command=("hostname",)), ()),
    make_spec(fixed((4, "north"), (1, "south"), (2, "south"))),
    make_spec(nonfixed(2, 2, 3), policy="another"),
    make_spec(nonfixed(4, 1, 2)),
    make_split(7),
    make_split(7, min_size=3, max_count=2),
    make_split(6, (6,), (3, 3)),
    make_split(4, (2, 2), min_size=2, max_count=2),
]


@pytest.mark.parametrize("good", GOOD)
@pytest.mark.parametrize("clusters", [GRID, UNKNOWN])
def test_check_submission_with_valid_fields_is_accepted(good: JobSpec, clusters: tuple[ClusterLimits, ...]) -> None:
    check_spec(good, clusters)


class Alone(Another):
    """A policy of another package that declares its capabilities."""

    name = "alone"
    combines_clusters = False
    fits_empty_grid = staticmethod(lambda sizes, idle: len(sizes) < 3)  # type: ignore[assignment]


def test_check_submission_uses_capabilities_of_external_policy() -> None:
    policies = builtin_policies()
    policies.register(Alone())
    limits = Limits(GRID, policies)
    submission.check_submission(make_spec(nonfixed(2, 2), policy="alone"), limits)
    with pytest.raises(UsageError) as refused:
        submission.check_submission(make_spec(nonfixed(1, 1, 1), policy="alone"), limits)
    assert "of 1+1+1 nodes never fit together by alone, even on the empty grid" in refused.value.message
    with pytest.raises(UsageError) as refused:
        submission.check_submission(make_spec(nonfixed(3, 2), policy="alone"), limits)
    assert refused.value.message.endswith("is 5, but policy alone takes one cluster, and none has more than 4 nodes")


def test_check_submission_checks_policy_last() -> None:
    assert rejection_of(make_spec(one_component(), policy="nope")).message == "there is no policy nope"
    assert rejection_of(make_spec(nonfixed(9), policy="nope")).field == "request.components[0].size"
    assert rejection_of(make_spec(FlexibleRequest(1), policy="worst-fit")).field == "policy"


def test_check_submission_checks_operator_limits_first() -> None:
    with pytest.raises(UsageError) as refused:
        submission.check_submission(
            make_spec(nonfixed(1, 9, 1), policy="nope"), Limits(GRID, POLICIES, max_components=2)
        )
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
    job = make_spec(**{"request": nonfixed(1), **large})  # type: ignore[arg-type]
    submission.check_submission(job, Limits(GRID, POLICIES, max_bytes=20_000))
    with pytest.raises(UsageError, match="more than max_bytes_per_job, 5000") as refused:
        submission.check_submission(job, Limits(GRID, POLICIES, max_bytes=5000))
    assert refused.value.field == field
    assert "rules.max_bytes_per_job" in refused.value.hint


def test_check_with_as_many_bytes_as_a_job_may_have_accepts_it() -> None:
    job = make_spec(nonfixed(1), ("x" * 1000,))
    size = next(n for n in range(1000, 2000) if _is_accepted(job, n))
    assert 1000 < size < 1200
    assert not _is_accepted(job, size - 1)


def _is_accepted(job: JobSpec, max_bytes: int) -> bool:
    try:
        submission.check_submission(job, Limits(GRID, POLICIES, max_bytes=max_bytes))
    except UsageError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(RESERVED_VARIABLES))
def test_variable_that_runner_sets_is_refused(name: str) -> None:
    refused = rejection_of(make_spec(one_component(), environment=((name, "5"),)))
    assert (refused.field, refused.message) == (
        f"environment.{name}",
        f"environment.{name} is set by koalapy on each node",
    )
    component = ComponentRequest(1, environment=((name, "5"),))
    assert rejection_of(make_spec(NonFixedRequest((component,)))).field == f"request.components[0].environment.{name}"
    check_spec(make_spec(one_component(), environment=((f"{name}_OF_MINE", "5"),)), GRID)


OF_AGENTS = {"KOALA_AGENT_TOKEN", "KOALA_CONFIG", "KOALA_SCRATCH"}
"""Variables of an agent that its jobs do not get, or get from its site."""


def test_reserved_variables_are_those_of_the_runner() -> None:
    sources = (Plan.environment, ScriptHead, process_launcher, runtime_settings, wire, agent_main)
    source = "".join(map(inspect.getsource, sources))
    variables = set(re.findall(r"\bKOALA_[A-Z_]+", source))
    assert variables - OF_AGENTS == RESERVED_VARIABLES


def test_several_processes_per_node_without_mpi_are_refused() -> None:
    refused = rejection_of(make_spec(one_component(), launcher=Launcher.PROCESSES, processes_per_node=2))
    assert (refused.field, refused.hint) == ("processes_per_node", "leave it out, or use the launcher openmpi")
    check_spec(make_spec(one_component(), launcher=Launcher.PROCESSES, processes_per_node=1), GRID)


@pytest.mark.parametrize(
    ("name", "problem", "hint"),
    [
        ("run-%4j.out", "and %4 has no meaning", "use %j for the job's id, "),
        ("%n_%a.out", "and %n has no meaning", "use %j for the job's id, "),
        ("100%", "and % has no meaning", "%% for a percent sign"),
        ("run-{job}", "and {job} is for commands and working directories", "write %j in its place"),
        ("{{cluster}}", "and {cluster} is for commands and working directories", "write %c in its place"),
        ("", "which no file can have as its name", "name a file, or leave it out"),
        ("a\0b", "which no file can have as its name", "name a file, or leave it out"),
    ],
)
def test_output_file_with_unsuited_name_is_refused(name: str, problem: str, hint: str) -> None:
    for field in ("output", "error"):
        refused = rejection_of(make_spec(one_component(), **{field: name}))
        assert refused.field == field
        assert problem in refused.message
        assert hint in refused.hint
        own = FixedRequest((ComponentRequest(1, "north", **{field: name}),))
        assert rejection_of(make_spec(own)).field == f"request.components[0].{field}"


def test_output_file_with_all_patterns_is_accepted() -> None:
    check_spec(make_spec(one_component(), output="%x-%j-%A_%a.%c.%r-100%%.out", error="err"), GRID)


def test_relative_working_directory_is_refused() -> None:
    assert rejection_of(make_spec(one_component(), workdir="relative")).field == "workdir"
    check_spec(make_spec(one_component(), workdir="/absolute"), GRID)


@pytest.mark.parametrize(
    ("field", "value"), [("label", True), ("output", "out.%r"), ("error", "%%%r"), ("output", "{job}")]
)
def test_script_with_ranks_in_its_output_is_refused(field: str, value: object) -> None:
    fields = {"script": "#!/bin/sh\ntrue\n", field: value}
    assert rejection_of(make_spec(one_component(), **fields)).field == field  # type: ignore[arg-type]
