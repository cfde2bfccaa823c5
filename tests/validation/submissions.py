"""Submissions and limits for tests of validation."""

from dataclasses import replace

import pytest

from koalapy.model.errors import UsageError
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, NonFixedRequest, Request
from koalapy.model.users import Accounts
from koalapy.policies.registry import builtin_policies
from koalapy.policies.worst_fit import WorstFit
from koalapy.validation import submission
from koalapy.validation.limits import ClusterLimits, Limits

GRID = (ClusterLimits("north", 4), ClusterLimits("south", 3))
UNKNOWN = (ClusterLimits("north", None), ClusterLimits("south", 3))
RUN = ("true",)


class Another(WorstFit):
    """A policy that the validation does not know."""

    name = "another"
    fits_empty_grid = None  # type: ignore[assignment]


POLICIES = builtin_policies()
POLICIES.register(Another())


def check_spec(spec: JobSpec, clusters: tuple[ClusterLimits, ...], accounts: Accounts | None = None) -> None:
    submission.check_submission(spec, Limits(clusters, POLICIES, accounts=accounts or Accounts()))


def make_spec(request: Request, command: tuple[str, ...] = RUN, **options: object) -> JobSpec:
    return replace(JobSpec(request, command), **options)  # type: ignore[arg-type]


def one_component(**component: object) -> NonFixedRequest:
    return NonFixedRequest((ComponentRequest(**({"size": 1} | component)),))  # type: ignore[arg-type]


def make_split(total: int, *options: tuple[int, ...], min_size: int = 1, max_count: int | None = None) -> JobSpec:
    return make_spec(FlexibleRequest(total, min_size, max_count, options))


def rejection_of(
    spec: JobSpec, clusters: tuple[ClusterLimits, ...] = GRID, accounts: Accounts | None = None
) -> UsageError:
    with pytest.raises(UsageError) as refused:
        check_spec(spec, clusters, accounts)
    return refused.value


def check_rejection(text: str, wrong: JobSpec, clusters: tuple[ClusterLimits, ...] = GRID) -> None:
    """Check that a submission is rejected with this text of problem and hint, which begins with the field."""
    error = rejection_of(wrong, clusters)
    assert f"{error.message}; {error.hint}".startswith(text)
    assert error.message.partition(" ")[0] == error.field
