"""``koala replay`` in a new process, with any hash seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.record.days import export_lines, record_day, write_export

pytestmark = pytest.mark.processes


def run_replay(*arguments: str, seed: str = "0") -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-m", "koalapy.cli.main", "replay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_replay_in_new_process_is_deterministic(tmp_path: Path, seed: str) -> None:
    day = record_day(jobs=40)
    result = run_replay(str(write_export(tmp_path / "day", day.lives)), "--json", seed=seed)
    assert result.returncode == 0, result.stderr
    lives = json.loads(result.stdout)["lives"]
    assert [life["divergence"] for life in lives] == [None, None]
    assert sum(life["placements"] for life in lives) == sum(entry.event == "placed" for entry in day.timeline) > 30


def test_replay_of_incomplete_record_reports_lost_parts(tmp_path: Path) -> None:
    first, second = record_day(jobs=4).lives
    day = export_lines([first, second]).splitlines(keepends=True)
    lost = b'{"lost":"the daemon could not read it"}\n'
    (tmp_path / "day").write_bytes(b"".join([*day[: len(first) + 2], lost, *day[len(first) + 2 :]]))
    result = run_replay(str(tmp_path / "day"))
    assert result.returncode == 1
    assert result.stdout.count("all as recorded") == 2
    assert "the record is incomplete: the daemon could not read it" in result.stderr
