"""Progress lines, with and without a terminal."""

import io
import os
import signal
import threading

import pytest

from koalapy.cli.terminal.screen import ERASE, Block, CountingReader, Progress, Transfer
from koalapy.client.timeouts import ClientTimeouts
from tests.cli.conftest import Koala, Server, StandardError
from tests.cli.terminal import Terminal
from tests.cli.test_job_progress import TIMELINE
from tests.cli.test_process import KOALA, make_environment

SHORT = ClientTimeouts(progress_delay_s=0.001, redraw_interval_s=0.001, plain_interval_s=0.001)


class StepCounter:
    """Returns ``step 1``, ``step 2`` and so on. The call ``held_step`` blocks until ``release``."""

    def __init__(self, held_step: int = 0) -> None:
        self._step, self._held_step, self._changed = 0, held_step, threading.Condition()

    def __call__(self) -> str:
        with self._changed:
            self._step += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._step != self._held_step, 60)
            return f"step {self._step}"

    def release(self) -> None:
        with self._changed:
            self._held_step = 0
            self._changed.notify_all()

    def wait_for_step(self, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._step >= number, 60)


def test_progress_on_terminal_is_erased_at_end(standard_error: StandardError) -> None:
    stream, steps = standard_error(), StepCounter(held_step=4)
    with Progress(steps, timeouts=SHORT):
        steps.wait_for_step(4)
        Block.report("koala: something else")
        steps.release()
        steps.wait_for_step(6)
    lines = stream.getvalue().split(ERASE)
    assert lines[:5] == ["step 1", "step 2", "step 3", "koala: something else\nstep 4", "step 5"]
    assert lines[-1] == "", "nothing is left"
    assert "\n" not in stream.getvalue().replace("koala: something else\n", "")
    assert Block._current is None


def test_progress_is_cut_to_terminal_width(standard_error: StandardError) -> None:
    stream, steps = standard_error(), StepCounter()

    def long() -> str:
        return f"{steps()} {'x' * 100}\n\x1b[2J"

    with Progress(long, timeouts=SHORT):
        steps.wait_for_step(3)
    assert all(len(line) <= 19 for line in stream.getvalue().split(ERASE))
    assert "\x1b[2J" not in stream.getvalue()


def test_progress_without_terminal_prints_lines(standard_error: StandardError) -> None:
    stream, steps = standard_error(terminal=False), StepCounter()
    with Progress(steps, timeouts=SHORT):
        steps.wait_for_step(3)
    assert stream.getvalue().startswith("koala: step 1\nkoala: step 2\n")
    assert ERASE not in stream.getvalue()
    first_lines = stream.getvalue()
    with Progress(steps, plain=False, timeouts=SHORT):
        Block.report("a line")
    assert stream.getvalue() == f"{first_lines}a line\n"


def test_progress_ends_before_program_output(standard_error: StandardError) -> None:
    stream, steps = standard_error(), StepCounter()
    with Progress(steps, timeouts=SHORT):
        steps.wait_for_step(2)
        Block.end_all()
        drawn = stream.getvalue()
        Block.report("koala: a line")
    assert drawn.endswith(ERASE)
    assert stream.getvalue() == f"{drawn}koala: a line\n"
    Block.end_all()


def test_transfer_counts_bytes_in_both_directions() -> None:
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
def test_wait_on_terminal_shows_cause_and_duration(koala: Koala, server: Server) -> None:
    koala("submit", "--flexible", "2", "--", "program")
    server.service.timeline_entries = TIMELINE[:1]
    for command in (["wait", "1"], ["logs", "-f", "1"]):
        with Terminal([*KOALA, *command], make_environment(server.url)) as terminal:
            terminal.expect("koala: job 1 is queued: too few idle nodes\r\n")
            assert ERASE not in terminal.output.partition("koala: job 1")[0]
            terminal.expect("job 1 is queued, [0-9-]*[0-9:]+: too few idle nodes")
            os.kill(terminal.pid, signal.SIGINT)
            assert terminal.wait_for_exit() == 130
            assert terminal.output.endswith(f"{ERASE}koala: job 1 goes on; cancel with: koala cancel 1\r\n")


@pytest.mark.processes
def test_wait_on_dumb_terminal_prints_lines_only(koala: Koala, server: Server) -> None:
    koala("submit", "--flexible", "2", "--", "program")
    server.service.timeline_entries = TIMELINE[:1]
    with Terminal([*KOALA, "wait", "1"], make_environment(server.url, TERM="dumb")) as terminal:
        terminal.expect("koala: job 1 is queued: too few idle nodes\r\n")
        os.kill(terminal.pid, signal.SIGINT)
        assert terminal.wait_for_exit() == 130
        assert "\x1b" not in terminal.output
