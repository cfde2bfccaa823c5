"""Planted faults are found, so that the silence of an audit means something."""

import pytest

from tests.proof.planted import PLANTED
from tests.proof.schedules import draw_dangerous_schedule, run_schedule

pytestmark = pytest.mark.processes
SEEDS = (200,)


@pytest.mark.parametrize("seed", SEEDS)
def test_dangerous_schedule_without_planted_fault_has_no_violation(seed: int) -> None:
    assert run_schedule(seed, elements=draw_dangerous_schedule(seed)).violations == []


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found(name: str) -> None:
    for seed in SEEDS:
        assert run_schedule(seed, fault=PLANTED[name], elements=draw_dangerous_schedule(seed)).violations, seed
