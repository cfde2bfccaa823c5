"""Filter the output of ``mpirun`` and its ranks: remove noise, and add hints for the user."""

from __future__ import annotations

import re

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
- an error of series 5 in each rank that creates a window, on nodes without a UCX network. It may appear between a
  line's text and its newline if a program writes the two separately;
- a failed write of mpirun to an MPI daemon that has ended. The runner reports the lost daemon itself, and a stopped
  job has daemons that end before mpirun does."""
SIGNS_OF_NOISE = (b"setpgid(", b"osc_ucx_component.c", b"oob:tcp: send_msg", b"oob_tcp_peer_send_handler")
RULE = rb"^-{20,}\n"
LOST = RULE + rb"(?:PRTE|ORTE) has lost communication with a remote daemon\.\n"
ALL_OF_LOST = re.compile(LOST + rb".*?(?:\Z|" + RULE + rb"\0?)", re.MULTILINE | re.DOTALL)
"""The whole message of mpirun about a lost daemon. Series 5 writes each line separately, and a zero byte at the end."""
BEGIN_OF_LOST = re.compile(rb"%s|%s\Z" % (LOST, RULE), re.MULTILINE)
PAUSE = 0.2
"""Seconds to wait for further output after a line that may begin this message."""
HOLD = 10.0
"""Maximum time in seconds to withhold the message about a lost daemon, until the job may be stopped.

If the job is stopped, the daemon was not lost: its node was stopped first, since clusters receive a stop one after the
other. For a failed node the runner fails the job before this time has passed."""
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


class OutputFilter:
    def __init__(self, runner: Node, plan: Plan) -> None:
        self._runner = runner
        commands = [" ".join(context["command"]) for context in plan.contexts]
        is_alone = len(plan.nodes) == 1 and plan.me["slots"] == 1
        self._is_clear = is_alone or any("-m mpi4py" in each for each in commands)
        """Whether no hint about exceptions is needed: no rank waits for another, or a failed rank ends all."""
        self._held = b""
        self._advice = dict(ADVICE)
        self._pending = ""
        self.has_lost = False
        """Whether a message of mpirun about a lost daemon is withheld from the user."""

    def apply(self, output: bytes) -> bytes:
        """Return the output to show to the user now. Withhold the rest."""
        for text in {text for words, text in self._advice.items() if words in output}:
            self._advice = {words: other for words, other in self._advice.items() if other != text}
            self._pending += f"koala: {text}\n"
            self._runner.loop.after("advice", PAUSE, self._advise)
        if not self._is_clear and TRACEBACK in output:
            self._is_clear = True  # print the hint once
            self._runner.loop.after("hint", HINT_DELAY, lambda: self._runner.say(HINT.format(seconds=HINT_DELAY)))
        if any(sign in output for sign in SIGNS_OF_NOISE):
            output = NOISE.sub(b"", output)
        output, self._held = self._held + output, b""
        if self.has_lost:
            self._held = output
            return b""
        self._runner.loop.cancel("held")
        begin = BEGIN_OF_LOST.search(output)
        if begin is None:
            return output
        self._held, self.has_lost = output[begin.start() :], not begin[0].endswith(b"-\n")
        self._runner.loop.after("held", HOLD if self.has_lost else PAUSE, self._release)
        return output[: begin.start()]

    def rest(self, *, stopped: bool) -> bytes:
        """Return the withheld output. Omit the message about a lost daemon if the job was ``stopped``."""
        held, self._held, self.has_lost = self._held, b"", False
        pending, self._pending = self._pending, ""
        return (ALL_OF_LOST.sub(b"", held) if stopped else held) + pending.encode()

    def close(self) -> None:
        self._runner.loop.cancel("hint")
        self._runner.loop.cancel("held")
        self._runner.loop.cancel("advice")

    def _advise(self) -> None:
        pending, self._pending = self._pending, ""
        self._runner.show(pending.encode())

    def _release(self) -> None:
        held, self._held, self.has_lost = self._held, b"", False
        self._runner.show(held)
