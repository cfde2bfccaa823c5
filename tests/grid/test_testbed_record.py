"""Replay of the record of the testbed's daemon."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.grid.grid import wait_until
from tests.grid.test_record import replay_record, submit_jobs
from tests.grid.testbed import Testbed


@pytest.fixture
def bed(testbed: Testbed) -> Iterator[Testbed]:
    yield testbed
    testbed.cancel_all_jobs()
    testbed.wait_until_idle()


def test_replay_reproduces_record_of_testbed(bed: Testbed, tmp_path: Path) -> None:
    """Record local jobs, a drained cluster, a failed node and cancelled jobs."""
    draw, gate = Random(11), bed.make_gate()
    alone = bed.submit({"type": "flexible", "total_size": 2}, "true")
    load = bed.start_local_job("south", 1)
    waiting_job = bed.submit({"type": "fixed", "components": [{"size": 2, "cluster": "north"}]}, *gate.hold)
    bed.wait_for_state(waiting_job, "running")
    assert bed.run_koala("clusters", "drain", "east", "--reason", "test").returncode == 0
    idents = [alone, waiting_job, *submit_jobs(bed, draw, 3)]
    for runner in bed.list_runners(f"{waiting_job}.", "north-1"):
        runner.kill()
    wait_until(lambda: bed.get_job(waiting_job)["restarts"] == 1, "the node's failure to be noticed")
    assert bed.run_koala("clusters", "resume", "east").returncode == 0
    gate.open()
    load.stop()
    idents += submit_jobs(bed, draw, 3)
    for ident in idents:
        bed.wait_for_end(ident)
    file = tmp_path / "day.gz"
    result = bed.run_koala("export", "-o", str(file), "--since", "60")
    assert result.returncode == 0, result.stderr
    *_, life = replay_record(bed, file)
    assert life["divergence"] is None
    assert life["placements"] >= len(idents)
