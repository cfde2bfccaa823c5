"""The benchmark of the scheduler's core does what it says, whatever that takes."""

import json
import sys

import pytest

from tests.benchmarks import core, trace

pytestmark = pytest.mark.nightly

LEFT_OUT = {"accasim", "accasim_trace"}  # which would be installed
if not trace.TRACES.has(trace.TRACE):
    LEFT_OUT |= {"trace", "trace_memory"}
PARTS = [name for name in core.PARTS if name not in LEFT_OUT]


@pytest.mark.parametrize("part", PARTS)
def test_each_part_runs_to_its_end_and_has_its_figures(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["core", part, "--rounds", "1", "--scale", "0.01"])
    core.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name for name, value in figures.items() if value is not None} == set(core.PARTS[part][1])


def test_all_figures_are_named_whether_they_were_measured_or_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["core", "job_end", "--rounds", "1", "--scale", "0.01"])
    core.main()
    assert list(json.loads(capsys.readouterr().out.splitlines()[-1])) == [
        "whole_life_jobs_per_s",
        "whole_life_multi_jobs_per_s",
        "placements_per_s",
        "matching_ms",
        "job_end_ms",
        "scan_ms",
        "wakeup_ms",
        "bytes_per_queued_job",
        "accasim_jobs_per_s",
        "trace_jobs_per_s",
        "trace_mb",
        "what_if_s",
        "accasim_trace_jobs_per_s",
    ]


def test_a_part_that_there_is_not_is_told_with_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["core", "lives"])
    with pytest.raises(SystemExit):
        core.main()
    assert "there is no part lives; there are whole_life, " in capsys.readouterr().err
