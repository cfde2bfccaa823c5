"""``koala replay``, in a process of its own: the same in each, whatever its hashes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.record.days import a_day, exported, written

pytestmark = pytest.mark.processes


def koala(*arguments: str, seed: str = "0") -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-m", "koalapy.cli.main", "replay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_day_is_replayed_in_any_process(tmp_path: Path, seed: str) -> None:
    day = a_day(jobs=40)
    done = koala(str(written(tmp_path / "day", day.lives)), "--json", seed=seed)
    assert done.returncode == 0, done.stderr
    lives = json.loads(done.stdout)["lives"]
    assert [life["divergence"] for life in lives] == [None, None]
    assert sum(life["placements"] for life in lives) == sum(entry.event == "placed" for entry in day.timeline) > 30


def test_what_the_daemon_could_not_read_is_told_beside_the_rest(tmp_path: Path) -> None:
    first, second = a_day(jobs=4).lives
    day = exported([first, second]).splitlines(keepends=True)
    lost = b'{"lost":"the daemon could not read it"}\n'
    (tmp_path / "day").write_bytes(b"".join([*day[: len(first) + 2], lost, *day[len(first) + 2 :]]))
    done = koala(str(tmp_path / "day"))
    assert done.returncode == 1
    assert done.stdout.count("all as recorded") == 2
    assert "the record is incomplete: the daemon could not read it" in done.stderr
