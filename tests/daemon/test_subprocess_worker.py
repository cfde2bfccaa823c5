"""Computations in a child process."""

import asyncio
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from koalapy.daemon.forecast import subprocess_worker
from koalapy.daemon.forecast.subprocess_worker import NICENESS, run_in_subprocess
from koalapy.model.errors import BusyError

pytestmark = pytest.mark.processes


def double_values(values: Iterator[int]) -> list[int]:
    print("this is not an answer")
    return [2 * value for value in values]


def add_all(start: Callable[[], int], values: Iterator[int]) -> int:
    return start() + sum(values)


def ten_values() -> int:
    return 10


def describe_process(_: Iterator[None]) -> dict[str, Any]:
    """Return the information about this process that another process of the same account can read."""
    process = json.loads(subprocess.run([sys.executable, "-c", LOOK], check=True, stdout=subprocess.PIPE).stdout)
    return {"pid": os.getpid(), "niceness": os.nice(0), "environment": dict(os.environ), **process}


LOOK = """
import json, os
pid, seen = os.getppid(), {}
for name in ("environ", "mem", "fd/0"):
    try:
        open(f"/proc/{pid}/{name}", "rb").close()
        seen[name] = "open"
    except OSError as error:
        seen[name] = type(error).__name__
print(json.dumps(seen))
"""


def processor_time_of_other(values: Iterator[int]) -> float:
    """Return the processor time in s that another process gets while this one gets 0.2 s of the same processor."""
    process, processor = values

    def used() -> float:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    os.sched_setaffinity(0, {processor})
    began = used()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    return used() - began


def raise_error(values: Iterator[str]) -> None:
    raise ValueError(next(values))


def exit_early(_: Iterator[None]) -> None:
    os._exit(3)


def kill_itself(_: Iterator[None]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def read_fifo(values: Iterator[str]) -> None:
    Path(next(values)).read_bytes()


def stop_child_process(_: Iterator[None]) -> None:
    if os.fork() == 0:
        stop_before_reading(_)
    os.wait()


def stop_before_reading(_: Iterator[None]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def return_values(values: Iterator[list[int]]) -> list[int]:
    return next(values)


@pytest.fixture(autouse=True)
def _child_finds_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


async def test_run_in_subprocess_returns_value_and_ignores_prints() -> None:
    assert await run_in_subprocess(double_values, [21, 4]) == [42, 8]


def count_values(values: Iterator[int], report: Callable[[int, str], None]) -> int:
    count = 0
    for count, value in enumerate(values, start=1):
        report(count, f"#{value}\n")
    return count


async def test_run_in_subprocess_repeats_reports() -> None:
    reports: list[tuple[int, str]] = []
    assert await run_in_subprocess(count_values, [7, 8], report=lambda *values: reports.append(values)) == 2
    assert reports == [(1, "#7\n"), (2, "#8\n")]


async def test_run_in_subprocess_passes_functions_by_name() -> None:
    assert await run_in_subprocess(add_all, [1, 2], ten_values) == 13


@pytest.mark.evidence("J4")
async def test_child_has_lower_priority_and_is_protected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KOALA_AGENT_TOKEN", "a-secret-of-the-daemon")
    child = await run_in_subprocess(describe_process, [])
    assert child["pid"] != os.getpid()
    assert child["niceness"] == min(19, os.nice(0) + NICENESS)
    assert "KOALA_AGENT_TOKEN" not in child["environment"]
    if os.getuid() != 0:
        assert (child["environ"], child["mem"], child["fd/0"]) == ("PermissionError",) * 3


@pytest.mark.evidence("J4")
def test_child_channel_cannot_be_opened_by_its_account() -> None:
    with tempfile.TemporaryFile() as errors:
        process, channel = subprocess_worker._start_child([double_values], 10.0, errors)
        with channel:
            for number in (0, 1):
                with pytest.raises(OSError, match=r"No such device|Permission denied"):
                    os.open(f"/proc/{process.pid}/fd/{number}", os.O_RDWR)
        process.kill()
        process.wait()


class RunsCode:
    """A value that runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.evidence("J4")
async def test_answer_with_pickled_code_is_not_run(tmp_path: Path) -> None:
    evil = pickle.dumps(RunsCode(tmp_path / "ran"))
    with pytest.raises(ValueError, match=r"decode|Expecting value"):
        await run_in_subprocess(answer_raw, [list(evil)])
    assert not (tmp_path / "ran").exists()


def answer_raw(values: Iterator[list[int]]) -> None:
    os.write(0, bytes(next(values)))
    os._exit(0)


async def test_values_not_json_are_rejected_before_sending(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        await run_in_subprocess(double_values, [RunsCode(tmp_path / "ran")])
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def processor() -> int:
    return min(os.sched_getaffinity(0))


@pytest.fixture
def busy_process(processor: int) -> Iterator[int]:
    """Run a process that keeps this processor busy; yield its process id."""
    code = f"import os; os.sched_setaffinity(0, {{{processor}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


async def test_child_on_busy_processor_gets_its_share(busy_process: int, processor: int) -> None:
    assert await run_in_subprocess(processor_time_of_other, [busy_process, processor]) < 2


async def test_run_in_subprocess_with_large_values_returns_all() -> None:
    values = list(range(300_000))
    assert await run_in_subprocess(return_values, [values]) == values


async def test_run_in_subprocess_with_failing_function_raises_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="ValueError: not like this"):
        await run_in_subprocess(raise_error, ["not like this"])
    with pytest.raises(RuntimeError, match="exit_early failed"):
        await run_in_subprocess(exit_early, [])


async def test_run_in_subprocess_with_killed_child_raises_busy_error() -> None:
    with pytest.raises(BusyError, match="was killed"):
        await run_in_subprocess(kill_itself, [])


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """Return a FIFO that the child reads without end; once the child has ended, no process reads it."""
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


async def test_child_that_stops_reading_is_killed_after_timeout() -> None:
    values = ["x" * 10_000_000]  # more than a socket buffers
    with pytest.raises(BusyError, match=r"stopped after 1 s"):
        await asyncio.wait_for(run_in_subprocess(stop_before_reading, values, timeout_s=1.0), 60.0)


async def test_child_with_grandchild_on_channel_is_killed_after_timeout() -> None:
    with pytest.raises(BusyError, match=r"stopped after 1 s"):
        await asyncio.wait_for(run_in_subprocess(stop_child_process, [], timeout_s=1.0), 60.0)


async def test_child_that_takes_too_long_is_killed(fifo: str) -> None:
    with pytest.raises(BusyError, match=r"stopped after 0\.5 s"):
        await run_in_subprocess(read_fifo, [fifo], timeout_s=0.5)
    with pytest.raises(OSError, match="No such device"):
        os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)


async def test_child_is_killed_when_caller_is_cancelled(fifo: str) -> None:
    waiting = asyncio.create_task(run_in_subprocess(read_fifo, [fifo]))
    writing = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    reader = select.poll()
    reader.register(writing, 0)
    ((_, event),) = await asyncio.to_thread(reader.poll, 60_000)
    os.close(writing)
    assert event == select.POLLERR


async def test_cancelled_caller_logs_no_failure(fifo: str) -> None:
    with capture_logs() as logs:
        waiting = asyncio.create_task(run_in_subprocess(read_fifo, [fifo]))
        writing = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.get_running_loop().shutdown_default_executor()  # wait until the thread has seen the child's end
        os.close(writing)
    assert logs == []
