"""A field of a job is said once, by ``JobSpec``: whatever takes, keeps or shows jobs has it from there."""

from dataclasses import replace
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koalapy.api.fields import as_json
from koalapy.api.job_views import JobSubmission, JobView, job_view
from koalapy.cli.jobs.job_options import JOB_FIELDS, form_of
from koalapy.cli.jobs.submit import submit_job
from koalapy.cli.terminal.arguments import click_command
from koalapy.daemon.jobs.jobs import JobRecord
from koalapy.model.field import describe_fields, split_annotation
from koalapy.model.job import Coallocation, Job, JobSpec, Lease
from koalapy.model.request import FlexibleRequest
from koalapy.store.rows import spec_from_json, spec_to_json
from tests.model.specs import specs, values_of

FIELDS = describe_fields(JobSpec)
GIVEN = {name: each for name, each in FIELDS.items() if each.field.is_settable}
SAID_OTHERWISE = {"request", "command", "workdir_optional"}
"""Without an option of its own: several options, the words after ``--``, and what follows from --chdir."""
PLAIN = JobSpec(FlexibleRequest(1), ("true",))


def test_only_some_fields_have_no_option() -> None:
    assert GIVEN.keys() - JOB_FIELDS.keys() == SAID_OTHERWISE
    assert FIELDS.keys() - GIVEN.keys() == {"internal"}


@pytest.mark.parametrize("name", GIVEN)
def test_job_field_is_accepted_and_shown_by_the_api(name: str) -> None:
    assert name in JobSubmission.model_fields
    assert name in JobView.model_fields


@pytest.mark.parametrize("name", JOB_FIELDS)
def test_a_field_has_its_option(name: str) -> None:
    option = next(one for one in click_command("submit", submit_job).params if one.name == name)
    assert isinstance(option, click.Option)
    assert (option.opts, option.help) == ([FIELDS[name].option], FIELDS[name].field.help)
    assert option.multiple == form_of(FIELDS[name].type).is_repeated


@pytest.mark.parametrize("name", [name for name in FIELDS if FIELDS[name].default == getattr(PLAIN, name)])
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_field_is_stored_where_it_differs_from_its_default(name: str, data: Any) -> None:
    spec = replace(PLAIN, **{name: data.draw(values_of(FIELDS[name].type))})
    stored = spec_to_json(spec)
    assert stored.keys() == {"request", "command"} | ({name} if spec != PLAIN else set())
    assert spec_from_json(stored) == spec


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(specs)
def test_everything_that_was_given_is_shown(spec: JobSpec) -> None:
    shown = as_json(job_view(JobRecord(Job(1, spec, 0.0), "")))
    assert shown.keys() >= GIVEN.keys()
    for name, each in GIVEN.items():
        if split_annotation(each.type)[0] in (str, int, float, bool) and each.type not in (Coallocation, Lease):
            assert shown[name] == getattr(spec, name)
