"""Conversion of submissions to stored JSON, and of records to rows, and back."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from koalapy.model.job import Attempt, Component, Job, TimelineEntry
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import Bundle, ComponentRequest, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.store import sql
from koalapy.store.sql import spec_from_json, spec_to_json
from tests.model.specs import specs


@given(specs)
def test_spec_json_roundtrip_is_lossless(spec: JobSpec) -> None:
    back = spec_from_json(json.loads(json.dumps(spec_to_json(spec))))
    assert back == spec
    assert hash(back) == hash(spec)
    assert back.claiming is spec.claiming
    assert spec_to_json(back) == spec_to_json(spec)


RECORDS: dict[type, tuple[Callable[[Any], Mapping[str, Any]], Callable[[Any, Any], Any]]] = {
    Job: (sql.new_job_to_row, lambda row, job: sql.job_from_row(row, job.attempt)),
    Attempt: (lambda attempt: sql.attempt_to_row(1, attempt), lambda row, a: sql.attempt_from_row(row, a.components)),
    Component: (lambda component: sql.component_to_row(1, 1, component), lambda row, _: sql.component_from_row(row)),
    TimelineEntry: (sql.entry_to_row, lambda row, _: sql.entry_from_row(row)),
}
"""The functions that return the row of a record, and the record of a row."""


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_row_roundtrip_keeps_all_fields(kind: type, data: st.DataObject) -> None:
    to_row, from_row = RECORDS[kind]
    record = data.draw(st.from_type(kind))
    row = json.loads(json.dumps(to_row(record)))
    assert repr(from_row(row, record)) == repr(record), "not a number is unequal to itself"


def test_spec_from_json_reads_first_revision() -> None:
    """Revision 0001 had neither inputs nor policy options."""
    component = {"size": 2, "cluster": None, "command": None, "environment": [], "output": None}
    spec = spec_from_json({"request": {"type": "nonfixed", "components": [component]}, "command": ["true"]})
    assert spec == JobSpec(NonFixedRequest((ComponentRequest(2),)), ("true",))


def test_spec_to_json_omits_defaults() -> None:
    spec = JobSpec(FlexibleRequest(6), ("true",))
    assert set(spec_to_json(spec)) == {"request", "command"}


def test_spec_to_json_format_is_stable() -> None:
    """After a downgrade, this version must read what a later one stored."""
    file = InputFile("f", 3, ("north",))
    spec = JobSpec(
        NonFixedRequest((ComponentRequest(2, environment=(("A", "b"),), inputs=(file,)),)),
        ("true",),
        walltime=90.0,
        retry_on_exit=(7,),
        environment=(("A", "b"),),
        inputs=(file,),
        bundle=Bundle("x", 1, 2),
    )
    stored_file = {"name": "f", "size": 3, "sites": ["north"], "distribution": "whole", "part": None, "target": ""}
    component = {
        "size": 2,
        "cluster": None,
        "command": None,
        "environment": [["A", "b"]],
        "output": None,
        "error": None,
    }
    component |= {"cores": None, "memory": None, "gpus": None, "features": [], "partition": "", "account": ""}
    component |= {"qos": "", "exclude": [], "inputs": [stored_file]}
    stored = {
        "request": {"type": "nonfixed", "components": [component]},
        "command": ["true"],
        "walltime": 90.0,
        "retry_on_exit": [7],
        "environment": [["A", "b"]],
        "inputs": [stored_file],
        "bundle": {"id": "x", "size": 1, "files": 2},
    }
    assert spec_to_json(spec) == stored


def test_spec_from_json_checks_no_bounds() -> None:
    """A version with tighter bounds must read what another accepted."""
    spec = JobSpec(FlexibleRequest(0), ("a\ud800",), name="x" * 1000, max_restarts=-1, retry_on_exit=(300,))
    assert spec_from_json({**spec_to_json(replace(spec, command=())), "command": ["a\ud800"]}) == spec
