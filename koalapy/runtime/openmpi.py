"""Running a program under Open MPI: mpirun on the head node, an MPI daemon on each other one."""

from __future__ import annotations

import os
import signal
import socket
import time

from koalapy.runtime.desk import Desk
from koalapy.runtime.plan import Plan
from koalapy.runtime.processes import find_program
from koalapy.runtime.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from koalapy.runtime.role import Node

RESEND = 2.0
LAUNCH_PATIENCE = 30.0


def mpirun_options(mpirun: str, launch_agent: str) -> list[str]:
    """Options that make mpirun start its daemons by our launch agent; they depend on Open MPI's series."""
    folder = os.path.dirname(os.path.realpath(mpirun))
    if os.access(os.path.join(folder, "prterun"), os.X_OK):
        options = {
            "plm": "ssh",
            "ras": "^slurm,gridengine",
            "plm_ssh_agent": launch_agent,
            "plm_ssh_no_tree_spawn": "1",
        }
        # Its launch threads lose track of a process that ends at once, and mpirun then hangs (seen in 5.0.11).
        options["odls_base_max_threads"] = "0"
        flag, more = "--prtemca", ["--leave-session-attached"]
    elif os.access(os.path.join(folder, "orterun"), os.X_OK):
        options = {
            "plm": "rsh",
            "ras": "^slurm,gridengine",
            "plm_rsh_agent": launch_agent,
            "plm_rsh_no_tree_spawn": "1",
        }
        flag, more = "--mca", ["--mca", "orte_leave_session_attached", "1"]
    else:
        raise Failure(f"{mpirun} is not Open MPI's: set the cluster's prefix")
    return [*(word for k, v in options.items() for word in (flag, k, v)), *more, "--bind-to", "none"]


def give_temporary_folder(node: Node) -> str:
    """Let Open MPI have its session files in a folder of ours: what it leaves when killed would hurt a later run."""
    node.environment["TMPDIR"] = folder = node.make_folder()
    return folder


def how_it_ended(code: int) -> str:
    """In words; a shell's 128 + n counts as killed by signal n."""
    number = -code if code < 0 else code - 128
    return f"was killed by signal {number}" if 0 < number <= signal.SIGRTMAX else f"ended with {code}"


def is_lost(code: int) -> bool:
    """Whether an MPI daemon that ended so was killed or never started; 1 is also how some end after a failed rank."""
    return code < 0 or code > 125


class Follower:
    """A node that runs an MPI daemon for the head node's mpirun, and tells the head how it ended."""

    def __init__(self, runner: Node, plan: Plan) -> None:
        self._runner, self._plan = runner, plan
        self._pid: int | None = None

    def start(self) -> None:
        """The head node will ask."""
        give_temporary_folder(self._runner)

    def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None:
        if payload["op"] == "launch":
            if self._pid is None:
                self._pid = self._runner.spawn(["sh", "-c", payload["command"]])
                self._runner.tell_running()
            self._tell({"op": "launched"})
        elif payload["op"] == "noted":
            self._runner.conclude(None)

    def child_ended(self, pid: int, code: int) -> None:
        if pid != self._pid:
            return
        self._tell_end(code)
        if is_lost(code):
            error = f"the MPI daemon on {self._runner.settings.name} {how_it_ended(code)}"
            self._runner.conclude(None, error, infrastructure=True)

    def close(self) -> None:
        self._runner.loop.cancel("daemon-ended")

    def _tell_end(self, code: int) -> None:
        self._tell({"op": "daemon_ended", "code": code})
        self._runner.loop.after("daemon-ended", RESEND, lambda: self._tell_end(code))

    def _tell(self, payload: dict[str, Any]) -> None:
        head = self._plan.head
        self._runner.relay(head["token"], head["node"], {**payload, "index": self._plan.index})


class Head:
    """The node whose mpirun starts the program; knows how every MPI daemon ended before it tells how the program did.

    That matters because mpirun ends with 0 when it loses a daemon.
    """

    def __init__(self, runner: Node, plan: Plan) -> None:
        self._runner, self._plan = runner, plan
        self._desk: Desk | None = None
        self._by_host = {n["host"]: i for i, n in enumerate(plan.nodes)}
        self._elsewhere = {i for i in range(len(plan.nodes)) if i != plan.index}
        self._commands: dict[int, tuple[str, float]] = {}
        self._started: set[int] = set()
        self._ended: dict[int, int] = {}
        self._local: int | None = None
        self._mpirun = 0
        self._code: int | None = None
        self._refusal = ""

    def start(self) -> None:
        environment = self._runner.environment
        program = self._plan.context["command"][0]
        if find_program(program, environment) is None:
            raise Failure(f"command not found: {program}", 127)
        prefix = environment.get("KOALA_MPI_PREFIX")
        mpirun = find_program(f"{prefix}/bin/mpirun" if prefix else "mpirun", environment)
        if mpirun is None:
            name = self._runner.settings.name
            raise Failure(f"mpirun not found on node {name}: install Open MPI or set the cluster's prefix")
        if all(name == "lo" for _, name in socket.if_nameindex()):
            raise Failure(
                "Open MPI's own control channel needs a network interface besides loopback; this node has none"
            )
        self._desk = Desk(self._runner.loop, give_temporary_folder(self._runner), list(self._by_host), self._asked)
        if os.geteuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        argv = [mpirun, *mpirun_options(mpirun, self._desk.agent), *self._plan.mpirun_contexts()]
        self._mpirun = self._runner.spawn(argv)
        self._tell_when_all_started()

    def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None:
        index, op = payload.get("index", -1), payload["op"]
        if op == "undelivered":
            self._refusal = payload["reason"]
        elif op == "launched" and index in self._commands:
            self._runner.loop.cancel(f"launch-{index}")
            del self._commands[index]
            self._started.add(index)
            self._tell_when_all_started()
        elif op == "daemon_ended":
            self._runner.relay(*sender, {"op": "noted"})
            self._daemon_ended(index, payload["code"])

    def child_ended(self, pid: int, code: int) -> None:
        if pid == self._local:
            self._daemon_ended(self._plan.index, code)
        elif pid == self._mpirun:
            self._code = code
            self._runner.loop.after("daemons", self._runner.settings.lease, self._conclude)
            self._conclude_when_all_ended()

    def close(self) -> None:
        if self._desk is not None:
            self._desk.close()
            self._desk = None
        for index in self._commands:
            self._runner.loop.cancel(f"launch-{index}")
        self._runner.loop.cancel("daemons")

    def _asked(self, host: str, command: str) -> None:
        index = self._by_host[host]
        if index != self._plan.index:
            self._commands[index] = (command, time.monotonic() + LAUNCH_PATIENCE)
            self._hand_over(index)
        else:
            self._local = self._runner.spawn(["sh", "-c", command])
            self._started.add(index)

    def _hand_over(self, index: int) -> None:
        """Ask a node's runner to start its MPI daemon, and again until it has answered: relays may get lost."""
        command, deadline = self._commands[index]
        if time.monotonic() > deadline:
            del self._commands[index]
            self._answer(index, f"node {self._plan.nodes[index]['host']} did not start its MPI daemon: {self._refusal}")
            return
        node = self._plan.nodes[index]
        self._runner.relay(node["token"], node["node"], {"op": "launch", "command": command})
        self._runner.loop.after(f"launch-{index}", RESEND, lambda: self._hand_over(index))

    def _answer(self, index: int, error: str = "") -> None:
        if self._desk is not None:
            self._desk.answer(self._plan.nodes[index]["host"], error)

    def _tell_when_all_started(self) -> None:
        if self._elsewhere <= self._started:
            self._runner.tell_running()

    def _daemon_ended(self, index: int, code: int) -> None:
        self._answer(index, how_it_ended(code) if code else "")
        self._ended[index] = code
        self._conclude_when_all_ended()

    def _conclude_when_all_ended(self) -> None:
        if self._code is not None and self._started <= self._ended.keys():
            self._conclude()

    def _conclude(self) -> None:
        code, nodes = self._code or 0, self._plan.nodes
        bad = next((i for i, c in self._ended.items() if is_lost(c) or (c != 0 and code == 0)), None)
        silent = next(iter(self._started - self._ended.keys()), None)
        unreached = next(iter(self._elsewhere - self._started), None)
        error = ""
        if code < 0:
            error = f"mpirun {how_it_ended(code)}"
        elif bad is not None:
            error = f"the MPI daemon on {nodes[bad]['host']} {how_it_ended(self._ended[bad])}"
        elif silent is not None:
            error = f"no word of how the MPI daemon on {nodes[silent]['host']} ended"
        elif unreached is not None:
            error = f"mpirun {how_it_ended(code)} before node {nodes[unreached]['host']} was reached {self._refusal}"
        self._runner.conclude(None if error else code, error, infrastructure=bool(error))
