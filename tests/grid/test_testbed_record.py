"""What the daemon of the testbed has recorded, with real resource managers below it, is replayed as it was."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.grid.grid import wait_until
from tests.grid.test_record import replayed, some_jobs
from tests.grid.testbed import Testbed


@pytest.fixture
def bed(testbed: Testbed) -> Iterator[Testbed]:
    yield testbed
    testbed.cancel_all_jobs()
    testbed.wait_until_idle()


def test_a_day_of_real_clusters_is_replayed_as_it_was(bed: Testbed, tmp_path: Path) -> None:
    """With local users, a cluster that is drained, a node that fails, and jobs that are cancelled."""
    draw, gate = Random(11), bed.make_gate()
    alone = bed.submit({"type": "flexible", "total_size": 2}, "true")
    load = bed.start_local_job("south", 1)
    held = bed.submit({"type": "fixed", "components": [{"size": 2, "cluster": "north"}]}, *gate.hold)
    bed.wait_for_state(held, "running")
    assert bed.run_koala("clusters", "drain", "east").returncode == 0
    idents = [alone, held, *some_jobs(bed, draw, 3)]
    for runner in bed.list_runners(f"{held}.", "north-1"):
        runner.kill()
    wait_until(lambda: bed.get_job(held)["restarts"] == 1, "the node's failure to be noticed")
    assert bed.run_koala("clusters", "resume", "east").returncode == 0
    gate.open()
    load.stop()
    idents += some_jobs(bed, draw, 3)
    for ident in idents:
        bed.wait_for_end(ident)
    file = tmp_path / "day.gz"
    done = bed.run_koala("export", "-o", str(file), "--since", "60")
    assert done.returncode == 0, done.stderr
    *_, life = replayed(bed, file)
    assert life["divergence"] is None
    assert life["placements"] >= len(idents)
