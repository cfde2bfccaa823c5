"""Marks that ranks write about themselves and each other, in real processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.clients import build_command
from tests.chaos.marks import Mark, MarkReader
from tests.chaos.rank import NO_INPUT, format_line
from tests.grid.grid import wait_until

pytestmark = pytest.mark.processes

StartRank = Callable[..., "subprocess.Popen[bytes]"]
WaitForMarks = Callable[[int], list[Mark]]
LONG = {"seconds": 120.0, "lines": 1, "width": 64, "code": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "locks").mkdir()
    return tmp_path


@pytest.fixture
def start_rank(folder: Path) -> Iterator[StartRank]:
    """Yield a function that starts a rank as a runner does."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(task: dict[str, Any], *, job: int = 1, generation: int = 1, index: int = 0, node: str = "") -> Any:
        environment = {
            "KOALA_JOB": str(job),
            "KOALA_GENERATION": str(generation),
            "KOALA_NODE_INDEX": str(index),
            "KOALA_NODES": "2",
            "KOALA_NODE": node or f"alder-{index + 1}",
            "KOALA_HOST": "127.71.1.1",
        }
        arguments = build_command(folder, task)
        started.append(subprocess.Popen(arguments, env=environment, cwd=folder, stdout=subprocess.PIPE))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def wait_for_begin_marks(folder: Path) -> WaitForMarks:
    """Return a function that waits for ``count`` begin marks and returns them."""
    marks: list[Mark] = []
    reader = MarkReader(folder)

    def wait(count: int) -> list[Mark]:
        def read_begin_marks() -> list[Mark]:
            marks.extend(reader.new())
            return [mark for mark in marks if mark.event == "begin"]

        wait_until(lambda: len(read_begin_marks()) >= count, f"{count} ranks to begin")
        return read_begin_marks()

    return wait


def test_rank_writes_marks_and_expected_output(folder: Path, start_rank: StartRank) -> None:
    process = start_rank({"seconds": 0.0, "lines": 3, "width": 64, "code": 5}, job=12, generation=2)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 5
    assert output == b"".join(format_line("12", 2, 0, number, 3, 64) for number in (1, 2, 3))
    begin, end = MarkReader(folder).new()
    assert (begin.event, begin.rank, begin.node, begin.trouble) == ("begin", ("12", 2, 0), "alder-1", ())
    assert (end.event, end.code, end.lines, end.pid) == ("end", 5, 3, process.pid)


def test_rank_other_than_failing_one_exits_with_0(start_rank: StartRank) -> None:
    process = start_rank({"seconds": 0.0, "lines": 1, "width": 64, "code": 5}, index=1)
    assert process.wait(30) == 0


def test_rank_without_input_file_exits_with_its_code(start_rank: StartRank) -> None:
    assert start_rank({**LONG, "input": "something"}).wait(30) == NO_INPUT


@pytest.mark.parametrize(
    ("first", "second", "trouble"),
    [
        ({"job": 1}, {"job": 2}, "node taken: 1.1.0"),
        ({"generation": 1, "index": 1}, {"generation": 2}, "attempt taken: rank 1 of attempt 1 lives"),
        ({"generation": 2, "index": 1}, {"generation": 1}, "attempt taken: rank 1 of attempt 2 lives"),
        ({}, {"node": "birch-1"}, "rank taken: another process"),
    ],
)
def test_second_rank_reports_the_first_one(
    start_rank: StartRank,
    wait_for_begin_marks: WaitForMarks,
    first: dict[str, Any],
    second: dict[str, Any],
    trouble: str,
) -> None:
    start_rank(LONG, **first)
    (mark,) = wait_for_begin_marks(1)
    assert mark.trouble == ()
    start_rank(LONG, **second)
    _, mark = wait_for_begin_marks(2)
    (found,) = mark.trouble
    assert found.startswith(trouble)


def test_ranks_of_one_attempt_report_no_trouble(start_rank: StartRank, wait_for_begin_marks: WaitForMarks) -> None:
    for index in range(3):
        start_rank(LONG, index=index)
    assert [mark.trouble for mark in wait_for_begin_marks(3)] == [()] * 3


def test_straggler_of_rank_keeps_its_locks(
    folder: Path, start_rank: StartRank, wait_for_begin_marks: WaitForMarks
) -> None:
    keeper = subprocess.Popen([sys.executable, "-c", SUBREAPER, *build_command(folder, STRAGGLER)], env=LOCAL)
    try:
        assert keeper.wait(30) == 0
        start_rank(LONG)
        _, second = wait_for_begin_marks(2)
        assert [trouble.partition(":")[0] for trouble in second.trouble] == ["node taken"]
    finally:
        (straggler,) = json.loads((folder / "left").read_text())
        os.kill(straggler, signal.SIGKILL)


STRAGGLER = {"local": "someone", "size": 1, "seconds": 0.0, "lines": 0, "width": 64, "code": 0, "straggler": True}
LOCAL = {"LOCALD_NODE_NAME": "alder-1", "LOCALD_NODE": "127.71.1.1", "LOCALD_NODE_INDEX": "0"}
SUBREAPER = """
import ctypes, json, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
subprocess.run(sys.argv[1:], check=True)
left = [int(pid) for pid in open(f"/proc/self/task/{os.getpid()}/children").read().split()]
open(sys.argv[-2] + "/left", "w").write(json.dumps(left))
"""
"""A program that runs a command and writes the ids of the processes that it adopted from it."""
