"""Output from the program to its submitter, through failures of the program, the daemon and the limit."""

from collections.abc import Callable

import pytest

from tests.grid.embedded import EmbeddedGrid
from tests.grid.grid import wait_until

pytestmark = pytest.mark.processes

MakeGrid = Callable[..., EmbeddedGrid]
ONE = {"type": "flexible", "total_size": 1}


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
