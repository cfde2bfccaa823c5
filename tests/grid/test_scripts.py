"""Scripts on a live grid, submitted by ``koala submit``."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import Grid, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.mpi]

TWO_STEPS = """\
#!/bin/bash
#KOALA --fixed {sites}
#KOALA --walltime 10m
echo "job $KOALA_JOB_ID on $KOALA_CLUSTER_LIST with $1"
{wait}
mpirun sh -c 'echo first $OMPI_COMM_WORLD_RANK $KOALA_CLUSTER; echo $KOALA_CLUSTER >rank-$OMPI_COMM_WORLD_RANK'
koala mpirun -np 3 sh -c 'echo second $OMPI_COMM_WORLD_RANK $KOALA_CLUSTER' >out
cat out
exit 5
"""


def write_script(grid: Grid, path: Path, wait: str = "") -> str:
    """Write a script that starts programs on two nodes of each resource manager, and return its text."""
    sites = ",".join(f"{name}:2" for name in grid.managers)
    path.write_text(text := TWO_STEPS.format(sites=sites, wait=wait))
    return text


def expected_lines(grid: Grid) -> list[str]:
    sites = [name for name in grid.managers for _ in range(2)]
    return [
        f"{step} {rank} {site}"
        for step, count in (("first", None), ("second", 3))
        for rank, site in enumerate(sites[:count])
    ]


def test_script_starts_two_programs_on_every_resource_manager(wide_grid: Grid, tmp_path: Path) -> None:
    folder = wide_grid.make_folder()
    text = write_script(wide_grid, tmp_path / "job.sh")
    ended = wide_grid.run_koala("submit", "--wait", "--chdir", folder.path, str(tmp_path / "job.sh"), "a b")
    assert ended.returncode == 5, ended.stderr
    first, *lines = ended.stdout.splitlines()
    shown = json.loads(wide_grid.run_koala("show", "--json").stdout)
    assert first == f"job {shown['id']} on {','.join(wide_grid.managers)} with a b"
    assert sorted(lines) == expected_lines(wide_grid)
    assert (shown["script"], shown["command"]) == (text, ["job.sh", "a b"])
    for number, cluster in enumerate(wide_grid.managers):
        assert [folder.read(f"rank-{rank}", cluster).strip() for rank in (2 * number, 2 * number + 1)] == [cluster] * 2
    wide_grid.wait_until_idle()


def test_script_calls_mpirun_after_restarts_of_daemon_and_agent(
    make_grid: Callable[..., EmbeddedGrid], tmp_path: Path
) -> None:
    grid = make_grid()
    gate = tmp_path / "gate"
    waiting = f"touch {gate}.begun; until [ -e {gate} ]; do sleep 0.1; done"
    write_script(grid, tmp_path / "job.sh", waiting)
    assert grid.run_koala("submit", "-q", "--chdir", str(tmp_path), str(tmp_path / "job.sh")).returncode == 0
    wait_until(lambda: os.path.exists(f"{gate}.begun"), "the start of the script")
    grid.kill_agent("south")
    grid.kill_daemon()
    gate.touch()
    grid.start()
    job = grid.wait_for_end(1)
    assert (job["state"], job["exit_code"], job["generation"]) == ("failed", 5, 1), grid.read_output(1)
    assert sorted(grid.read_output(1).splitlines()[1:]) == expected_lines(grid)


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
