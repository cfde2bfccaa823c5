"""Parallel computation in forked processes."""

import os
import signal
import subprocess
import sys

import pytest

from koalapy.simulation.processes import forked_map

pytestmark = pytest.mark.processes

PROGRAM = r"""
import os, time
from koalapy.simulation.processes import forked_map
def work(number):
    os.write(1, b"%d\n" % os.getpid())  # at once: print may write a number and its line's end one after the other
    time.sleep(60)
list(forked_map(work, range(2), 2, type(None)))
"""


def test_forked_map_with_function_that_cannot_be_pickled_keeps_order_of_arguments() -> None:
    assert list(forked_map(lambda number: number * 2, range(20), 3, int)) == [number * 2 for number in range(20)]
    assert list(forked_map(lambda number: number * 2, [], 3, int)) == []


def test_forked_map_with_failing_process_raises_runtime_error() -> None:
    def raise_error(number: int) -> None:
        raise ValueError(f"not {number}")

    with pytest.raises(RuntimeError, match="a worker process of the simulation has failed"):
        list(forked_map(raise_error, [1, 2], 2, type(None)))


class _RunsCode:
    """A value that would run code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os._exit, (5,)


def test_forked_map_with_value_that_would_run_code_raises_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="a worker process of the simulation has failed"):
        list(forked_map(lambda _: _RunsCode(), [1, 2], 2, object))


def test_forked_map_of_killed_parent_ends_its_workers() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        assert parent.pid not in workers
        os.kill(parent.pid, signal.SIGKILL)
        parent.stdout.read()  # ends when no process has the pipe open for writing
