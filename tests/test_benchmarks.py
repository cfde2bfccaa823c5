"""What benchmarks compare, store and ask of the machine."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.figures import FILE, calibrate, compare_and_store, gain
from tests.benchmarks.relay import describe_missing
from tests.needs import Need


@pytest.mark.parametrize(
    ("name", "new", "machine", "expected"),
    [
        ("whole_life_jobs_per_s", 220.0, 1.0, 1.1),
        ("whole_life_jobs_per_s", 220.0, 2.0, 0.55),
        ("placements_per_s.auto", 100.0, 0.5, 1.0),
        ("job_end_ms", 100.0, 1.0, 2.0),
        ("job_end_ms", 100.0, 2.0, 1.0),
        ("bytes_per_queued_job", 100.0, 2.0, 2.0),
        ("trace_mb", 400.0, 2.0, 0.5),
    ],
)
def test_gain_of_figure_is_relative_to_the_machine(name: str, new: float, machine: float, expected: float) -> None:
    assert gain(name, new, 200.0, machine) == pytest.approx(expected)


def test_figures_are_compared_with_the_last_run_that_measured_them(tmp_path: Path) -> None:
    file = tmp_path / "core.json"
    assert compare_and_store({"scan_ms": 2.0, "placements_per_s": {"auto": 100.0}, "trace_mb": None}, 0.1, file) == []
    # The machine is twice as slow now.
    assert compare_and_store({"scan_ms": 2.0, "placements_per_s": {"auto": 50.0}}, 0.2, file) == [
        "  scan_ms: 2.00 of 2, better if more than 1",
        "  placements_per_s.auto: 1.00 of 100, better if more than 1",
    ]
    assert compare_and_store({"scan_ms": 4.0}, 0.2, file) == ["  scan_ms: 0.50 of 2, better if more than 1"]
    stored = json.loads(file.read_text())
    assert stored["placements_per_s.auto"] == {"value": 50.0, "calibration_s": 0.2}
    assert "trace_mb" not in stored


def test_stored_figures_of_the_scheduler_are_valid() -> None:
    stored = json.loads(FILE.read_text())
    assert {"whole_life_jobs_per_s", "placements_per_s.worst-fit"} <= stored.keys()
    assert all(figure["value"] > 0 and figure["calibration_s"] > 0 for figure in stored.values())
    assert calibrate() > 0


def test_relay_benchmark_without_laboratory_names_the_packages() -> None:
    need = Need("laboratory", False, "apt-get install iproute2 nftables")
    assert describe_missing(5, need) == "laboratory missing: apt-get install iproute2 nftables"
    assert describe_missing(3, need) == "the series of Open MPI is 3; give 4 or 5"
