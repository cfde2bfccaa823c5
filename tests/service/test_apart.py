"""Work in a process of its own."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from koalapy.model.errors import BusyError
from koalapy.service.apart import NICENESS, apart


def double(number: int) -> int:
    print("this is no answer")
    return 2 * number


def who(_: None) -> tuple[int, int]:
    return os.getpid(), os.nice(0)


def other_ones_time(process: int, processor: int) -> float:
    """The processor time in seconds that another process has while this one has 0.2 s, on the same processor."""

    def used() -> float:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    os.sched_setaffinity(0, {processor})
    began = used()
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    return used() - began


def fail(text: str) -> None:
    raise ValueError(text)


def vanish(_: None) -> None:
    os._exit(3)


def die(_: None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def never_ends(fifo: str) -> None:
    Path(fifo).read_bytes()


def one_of_two_hangs(_: None) -> None:
    if os.fork() == 0:
        stop_for_good()
    os.wait()


class Hangs:
    """Stops the process that it is handed to, for good: it reads nothing any more."""

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return stop_for_good, ()


def stop_for_good() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def nothing(*_: object) -> None:
    raise AssertionError("it is never called")


def size_of(values: list[int]) -> list[int]:
    return values


@pytest.fixture(autouse=True)
def _child_finds_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))


async def test_what_it_answers_is_told_and_nothing_that_it_prints() -> None:
    assert await apart(double, 21) == 42


async def test_it_is_another_process_that_others_go_before() -> None:
    process, niceness = await apart(who, None)
    assert process != os.getpid()
    assert niceness == min(19, os.nice(0) + NICENESS)


@pytest.fixture
def processor() -> int:
    return min(os.sched_getaffinity(0))


@pytest.fixture
def busy(processor: int) -> Iterator[int]:
    """A process that takes all that it gets of that processor."""
    code = f"import os; os.sched_setaffinity(0, {{{processor}}}); print(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


async def test_a_busy_machine_does_not_keep_it_from_its_end(busy: int, processor: int) -> None:
    assert await apart(other_ones_time, busy, processor) < 2


async def test_much_comes_and_goes() -> None:
    """More than a pipe holds, both ways."""
    values = list(range(300_000))
    assert await apart(size_of, values) == values


async def test_a_failure_is_told_with_its_reason() -> None:
    with pytest.raises(RuntimeError, match="ValueError: not like this"):
        await apart(fail, "not like this")
    with pytest.raises(RuntimeError, match="vanish failed"):
        await apart(vanish, None)


async def test_one_that_is_killed_is_told_as_such() -> None:
    with pytest.raises(BusyError, match="was killed"):
        await apart(die, None)


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    """What is read by who never ends: nobody reads it once that has ended."""
    os.mkfifo(tmp_path / "fifo")
    return str(tmp_path / "fifo")


async def test_one_that_hangs_while_it_is_told_what_to_do_is_not_waited_for() -> None:
    """There is more to tell than a pipe holds."""
    with pytest.raises(BusyError, match=r"longer than 1 s"):
        await asyncio.wait_for(apart(nothing, Hangs(), bytes(10_000_000), seconds=1.0), 60.0)


async def test_a_process_of_its_own_that_hangs_is_not_waited_for() -> None:
    """It has the pipe by which an answer would come, and keeps that when the one that waits for it is killed."""
    with pytest.raises(BusyError, match=r"longer than 1 s"):
        await asyncio.wait_for(apart(one_of_two_hangs, None, seconds=1.0), 60.0)


async def test_what_takes_too_long_ends(fifo: str) -> None:
    with pytest.raises(BusyError, match=r"longer than 0\.5 s"):
        await apart(never_ends, fifo, seconds=0.5)
    with pytest.raises(OSError, match="No such device"):
        os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)


async def test_it_ends_with_who_waits_for_it(fifo: str) -> None:
    waiting = asyncio.create_task(apart(never_ends, fifo))
    writing = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    reader = select.poll()
    reader.register(writing, 0)
    ((_, event),) = await asyncio.to_thread(reader.poll, 60_000)
    os.close(writing)
    assert event == select.POLLERR


async def test_one_that_nobody_waits_for_any_more_has_not_failed(fifo: str) -> None:
    with capture_logs() as logs:
        waiting = asyncio.create_task(apart(never_ends, fifo))
        writing = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.get_running_loop().shutdown_default_executor()  # so that the thread has seen its end
        os.close(writing)
    assert logs == []
