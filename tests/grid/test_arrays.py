"""Arrays on a real grid: the variables of tasks, their output by index, and a daemon that is killed in the middle."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import Grid, wait_until

pytestmark = pytest.mark.processes

ONE_NODE = {"type": "flexible", "total_size": 1}
SHOW = ("sh", "-c", 'echo "$KOALA_ARRAY_JOB $KOALA_ARRAY_INDEX of $KOALA_ARRAY_COUNT: $KOALA_ARRAY_LINE"')


def run(grid: Grid, *arguments: str) -> str:
    """Run the command, which succeeds, and return its output."""
    done = grid.run_koala(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tasks_get_their_indices_and_lines(grid: Grid, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"first\r\n\nthe third, with blanks\n")
    options = ["--flexible", "1", "--launcher", "processes", "--chdir", "/tmp", "--each-line", str(file)]
    array = int(run(grid, "submit", "-q", *options, "--", *SHOW))
    run(grid, "wait", str(array))
    outputs = [run(grid, "logs", f"{array}[{index}]") for index in (1, 2, 3)]
    assert outputs == [f"{array} 1 of 3: first\n", f"{array} 2 of 3: \n", f"{array} 3 of 3: the third, with blanks\n"]
    assert "3 succeeded" in run(grid, "show", str(array))
    assert f"{array}[3]" in run(grid, "show", f"{array}[3]")
    listed = run(grid, "queue", "--all", "--state", "succeeded", "--tasks", str(array), "-q").split()
    assert listed == [str(array + 3), str(array + 2), str(array + 1)]


def test_cancelled_indices_do_not_run(grid: Grid) -> None:
    gate = grid.make_gate()
    array = grid.submit(ONE_NODE, *gate.hold, launcher="processes", array="1-9%2")
    wait_until(lambda: grid.get_job(array)["tasks"]["running"] == 2, "two tasks")
    run(grid, "cancel", f"{array}[2-8]")
    gate.open()
    end = grid.wait_for_end(array)
    assert (end["state"], end["tasks"]["succeeded"], end["tasks"]["cancelled"]) == ("cancelled", 2, 7)


def test_killed_daemon_runs_each_index_once(make_grid: Callable[..., EmbeddedGrid], tmp_path: Path) -> None:
    grid = make_grid()
    script = f'echo "$KOALA_ARRAY_INDEX" >>{tmp_path}/ran; [ "$KOALA_ARRAY_INDEX" -ne 7 ]'
    array = grid.submit(ONE_NODE, "sh", "-c", script, launcher="processes", array="1-40%5")
    wait_until(lambda: grid.get_job(array)["tasks"]["succeeded"] >= 8, "some tasks")
    grid.kill_daemon()
    grid.start()
    end = grid.wait_for_end(array)
    assert (end["state"], end["exit_code"], end["reason"]) == ("failed", 1, "39 succeeded, 1 failed")
    assert sorted(map(int, (tmp_path / "ran").read_text().split())) == list(range(1, 41))
