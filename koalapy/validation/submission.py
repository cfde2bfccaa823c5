"""All that is held against a submission before it becomes a job (semantics 2).

Each check is whole: it raises ``UsageError`` with the field, its value and the way out, or says nothing. The first that
fails is told. What inputs mean by the replica catalogue is worked out by ``inputs``, once ``check_size`` allows.
"""

from collections.abc import Callable

from koalapy.model.job import JobSpec
from koalapy.validation.combination import check_combination
from koalapy.validation.fields import check_fields
from koalapy.validation.fitting import check_fits, check_fits_one_series
from koalapy.validation.limits import Limits
from koalapy.validation.program import check_program, check_warning
from koalapy.validation.request import check_components, check_flexible
from koalapy.validation.site import check_accounts, check_folders, check_home_site, check_mpi_series
from koalapy.validation.size import check_size


def check_policy(spec: JobSpec, limits: Limits) -> None:
    """There is such a policy, it has such options and serves such requests, and its own check passes (semantics 3)."""
    limits.policies.resolve(spec.policy, spec.request, spec.policy_options)


CHECKS: tuple[Callable[[JobSpec, Limits], None], ...] = (
    check_size,
    check_fields,
    check_program,
    check_warning,
    check_components,
    check_flexible,
    check_accounts,
    check_home_site,
    check_folders,
    check_mpi_series,
    check_fits,
    check_fits_one_series,
    check_combination,
    check_policy,
)


def check(spec: JobSpec, limits: Limits) -> None:
    """``UsageError`` for the first thing that can never work, whatever becomes idle."""
    for each in CHECKS:
        each(spec, limits)
