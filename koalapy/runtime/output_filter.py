"""What ``mpirun`` and its ranks write that needs a hint for the user, or that nobody should have to read."""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from koalapy.runtime.plan import Plan
    from koalapy.runtime.role import Node

NOISE = re.compile(rb"^\[[^\]\n]*\] plm:[sr]sh: Warning: setpgid\([^\n]*\n+", re.MULTILINE)
"""Open MPI warns of a harmless race between itself and its launch agent; nobody should have to read it."""
TRACEBACK = b"Traceback (most recent call last)"
HINT_DELAY = 10.0
"""Seconds after an exception for which ranks go on before we say what may be wrong."""
HINT = (
    "a rank wrote a traceback {seconds:g} s ago, and the program has not ended: where one rank ends by an exception, "
    "mpi4py waits for ever for the others; started as python -m mpi4py PROGRAM it ends them all"
)


class OutputFilter:
    """Of the output of one run."""

    def __init__(self, runner: Node, plan: Plan) -> None:
        self._runner = runner
        commands = [" ".join(context["command"]) for context in plan.contexts]
        is_alone = len(plan.nodes) == 1 and plan.me["slots"] == 1
        self._is_clear = is_alone or any("-m mpi4py" in each for each in commands)
        """Whether there is nothing to say: no rank waits for another, or one that fails ends all."""

    def apply(self, output: bytes) -> bytes:
        """What the user is to see of it."""
        if not self._is_clear and TRACEBACK in output:
            self._is_clear = True  # said once
            self._runner.loop.after("hint", HINT_DELAY, self._hint)
        return NOISE.sub(b"", output) if b"setpgid(" in output else output

    def close(self) -> None:
        self._runner.loop.cancel("hint")

    def _hint(self) -> None:
        self._runner.say(HINT.format(seconds=HINT_DELAY))
