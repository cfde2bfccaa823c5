"""Specifications of jobs."""

from dataclasses import replace

import pytest

from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import FlexibleRequest

SPEC = JobSpec(FlexibleRequest(4), ("run", "1"), name="study", environment=(("A", "1"),), walltime=60.0)


@pytest.mark.parametrize(
    "changes", [{}, {"owner": "alice"}, {"request": FlexibleRequest(2), "priority": Priority.HIGH, "walltime": None}]
)
def test_with_fields_returns_changed_copy(changes: dict[str, object]) -> None:
    assert SPEC.with_fields(**changes) == replace(SPEC, **changes)  # type: ignore[arg-type]


def test_with_fields_of_unknown_field_raises() -> None:
    with pytest.raises(KeyError):
        SPEC.with_fields(colour="red")
