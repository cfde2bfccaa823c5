"""Filter the output of ``mpirun`` and its ranks: remove noise, and add hints for the user."""

from __future__ import annotations

import re
from collections.abc import Callable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from koalapy.runner.plan import Node, Plan

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
SIGNS_OF_NOISE = (b"setpgid(", b"osc_ucx_component.c", b"oob:tcp: send_msg", b"oob_tcp_peer_send_handler")
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
ADVICE = {
    b"All nodes which are allocated for this job are already filled": (
        "MPI_Comm_spawn is not supported, and so MPIPoolExecutor by itself is not: the nodes of a job run its command "
        "only; start a program with MPIPoolExecutor as python -m mpi4py.futures PROGRAM, which makes ranks the workers"
    ),
    b"PMI_Init returned -1": BUILT_WITH_MPICH,
    b"MPIR_pmi_init(": BUILT_WITH_MPICH,
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

    def apply(self, output: bytes, mpirun: int) -> bytes:
        """Return the output to show to the user now, and withhold the rest. ``mpirun`` is the process ID of mpirun."""
        for text in {text for pattern, text in self._advice.items() if pattern in output}:
            self._advice = {pattern: hint for pattern, hint in self._advice.items() if hint != text}
            self._pending += f"koala: {text}\n"
            self._runner.loop.set_alarm("advice", PAUSE, self._show_advice)
        if not self._is_clear and TRACEBACK in output:
            self._is_clear = True  # print the hint once
            self._runner.loop.set_alarm("hint", HINT_DELAY, lambda: self._runner.say(HINT.format(seconds=HINT_DELAY)))
        output = remove_noise(output)
        output, self._held = self._held + output, b""
        if self.is_giving_up:
            self._held = output
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
