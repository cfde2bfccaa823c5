"""Whose fault it is that a resource manager takes no job, by what real ones said."""

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agents.lrm.drmaa import codes as drmaa_codes
from koalapy.agents.lrm.port import Fault
from koalapy.agents.lrm.sge import refusals as sge_refusals
from koalapy.agents.lrm.slurm import refusals as slurm_refusals

HERE = Path(__file__).parent
FAULT_OF: dict[str, Callable[[str], Fault]] = {"slurm": slurm_refusals.fault_of, "sge": sge_refusals.fault_of}


def recorded(kind: str) -> list[tuple[str, str, str]]:
    lines = (HERE / kind / "answers" / "refusals.txt").read_text().splitlines()
    return [(kind, *line.split(" ", 1)) for line in lines if not line.startswith("#")]  # type: ignore[misc]


@pytest.mark.parametrize(("kind", "fault", "told"), [*recorded("slurm"), *recorded("sge")])
def test_what_was_said_is_of_one_fault_by_commands_and_library(kind: str, fault: str, told: str) -> None:
    assert FAULT_OF[kind](told) == fault
    assert drmaa_codes.fault_of(f"DRMAA: {told}") == fault


@given(st.text())
def test_any_words_get_an_answer(told: str) -> None:
    for fault_of in (*FAULT_OF.values(), drmaa_codes.fault_of):
        assert fault_of(told) in get_args(Fault)


@pytest.mark.parametrize(
    ("reason", "fault"),
    [
        ("PartitionTimeLimit", "job"),
        ("InvalidQOS", "site"),
        ("Resources", None),
        ("Priority", None),
        ("", None),
        ("PartitionNodeLimit", None),
        ("QOSMaxJobsPerUserLimit", None),
    ],
)
def test_a_job_that_was_taken_and_never_starts(reason: str, fault: str | None) -> None:
    assert slurm_refusals.fault_of_waiting(reason) == fault
