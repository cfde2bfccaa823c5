"""A short workload of mohamed-2005 on a grid with failing starts; ``make experiment`` runs all of it."""

from pathlib import Path

import pytest

from koalapy.model.job_spec import ClaimingMode
from tests.experiments.koala_m05 import run

pytestmark = [pytest.mark.processes, pytest.mark.nightly]


@pytest.mark.parametrize("claiming", [ClaimingMode.ATOMIC, ClaimingMode.INCREMENTAL])
def test_workload_with_failing_starts_succeeds(claiming: ClaimingMode, tmp_path: Path) -> None:
    report = run(tmp_path / "grid", claiming, jobs=15, failures=0.3, every=0.3, scale=0.2, longest=100)
    assert report["summary"]["states"] == {"succeeded": 15}, report["run"]
    assert report["summary"]["restarts"] > 0
    assert report["utilisation"]["all"]["background"] > 0
