"""Scripts on a live grid, submitted by ``koala submit``."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.mpi]

TWO_STEPS = """\
#!/bin/bash
#KOALA --nonfixed 2,2
#KOALA --walltime 10m
echo "job $KOALA_JOB_ID on $KOALA_CLUSTER_LIST with $1"
{wait}
mpirun sh -c 'echo first $OMPI_COMM_WORLD_RANK $KOALA_CLUSTER'
koala mpirun -np 3 sh -c 'echo second $OMPI_COMM_WORLD_RANK $KOALA_CLUSTER' > {folder}/out
cat {folder}/out
exit 5
"""
EXPECTED = [
    *(f"first {rank} {cluster}" for rank, cluster in enumerate(["north", "north", "south", "south"])),
    *(f"second {rank} {cluster}" for rank, cluster in enumerate(["north", "north", "south"])),
]


def test_script_starts_two_programs_over_two_clusters(make_grid: Callable[..., EmbeddedGrid], tmp_path: Path) -> None:
    grid = make_grid()
    text = TWO_STEPS.format(wait="", folder=tmp_path)
    (tmp_path / "job.sh").write_text(text)
    ended = grid.run_koala("submit", "--wait", str(tmp_path / "job.sh"), "a b")
    assert ended.returncode == 5, ended.stderr
    first, *lines = ended.stdout.splitlines()
    assert first == "job 1 on north,south with a b"
    assert sorted(lines) == EXPECTED
    shown = json.loads(grid.run_koala("show", "1", "--json").stdout)
    assert (shown["script"], shown["command"]) == (text, ["job.sh", "a b"])
    grid.wait_until_idle()


def test_script_calls_mpirun_after_restarts_of_daemon_and_agent(
    make_grid: Callable[..., EmbeddedGrid], tmp_path: Path
) -> None:
    grid = make_grid()
    gate = tmp_path / "gate"
    waiting = f"touch {gate}.begun; until [ -e {gate} ]; do sleep 0.1; done"
    (tmp_path / "job.sh").write_text(TWO_STEPS.format(wait=waiting, folder=tmp_path))
    assert grid.run_koala("submit", "-q", str(tmp_path / "job.sh")).returncode == 0
    wait_until(lambda: os.path.exists(f"{gate}.begun"), "the start of the script")
    grid.kill_agent("south")
    grid.kill_daemon()
    gate.touch()
    grid.start()
    job = grid.wait_for_end(1)
    assert (job["state"], job["exit_code"], job["generation"]) == ("failed", 5, 1), grid.read_output(1)
    assert sorted(grid.read_output(1).splitlines()[1:]) == EXPECTED


def test_cluster_that_accepts_no_scripts_shares_none(make_grid: Callable[..., EmbeddedGrid], tmp_path: Path) -> None:
    south = {"kind": "local", "accepts_scripts": False}
    grid = make_grid(KOALA_CLUSTERS=json.dumps({"north": {"kind": "local"}, "south": south}))
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\nmpirun sh -c 'echo $KOALA_CLUSTER'\n")
    refused = grid.run_koala("submit", "--fixed", "north:1,south:1", "--dry-run", str(path))
    assert refused.returncode == 2
    assert "south does not accept scripts together with other clusters" in refused.stderr
    refused = grid.run_koala("submit", "--flexible", "6", str(path))
    assert "south does not accept scripts together with other clusters" in refused.stderr
    ended = grid.run_koala("submit", "--fixed", "south:2", "--wait", str(path))
    assert (ended.returncode, ended.stdout) == (0, "south\nsouth\n"), ended.stderr
