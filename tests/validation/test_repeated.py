"""Checks of submissions that differ from accepted ones in their commands and names."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.errors import UsageError
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, NonFixedRequest
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.submission import MAX_KIND_BYTES, MAX_KINDS, SubmissionChecks, check_submission
from tests.validation.submissions import GRID, POLICIES

FLEXIBLE = FlexibleRequest(3)
COMPONENTS = (ComponentRequest(1), ComponentRequest(2, command=("{scratch}/own",)))
GRID_WITH_FOLDER = (ClusterLimits("north", 4, ClusterProfile(scratch="/scratch")), ClusterLimits("south", 3))
commands = st.lists(st.sampled_from(["run", "", "{scratch}/x", "{input}", "a\0b", "long" * 20]), max_size=3).map(tuple)
specs = st.builds(
    JobSpec,
    st.sampled_from([
        FLEXIBLE,
        FlexibleRequest(9),
        NonFixedRequest(COMPONENTS),
        FixedRequest((ComponentRequest(1, "north"), ComponentRequest(1, "nowhere"))),
        FixedRequest((ComponentRequest(1, "north", command=("{scratch}/own",)), ComponentRequest(1, "south"))),
        FixedRequest((ComponentRequest(3, "south"),)),
    ]),
    commands,
    name=st.sampled_from(["", "study", "name" * 20]),
    policy=st.sampled_from(["", "worst-fit", "auto"]),
    script=st.sampled_from(["", "#!/bin/sh\n"]),
    walltime=st.sampled_from([None, 60.0]),
    processes_per_node=st.sampled_from([None, 0, 2]),
    launcher=st.sampled_from(Launcher),
)  # fmt: skip


class CountedLimits:
    """Limits that count the jobs for which a policy is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.limits = Limits(GRID, POLICIES, refusal_on_empty_grid=self._refuse_nothing)

    def _refuse_nothing(self, _: JobSpec) -> str:
        self.asked += 1
        return ""


def outcome_of(check: object, spec: JobSpec, limits: Limits) -> object:
    """Return the message, field, value and hint of a rejection; None for an accepted submission."""
    assert callable(check)
    try:
        check(spec, limits)
    except UsageError as error:
        return str(error), error.field, error.value, error.hint
    return None


@given(st.lists(specs, min_size=2, max_size=6), st.sampled_from([None, 60, 150]))
def test_check_of_several_submissions_has_outcomes_of_single_checks(
    submissions: Sequence[JobSpec], max_bytes: int | None
) -> None:
    checks, limits = SubmissionChecks(), Limits(GRID_WITH_FOLDER, POLICIES, max_bytes=max_bytes)
    for spec in (*submissions, *(replace(spec, command=submissions[0].command) for spec in submissions)):
        assert outcome_of(checks.check, spec, limits) == outcome_of(check_submission, spec, limits)


def test_check_finds_folder_that_the_cluster_of_a_component_lacks() -> None:
    request = FixedRequest((ComponentRequest(1, "north", command=("{scratch}/own",)), ComponentRequest(1, "south")))
    checks, limits = SubmissionChecks(), Limits(GRID_WITH_FOLDER, POLICIES)
    checks.check(JobSpec(request, ("true",)), limits)
    with pytest.raises(UsageError, match="scratch"):
        checks.check(JobSpec(request, ("{scratch}/job",)), limits)


def test_check_of_another_command_and_name_asks_the_policy_once() -> None:
    checks, counted = SubmissionChecks(), CountedLimits()
    for number in range(3):
        checks.check(JobSpec(FLEXIBLE, ("run", str(number)), name=f"case {number}"), counted.limits)
    assert counted.asked == 1


@pytest.mark.parametrize("change", [{"walltime": 60.0}, {"owner": "alice"}, {"request": FlexibleRequest(2)}])
def test_check_of_another_field_asks_the_policy_again(change: dict[str, object]) -> None:
    checks, counted, spec = SubmissionChecks(), CountedLimits(), JobSpec(FLEXIBLE, ("run",))
    checks.check(spec, counted.limits)
    checks.check(spec.with_fields(**change), counted.limits)
    assert counted.asked == 2


def test_check_under_new_limits_asks_the_policy_again() -> None:
    checks, first, second, spec = SubmissionChecks(), CountedLimits(), CountedLimits(), JobSpec(FLEXIBLE, ("run",))
    for counted in (first, second, first):
        checks.check(spec, counted.limits)
    assert (first.asked, second.asked) == (2, 1)


def test_check_with_learning_policy_asks_it_for_each_job() -> None:
    checks, counted = SubmissionChecks(), CountedLimits()
    for _ in range(2):
        checks.check(JobSpec(FLEXIBLE, ("run",), policy="auto"), counted.limits)
    assert counted.asked == 2


def test_check_does_not_keep_large_submissions() -> None:
    checks, counted = SubmissionChecks(), CountedLimits()
    for _ in range(2):
        checks.check(JobSpec(FLEXIBLE, ("run",), environment=(("A", "b" * MAX_KIND_BYTES),)), counted.limits)
    assert counted.asked == 2


def test_check_of_many_kinds_forgets_the_first() -> None:
    checks, counted = SubmissionChecks(), CountedLimits()
    for walltime in (*range(1, MAX_KINDS + 2), 1):
        checks.check(JobSpec(FLEXIBLE, ("run",), walltime=float(walltime)), counted.limits)
    assert counted.asked == MAX_KINDS + 2
