"""What is submitted is what is shown."""

import pytest
from hypothesis import given

from koalapy.api.conversion import request_view, spec_of
from koalapy.api.schemas import JobSubmission, seconds
from koalapy.model.job import JobSpec
from tests.store.test_rows import specs


@given(specs)
def test_a_shown_request_can_be_submitted_again(spec: JobSpec) -> None:
    view = request_view(spec.request)
    for component in view.get("components", []):
        if view["type"] == "fixed" and not component.get("cluster"):
            return
    body = {"request": view, "command": list(spec.command), "environment": {}}
    assert request_view(spec_of(JobSubmission.model_validate(body)).request) == view


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("1:30", 90), ("1:30:00", 5400), ("2-12:00:00", 216000),
     ("1d", 86400), ("", ""), ("soon", "soon"), (12.5, 12.5)],
)  # fmt: skip
def test_durations(text: object, expected: object) -> None:
    assert seconds(text) == expected
