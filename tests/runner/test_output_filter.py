"""Filtering of messages that mpirun adds to output: the result is independent of the pieces."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.runner.output_streams import ADVICE, HOLD, MAX_HELD, PAUSE, OutputFilter

RULE = "-" * 74 + "\n"
TROUBLE = f"{RULE}PRTE has lost communication with a remote daemon.\n\n  HNP daemon   : n1\n\nThis is bad.\n{RULE}\0"
MPIRUN = 42
ABORT = (
    f"{RULE}Primary job  terminated normally, but 1 process returned\n"
    f"a non-zero exit code. Per user-direction, the job has been aborted.\n{RULE}{RULE}"
    f"mpirun noticed that process rank 2 with PID 7 on node n2 exited on signal 15 (Terminated).\n{RULE}"
)
CRASH = "[n1:42] *** Process received signal ***\n[n1:42] Signal: Segmentation fault (11)\n[n1:42] [ 0] /lib/x(+0x1)\n"
CRASH_OF_A_RANK = "[n1:43] *** Process received signal ***\n[n1:43] Signal: Aborted (6)\n"
TABLE = f"{RULE}a table\n{RULE}"
FAILED_SEND = "[n1:42] oob:tcp: send_msg: write failed: Broken pipe (32) [sd = 20]\n"


class Timers:
    def __init__(self) -> None:
        self.due: dict[str, tuple[float, Callable[[], None]]] = {}

    def set_alarm(self, name: str, delay: float, do: Callable[[], None]) -> None:
        self.due[name] = (delay, do)

    def cancel_alarm(self, name: str) -> None:
        self.due.pop(name, None)


class RecordingRunner:
    """The parts of a runner that the filter uses."""

    def __init__(self) -> None:
        self.loop, self.seen = Timers(), b""

    def show(self, output: bytes) -> None:
        self.seen += output

    def wait(self) -> float:
        """Run all timers; return their total delay in seconds."""
        lasted = 0.0
        while self.loop.due:
            delay, do = self.loop.due.pop(min(self.loop.due))
            lasted += delay
            do()
        return lasted


class Plan:
    """A plan with one rank."""

    contexts = ({"command": ["x"]},)
    nodes = ({"slots": 1},)
    me = nodes[0]


def lines_in_pieces(text: str) -> st.SearchStrategy[list[bytes]]:
    """Draw ways of joining neighbouring lines; mpirun writes complete lines."""
    lines = [line.encode() for line in text.splitlines(keepends=True)]

    def join(cuts: list[bool]) -> list[bytes]:
        pieces = [lines[0]]
        for line, is_cut in zip(lines[1:], cuts, strict=True):
            if is_cut:
                pieces.append(line)
            else:
                pieces[-1] += line
        return pieces

    return st.lists(st.booleans(), min_size=len(lines) - 1, max_size=len(lines) - 1).map(join)


def filter_pieces(pieces: list[bytes]) -> tuple[RecordingRunner, OutputFilter]:
    runner = RecordingRunner()
    output_filter = OutputFilter(runner, Plan(), runner.show)  # type: ignore[arg-type]
    for piece in pieces:
        runner.show(output_filter.apply(piece, MPIRUN))
    return runner, output_filter


@pytest.mark.parametrize("message", [TROUBLE, ABORT, ABORT + CRASH, CRASH])
@given(st.data())
def test_output_filter_of_stopped_job_omits_end_messages(message: str, data: st.DataObject) -> None:
    runner, output_filter = filter_pieces(
        data.draw(lines_in_pieces(f"up\n{TABLE}down\n{message}{CRASH_OF_A_RANK}last words\n"))
    )
    assert runner.seen == f"up\n{TABLE}down\n".encode()
    assert output_filter.is_giving_up
    output_filter.close()
    runner.show(output_filter.take_withheld(MPIRUN, stopped=True))
    assert runner.seen == f"up\n{TABLE}down\n{CRASH_OF_A_RANK}last words\n".encode()
    assert not runner.loop.due


@pytest.mark.parametrize("message", [TROUBLE, ABORT, CRASH])
@pytest.mark.parametrize("is_over", [False, True])
@given(data=st.data())
def test_output_filter_of_failed_job_shows_end_messages(message: str, is_over: bool, data: st.DataObject) -> None:
    output = f"up\n{TABLE}down\n{message}last words\n"
    runner, output_filter = filter_pieces(data.draw(lines_in_pieces(output)))
    if is_over:
        output_filter.close()
        runner.show(output_filter.take_withheld(MPIRUN, stopped=False))
    else:
        assert runner.wait() == HOLD
    assert runner.seen == output.encode()


@pytest.mark.parametrize(("message", "is_loss"), [(TROUBLE, True), (FAILED_SEND, True), (ABORT + CRASH + TABLE, False)])
@given(st.integers(1, 100))
def test_output_filter_knows_that_mpirun_lost_a_daemon(message: str, is_loss: bool, size: int) -> None:
    output = f"up\n{message}last words\n".encode()
    _, output_filter = filter_pieces([output[i : i + size] for i in range(0, len(output), size)])
    assert output_filter.says_loss is is_loss


def test_output_filter_shows_crash_of_rank_at_once() -> None:
    runner, output_filter = filter_pieces([CRASH_OF_A_RANK.encode()])
    assert (runner.seen, output_filter.is_giving_up) == (CRASH_OF_A_RANK.encode(), False)


@given(lines_in_pieces(f"up\n{TABLE}{RULE}"))
def test_output_filter_releases_tables_of_program(pieces: list[bytes]) -> None:
    runner, _ = filter_pieces(pieces)
    assert runner.wait() in (0.0, PAUSE)
    assert runner.seen == f"up\n{TABLE}{RULE}".encode()


SETPGID = "[n1:42] plm:rsh: Warning: setpgid(43,43) failed in parent with errno=Permission denied(13)\n\n"
UCX = (
    "[n1:42] /src/ompi/mca/osc/ucx/osc_ucx_component.c:375  Error: OSC UCX component priority set inside component "
    "query failed \n \n"
)


BROKEN_PIPE = (
    "[n1:42] oob:tcp: send_msg: write failed: Broken pipe (32) [sd = 20]\n"
    "[n1:42] [prterun-n1-42@0,0]-[prterun-n1-42@0,2] prte_oob_tcp_peer_send_handler: unable to send message ON SOCKET "
    "20\n"
)


@pytest.mark.parametrize("noise", [SETPGID, UCX, BROKEN_PIPE])
def test_output_filter_removes_noise_of_open_mpi(noise: str) -> None:
    runner, _ = filter_pieces([f"up\n{noise}down\n{noise}".encode()])
    assert runner.seen == b"up\ndown\n"


@given(st.lists(st.sampled_from(["", UCX, UCX * 2]), min_size=6, max_size=6), st.data())
def test_output_filter_removes_noise_within_line(noises: list[str], data: st.DataObject) -> None:
    """The pieces have any size: unbuffered programs write a line's text and its end separately."""
    texts = ["[[1, 2]]", "\n", "\n", "[north] of", " two\n", "last"]
    parts = [part.encode() for pair in zip(texts, noises, strict=True) for part in pair if part]
    cuts = data.draw(st.lists(st.booleans(), min_size=len(parts), max_size=len(parts)))
    pieces = [b""]
    for part, is_cut in zip(parts, cuts, strict=True):
        if is_cut:
            pieces.append(part)
        else:
            pieces[-1] += part
    runner, _ = filter_pieces(pieces)
    assert runner.seen == b"[[1, 2]]\n\n[north] of two\nlast"


@pytest.mark.parametrize("words", ADVICE)
@pytest.mark.parametrize("ends", [False, True])
def test_output_filter_adds_advice_once(words: bytes, ends: bool) -> None:
    runner = RecordingRunner()
    outputs = OutputFilter(runner, Plan(), runner.show)  # type: ignore[arg-type]
    assert outputs.apply(b"before\n" + words + b"\nafter\n", MPIRUN) == b"before\n" + words + b"\nafter\n"
    assert outputs.apply(words + b"\n", MPIRUN) == words + b"\n"
    if ends:
        outputs.close()
    runner.wait()
    assert (runner.seen, outputs.take_withheld(MPIRUN, stopped=False))[ends] == f"koala: {ADVICE[words]}\n".encode()
    assert outputs.take_withheld(MPIRUN, stopped=False) == b""


def test_output_filter_withholds_a_limited_number_of_bytes() -> None:
    """The program itself may write such a line, and much after it, faster than in the time for which it is withheld."""
    pieces = [TROUBLE.encode(), *[b"x" * 65535 + b"\n"] * 40]
    runner, _ = filter_pieces(pieces)
    assert len(runner.seen) >= sum(map(len, pieces)) - MAX_HELD
    assert runner.wait() == 0
    assert runner.seen == b"".join(pieces)
