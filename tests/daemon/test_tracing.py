"""Spans of jobs in a trace collector, which may be unavailable."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from koalapy.config.settings import Settings
from koalapy.daemon.observability import tracing
from koalapy.daemon.observability.spans import id_of, spans_of_job, trace_of, traced_jobs
from koalapy.daemon.observability.tracing import Tracing
from koalapy.model.errors import UsageError
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.reports import ComponentStatus
from koalapy.model.request import ComponentRequest, FixedRequest
from tests import signals
from tests.collector import Collector, parent_span_names, read_attributes
from tests.daemon.test_jobs import SPEC, job_when, north_and_jobs
from tests.identities import ADA

WAITS = replace(SPEC, request=FixedRequest((ComponentRequest(1, cluster="south"),)))
"""A job for a cluster that never connects."""
IN_AN_ATTEMPT = {("claiming", "attempt"), ("component", "attempt")}


def tracing_settings(endpoint: str) -> Settings:
    return Settings.model_validate({"tracing": {"endpoint": endpoint}})


async def test_tracing_of_retried_job_is_one_trace(tmp_path: Path) -> None:
    with Collector() as collector:
        async with north_and_jobs(tmp_path) as (daemon, north, jobs):
            with traced_jobs(tracing_settings(collector.endpoint), daemon.engine, "test"):
                await jobs.submit(SPEC, ADA)
                await job_when(jobs, JobState.CLAIMING, 1)
                lost = ComponentStatus(
                    token="1.1.0.fa", state=ComponentState.ENDED, hosts=(), error="no shell", infrastructure=True
                )
                north.say_to_daemon(lost)
                await job_when(jobs, JobState.CLAIMING, 2)
                for state in (ComponentState.CLAIMED, ComponentState.RUNNING, ComponentState.ENDED):
                    code = 0 if state is ComponentState.ENDED else None
                    token = "1.2.0.fb"
                    north.say_to_daemon(ComponentStatus(token=token, state=state, hosts=("a", "b"), program_exit=code))
                job = await job_when(jobs, JobState.SUCCEEDED, 2)
                spans = await asyncio.to_thread(collector.wait_for_jobs, 1)
    inside = {("starting", "attempt"), ("running", "attempt")}
    assert parent_span_names(spans) == {("job", ""), ("queued", "job"), ("attempt", "job"), *IN_AN_ATTEMPT, *inside}
    assert {span.trace_id for span in spans} == {trace_of("test", 1).to_bytes(16)}
    (root,) = [span for span in spans if span.name == "job"]
    assert root.span_id == id_of("test", 1, "job").to_bytes(8)
    attributes = read_attributes(root)
    assert (attributes["koala.job"], attributes["koala.user"], attributes["koala.state"]) == (1, "ada", "succeeded")
    assert job.ended_at is not None
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (
        int(job.submitted_at * 1e9),
        int(job.ended_at * 1e9),
    )
    first, second = sorted((span for span in spans if span.name == "attempt"), key=lambda s: s.start_time_unix_nano)
    assert "no shell" in first.status.message
    assert first.status.code == 2
    assert (second.status.code, read_attributes(second)["koala.clusters"]) == (0, ["north"])
    assert [span.name for span in spans].count("queued") == 2
    for span in spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    assert collector.services == {"koala"}


async def test_tracing_without_collector_loses_spans_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []  # collected without structlog's capture, which misses other threads

    def note(event: str, action: str, **_: object) -> None:
        messages.append(action)

    async def until_said(action: str) -> None:
        await signals.until(lambda: action in messages)

    monkeypatch.setattr(tracing, "log", SimpleNamespace(warning=note, info=note, error=note))
    with Collector() as collector:
        collector.status = 400
        async with north_and_jobs(tmp_path) as (daemon, _, jobs):
            with traced_jobs(tracing_settings(collector.endpoint), daemon.engine, "test"):
                for ident in (1, 2):
                    await jobs.submit(WAITS, ADA)
                    await jobs.cancel(ident, ADA, "not wanted")
                await asyncio.to_thread(collector.wait_for_rejection)
                await until_said("spans-lost")
                collector.status = 200
                await jobs.submit(WAITS, ADA)
                await jobs.cancel(3, ADA, "")
                await asyncio.to_thread(collector.wait_for_jobs, 1)
                await until_said("spans-taken")
    assert messages == ["spans-lost", "spans-taken"]


def test_tracing_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tracing, "_run_sender", lambda self: None)
    sends = Tracing("http://127.0.0.1:1/v1/traces", "test", max_waiting=2)
    job = Job(1, SPEC, 0.0, JobState.CANCELLED, ended_at=1.0)
    for _ in range(5):
        sends.job_changed(job, JobState.QUEUED)
    assert sends._lost == 3
    sends.stop()


def test_spans_of_job_are_contiguous_phases() -> None:
    component = Component(
        0, "north", 2, submitted_at=3.0, ended_at=9.0, staging_since=2.0, staged_at=4.0, staged=7, lrm_job="77"
    )
    attempt = Attempt(1, (component,), placed_at=2.0, barrier_at=5.0, launched_at=6.0, ended_at=8.0)
    job = Job(1, SPEC, 1.0, JobState.FAILED, reason="exit 3", attempt=attempt, generation=1, ended_at=9.5, exit_code=3)
    spans = {span.path: span for span in spans_of_job(job, 1.0)}
    phases = [(path, span.start, span.end) for path, span in spans.items()]
    assert phases == [
        ("job", 1.0, 9.5),
        ("queued-1", 1.0, 2.0),
        ("attempt-1", 2.0, 8.0),
        ("attempt-1/claiming", 2.0, 5.0),
        ("attempt-1/starting", 5.0, 6.0),
        ("attempt-1/running", 6.0, 8.0),
        ("attempt-1/component-0", 3.0, 9.0),
        ("attempt-1/component-0/files", 2.0, 4.0),
    ]
    assert (spans["job"].fault, spans["job"].attributes["koala.exit_code"]) == ("exit 3", 3)
    never = Job(2, SPEC, 1.0, JobState.CANCELLED, ended_at=3.0)
    assert [span.path for span in spans_of_job(never, 1.0)] == ["job", "queued-1"]


@pytest.mark.parametrize("wrong", ["127.0.0.1:4318", "ftp://host/", "http://", "http://ada:the-secret@host/v1/traces"])
def test_traced_jobs_with_invalid_address_hides_password(wrong: str, tmp_path: Path) -> None:
    from koalapy.config.settings import load_settings

    config = tmp_path / "koala.yaml"
    config.write_text(f"tracing: {{endpoint: '{wrong}'}}\n")
    with pytest.raises(UsageError, match=r"^/.*: tracing\.endpoint") as refused:
        load_settings(config)
    assert "the-secret" not in f"{refused.value!r} {refused.value} {refused.value.hint}"


async def test_traced_jobs_without_packages_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "koalapy.daemon.observability.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    async with north_and_jobs(tmp_path) as (daemon, _, _):
        context = traced_jobs(tracing_settings("http://127.0.0.1:1/v1/traces"), daemon.engine, "test")
        with pytest.raises(UsageError, match="is missing") as refused, context:
            pass
    assert refused.value.hint == "pip install 'koalapy[tracing]'"
    assert not daemon.engine._attempt_observers
