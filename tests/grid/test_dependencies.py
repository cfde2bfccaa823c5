"""Jobs after other jobs on a real grid: a pipeline, a deadline, and a daemon that is killed while jobs are deferred."""

import shlex
from collections.abc import Callable

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import Grid

pytestmark = pytest.mark.processes

ONE_NODE = {"type": "flexible", "total_size": 1}
FIRST_TWO = {"type": "nonfixed", "components": [{"size": 1}, {"size": 1}]}


def submit(grid: Grid, *arguments: str) -> int:
    """Submit a job by the command line, and return its number."""
    done = grid.run_koala("submit", "-q", "--launcher", "processes", *arguments)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_pipeline_runs_in_order_and_its_branches_by_the_ends(wide_grid: Grid) -> None:
    """Jobs of the pipeline run under different resource managers."""
    grid, gate = wide_grid, wide_grid.make_gate()
    on_first, on_last = (("--fixed", f"{name}:2") for name in (grid.managers[0], grid.managers[-1]))
    first = grid.submit(grid.request_on_managers(), *gate.hold, launcher="processes")
    second = submit(grid, *on_first, "--after", str(first), "--", "sh", "-c", "exit 3")
    third = submit(grid, *on_last, "--after", f"{first},{second}:failed", "--", "hostname")
    never = submit(grid, *on_last, "--after", str(second), "--", "hostname")
    shown = grid.run_koala("show", str(second)).stdout
    assert f"job {first} (" in shown
    assert f"job {third} (queued)" in shown
    assert grid.get_job(third)["state"] == "queued"
    gate.open()
    ends = [grid.wait_for_end(job) for job in (first, second, third, never)]
    assert [end["state"] for end in ends] == ["succeeded", "failed", "succeeded", "failed"]
    assert ends[3]["reason"] == f"dependency: job {second} failed, and it had to succeed"
    assert ends[0]["ended_at"] <= ends[1]["placed_at"] <= ends[1]["ended_at"] <= ends[2]["placed_at"]


def test_deferred_jobs_survive_a_killed_daemon(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid()
    gate = grid.make_gate()
    first = grid.submit(ONE_NODE, *gate.hold, launcher="processes")
    second = grid.submit(ONE_NODE, "hostname", launcher="processes", after=[first])
    by_time = grid.submit(ONE_NODE, "hostname", launcher="processes", begin="now+4s")
    grid.kill_daemon()
    grid.start()
    assert grid.get_job(second)["awaits"] == [f"{first}:ok"]
    gate.open()
    assert [grid.wait_for_end(job)["state"] for job in (first, second, by_time)] == ["succeeded"] * 3


def test_results_of_jobs_and_tasks_are_inputs_of_a_later_job(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid()
    gate = grid.make_gate()
    wait = shlex.join(gate.hold)
    script = f"{wait}; echo $KOALA_CLUSTER > out; mkdir res; echo $KOALA_RANK > res/rank"
    first = grid.submit(FIRST_TWO, "sh", "-c", script, launcher="processes", collect=["out", "res"])
    sweep = submit(
        grid, "--flexible", "1", "--array", "3-4", "--collect", "out", "--", "sh", "-c", f"{wait}; echo 4 > out"
    )
    inputs = (f"{first}.1:res", f"{first}.0:out:as=first", f"{sweep}[4]:out:as=task")
    options = [word for each in inputs for word in ("--input-from", each)]
    last = submit(grid, "--nonfixed", "1,1", *options, "--", "sh", "-c", "cat res/rank first task")
    unclear = submit(grid, "--flexible", "1", "--input-from", f"{first}:out", "--", "true")
    assert sorted(grid.get_job(last)["awaits"]) == [f"{first}:ok", f"{sweep}:ok"]
    grid.kill_daemon()
    grid.start()
    gate.open()
    ends = [grid.wait_for_end(job) for job in (first, sweep, last, unclear)]
    assert [end["state"] for end in ends] == ["succeeded", "succeeded", "succeeded", "failed"]
    assert sorted(grid.read_output(last).split()) == ["1", "1", "4", "4", "north", "north"]
    assert f"components 0 (north) and 1 (south) of job {first} each have out" in ends[3]["reason"]


def test_absent_results_fail_the_job_and_not_its_cluster(make_grid: Callable[..., EmbeddedGrid]) -> None:
    grid = make_grid()
    gate = grid.make_gate()
    first = grid.submit(ONE_NODE, *gate.hold, launcher="processes", collect=["out*"])
    second = submit(grid, "--flexible", "1", "--input-from", f"{first}:out.csv", "--", "cat", "out.csv")
    third = submit(grid, "--flexible", "1", "--after", str(second), "--", "true")
    gate.open()
    end = grid.wait_for_end(second)
    expected = f"its inputs from other jobs: job {first} collected no out.csv"
    assert (end["state"], end["restarts"], end["reason"]) == ("failed", 0, expected)
    assert grid.wait_for_end(third)["reason"] == f"dependency: job {second} failed, and it had to succeed"
    assert [cluster["errors"] for cluster in grid.list_clusters()] == [0, 0]


def test_program_is_ended_at_its_deadline_after_its_warning(wide_grid: Grid) -> None:
    script = "trap 'echo warned' TERM; while :; do sleep 0.1; done"
    options = {"launcher": "processes", "deadline": "now+6s", "warning": "TERM@2"}
    job = wide_grid.submit(ONE_NODE, "sh", "-c", script, **options)
    end = wide_grid.wait_for_end(job)
    assert (end["state"], end["reason"].startswith("deadline ")) == ("failed", True)
    assert "warned" in wide_grid.read_output(job)
