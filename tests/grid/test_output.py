"""Output from the program to its submitter, through failures of the program, the daemon and the limit."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

pytestmark = pytest.mark.processes

MakeGrid = Callable[..., EmbeddedGrid]
ONE = {"type": "flexible", "total_size": 1}
TWO_CLUSTERS = {"type": "fixed", "components": [{"size": 1, "cluster": "north"}, {"size": 2, "cluster": "south"}]}
SPEAK = "echo one; echo two >&2; printf last"
LOG_OPTIONS = ("", "--output", "--error", "--tail 1", "--error --tail 1")


@pytest.mark.parametrize("limit", [100_000, 0])
def test_job_with_output_over_limit_succeeds_after_daemon_restart(make_grid: MakeGrid, limit: int) -> None:
    grid = make_grid(KOALA_OUTPUT_LIMIT=str(limit))
    gate = grid.make_gate()
    script = f"seq 1 200000; echo half; while [ ! -e {gate.path} ]; do sleep 0.05; done; seq 200001 400000; exit 3"
    ident = grid.submit(ONE, "sh", "-c", script)
    grid.wait_for_state(ident, "running")
    if limit:
        wait_until(lambda: grid.read_output(ident).endswith("half\n"), "the first half to be there")
    grid.kill_daemon()
    gate.open()
    grid.start()
    job = grid.wait_for_end(ident)
    assert (job["state"], job["exit_code"], job["restarts"]) == ("failed", 3, 0)
    full_output = "".join(f"{i}\n" for i in range(1, 200_001)) + "half\n"
    full_output += "".join(f"{i}\n" for i in range(200_001, 400_001))
    half = limit // 2
    left_out = f"koala: {len(full_output) - limit} bytes are left out here (output_limit is {limit}); "
    head, _, end = grid.read_output(ident).partition(left_out)
    assert head.removesuffix("\n") == full_output[:half].removesuffix("\n")
    hint, _, tail = end.partition("\n")
    assert hint == "a file given with --output would have all of it"
    assert tail == full_output[len(full_output) - half :]
    grid.wait_until_idle()


def test_streams_and_files_of_processes_on_two_clusters(make_grid: MakeGrid) -> None:
    grid = make_grid()
    folder = grid.make_folder()
    options = {"output": "%x-%j-%c.%r", "error": "errors-100%%", "label": True, "name": "ocean model"}
    ident = grid.submit(TWO_CLUSTERS, "sh", "-c", SPEAK, launcher="processes", workdir=folder.path, **options)
    assert grid.wait_for_end(ident)["state"] == "succeeded", grid.read_output(ident)
    logs = {option: grid.run_koala("logs", str(ident), *option.split()).stdout for option in LOG_OPTIONS}
    assert sorted(logs["--output"].splitlines()) == sorted(f"{i}: {text}" for i in range(3) for text in ("one", "last"))
    assert sorted(logs["--error"].splitlines()) == ["0: two", "1: two", "2: two"]
    assert sorted(logs[""].splitlines()) == sorted((logs["--output"] + logs["--error"]).splitlines())
    assert len(logs["--tail 1"].splitlines()) == 2  # of each component
    assert sorted(logs["--error --tail 1"].splitlines())[0] == "0: two"
    for rank, cluster in enumerate(("north", "south", "south")):
        assert folder.read(f"ocean_model-{ident}-{cluster}.{rank}", cluster) == "one\nlast"
    assert sorted(folder.read("errors-100%", "south").splitlines()) == ["0: two", "1: two", "2: two"]
    undivided = grid.submit(ONE, "sh", "-c", SPEAK)
    grid.wait_for_end(undivided)
    refused = grid.run_koala("logs", str(undivided), "--error")
    assert refused.returncode == 2
    assert "submit with --error FILE or --label" in refused.stderr
    assert grid.run_koala("logs", str(undivided), "--tail", "2").stdout == "two\nlast"


@pytest.mark.mpi
def test_streams_and_files_of_mpi_ranks_on_two_clusters(make_grid: MakeGrid) -> None:
    grid = make_grid()
    folder = grid.make_folder()
    options = {"output": "out.%r", "error": "errors", "label": True, "launcher": "openmpi", "processes_per_node": 2}
    ident = grid.submit(TWO_CLUSTERS, "sh", "-c", SPEAK, workdir=folder.path, **options)
    assert grid.wait_for_end(ident)["state"] == "succeeded", grid.read_output(ident)
    output, errors = (grid.run_koala("logs", str(ident), option).stdout for option in ("--output", "--error"))
    assert sorted(output.splitlines()) == sorted(f"{i}: {text}" for i in range(6) for text in ("one", "last"))
    assert sorted(errors.splitlines()) == [f"{i}: two" for i in range(6)]
    assert sorted(folder.read("errors", "south").splitlines()) == [f"{i}: two" for i in range(6)]
    for rank in range(6):
        assert folder.read(f"out.{rank}", "south") == "one\nlast"


@pytest.mark.parametrize("stop", [EmbeddedGrid.kill_daemon, EmbeddedGrid.stop_daemon])
def test_commands_print_all_output_over_a_restart_of_the_daemon(
    make_grid: MakeGrid, stop: Callable[[EmbeddedGrid], object]
) -> None:
    grid = make_grid()
    gate, port = grid.make_gate(), grid.http.base_url.port
    script = f"seq 1 3000; while [ ! -e {gate.path} ]; do sleep 0.05; done; seq 3001 6000; echo error >&2"
    options = ("--flexible", "1", "--launcher", "processes", "--", "sh", "-c", script)
    with ThreadPoolExecutor() as pool:
        commands = [pool.submit(grid.run_koala, *words, *options) for words in (("run",), ("submit", "--wait"))]

        def has_first_half() -> bool:
            jobs = grid.http.get("/api/v1/jobs", params={"active": True}).json()["jobs"]
            return len(jobs) == 2 and all(grid.read_output(job["id"]).endswith("3000\n") for job in jobs)

        wait_until(has_first_half, "the first half of both outputs")
        stop(grid)
        gate.open()
        grid.start(port or 0)
        run, waited = (command.result() for command in commands)
    numbers = "".join(f"{number}\n" for number in range(1, 6001))
    assert (run.returncode, run.stdout) == (0, numbers), run.stderr
    assert "error\n" in run.stderr
    assert (waited.returncode, waited.stdout) == (0, f"{numbers}error\n"), waited.stderr
