"""A small run of the whole: the harness works, and what it attacks withstands."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import victims
from tests.chaos.run import Orders, run

pytestmark = pytest.mark.processes


@pytest.fixture
def ground() -> Iterator[Path]:
    """Not pytest's own folder, whose name is too long for the sockets below it."""
    with tempfile.TemporaryDirectory(prefix="koala-chaos-", dir="/tmp") as folder:
        yield Path(folder)
        victims.kill_all(Path(folder))


@pytest.mark.grid
def test_a_few_jobs_and_faults(ground: Path) -> None:
    outcome = run(Orders(seed=20, jobs=16, faults=6, minutes=0.3), ground)
    assert outcome.violations == [], (ground / "daemon.log").read_text()[-2000:]
    assert sum(outcome.faults.values()) >= 1
    assert sum(outcome.states.values()) >= 4
    assert outcome.ranks >= 4
    assert outcome.looks >= 4
