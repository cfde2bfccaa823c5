"""A sample of the crash points, chosen by risk. ``python -m tests.crash --all FILE`` interrupts all of them."""

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.interposer import Crash, Interposer, Point
from tests.crash.plans import choose_crashes
from tests.crash.runs import interrupt, record_points
from tests.needs import C_COMPILER, needs

pytestmark = [pytest.mark.processes, needs(C_COMPILER)]

SAMPLE = {
    "commit of the daemon": ("daemon", "fsync", "koala.db-wal", "after"),
    "answer of the daemon": ("daemon", "send", "tcp", "before"),
    "journal of an agent": ("agent", "fsync", "journal", "after"),
    "hand-over to the resource manager": ("agent", "send", "unix", "after"),
    "start of a runner": ("manager", "fork", "-", "after"),
    "result of a runner": ("runner", "rename", "result.#.json", "before"),
}


@pytest.fixture(scope="module")
def points() -> Counter[Point]:
    return record_points()


def test_recorded_run_reaches_effects_of_every_process(points: Counter[Point]) -> None:
    assert {point.process for point in points} == {"daemon", "agent", "manager", "runner"}
    assert {"write", "fsync", "rename", "unlink", "mkdir", "send", "fork", "spawn", "kill"} <= {
        point.effect for point in points
    }
    assert {(crash.moment, crash.count) for crash in choose_crashes(points)} >= {("before", 1), ("after", 1)}


@pytest.mark.parametrize("name", SAMPLE)
def test_interrupted_effect_leaves_no_violation(points: Counter[Point], name: str) -> None:
    process, effect, target, moment = SAMPLE[name]
    candidates = [point for point in points if (point.process, point.effect, point.object) == (process, effect, target)]
    point = max(candidates, key=lambda candidate: (points[candidate], candidate))
    outcome = interrupt(Crash(point, moment, 1 + points[point] // 2))
    assert outcome.violations == []
    assert outcome.has_crashed


@pytest.fixture
def interposer(tmp_path: Path) -> Interposer:
    return Interposer(tmp_path / "control", tmp_path / "data")


def test_interposer_of_a_foreign_process_records_nothing(interposer: Interposer, tmp_path: Path) -> None:

    (tmp_path / "data").mkdir()
    environment = {**os.environ, **interposer.environment}
    subprocess.run(["sh", "-c", f"echo text >{tmp_path}/data/file"], env=environment, check=True)
    assert interposer.count_points() == Counter()
