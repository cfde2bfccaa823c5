"""What a node does in its gang, and what it may ask of the runner it does it in."""

from __future__ import annotations

from koalapy.runner.plan import Plan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from koalapy.runner.exec_guard import ExecGuard
    from koalapy.runner.link import Loop
    from koalapy.runner.settings import Settings

    class Node(Protocol):
        """The runner, as far as a role needs it."""

        settings: Settings
        loop: Loop
        environment: dict[str, str]

        def spawn(
            self, command: list[str], environment: dict[str, str] | None = None, guard: ExecGuard | None = None
        ) -> int:
            """Start a command on this node, in its environment or another one; ``Failure`` when it cannot be.

            A ``guard`` traces it from before its first instruction.
            """
            ...

        def make_folder(self) -> str:
            """A folder for this run on this node, gone when the run is over."""
            ...

        def report_running(self) -> None:
            """What this node is to start was started."""

        def relay(self, token: str, node: int, payload: dict[str, Any]) -> None:
            """Say something to another node's runner; may get lost."""

        def show(self, output: bytes) -> None:
            """Let the user see this of the program's output."""

        def say(self, line: str) -> None:
            """Tell the user, between the lines of the program's output."""

        def conclude(self, code: int | None, error: str = "", *, infrastructure: bool = False) -> None:
            """The program is over on this node."""

    class Role(Protocol):
        """What a node does once the barrier is open."""

        def start(self) -> None: ...

        def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None: ...

        def child_ended(self, pid: int, code: int) -> None: ...

        def is_starter(self, pid: int) -> bool:
            """Whether a process is not the program's, but one that starts it."""
            ...

        def filter_output(self, output: bytes) -> bytes:
            """What the user is to see now of what came from the program."""
            ...

        def rest_of_output(self, *, stopped: bool) -> bytes:
            """What the user is to see of what was held back, when all is over; ``stopped`` when we were told to."""
            ...

        def close(self) -> None: ...


class Single:
    """The program runs once on this node (launcher ``processes``)."""

    def __init__(self, runner: Node, plan: Plan) -> None:
        self._runner, self._plan = runner, plan

    def start(self) -> None:
        self._pid = self._runner.spawn(self._plan.context["command"])
        self._runner.report_running()

    def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None:
        """Nobody has anything to say to such a node."""

    def child_ended(self, pid: int, code: int) -> None:
        if pid == self._pid:
            self._runner.conclude(code if code >= 0 else 128 - code)

    def is_starter(self, pid: int) -> bool:
        """Everything here is the program."""
        return False

    def filter_output(self, output: bytes) -> bytes:
        return output

    def rest_of_output(self, *, stopped: bool) -> bytes:
        return b""

    def close(self) -> None:
        """Nothing to let go of."""
