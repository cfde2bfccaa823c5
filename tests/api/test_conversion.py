"""What is submitted is what is shown, and what is shown can be submitted again."""

import json
from dataclasses import replace

import pytest
from hypothesis import given

from koalapy.api.conversion import job_view, spec_of
from koalapy.api.schemas import JobSubmission, seconds
from koalapy.model.job import Job, JobSpec
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest
from koalapy.ports import JobRecord
from tests.store.test_rows import specs


def _printable(text: str) -> str:
    return "".join(character for character in text if character.isprintable())


def _acceptable(spec: JobSpec) -> JobSpec:
    """A spec without what the API refuses by its form, and with variables in the order in which the API has them."""
    request = spec.request
    if not isinstance(request, FlexibleRequest):
        is_fixed = isinstance(request, FixedRequest)
        request = replace(request, components=tuple(_acceptable_component(c, is_fixed) for c in request.components))
    return replace(
        spec, request=request, name=_printable(spec.name), owner=_printable(spec.owner), policy=_printable(spec.policy),
        environment=tuple(sorted(dict(spec.environment).items())),
        policy_options=tuple(sorted(dict(spec.policy_options).items())),
        workdir=spec.workdir and spec.workdir.replace("\0", ""), output=spec.output and spec.output.replace("\0", ""),
    )  # fmt: skip


def _acceptable_component(component: ComponentRequest, is_fixed: bool) -> ComponentRequest:
    return replace(
        component,
        cluster=(component.cluster or "north") if is_fixed else None,
        environment=tuple(sorted(dict(component.environment).items())),
        output=component.output and component.output.replace("\0", ""),
        inputs=(),
    )


@given(specs.map(_acceptable))
def test_a_shown_job_submitted_again_asks_for_the_same(spec: JobSpec) -> None:
    shown = json.loads(json.dumps(job_view(JobRecord(Job(1, spec, 0.0), ""))))
    assert shown["coallocation"] == {None: "allowed", 1: "never"}.get(spec.coallocation, spec.coallocation)
    submission = {name: shown[name] for name in JobSubmission.model_fields}
    assert spec_of(JobSubmission.model_validate(submission)) == spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("1:30", 90), ("1:30:00", 5400), ("2-12:00:00", 216000),
     ("1d", 86400), ("", ""), ("soon", "soon"), (12.5, 12.5)],
)  # fmt: skip
def test_durations(text: object, expected: object) -> None:
    assert seconds(text) == expected
