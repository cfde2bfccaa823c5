"""Work that goes over processes."""

import os
import signal
import subprocess
import sys

import pytest

from koalapy.simulation.processes import forked_map

PROGRAM = r"""
import os, time
from koalapy.simulation.processes import forked_map
def work(number):
    os.write(1, b"%d\n" % os.getpid())  # at once: print may write a number and its line's end one after the other
    time.sleep(60)
forked_map(work, range(2), 2)
"""


def test_answers_come_in_the_order_of_the_arguments_from_what_cannot_be_pickled() -> None:
    assert forked_map(lambda number: number * 2, range(20), 3) == [number * 2 for number in range(20)]
    assert forked_map(lambda number: number * 2, [], 3) == []


def test_what_a_process_refuses_is_refused() -> None:
    def refuses(number: int) -> None:
        raise ValueError(f"not {number}")

    with pytest.raises(ValueError, match="not 1"):
        forked_map(refuses, [1, 2], 2)


def test_who_is_killed_leaves_nobody_behind() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(parent.stdout.readline()) for _ in range(2)]
        assert parent.pid not in workers
        os.kill(parent.pid, signal.SIGKILL)
        parent.stdout.read()  # comes to its end when the last who could write has ended
