"""What ranks mark of themselves and of each other, by real processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.clients import command
from tests.chaos.marks import Mark, MarkReader
from tests.chaos.rank import NO_INPUT, line
from tests.grid.grid import wait_until

pytestmark = pytest.mark.processes

Start = Callable[..., "subprocess.Popen[bytes]"]
LONG = {"seconds": 120.0, "lines": 1, "width": 64, "code": 0}


@pytest.fixture
def ground(tmp_path: Path) -> Path:
    (tmp_path / "locks").mkdir()
    return tmp_path


@pytest.fixture
def start(ground: Path) -> Iterator[Start]:
    """Starts a rank as a runner would."""
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
        words = command(ground, task)
        started.append(subprocess.Popen(words, env=environment, cwd=ground, stdout=subprocess.PIPE))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def begun(ground: Path) -> Callable[[int], list[Mark]]:
    """Waits until so many ranks have marked their begin."""
    marks: list[Mark] = []
    reader = MarkReader(ground)

    def wait(count: int) -> list[Mark]:
        def look() -> list[Mark]:
            marks.extend(reader.new())
            return [mark for mark in marks if mark.what == "begin"]

        wait_until(lambda: len(look()) >= count, f"{count} ranks to begin")
        return look()

    return wait


def test_a_rank_marks_its_begin_and_its_end_and_writes_what_can_be_foretold(ground: Path, start: Start) -> None:
    process = start({"seconds": 0.0, "lines": 3, "width": 64, "code": 5}, job=12, generation=2)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 5
    assert output == b"".join(line("12", 2, 0, number, 3, 64) for number in (1, 2, 3))
    begin, end = MarkReader(ground).new()
    assert (begin.what, begin.rank, begin.node, begin.trouble) == ("begin", ("12", 2, 0), "alder-1", ())
    assert (end.what, end.code, end.lines, end.pid) == ("end", 5, 3, process.pid)


def test_only_the_rank_that_is_to_fail_fails(start: Start) -> None:
    process = start({"seconds": 0.0, "lines": 1, "width": 64, "code": 5}, index=1)
    assert process.wait(30) == 0


def test_a_rank_without_its_files_says_so(start: Start) -> None:
    assert start({**LONG, "input": "something"}).wait(30) == NO_INPUT


def test_a_second_rank_on_a_node_sees_the_first(start: Start, begun: Callable[[int], list[Mark]]) -> None:
    start(LONG, job=1)
    (first,) = begun(1)
    start(LONG, job=2)
    _, second = begun(2)
    assert first.trouble == ()
    (trouble,) = second.trouble
    assert trouble.startswith("node taken: 1.1.0")


def test_a_second_attempt_sees_the_first(start: Start, begun: Callable[[int], list[Mark]]) -> None:
    start(LONG, generation=1, index=1)
    begun(1)
    start(LONG, generation=2, index=0)
    _, second = begun(2)
    assert second.trouble == ("attempt taken: rank 1 of attempt 1 lives",)


def test_an_old_attempt_that_comes_late_sees_the_new_one(start: Start, begun: Callable[[int], list[Mark]]) -> None:
    start(LONG, generation=2, index=1)
    begun(1)
    start(LONG, generation=1, index=0)
    _, second = begun(2)
    assert second.trouble == ("attempt taken: rank 1 of attempt 2 lives",)


def test_a_rank_that_runs_twice_sees_the_first(start: Start, begun: Callable[[int], list[Mark]]) -> None:
    start(LONG)
    begun(1)
    start(LONG, node="birch-1")
    _, second = begun(2)
    assert [trouble.partition(":")[0] for trouble in second.trouble] == ["rank taken"]


def test_ranks_of_one_attempt_do_not_disturb_each_other(start: Start, begun: Callable[[int], list[Mark]]) -> None:
    for index in range(3):
        start(LONG, index=index)
    assert [mark.trouble for mark in begun(3)] == [()] * 3


def test_what_a_rank_left_behind_holds_its_locks(
    ground: Path, start: Start, begun: Callable[[int], list[Mark]]
) -> None:
    keeper = subprocess.Popen([sys.executable, "-c", SUBREAPER, *command(ground, STRAGGLER)], env=LOCAL)
    try:
        assert keeper.wait(30) == 0
        start(LONG)
        _, second = begun(2)
        assert [trouble.partition(":")[0] for trouble in second.trouble] == ["node taken"]
    finally:
        (left,) = json.loads((ground / "left").read_text())
        os.kill(left, signal.SIGKILL)


STRAGGLER = {"local": "someone", "size": 1, "seconds": 0.0, "lines": 0, "width": 64, "code": 0, "straggler": True}
LOCAL = {"LOCALD_NODE_NAME": "alder-1", "LOCALD_NODE": "127.71.1.1", "LOCALD_NODE_INDEX": "0"}
SUBREAPER = """
import ctypes, json, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
subprocess.run(sys.argv[1:], check=True)
left = [int(pid) for pid in open(f"/proc/self/task/{os.getpid()}/children").read().split()]
open(sys.argv[-2] + "/left", "w").write(json.dumps(left))
"""
"""Runs a command, and writes down which processes it left behind: they became its own."""
