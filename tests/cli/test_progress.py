"""How far something long has come is said in one line, which disturbs nothing else that is printed."""

import io
import os
import signal
import threading

import pytest

from koalapy.cli.terminal.progress import CountingReader, Progress, Transfer
from koalapy.cli.terminal.screen import ERASE, Block
from koalapy.client.timeouts import ClientTimeouts
from tests.cli.conftest import Koala, Server, StandardError
from tests.cli.terminal import Terminal
from tests.cli.test_job_progress import STORY
from tests.cli.test_process import KOALA, environment

SHORT = ClientTimeouts(progress_delay_s=0.001, redraw_interval_s=0.001, plain_interval_s=0.001)


class Told:
    """What is told, one number after the other; ``until`` waits for so many.

    The one whose number is ``held`` is begun, but not told before ``let_go``.
    """

    def __init__(self, held: int = 0) -> None:
        self._told, self._held, self._changed = 0, held, threading.Condition()

    def __call__(self) -> str:
        with self._changed:
            self._told += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._told != self._held, 60)
            return f"step {self._told}"

    def let_go(self) -> None:
        with self._changed:
            self._held = 0
            self._changed.notify_all()

    def until(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._told >= number, 60)


def test_a_terminal_shows_one_line_that_is_gone_afterwards(standard_error: StandardError) -> None:
    stream, told = standard_error(), Told(held=4)
    with Progress(told, timeouts=SHORT):
        told.until(4)
        Block.report("koala: something else")
        told.let_go()
        told.until(6)
    lines = stream.getvalue().split(ERASE)
    assert lines[:5] == ["step 1", "step 2", "step 3", "koala: something else\nstep 4", "step 5"]
    assert lines[-1] == "", "nothing is left"
    assert "\n" not in stream.getvalue().replace("koala: something else\n", "")
    assert Block._current is None


def test_what_has_no_room_is_cut_to_one_line(standard_error: StandardError) -> None:
    stream, told = standard_error(), Told()

    def long() -> str:
        return f"{told()} {'x' * 100}\n\x1b[2J"

    with Progress(long, timeouts=SHORT):
        told.until(3)
    assert all(len(line) <= 19 for line in stream.getvalue().split(ERASE))
    assert "\x1b[2J" not in stream.getvalue()


def test_elsewhere_there_are_whole_lines_or_none(standard_error: StandardError) -> None:
    stream, told = standard_error(terminal=False), Told()
    with Progress(told, timeouts=SHORT):
        told.until(3)
    assert stream.getvalue().startswith("koala: step 1\nkoala: step 2\n")
    assert ERASE not in stream.getvalue()
    before = stream.getvalue()
    with Progress(told, plain=False, timeouts=SHORT):
        Block.report("a line")
    assert stream.getvalue() == f"{before}a line\n"


def test_nothing_is_drawn_over_what_a_job_prints(standard_error: StandardError) -> None:
    stream, told = standard_error(), Told()
    with Progress(told, timeouts=SHORT):
        told.until(2)
        Block.end_all()
        drawn = stream.getvalue()
        Block.report("koala: a line")
    assert drawn.endswith(ERASE)
    assert stream.getvalue() == f"{drawn}koala: a line\n"
    Block.end_all()


def test_bytes_are_counted_that_come_and_go() -> None:
    got = Transfer("fetches")
    assert b"".join(got.count_bytes(iter([b"abc", b"", b"de"]))) == b"abcde"
    assert str(got).startswith("fetches: 5 bytes")
    sent = Transfer("sends", 4000)
    file = CountingReader(io.BytesIO(b"x" * 4000), sent)
    assert str(sent) == "sends: 0 bytes of 4 KB (0%)"
    file.read(1000)
    assert str(sent).startswith("sends: 1 KB of 4 KB (25%), ")
    file.seek(0)
    assert str(sent) == "sends: 0 bytes of 4 KB (0%)"
    assert len(file.read(9999)) == sent.transferred == 4000
    assert str(Transfer("sends", 0)) == "sends: 0 bytes of 0 bytes"


@pytest.mark.processes
def test_who_waits_at_a_terminal_sees_for_what_and_how_long_in_one_line(koala: Koala, server: Server) -> None:
    koala("submit", "--flexible", "2", "--", "program")
    server.service.story = STORY[:1]
    for command in (["wait", "1"], ["logs", "-f", "1"]):
        with Terminal([*KOALA, *command], environment(server.url)) as terminal:
            terminal.expect("koala: job 1 is queued: too few idle nodes\r\n")
            assert ERASE not in terminal.printed.partition("koala: job 1")[0]
            terminal.expect("job 1 is queued, [0-9-]*[0-9:]+: too few idle nodes")
            os.kill(terminal.pid, signal.SIGINT)
            assert terminal.end() == 130
            assert terminal.printed.endswith(f"{ERASE}koala: job 1 goes on; cancel with: koala cancel 1\r\n")


@pytest.mark.processes
def test_a_terminal_that_cannot_draw_gets_lines_only(koala: Koala, server: Server) -> None:
    koala("submit", "--flexible", "2", "--", "program")
    server.service.story = STORY[:1]
    with Terminal([*KOALA, "wait", "1"], environment(server.url, TERM="dumb")) as terminal:
        terminal.expect("koala: job 1 is queued: too few idle nodes\r\n")
        os.kill(terminal.pid, signal.SIGINT)
        assert terminal.end() == 130
        assert "\x1b" not in terminal.printed
