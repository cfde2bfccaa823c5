"""A short run of the whole harness."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import victims
from tests.chaos.run import RunOptions, run

pytestmark = pytest.mark.processes


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a path short enough for sockets, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="koala-chaos-", dir="/tmp") as folder:
        yield Path(folder)
        victims.kill_all(Path(folder))


@pytest.mark.grid
def test_short_run_has_no_violation(folder: Path) -> None:
    outcome = run(RunOptions(seed=20, jobs=16, faults=6, minutes=0.3), folder)
    assert outcome.violations == [], (folder / "daemon.log").read_text()[-2000:]
    assert sum(outcome.faults.values()) >= 1
    assert sum(outcome.states.values()) >= 4
    assert outcome.ranks >= 4
    assert outcome.looks >= 4
