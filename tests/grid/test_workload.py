"""The workload of mohamed-2005 in short, on a grid whose starts fail; ``make experiment`` plays all of it."""

from pathlib import Path

import pytest

from koalapy.model.job import ClaimingMode
from tests.experiments.koala_m05 import run
from tests.experiments.m05 import table

pytestmark = [pytest.mark.processes, pytest.mark.nightly]


@pytest.mark.parametrize("claiming", [ClaimingMode.ATOMIC, ClaimingMode.INCREMENTAL])
def test_every_job_succeeds(claiming: ClaimingMode, tmp_path: Path) -> None:
    done = run(tmp_path / "grid", claiming, jobs=15, failures=0.3, every=0.3, scale=0.2, longest=100)
    print(table([done]))
    assert len(done.outcomes) == 15
    assert all(outcome.succeeded for outcome in done.outcomes)
    assert sum(outcome.restarts for outcome in done.outcomes) > 0
    assert done.local > 0
