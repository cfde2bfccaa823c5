"""Rejections are classified by messages of real resource managers."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.lrm.drmaa.control import convert_error
from koalapy.agent.lrm.rejections import classify_rejection
from koalapy.agent.lrm.slurm.states import waiting_fault
from koalapy.model.errors import SiteRejected

HERE = Path(__file__).parent


def recorded_refusals(kind: str) -> list[tuple[str, str]]:
    lines = (HERE / kind / "answers" / "refusals.txt").read_text().splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if not line.startswith("#")]  # type: ignore[misc]


@pytest.mark.parametrize(("fault", "text"), [*recorded_refusals("slurm"), *recorded_refusals("sge")])
def test_classify_recorded_rejection_is_same_for_library(fault: str, text: str) -> None:
    assert classify_rejection(text) == fault
    error = convert_error("DeniedByDrmException", f"code 17: {text}")
    assert isinstance(error, SiteRejected)
    assert error.fault == fault


@given(st.from_regex(r"sbatch: (lua: )?[a-z ,.]{0,60}; Batch job submission failed: Unspecified error", fullmatch=True))
def test_classify_unknown_text_is_never_job(text: str) -> None:
    assert classify_rejection(text) != "job"


@pytest.mark.parametrize(
    ("reason", "fault"),
    [
        ("PartitionTimeLimit", "unsuitable"),
        ("InvalidQOS", "site"),
        ("Resources", None),
        ("Priority", None),
        ("", None),
        ("PartitionNodeLimit", None),
        ("QOSMaxJobsPerUserLimit", None),
    ],
)
def test_fault_is_set_for_jobs_that_never_start(reason: str, fault: str | None) -> None:
    assert waiting_fault(reason) == fault
