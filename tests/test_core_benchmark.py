"""The parts of the benchmark of the scheduler's core run and print their figures."""

import json
import sys

import pytest

from tests.benchmarks import core, trace

pytestmark = pytest.mark.nightly

UNAVAILABLE_PARTS = set() if trace.TRACES.has(trace.TRACE) else {"trace", "trace_memory"}
PARTS = [name for name in core.PARTS if name not in UNAVAILABLE_PARTS]


@pytest.mark.parametrize("part", PARTS)
def test_benchmark_part_prints_its_figures(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["core", part, "--rounds", "1", "--scale", "0.01"])
    core.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name for name, value in figures.items() if value is not None} == set(core.PARTS[part][1])


def test_benchmark_output_names_unmeasured_figures(
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
        "planned_scan_ms",
        "saturated_step_ms",
        "bytes_per_queued_job",
        "trace_jobs_per_s",
        "trace_mb",
        "what_if_s",
    ]


def test_unknown_benchmark_part_is_rejected_with_known_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["core", "lives"])
    with pytest.raises(SystemExit):
        core.main()
    assert "there is no part lives; there are whole_life, " in capsys.readouterr().err
