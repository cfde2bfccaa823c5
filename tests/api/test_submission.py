"""What is submitted is what is shown, and what is shown can be submitted again."""

import json
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given

from koalapy.api.fields import as_json, parse_duration
from koalapy.api.job_views import JobSubmission, attempt_view, job_view
from koalapy.daemon.jobs.jobs import JobRecord
from koalapy.model.job import Attempt, Component, Job, JobSpec, JobState
from koalapy.model.request import Bundle, ComponentRequest, FixedRequest, FlexibleRequest, InputFile
from tests.model.specs import specs


def _printable(text: str) -> str:
    return "".join(character for character in text if character.isprintable())


def _without_nul(value: Any) -> Any:
    """A text, or all that are in something, without NULs."""
    if isinstance(value, str):
        return value.replace("\0", "")
    if isinstance(value, tuple):
        return tuple(_without_nul(one) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _without_nul(getattr(value, field.name)) for field in fields(value)})
    return value


def _acceptable(given: JobSpec) -> JobSpec:
    """A spec without what the API refuses by its form, and with variables in the order in which the API has them."""
    spec: JobSpec = _without_nul(given)
    request = spec.request
    if not isinstance(request, FlexibleRequest):
        is_fixed = isinstance(request, FixedRequest)
        request = replace(request, components=tuple(_acceptable_component(c, is_fixed) for c in request.components))
    return replace(
        spec,
        request=request,
        name=_printable(spec.name),
        owner=_printable(spec.owner),
        home_site=_printable(spec.home_site),
        policy=_printable(spec.policy),
        environment=tuple(sorted(dict(spec.environment).items())),
        policy_options=tuple(sorted(dict(spec.policy_options).items())),
        inputs=tuple(_acceptable_input(file, may_be_partitioned=True) for file in spec.inputs),
        bundle=spec.bundle and Bundle(_printable(spec.bundle.id), 0, 0),
        application=_printable(spec.application),
        mail_user=_printable(spec.mail_user),
        webhook=_printable(spec.webhook),
        internal=False,
    )


def _acceptable_input(file: InputFile, *, may_be_partitioned: bool) -> InputFile:
    """What a user says of an input; its size and sites are what the catalogue says."""
    part = None if may_be_partitioned else file.part
    distribution = file.distribution if may_be_partitioned else "whole" if part is None else "partitioned"
    return InputFile(_printable(file.name) or "x", distribution=distribution, part=part, target=_printable(file.target))


def _acceptable_component(component: ComponentRequest, is_fixed: bool) -> ComponentRequest:
    return replace(
        component,
        cluster=(component.cluster or "north") if is_fixed else None,
        environment=tuple(sorted(dict(component.environment).items())),
        inputs=tuple(_acceptable_input(file, may_be_partitioned=False) for file in component.inputs),
    )


@given(specs.map(_acceptable))
def test_a_shown_job_submitted_again_asks_for_the_same(spec: JobSpec) -> None:
    shown = json.loads(json.dumps(as_json(job_view(JobRecord(Job(1, spec, 0.0), "")))))
    assert shown["coallocation"] == {None: "allowed", 1: "never"}.get(spec.coallocation, spec.coallocation)
    submission = {name: shown[name] for name in JobSubmission.model_fields}
    assert JobSubmission.model_validate(submission).to_model() == spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("1h30", "1h30"),
        ("5m30", "5m30"),
        ("1h 30m", "1h 30m"),
        ("1:30", 90),
        ("1:30:00", 5400),
        ("2-12:00:00", 216000),
        ("1d", 86400),
        ("", ""),
        ("soon", "soon"),
        (12.5, 12.5),
    ],
)
def test_durations(text: object, expected: object) -> None:
    assert parse_duration(text) == expected


def test_queue_time_and_start_up_make_the_wait() -> None:
    """And start-up ends when all components are ready to execute (sonmez-2010 VI-B.1), not when the program runs."""
    attempt = Attempt(1, (Component(0, "north", 1),), 13.0, barrier_at=17.0, launched_at=19.0, ended_at=30.0)
    job = Job(1, JobSpec(FlexibleRequest(1), ("true",)), 10.0, JobState.SUCCEEDED, generation=1, attempt=attempt)
    job = replace(job, placed_at=13.0, started_at=17.0, ended_at=31.0)
    for view in (job_view(JobRecord(job, "")), attempt_view(job, attempt)):
        assert (view.queue_time, view.startup_overhead, view.wait_time) == (3.0, 4.0, 7.0)
