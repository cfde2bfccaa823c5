"""API, command line and store take the fields of jobs from ``JobSpec``."""

from dataclasses import replace
from typing import Any

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koalapy.api.fields import as_json
from koalapy.api.job_views import JobSubmission, JobView, job_view
from koalapy.cli.jobs.submission import form_of
from koalapy.cli.jobs.submit import submit_job
from koalapy.cli.terminal.arguments import click_command
from koalapy.daemon.jobs.job_records import JobRecord
from koalapy.model.command_line import JOB_FIELDS, texts_of
from koalapy.model.field import describe_fields, split_annotation
from koalapy.model.job import Job
from koalapy.model.job_spec import Coallocation, JobSpec, Lease, PointInTime
from koalapy.model.request import FlexibleRequest
from koalapy.store.sql import spec_from_json, spec_to_json
from tests.model.specs import specs, values_of

FIELDS = describe_fields(JobSpec)
SETTABLE_FIELDS = {name: each for name, each in FIELDS.items() if each.field.is_settable}
FIELDS_WITHOUT_OPTION = {"request", "command", "script", "workdir_optional", "interactive"}
"""Fields that several options, the words after ``--``, a script, --chdir, or another command set."""
DEFAULT_SPEC = JobSpec(FlexibleRequest(1), ("true",))


def test_settable_field_has_option_with_exceptions() -> None:
    assert SETTABLE_FIELDS.keys() - JOB_FIELDS.keys() == FIELDS_WITHOUT_OPTION
    assert FIELDS.keys() - SETTABLE_FIELDS.keys() == {"internal"}


@pytest.mark.parametrize("name", SETTABLE_FIELDS)
def test_job_field_is_accepted_and_shown_by_the_api(name: str) -> None:
    assert name in JobSubmission.model_fields
    assert name in JobView.model_fields


@pytest.mark.parametrize("name", JOB_FIELDS)
def test_submit_option_has_name_and_help_of_field(name: str) -> None:
    option = next(parameter for parameter in click_command("submit", submit_job).params if parameter.name == name)
    assert isinstance(option, click.Option)
    assert (option.opts, option.help) == ([*FIELDS[name].option_names], FIELDS[name].field.help)
    assert option.multiple == form_of(FIELDS[name].type).is_repeated == texts_of(FIELDS[name].type).is_repeated


@pytest.mark.parametrize("name", [name for name in FIELDS if FIELDS[name].default == getattr(DEFAULT_SPEC, name)])
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_spec_stores_only_fields_with_other_values(name: str, data: Any) -> None:
    spec = replace(DEFAULT_SPEC, **{name: data.draw(values_of(FIELDS[name].type))})
    stored = spec_to_json(spec)
    assert stored.keys() == {"request", "command"} | ({name} if spec != DEFAULT_SPEC else set())
    assert spec_from_json(stored) == spec


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(specs)
def test_job_view_shows_all_settable_fields(spec: JobSpec) -> None:
    view = as_json(job_view(JobRecord(Job(1, spec, 0.0), "")))
    assert view.keys() >= SETTABLE_FIELDS.keys()
    for name, field in SETTABLE_FIELDS.items():
        if split_annotation(field.type)[0] in (str, int, float, bool) and field.type not in (
            Coallocation,
            Lease,
            PointInTime,
        ):
            assert view[name] == getattr(spec, name)
