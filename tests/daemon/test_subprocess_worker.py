"""Computations in a child process."""

import asyncio
import errno
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

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
    return {
        "pid": os.getpid(),
        "niceness": os.nice(0),
        "is_socket": stat.S_ISSOCK(os.fstat(0).st_mode),
        "environment": dict(os.environ),
        **process,
    }


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
    assert child["is_socket"], "no process can open it through /proc"
    assert "KOALA_AGENT_TOKEN" not in child["environment"]
    if os.getuid() != 0:
        assert (child["environ"], child["mem"], child["fd/0"]) == ("PermissionError",) * 3


async def test_values_that_are_not_json_are_rejected() -> None:
    with pytest.raises(TypeError):
        await run_in_subprocess(double_values, [object()])


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


@pytest.mark.parametrize("step", ["tempfile.TemporaryFile", "asyncio.create_subprocess_exec"])
async def test_run_in_subprocess_without_resources_raises_busy_error_and_closes_sockets(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pair = socket.socketpair()
    monkeypatch.setattr("socket.socketpair", lambda: pair)
    monkeypatch.setattr(step, fail)
    with capture_logs() as logs, pytest.raises(BusyError, match="no worker process could be started"):
        await run_in_subprocess(double_values, [1])
    assert [entry["error"] for entry in logs] == ["it could not be started: [Errno 28] No space left on device"]
    await asyncio.sleep(0)
    is_used = step == "asyncio.create_subprocess_exec"
    assert [end.fileno() == -1 for end in pair] == [is_used, is_used]
    for end in pair:
        end.close()


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """Return a FIFO that the child reads without end; once the child has ended, no process reads it."""
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


@pytest.mark.parametrize(("function", "values"), [(stop_before_reading, ["x" * 10_000_000]), (stop_child_process, [])])
async def test_child_that_stops_or_starts_another_is_killed_after_timeout(
    function: Callable[..., Any], values: list[str]
) -> None:
    with pytest.raises(BusyError, match=r"stopped after 1 s"):
        await asyncio.wait_for(run_in_subprocess(function, values, timeout_s=1.0), 60.0)


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
        os.close(writing)
    assert logs == []
