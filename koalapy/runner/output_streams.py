"""Keep a program's two output streams apart, label lines, read the tags of mpirun, and remove its noise.

Output is one stream of bytes from runner to daemon. In the output of jobs with a separate error stream, that stream
is marked: ``ERROR_BEGINS`` starts it, and ``ERROR_ENDS`` or the end of the line ends it. So a line is complete by
itself, as agents interleave the lines of several nodes. ``ESCAPE`` precedes such bytes of the program itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from koalapy.runner.plan import Node, Plan, RankedBytes

ERROR_BEGINS, ERROR_ENDS, ESCAPE = b"\x0e", b"\x0f", b"\x10"
"""Shift out, shift in and data link escape, which text does not have."""
_SPECIAL = re.compile(rb"[\x0e\x0f\x10]")
_ESCAPED = re.compile(rb"\x10([\s\S])")
_ERROR_TEXT = re.compile(rb"\x10[\s\S]|\x0e([^\x0f\n\x10]*(?:\x10[\s\S][^\x0f\n\x10]*)*)(\x0f|\n|\Z)")
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
MAX_LINE = 64 * 1024
"""Bytes of an unfinished line that are held back."""


def split_lines(data: bytes) -> list[bytes]:
    """Return the lines with their ends. Unlike ``bytes.splitlines``, take only line feeds for ends."""
    return _LINE.findall(data)


def mark_stream(data: bytes, *, is_error: bool) -> bytes:
    """Return a piece of one stream as it is sent to the daemon."""
    data = _SPECIAL.sub(ESCAPE + rb"\g<0>", data)
    if not is_error or not data:
        return data
    lines = data.split(b"\n")
    whole = b"".join(ERROR_BEGINS + line + b"\n" for line in lines[:-1])
    return whole + (ERROR_BEGINS + lines[-1] + ERROR_ENDS if lines[-1] else b"")


class StreamSplitter:
    """Divides marked output into its two streams, piece by piece."""

    def __init__(self) -> None:
        self._carried = b""
        """Bytes that the next piece is read after: an open mark, an incomplete escape, or both."""

    def split(self, data: bytes) -> list[tuple[bool, bytes]]:
        """Return parts of a piece in order, each with whether it belongs to the error stream."""
        data, self._carried = self._carried + data, b""
        if (len(data) - len(data.rstrip(ESCAPE))) % 2:
            data, self._carried = data[:-1], ESCAPE
        parts: list[tuple[bool, bytes]] = []
        position = 0
        for match in _ERROR_TEXT.finditer(data):
            if match[1] is None:
                continue  # an escape of the program's own output
            parts.append((False, data[position : match.start()]))
            parts.append((True, match[1] + (b"\n" if match[2] == b"\n" else b"")))
            position = match.end()
            if not match[2]:
                self._carried = ERROR_BEGINS + self._carried
        parts.append((False, data[position:]))
        return [(is_error, _ESCAPED.sub(rb"\1", part)) for is_error, part in parts if part]


class LineLabels:
    """Begins each line with its rank, and holds back unfinished lines, so that those of other ranks do not mix in."""

    def __init__(self) -> None:
        self._unfinished: dict[tuple[int | None, bool], bytes] = {}
        self._cut: set[tuple[int | None, bool]] = set()
        """Ranks and streams with a line of which a part was released, since it is long."""

    def add(self, rank: int | None, data: bytes, *, is_error: bool) -> bytes:
        """Return the lines that are complete with this piece, with labels. Lines without a rank get none."""
        data = self._unfinished.pop((rank, is_error), b"") + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > MAX_LINE:
            end = len(data)
        elif data[end:]:
            self._unfinished[rank, is_error] = data[end:]
        return self._label(rank, data[:end], is_error)

    def take_unfinished(self) -> list[tuple[bool, bytes]]:
        """Return the unfinished lines with labels, each with whether it belongs to the error stream."""
        unfinished, self._unfinished = self._unfinished, {}
        return [(is_error, self._label(rank, line, is_error) + b"\n") for (rank, is_error), line in unfinished.items()]

    def _label(self, rank: int | None, data: bytes, is_error: bool) -> bytes:
        if rank is None or not data:
            return data
        label, key = b"%d: " % rank, (rank, is_error)
        labelled = (b"" if key in self._cut else label) + label.join(split_lines(data))
        self._cut.discard(key) if data.endswith(b"\n") else self._cut.add(key)
        return labelled


class TagReader:
    """Reads the ranks from the output of ``mpirun``, which tags the beginning of each line or of each piece of one."""

    _TAG = re.compile(rb"\[[^\[\]\s,]{1,255},(\d{1,9})\]<(?:stdout|stderr|stddiag)>:")

    def __init__(self, size: int, separator: bytes) -> None:
        """``size``: number of ranks; a tag of another rank is text. ``separator``: text between a tag and the line."""
        self._size, self._separator = size, separator
        self._unfinished = b""

    def read(self, data: bytes) -> list[RankedBytes]:
        """Return the output of each rank in order, up to the last whole line."""
        data = self._unfinished + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > MAX_LINE:
            end = len(data)
        self._unfinished = data[end:]
        return self._split_tags(data[:end])

    def take_unfinished(self) -> list[RankedBytes]:
        """Return the output after the last whole line."""
        unfinished, self._unfinished = self._unfinished, b""
        return self._split_tags(unfinished)

    def _split_tags(self, data: bytes) -> list[RankedBytes]:
        output: list[RankedBytes] = []
        for line in split_lines(data):
            rank, position = None, 0
            for tag in self._TAG.finditer(line):
                if int(tag[1]) < self._size:
                    output.append((rank, line[position : tag.start()]))
                    rank, position = int(tag[1]), tag.end()
                    position += len(self._separator) if line.startswith(self._separator, position) else 0
            output.append((rank, line[position:]))
        return [(rank, text) for rank, text in output if text]


NOISE = re.compile(
    rb"\[[^\[\]\n]*\] (?:plm:[sr]sh: Warning: setpgid\([^\n]*\n(?:[ \t]*\n)*"
    rb"|\S*osc_ucx_component\.c:\d+ +Error: OSC UCX component priority set inside component query failed[^\n]*\n"
    rb"(?:[ \t]+\n)*"
    rb"|oob:tcp: send_msg: write failed: [^\n]*\n"
    rb"|\[[^\[\]\n]*\]-\[[^\[\]\n]*\] \w*oob_tcp_peer_send_handler: unable to send message ON SOCKET [^\n]*\n)"
)
"""Messages of Open MPI that are removed from the output:

- a warning about a harmless race between mpirun and its launch agent;
- an error of Open MPI 5 in each rank that creates a window, on nodes without a UCX network. It may appear between a
  line's text and its newline if a program writes the two separately;
- a failed write of mpirun to an MPI daemon that has ended. The runner reports the lost daemon itself, and a stopped
  job has daemons that end before mpirun does."""
FAILED_SENDS = (b"oob:tcp: send_msg", b"oob_tcp_peer_send_handler")
SIGNS_OF_NOISE = (b"setpgid(", b"osc_ucx_component.c", *FAILED_SENDS)
LOST_COMMUNICATION = b"has lost communication with a remote daemon"
SIGNS_OF_LOSS = (LOST_COMMUNICATION, *FAILED_SENDS)
"""mpirun writes one of these texts when it loses an MPI daemon that it has not ordered to end."""
RULE = rb"^-{20,}\n"
GIVING_UP = RULE + (
    rb"(?:(?:PRTE|ORTE) has lost communication with a remote daemon\.\n"
    rb"|Primary job  terminated normally, but "
    rb"|[\w.-]*(?:mpirun|prterun)[\w.-]* (?:noticed that (?:process rank|the job aborted)|detected that one or more "
    rb"processes exited))"
)
WHOLE_MESSAGE = re.compile(GIVING_UP + rb".*?(?:\Z|" + RULE + rb"\0?)", re.MULTILINE | re.DOTALL)
"""A message of mpirun about a lost daemon or a failed rank. Open MPI 5 writes a zero byte at its end."""
CRASH = rb"\*\*\* Process received signal "
PAUSE = 0.2
"""Seconds to wait for more after a line that may begin such a message: Open MPI 5 writes each line separately."""
HOLD = 10.0
"""Maximum time in seconds to withhold such a message, until the job may be stopped.

If the job is stopped, nothing failed: a node was stopped before the others, since clusters receive a stop one after the
other. For a failed node or rank the runner ends the job before this time has passed."""
MAX_HELD = 1024 * 1024
"""Bytes that are withheld after the begin of such a message, which may be the program's own. Then all is shown."""
TRACEBACK = b"Traceback (most recent call last)"
HINT_DELAY = 10.0
"""Seconds that ranks may continue after an exception before the user gets the hint."""
HINT = (
    "a rank wrote a traceback {seconds:g} s ago, and the program has not ended: where one rank ends by an exception, "
    "mpi4py waits for the other ranks without end; start it as python -m mpi4py PROGRAM, which ends them all"
)
BUILT_WITH_MPICH = (
    "the program was built with MPICH, or an MPI that descends from it, and is started by Open MPI: build it (or "
    "mpi4py) with the Open MPI of its clusters, or use the launcher processes and the program's own mpiexec"
)
OTHER_INSTALLATION = (
    "the program uses parts of another Open MPI than the one that starts it: the wheel of Open MPI lacks the libraries "
    "of Fortran (libmpi_mpifh), which are then the system's; let the clusters use the program's Open MPI, for example "
    "clusters.CLUSTER.mpi: {series: 4, prefix: /usr}"
)
ADVICE = {
    b"All nodes which are allocated for this job are already filled": (
        "MPI_Comm_spawn is not supported, and so MPIPoolExecutor by itself is not: the nodes of a job run its command "
        "only; start a program with MPIPoolExecutor as python -m mpi4py.futures PROGRAM, which makes ranks the workers"
    ),
    b"PMI_Init returned -1": BUILT_WITH_MPICH,
    b"MPIR_pmi_init(": BUILT_WITH_MPICH,
    b"opal_shmem_base_select failed": OTHER_INSTALLATION,
    b"libmpi_mpifh.so": OTHER_INSTALLATION,
}
"""Hints for the user by text in the output. Each hint is printed once."""


def remove_noise(output: bytes) -> bytes:
    """Return output without harmless messages of Open MPI."""
    return NOISE.sub(b"", output) if any(sign in output for sign in SIGNS_OF_NOISE) else output


def mpirun_line(mpirun: int, begin: bytes = b"") -> bytes:
    """Return the pattern of a line about the process ``mpirun`` itself, such as those of its crash."""
    return rb"^\[[^\[\]\n]*:%d\] %s[^\n]*(?:\n|\Z)" % (mpirun, begin)


class OutputFilter:
    def __init__(self, runner: Node, plan: Plan, show: Callable[[bytes], None]) -> None:
        """``show`` is called with output that was withheld and is shown after all."""
        self._runner, self._show = runner, show
        commands = [" ".join(context["command"]) for context in plan.contexts]
        is_alone = len(plan.nodes) == 1 and plan.me["slots"] == 1
        self._is_clear = is_alone or any("-m mpi4py" in command for command in commands)
        """Whether no hint about exceptions is needed: no rank waits for another, or a failed rank ends all."""
        self._held = b""
        self._advice = dict(ADVICE)
        self._pending = ""
        self.is_giving_up = False
        """Whether a message of mpirun about a lost daemon, a failed rank or its own crash is withheld."""
        self._last = b""
        """The last bytes of the output, in which one of ``SIGNS_OF_LOSS`` may begin."""
        self.says_loss = False
        """Whether mpirun has written that it lost the connection to an MPI daemon."""

    def apply(self, output: bytes, mpirun: int) -> bytes:
        """Return the output to show to the user now, and withhold the rest. ``mpirun`` is the process ID of mpirun."""
        for text in {text for pattern, text in self._advice.items() if pattern in output}:
            self._advice = {pattern: hint for pattern, hint in self._advice.items() if hint != text}
            self._pending += f"koala: {text}\n"
            self._runner.loop.set_alarm("advice", PAUSE, self._show_advice)
        if not self._is_clear and TRACEBACK in output:
            self._is_clear = True  # print the hint once
            self._runner.loop.set_alarm("hint", HINT_DELAY, lambda: self._runner.say(HINT.format(seconds=HINT_DELAY)))
        recent = self._last + output
        self.says_loss = self.says_loss or any(sign in recent for sign in SIGNS_OF_LOSS)
        self._last = recent[1 - len(LOST_COMMUNICATION) :]
        output = remove_noise(output)
        output, self._held = self._held + output, b""
        if self.is_giving_up:
            self._held = output
            if len(output) > MAX_HELD:
                self._runner.loop.cancel_alarm("held")
                self._release_output()
            return b""
        self._runner.loop.cancel_alarm("held")
        crash = mpirun_line(mpirun, CRASH)
        begin = re.search(rb"(?P<begin>%s|%s)|%s\Z" % (GIVING_UP, crash, RULE), output, re.MULTILINE)
        if begin is None:
            return output
        self._held, self.is_giving_up = output[begin.start() :], begin["begin"] is not None
        self._runner.loop.set_alarm("held", HOLD if self.is_giving_up else PAUSE, self._release_output)
        return output[: begin.start()]

    def take_withheld(self, mpirun: int, *, stopped: bool) -> bytes:
        """Return the withheld output, without mpirun's messages about its end if the job was ``stopped``."""
        withheld, self._held, self.is_giving_up = self._held, b"", False
        pending, self._pending = self._pending, ""
        if stopped:
            withheld = re.sub(mpirun_line(mpirun), b"", WHOLE_MESSAGE.sub(b"", withheld), flags=re.MULTILINE)
        return withheld + pending.encode()

    def close(self) -> None:
        self._runner.loop.cancel_alarm("hint")
        self._runner.loop.cancel_alarm("held")
        self._runner.loop.cancel_alarm("advice")

    def _show_advice(self) -> None:
        pending, self._pending = self._pending, ""
        self._show(pending.encode())

    def _release_output(self) -> None:
        withheld, self._held, self.is_giving_up = self._held, b"", False
        self._show(withheld)
