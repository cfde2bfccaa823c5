"""Validation of rule values."""

import pytest

from koalapy.model.errors import UsageError
from koalapy.scheduler.rules import Rules


@pytest.mark.parametrize(
    "field",
    [
        "scan_interval",
        "claim_grace",
        "barrier_timeout",
        "unreachable_after",
        "claim_epsilon",
        "probation_pause",
        "probation_pause_max",
    ],
)
@pytest.mark.parametrize("value", [0.0, 1e-9, -1.0, float("nan")])
def test_rules_time_below_minimum_is_rejected(field: str, value: float) -> None:
    with pytest.raises(UsageError) as error:
        Rules(**{field: value})  # type: ignore[arg-type]
    assert error.value.message == f"{field} is {value}, but must be at least 0.001"
    assert error.value.field == field


@pytest.mark.parametrize(
    "field",
    ["high_scans_per_low", "placement_queue_limit", "max_components_per_job", "error_threshold", "max_placement_tries"],
)
@pytest.mark.parametrize("value", [0, -3])
def test_rules_count_below_one_is_rejected(field: str, value: int) -> None:
    with pytest.raises(UsageError) as error:
        Rules(**{field: value})  # type: ignore[arg-type]
    assert error.value.message == f"{field} is {value}, but must be at least 1"
    assert (error.value.field, error.value.value) == (field, value)


def test_rules_accept_zero_restarts_and_reject_invalid_pauses() -> None:
    assert Rules(max_restarts=0).max_restarts == 0
    assert Rules(restart_pause=0, restart_pause_max=0).restart_pause == 0
    with pytest.raises(UsageError, match="restart_pause is -1, but must be at least 0"):
        Rules(restart_pause=-1)
    for field in ("restart_pause_max", "probation_pause", "claim_epsilon"):
        with pytest.raises(UsageError, match=f"{field} is inf, but must be finite"):
            Rules(**{field: float("inf")})  # type: ignore[arg-type]
    assert Rules(max_restarts=None).max_restarts is None
    with pytest.raises(UsageError, match="max_restarts is -1, but must be at least 0"):
        Rules(max_restarts=-1)


def test_rules_defaults_are_documented_values() -> None:
    rules = Rules()
    assert (rules.queue, rules.queue_order, rules.high_scans_per_low, rules.event_driven) == ("scan", "fcfs", 2, True)
    assert (rules.claim_grace, rules.error_threshold, rules.max_restarts) == (10, 3, 10)
    assert (rules.placement_queue_limit, rules.max_placement_tries) == (100_000, None)
