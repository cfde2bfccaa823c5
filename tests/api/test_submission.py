"""Round trips between job submissions and job views."""

import json
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given

from koalapy.api.fields import as_json, parse_duration
from koalapy.api.job_changes import submission_of
from koalapy.api.job_views import JobSubmission, attempt_view, job_view
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.model.dependency import ResultInput
from koalapy.model.job import Attempt, Component, Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import Bundle, ComponentRequest, FixedRequest, FlexibleRequest, InputFile
from koalapy.model.wording import MIN_MEMORY
from tests.model.specs import specs


def remove_unprintable(text: str) -> str:
    return "".join(character for character in text if character.isprintable())


def remove_nul(value: Any) -> Any:
    """Remove NUL characters from a text, or from all texts of a value."""
    if isinstance(value, str):
        return value.replace("\0", "")
    if isinstance(value, tuple):
        items = map(remove_nul, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: remove_nul(getattr(value, field.name)) for field in fields(value)})
    return value


def make_acceptable(generated: JobSpec) -> JobSpec:
    """Remove what the API rejects by its form from a spec, and sort its variables as the API does."""
    spec: JobSpec = remove_nul(generated)
    request = spec.request
    if not isinstance(request, FlexibleRequest):
        is_fixed = isinstance(request, FixedRequest)
        request = replace(request, components=tuple(make_acceptable_component(c, is_fixed) for c in request.components))
    return replace(
        spec,
        request=request,
        name=remove_unprintable(spec.name),
        owner=remove_unprintable(spec.owner),
        home_site=remove_unprintable(spec.home_site),
        policy=remove_unprintable(spec.policy),
        environment=tuple(sorted(dict(spec.environment).items())),
        policy_options=tuple(sorted(dict(spec.policy_options).items())),
        inputs=tuple(make_acceptable_input(file, may_be_partitioned=True) for file in spec.inputs),
        result_inputs=tuple(map(make_acceptable_result, spec.result_inputs)),
        bundle=spec.bundle and Bundle(remove_unprintable(spec.bundle.id), 0, 0),
        application=remove_unprintable(spec.application),
        memory=spec.memory and max(spec.memory, MIN_MEMORY),
        reservation=remove_unprintable(spec.reservation),
        mail_user=remove_unprintable(spec.mail_user),
        webhook=remove_unprintable(spec.webhook),
        internal=False,
        after=tuple(tuple(dict.fromkeys(replace(d, job=d.job + 1) for d in clause)) for clause in spec.after if clause),
        begin=spec.begin and max(1.0, round(spec.begin)),
        deadline=spec.deadline and max(1.0, round(spec.deadline)),
    )


def make_acceptable_input(file: InputFile, *, may_be_partitioned: bool) -> InputFile:
    """Return an input as a user gives it; the catalogue adds size and sites."""
    part = None if may_be_partitioned else file.part
    distribution = file.distribution if may_be_partitioned else "whole" if part is None else "partitioned"
    return InputFile(
        remove_unprintable(file.name) or "x",
        distribution=distribution,
        part=part,
        target=remove_unprintable(file.target),
    )


def make_acceptable_result(result: ResultInput) -> ResultInput:
    """Return a result of another job as a user gives it; its source is set at submission."""
    path, target = (remove_unprintable(text).replace(":", "") for text in (result.path, result.target))
    rank = result.rank and result.rank % 100
    index = result.index and result.index % 100
    return ResultInput(result.job % 1000 + 1, path or "x", index, rank, target)


def make_acceptable_component(component: ComponentRequest, is_fixed: bool) -> ComponentRequest:
    return replace(
        component,
        cluster=(component.cluster or "north") if is_fixed else None,
        environment=tuple(sorted(dict(component.environment).items())),
        memory=component.memory and max(component.memory, MIN_MEMORY),
        inputs=tuple(make_acceptable_input(file, may_be_partitioned=False) for file in component.inputs),
    )


@given(specs.map(make_acceptable))
def test_job_view_can_be_submitted_again(spec: JobSpec) -> None:
    view = json.loads(json.dumps(as_json(job_view(JobRecord(Job(1, spec, 0.0), "")))))
    assert view["coallocation"] == {None: "allowed", 1: "never"}.get(spec.coallocation, spec.coallocation)
    submission = {name: view[name] for name in JobSubmission.model_fields}
    assert JobSubmission.model_validate(submission).to_model() == spec
    assert JobSubmission.model_validate(json.loads(json.dumps(submission_of(spec)))).to_model() == spec


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("1:30", 90),
        ("1:30:00", 5400),
        ("2-12:00:00", 216000),
        ("1d", 86400),
    ],
)
def test_parse_duration_of_text_returns_seconds(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["1h30", "5m30", "1h 30m", "", "soon"])
def test_parse_duration_of_other_text_raises(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_duration(text)


def test_wait_time_is_queue_time_plus_startup_overhead() -> None:
    """Start-up ends when all components are ready to execute (sonmez-2010 VI-B.1), not when the program runs."""
    attempt = Attempt(1, (Component(0, "north", 1),), 13.0, barrier_at=17.0, launched_at=19.0, ended_at=30.0)
    job = Job(1, JobSpec(FlexibleRequest(1), ("true",)), 10.0, JobState.SUCCEEDED, generation=1, attempt=attempt)
    job = replace(job, placed_at=13.0, started_at=17.0, ended_at=31.0)
    for view in (job_view(JobRecord(job, "")), attempt_view(job, attempt)):
        assert (view.queue_time, view.startup_overhead, view.wait_time) == (3.0, 4.0, 7.0)
