"""Choose the role of a node in the program of its job, and start programs of the launcher ``processes``.

These run once on each node, with what distributed frameworks need to find each other.
"""

from __future__ import annotations

import os
import socket

from koalapy.runner.containers import Container, find_container
from koalapy.runner.openmpi import Follower, Head
from koalapy.runner.parameters import rank_ports
from koalapy.runner.plan import Plan, Role
from koalapy.runner.processes import require_program
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from koalapy.runner.plan import Node, RankedBytes

ASK_INTERVAL = 2.0
PORT_TIMEOUT = 600.0
"""Seconds to wait for the first node's port. Most programs need no port, so they start without it then."""
MAX_PORT_TRIES = 64


class Single(Role):
    """The role of a node that runs the program once (launcher ``processes``).

    The first node, that of rank 0, chooses a free port for the program and sends it to the others. Messages between
    nodes may get lost, so a node without the port asks for it.
    """

    def __init__(self, runner: Node, plan: Plan) -> None:
        super().__init__(runner, plan)
        self._pid = 0
        self._port: int | None = None
        self._container: Container | None = None

    @property
    def first_rank(self) -> int:
        return self._plan.index

    def start(self) -> None:
        if self._plan.offer is not None and (pairs := sorted(self._plan.pairs & self._plan.offer.required)):
            raise Failure(
                f"relayed links carry programs under Open MPI only, and the clusters {pairs[0][0]} and {pairs[0][1]} "
                "have no other: submit it to clusters whose nodes reach each other, with --links direct",
                1,
            )
        self._container = find_container(self._plan, self._runner.settings, self._runner.environment)
        if len(self._plan.nodes) > 1 and self._container is None:  # before another node starts the program
            require_program(self._plan.context["command"][0], self._runner.environment)
        if self._plan.index > 0:
            self._deadline = self._runner.loop.time() + PORT_TIMEOUT
            self._runner.loop.set_alarm("port", ASK_INTERVAL, self._ask_for_port)
            return
        self._port = find_free_port(self._plan.me["host"], rank_ports(self._runner.environment))
        for node in self._plan.nodes[1:]:
            self._send(node, {"op": "port", "port": self._port})
        self._start_process()

    def relayed(self, sender: tuple[str, int], payload: dict[str, Any]) -> None:
        """Answer a node that asks for the port, or start with the port of the first node."""
        index, op = self._plan.index_of(sender), payload["op"]
        if index is not None and op == "ask" and self._plan.index == 0:
            self._send(self._plan.nodes[index], {"op": "port", "port": self._port})
        elif op == "undelivered" and payload.get("ended") is True and self._is_waiting:
            self._start_later(None)  # the first node has ended: its port leads nowhere
        elif op == "port" and index == 0 and self._is_waiting:
            port = payload["port"]
            if port is not None and not (isinstance(port, int) and 0 < port < 65536):
                raise ValueError(f"{str(port)[:100]} is not a port")
            self._start_later(port)

    @property
    def _is_waiting(self) -> bool:
        """Whether this node waits for the port of the first node."""
        return self._plan.index > 0 and not self._pid

    def child_ended(self, pid: int, code: int) -> None:
        if pid == self._pid:
            self._runner.conclude(code if code >= 0 else 128 - code)

    def rank_output(self, output: bytes, *, is_error: bool) -> list[RankedBytes]:
        return [(self._plan.index, output)]

    def close(self) -> None:
        self._runner.loop.cancel_alarm("port")

    def _ask_for_port(self) -> None:
        """Ask the first node for its port, or start without it after ``PORT_TIMEOUT``."""
        if self._runner.loop.time() < self._deadline:
            self._send(self._plan.nodes[0], {"op": "ask"})
            self._runner.loop.set_alarm("port", ASK_INTERVAL, self._ask_for_port)
        else:
            name = self._runner.settings.name
            self._runner.say(f"node {name} received no port of the first node: it starts without KOALA_HEAD_PORT")
            self._start_later(None)

    def _start_later(self, port: int | None) -> None:
        """Start the process after the beginning of the program. Report an error as one at the beginning."""
        self._runner.loop.cancel_alarm("port")
        self._port = port
        try:
            self._start_process()
        except Failure as failure:
            self._runner.say(failure.message)
            self._runner.conclude(failure.code, failure.message, infrastructure=failure.code is None)

    def _start_process(self) -> None:
        add_framework_variables(self._runner.environment, self._plan, self._port)
        if self._plan.reads_input:
            self._runner.make_input()
        command = self._plan.context["command"]
        if self._container is not None:
            temporary = self._runner.environment.get("TMPDIR", "/tmp")
            command = self._container.wrap_command(command, os.getcwd(), temporary)
        self._pid = self._runner.spawn(command, is_program=True)
        self._runner.report_running()

    def _send(self, node: dict[str, Any], payload: dict[str, Any]) -> None:
        self._runner.relay(node["token"], node["node"], payload)


def add_framework_variables(environment: dict[str, str], plan: Plan, port: int | None) -> None:
    """Add the variables by which the processes of a distributed framework find each other.

    Those of ``torch.distributed`` keep a value that the user has set. ``port``: a port of the first node, if known.
    """
    clusters = list(dict.fromkeys(node["cluster"] for node in plan.nodes))
    variables = {
        "KOALA_RANK": plan.index,
        "KOALA_SIZE": len(plan.nodes),
        "KOALA_LOCAL_RANK": 0,
        "KOALA_LOCAL_SIZE": 1,
        "KOALA_CLUSTER_INDEX": clusters.index(plan.me["cluster"]),
        "KOALA_CLUSTER_LIST": ",".join(clusters),
        "KOALA_HEAD_HOST": plan.nodes[0]["host"],
        **({} if port is None else {"KOALA_HEAD_PORT": port}),
    }
    environment.update((name, str(value)) for name, value in variables.items())
    for name, source in TORCH_VARIABLES.items():
        if source in environment:
            environment.setdefault(name, environment[source])


TORCH_VARIABLES = {
    "MASTER_ADDR": "KOALA_HEAD_HOST",
    "MASTER_PORT": "KOALA_HEAD_PORT",
    "RANK": "KOALA_RANK",
    "WORLD_SIZE": "KOALA_SIZE",
    "LOCAL_RANK": "KOALA_LOCAL_RANK",
}
"""Variables of ``torch.distributed``, which other frameworks read as well, and the variables with their values."""


def find_free_port(host: str, ports: tuple[int, int] | None) -> int | None:
    """Return a port at which nothing listens on any address of this node; None if none was found.

    ``ports``: the first and last that the cluster allows; None: any. Start at a random one, since a job that started
    just before may not listen yet.
    """
    family, everywhere = (socket.AF_INET6, "::") if ":" in host else (socket.AF_INET, "")
    first, last = ports or (0, 0)
    count = last - first + 1
    start = int.from_bytes(os.urandom(4), "big") % count
    for offset in range(start, start + min(count, MAX_PORT_TRIES)):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((everywhere, first + offset % count))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
            return port
    return None


def make_role(runner: Node, plan: Plan) -> Role:
    """Return the role of a node, as the plan's launcher, script and head say."""
    is_head = plan.me is plan.head
    if plan.message["launcher"] == "processes":
        return Single(runner, plan)
    if plan.message.get("is_script"):
        from koalapy.runner.script import ScriptFollower, ScriptHead  # few jobs need it

        return ScriptHead(runner, plan) if is_head else ScriptFollower(runner, plan)
    return Head(runner, plan) if is_head else Follower(runner, plan)
