"""The measurement of processor time and memory on a node, with real processes."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import pytest

from koalapy.runner.connections import Loop
from koalapy.runner.exec_guard import ExecGuard
from koalapy.runner.processes import (
    COST_FACTOR,
    FIRST_INTERVAL_S,
    MAX_INTERVAL_S,
    Processes,
    UsageMeter,
    resident_pages,
)

pytestmark = pytest.mark.processes
BURN = "import time\nx = bytearray(60_000_000)\nwhile time.process_time() < 0.3: pass"


THREADED = """
import subprocess, threading
ended = threading.Event()
threads = [threading.Thread(target=ended.wait) for _ in range(4)]
for thread in threads:
    thread.start()
subprocess.run(["/bin/sh", "-c", 'exec /bin/sh "$KOALA_RANK_SCRIPT"'])
ended.set()
for thread in threads:
    thread.join()
"""


class ManualLoop(Loop):
    """A loop with alarms that the test calls."""

    def __init__(self) -> None:
        super().__init__()
        self.delays: list[float] = []
        self.callback: Callable[[], None] | None = None

    def set_alarm(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        self.delays.append(seconds)
        self.callback = callback

    def cancel_alarm(self, name: str) -> None:
        self.callback = None


def measure(script: str, is_expected: Callable[[dict[str, Any]], bool], before: str = ":") -> None:
    """Measure a shell script in a process that reaps all of its children, and check its use."""
    pid = os.fork()
    if pid == 0:
        os.system(before)
        processes = Processes()
        meter = UsageMeter(ManualLoop(), processes)
        meter.start()
        processes.start(["/bin/sh", "-c", script], dict(os.environ), os.open(os.devnull, os.O_WRONLY))
        while processes.reap()[1]:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        usage = meter.finish()
        os._exit(0 if usage and is_expected(usage) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_usage_has_processor_time_and_memory_of_ended_descendants() -> None:
    measure(
        f"{sys.executable} -c '{BURN}' & wait",
        lambda usage: 0.3 <= usage["cpu"] < 30 and 60e6 <= usage["memory"] < 1e9 and usage["seconds"] > 0,
    )


def test_usage_of_traced_threads_counts_their_process_once(tmp_path: Path) -> None:
    """MPI daemons of jobs over several clusters are traced; the system reports the whole process for each thread."""
    script = tmp_path / "rank.sh"
    script.write_text("i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done\n")
    environment = {"PATH": os.environ["PATH"], "KOALA_RANK_SCRIPT": str(script)}
    interpreter = os.path.realpath(sys.executable)
    pid = os.fork()
    if pid == 0:
        processes = Processes()
        guard = ExecGuard((os.path.basename(interpreter),), str(script), environment, lambda program: None)
        output = os.open(os.devnull, os.O_WRONLY)
        processes.start_guarded([interpreter, "-I", "-S", "-c", THREADED], environment, output, guard)
        while processes.reap()[1]:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        used = getrusage(RUSAGE_CHILDREN)
        os._exit(0 if 0 < processes.cpu_time <= used.ru_utime + used.ru_stime else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_usage_after_earlier_program_has_processor_time_of_its_own_program() -> None:
    measure(":", lambda usage: usage["cpu"] < 0.3, before=f"{sys.executable} -c '{BURN}'")


def test_usage_without_program_is_unknown() -> None:
    assert UsageMeter(ManualLoop(), Processes()).finish() is None


def test_usage_reads_memory_of_running_processes_at_growing_intervals() -> None:
    now = [0.0]
    loop = ManualLoop()
    meter = UsageMeter(loop, Processes(), lambda: now[0])
    meter.start()
    meter.start()
    assert loop.delays == [FIRST_INTERVAL_S], "it starts once"
    for now[0] in (1.0, 100.0, 1e6):
        assert loop.callback is not None
        loop.callback()
    assert loop.delays[1:] == [FIRST_INTERVAL_S, 10.0, MAX_INTERVAL_S]
    usage = meter.finish()
    assert usage is not None
    assert (usage["seconds"], usage["processors"]) == (1e6, len(os.sched_getaffinity(0)))
    assert loop.callback is None


def test_slow_readings_are_rare() -> None:
    ticks = iter([0.0, 10.0, 10.5])
    loop = ManualLoop()
    meter = UsageMeter(loop, Processes(), lambda: next(ticks))
    meter.start()
    assert loop.callback is not None
    loop.callback()
    assert loop.delays[-1] == 0.5 * COST_FACTOR


def test_resident_pages_of_ended_process_are_zero() -> None:
    assert resident_pages(os.getpid()) > 100
    assert resident_pages(2**22 + 1) == 0
