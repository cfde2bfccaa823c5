"""The grid under random faults in virtual time: every promise holds, and a seed repeats exactly."""

import pytest

from tests.proof.schedules import Element, draw_schedule, run_schedule

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("first", range(1000, 1100, 20))
def test_many_schedules_have_no_violation(first: int) -> None:
    assert [outcome for seed in range(first, first + 20) if (outcome := run_schedule(seed)).violations] == []


def test_running_program_of_unknown_job_is_not_given_up() -> None:
    """All replies to a submission and to searches are lost, while its runner has connected."""
    needed = [
        Element("job3", 20.0, "non-fixed"),
        Element("fault1", 20.6344, "lost replies"),
        Element("job0", 23.3925, "array"),
    ]
    assert run_schedule(1050, elements=needed).violations == []


def test_job_that_ended_out_of_reach_may_fail_by_the_end_of_its_reservation() -> None:
    """A partition hides that its program has succeeded, and its reservation ends before the next attempt."""
    needed = [Element("job2", 1.2691443047813622, "reserved"), Element("fault0", 67.73343775426554, "long cut")]
    assert run_schedule(3017, elements=needed).violations == []


def test_schedule_with_same_seed_repeats_exactly() -> None:
    assert run_schedule(2).trace == run_schedule(2).trace


def test_part_of_schedule_keeps_elements_as_they_were() -> None:
    schedule = draw_schedule(7)
    part = [element for element in draw_schedule(7) if element.name != schedule[0].name]
    assert part == schedule[1:]
    assert [e.random(7).random() for e in part] == [e.random(7).random() for e in schedule[1:]]
