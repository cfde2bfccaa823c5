"""Receive the calls of ``mpirun`` from a job's script, and run their programs with the roles of Open MPI on nodes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import struct
from collections.abc import Callable
from traceback import print_exc

from koalapy.runner.connections import Loop
from koalapy.runner.folders import remove_tree, short_socket_path
from koalapy.runner.openmpi import RESEND_INTERVAL, Follower, Head
from koalapy.runner.parameters import MAX_STEPS
from koalapy.runner.plan import Plan, Role
from koalapy.runner.processes import parent_of
from koalapy.runner.rank_processors import MAX_SLOTS
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection
    from typing import Any

    from koalapy.runner.exec_guard import ExecGuard
    from koalapy.runner.plan import Node
    from koalapy.runner.processes import Processes
    from koalapy.runner.relay_links import Pair
    from koalapy.runner.settings import Settings

SOCKET = "calls"
MAX_CALLS = 256
"""Calls that run or wait at the same time; further ones are rejected."""
MAX_REQUEST_SIZE = 4 * 1024 * 1024
SIGNALS = ("TERM", "INT", "HUP", "USR1", "USR2", "CONT")
"""Signals that a call passes to its program."""


class Call:
    """One call of ``mpirun``: its request, the descriptors of its output, and the answer."""

    def __init__(self, loop: Loop, connection: socket.socket, calls: Calls) -> None:
        self._loop, self._connection, self._calls = loop, connection, calls
        self._incoming = b""
        self.outputs: tuple[int, int] | None = None
        """The caller's standard output and error."""
        self.input_file = ""
        """A path to the caller's standard input; empty: rank 0 reads nothing."""
        self.on_signal: Callable[[int], None] | None = None
        self.on_gone: Callable[[], None] | None = None
        """Called once if the caller ends before the program."""
        self._is_read = False
        loop.watch(connection.fileno(), self._read)

    def say(self, line: str) -> None:
        """Print a line on the caller's standard error."""
        self._send({"say": line[:4000]})

    def finish(self, code: int) -> None:
        """Close the call's output, then let it end with an exit code."""
        self._close_outputs()
        self._send({"code": code})
        self.close()

    def close(self) -> None:
        if self._connection.fileno() >= 0:
            self._loop.forget(self._connection.fileno())
            self._connection.close()
            self._close_outputs()
            self._calls.open.discard(self)

    def _close_outputs(self) -> None:
        for file in self.outputs or ():
            os.close(file)
        self.outputs = None

    def _send(self, message: dict[str, Any]) -> None:
        """Send a message, or drop it if the caller takes none."""
        try:
            self._connection.send(json.dumps(message).encode() + b"\n")
        except OSError:
            return

    def _read(self, _events: int) -> None:
        """Read a request with its descriptors, and later signals. Close a call that has ended or is invalid."""
        try:
            if self.outputs is None and not self._is_read:
                data, files, _, _ = socket.recv_fds(self._connection, 65536, 2)
                for file in files:
                    os.set_inheritable(file, False)
                self.outputs = (files[0], files[1]) if len(files) == 2 else None
            else:
                data = self._connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        try:
            for line in lines:
                self._handle_line(json.loads(line))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            self.say(f"koala: mpirun sent an invalid request: {error}")
            self.finish(1)
            return
        if not data or len(self._incoming) > MAX_REQUEST_SIZE:
            gone, self.on_gone = self.on_gone, None
            self.close()
            if gone is not None:
                gone()

    def _handle_line(self, message: dict[str, Any]) -> None:
        if not self._is_read:
            self._is_read = True
            self.input_file = str(message.pop("input_file", ""))
            self._calls.handle(self, message)
        elif message["signal"] in SIGNALS and self.on_signal is not None:
            self.on_signal(getattr(signal, f"SIG{message['signal']}"))


class Calls:
    """A socket in a folder, at which processes of this job call ``mpirun``."""

    def __init__(self, loop: Loop, folder: str, handle: Callable[[Call, dict[str, Any]], None]) -> None:
        self._loop, self.handle = loop, handle
        self.open: set[Call] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        with short_socket_path(os.path.join(folder, SOCKET)) as path:
            self._listener.bind(path)
        self._listener.listen(MAX_CALLS)
        loop.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for call in list(self.open):
            call.close()

    def _accept(self, _events: int) -> None:
        """Accept a call from a process of this job; reject others, and calls beyond ``MAX_CALLS``."""
        try:
            connection, _ = self._listener.accept()
        except OSError:
            self._loop.pause(self._listener.fileno())
            return
        connection.setblocking(False)
        call = Call(self._loop, connection, self)
        self.open.add(call)
        if not is_called_from_below(connection):
            call.say("koala: mpirun was called by a process that is not of this job")
            call.finish(1)
        elif len(self.open) > MAX_CALLS:
            call.say(f"koala: more than {MAX_CALLS} calls of mpirun run or wait: wait for some to end")
            call.finish(1)


def is_called_from_below(connection: socket.socket) -> bool:
    """Return whether the other side of a connection, as the kernel knows it, is a process below this one."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    while pid > 1 and pid != os.getpid():
        pid = parent_of(pid)
    return pid == os.getpid()


MAX_WORDS = 10_000
"""Maximum words of a program, and variables that a script passes to it."""
STOP_GRACE = 1.0
"""Seconds that processes which a program leaves behind have to end."""
SWEEP_INTERVAL = 0.1
NAME = re.compile(r"(?!KOALA_)[^=\0]{1,1000}", re.ASCII)
"""Names of variables that a script may pass to ranks; those of koalapy are each node's own."""


class Order:
    """One program of a script: its ranks on each node of the job, its words, its variables and its folder."""

    def __init__(self, content: dict[str, Any], nodes: int) -> None:
        """Read an order for a job of so many nodes. Raise ``ValueError`` if it is invalid: it may be another site's."""
        self.slots: list[int] = content["slots"]
        self.command: list[str] = content["command"]
        self.environment: dict[str, str] = content["environment"]
        self.folder: str = content["folder"]
        """Where ranks start: relative to the job's folder on each node, or an absolute path."""
        self.must_exist: bool = content["must_exist"]
        """Whether ranks start nowhere else if the folder, an absolute path, is missing on their node."""
        kinds = (self.slots, list), (self.command, list), (self.environment, dict), (self.must_exist, bool)
        if not all(isinstance(value, kind) for value, kind in kinds):
            raise ValueError("a program of the job's script is invalid")
        self.lane: int = content["lane"]
        """Which of the programs that run at once it is."""
        texts = [*self.command, *self.environment.values(), self.folder]
        if (
            len(self.slots) != nodes
            or self.lane not in range(MAX_STEPS)
            or not all(type(count) is int and 0 <= count <= MAX_SLOTS for count in self.slots)
            or not (self.command and self.command[0])
            or len(self.command) + len(self.environment) > MAX_WORDS
            or not all(isinstance(text, str) and "\0" not in text for text in texts)
            or not all(NAME.fullmatch(name) for name in self.environment)
            or (not os.path.isabs(self.folder) and ".." in self.folder.split("/"))
        ):
            raise ValueError("a program of the job's script is invalid")

    def plan_for(self, job: Plan, settings: Settings) -> Plan:
        """Return the plan of the nodes that have ranks, and the head node, as one of these nodes sees it."""
        chosen = [i for i, node in enumerate(job.nodes) if self.slots[i] or node is job.head]
        positions = {index: position for position, index in enumerate(chosen)}
        contexts = [
            {
                **context,
                "output": None,
                "error": None,
                "label": False,  # those of the script, which gets the output
                "command": self.command,
                "environment": {**context["environment"], **self.environment},
                "nodes": [positions[index] for index in context["nodes"] if index in positions],
            }
            for context in job.contexts
        ]
        nodes = [{**job.nodes[index], "slots": self.slots[index]} for index in chosen]
        plan = Plan({**job.message, "nodes": nodes, "contexts": contexts}, settings.token, settings.node)
        plan.lane, plan.job = self.lane, job
        return plan

    def find_folder(self) -> str:
        """Return the folder of ranks on this node; create a missing one below the job's folder. Raise ``Failure``."""
        path = os.path.join(os.getcwd(), self.folder)
        if os.path.isdir(path):
            return path
        if not os.path.isabs(self.folder):
            try:
                os.makedirs(path)
            except OSError as error:
                raise Failure(f"cannot make {path}, where mpirun was called: {error.strerror}", 126) from error
            return path
        if self.must_exist:
            raise Failure(f"cannot run in {path}: no such folder", 126)
        return os.getcwd()


class StepLoop(Loop):
    """The runner's event loop for one program: its alarms have separate names, its errors end only the program."""

    def __init__(self, loop: Loop, prefix: str, run: Callable[[Callable[[], object]], None]) -> None:
        self._loop, self._prefix, self._run = loop, prefix, run

    def time(self) -> float:
        return self._loop.time()

    def watch(self, file: int, callback: Callable[[int], object], events: int = 1) -> None:
        self._loop.watch(file, lambda ready: self._run(lambda: callback(ready)), events)

    def forget(self, file: int) -> None:
        self._loop.forget(file)

    def set_alarm(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        self._loop.set_alarm(self._prefix + name, seconds, lambda: self._run(callback))

    def cancel_alarm(self, name: str) -> None:
        self._loop.cancel_alarm(self._prefix + name)


class Step:
    """One program of a script on one node: the runner that the roles of Open MPI see."""

    role: Role

    def __init__(self, runner: Node, number: int, order: Order, job: Plan, folder: str) -> None:
        """``folder``: the runner's folder, in which the program gets one."""
        self._runner, self.number, self._order = runner, number, order
        self.plan = plan = order.plan_for(job, runner.settings)
        self.settings: Settings = runner.settings
        self.processes: Processes = runner.processes
        self.loop: Loop = StepLoop(runner.loop, f"step-{number}-", self.run)
        self.environment: dict[str, str] = plan.environment(runner.settings)
        self._folder = f"{folder}/{number}"
        self._outputs: tuple[int, int] | None = None
        self._sessions: set[int] = set()
        self._kill_at = 0.0
        self.is_ending = False

    def start(self) -> None:
        """Start this node's part of the program. An error ends the program, not the job."""
        self.run(self._start_role)

    def _start_role(self) -> None:
        os.mkdir(self._folder, 0o700)
        self.plan.rank_folder = self._order.find_folder()
        self.role.start()

    def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None:
        """Handle a message of another node about this program."""
        self.run(lambda: self.role.relayed(sender, payload))

    def child_ended(self, pid: int, code: int) -> None:
        self.run(lambda: self.role.child_ended(pid, code))

    def close(self) -> None:
        """Cancel all alarms: the job ends, and with it all processes."""
        if not self.is_ending:
            self.is_ending = True
            self.role.close()
        self._runner.loop.cancel_alarm(f"sweep-{self.number}")

    def run(self, action: Callable[[], object]) -> None:
        """Run an action of the role, and end the program if it fails."""
        if self.is_ending:
            return
        try:
            action()
        except Failure as failure:
            self.fail(failure)
        except Exception as error:  # noqa: BLE001 the script must receive any error
            print_exc()
            self.fail(Failure(f"the runner on {self.settings.name} failed: {error!r}"))

    def fail(self, failure: Failure) -> None:
        """End the program with an error."""
        self.conclude(failure.code, failure.message)

    def spawn(
        self,
        command: list[str],
        environment: dict[str, str] | None = None,
        guard: ExecGuard | None = None,
        *,
        is_program: bool = False,
        outputs: tuple[int, int] | None = None,
    ) -> int:
        """Start a command with the caller's output; ``is_program`` has no effect, since ranks get no input."""
        environment = self.environment if environment is None else environment
        pid = self._runner.spawn(command, environment, guard, outputs=outputs or self._outputs)
        self._sessions.add(pid)
        return pid

    def make_folder(self) -> str:
        return self._folder

    def make_input(self, path: str = "") -> None:
        """Do nothing: the ranks of a step get no input."""

    def report_running(self) -> None:
        """Do nothing: the job runs already."""

    def relay(self, token: str, node: int, payload: dict[str, Any]) -> None:
        self._runner.relay(token, node, {"op": "step", "step": self.number, "payload": payload})

    def start_relay(self, plan: Plan, on_start: Callable[[bool, str], None]) -> None:
        self._runner.start_relay(plan, lambda is_ready, reason: self.run(lambda: on_start(is_ready, reason)))

    @property
    def relayed_before(self) -> tuple[set[Pair], int]:
        return self._runner.relayed_before

    def report_relayed(self, pairs: Collection[Pair], unreached: Collection[Pair], layout: int) -> None:
        self._runner.report_relayed(pairs, unreached, layout)

    def show(self, output: bytes, rank: int | None = None) -> None:
        self._runner.show(output, rank)

    def say(self, line: str) -> None:
        self._runner.say(line)

    def read_output(self) -> bool:
        """Return False: the caller of ``mpirun`` has the program's output."""
        return False

    def conclude_part(self) -> None:
        """End this node's part of a program whose end the head node knows."""
        self.conclude(None)

    def conclude(self, code: int | None, error: str = "", *, infrastructure: bool = False) -> None:
        """End this node's part of the program."""
        raise NotImplementedError

    def end(self) -> None:
        """End the processes of the program on this node, then call ``on_end``."""
        if self.is_ending:
            return
        self.is_ending = True
        self.role.close()
        self._kill_at = self._runner.loop.time() + STOP_GRACE
        self._sweep()

    def on_end(self) -> None:
        """Act on the end of the program's last process."""

    def _sweep(self) -> None:
        number = signal.SIGTERM if self._runner.loop.time() < self._kill_at else signal.SIGKILL
        if self.processes.end_sessions(self._sessions, number):
            remove_tree(self._folder)
            self.on_end()
        else:
            self._runner.loop.set_alarm(f"sweep-{self.number}", SWEEP_INTERVAL, self._sweep)


class HeadStep(Step):
    """A program of a script on the head node, which runs ``mpirun`` for a call of the script."""

    def __init__(
        self, runner: Node, number: int, order: Order, job: Plan, folder: str, call: Call, on_end: Callable[[int], None]
    ) -> None:
        super().__init__(runner, number, order, job, folder)
        self._call, self._ended = call, on_end
        self._outputs = call.outputs
        self.plan.input_file = call.input_file
        self._code = 0
        self._head = Head(self, self.plan, runner.settings.agent_timeout)
        self.role = self._head
        self._unstarted = {i for i, count in enumerate(order.slots) if count and job.nodes[i] is not job.head}
        """Nodes that have not answered yet, as indices of the job's nodes."""
        self._job = job
        self.nodes, self.lane, self.slots = tuple(self._unstarted), order.lane, order.slots

    def start(self) -> None:
        super().start()
        if not self.is_ending:
            self._send_order()

    def _send_order(self) -> None:
        """Send the order to the nodes that have not answered, until they do: messages between nodes may get lost."""
        for index in self._unstarted:
            node = self._job.nodes[index]
            self._runner.relay(node["token"], node["node"], {"op": "begin", "step": self.number, **vars(self._order)})
        if self._unstarted:
            self.loop.set_alarm("order", RESEND_INTERVAL, self._send_order)

    def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None:
        self._unstarted.discard(-1 if (index := self._job.index_of(sender)) is None else index)
        super().relayed(sender, payload)

    def say(self, line: str) -> None:
        self._call.say(f"koala: {line}")

    def conclude(self, code: int | None, error: str = "", *, infrastructure: bool = False) -> None:
        """End the program and answer the call with its exit code; 1 if it could not run."""
        if self.is_ending:
            return
        if error:
            self.say(error)
        self._code = 1 if code is None else code
        self.loop.cancel_alarm("order")
        self.end()

    def interrupt(self, number: int) -> None:
        """Pass a signal of the call to ``mpirun``."""
        if self._head.mpirun and not self.is_ending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._head.mpirun, number)

    def cancel(self) -> None:
        """End the program, since its caller has ended."""
        self.conclude(128 + signal.SIGTERM)

    def close(self) -> None:
        self.loop.cancel_alarm("order")
        super().close()

    def on_end(self) -> None:
        self._call.finish(self._code)
        self._ended(self.number)


class FollowerStep(Step):
    """A program of a script on another node, which runs an MPI daemon for it."""

    def __init__(self, runner: Node, number: int, order: Order, job: Plan, folder: str) -> None:
        super().__init__(runner, number, order, job, folder)
        self.role = Follower(self, self.plan)
        self.lane = order.lane
        self._error = ""

    def conclude(self, code: int | None, error: str = "", *, infrastructure: bool = False) -> None:
        """End this node's part, and report an error to the head node until it ends the program."""
        if error and not self._error:
            self._error = error
            self._report_error(code or 1)
        self.end()

    def _report_error(self, code: int) -> None:
        head = self.plan.head
        report = {"op": "unfit", "index": self.plan.index, "code": code, "error": self._error}
        self.relay(head["token"], head["node"], report)
        self._runner.loop.set_alarm(f"error-{self.number}", RESEND_INTERVAL, lambda: self._report_error(code))

    def forget_error(self) -> None:
        """Stop to report an error: the head node has ended the program."""
        self._runner.loop.cancel_alarm(f"error-{self.number}")
