"""Start the relay of this node for a job with relayed links, with the ports that it serves."""

from __future__ import annotations

import json
import os
import sys

from koalapy.runner.connections import encode
from koalapy.runner.relay_links import split_ports
from koalapy.runner.relay_protocol import derive_node_key
from koalapy.runner.settings import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from koalapy.runner.connections import Loop
    from koalapy.runner.plan import Plan
    from koalapy.runner.processes import Processes
    from koalapy.runner.settings import Settings

    Waiter = Callable[[bool, str], None]

PROGRAM = f"{os.path.dirname(os.path.abspath(__file__))}/relay_node.py"
START_TIMEOUT = 10.0
"""Seconds in which the head's relay must accept this node, which it may learn of later than the runner."""
RETRY_INTERVAL = 0.3
LOOPBACK = "127.0.0.1"


def child_settings(plan: Plan, secret: bytes) -> dict[str, Any]:
    """Return the settings of this node's relay: it serves the ports of all other nodes of the job. Raise ``Failure``.

    Which of these are used is decided by the parameters of Open MPI. So the programs of a script can share a relay.
    """
    head = plan.message.get("relay_head")
    if plan.offer is None or plan.relayed is None:
        raise Failure("the job needs relayed links, but the relays of its clusters were not ready when it started")
    if not head:
        raise Failure(
            f"the job needs relayed links, but the agent of {plan.me['cluster']} was not connected with its relay: "
            "koala check on its head node says why"
        )
    layout, me = plan.offer.layouts[plan.relayed.layout], plan.me["number"]
    first = next(i for i, node in enumerate(plan.job.nodes) if node is plan.job.head)
    listeners: list[Any] = [[LOOPBACK, *split_ports(layout[i])[1], i] for i in range(len(layout)) if i != me]
    targets: list[Any] = [[*split_ports(layout[me])[1], LOOPBACK, LOOPBACK]]
    if me == first:
        targets.append([*split_ports(layout[me])[0], plan.me["host"], ""])
    elif plan.relayed.joins(plan.me["cluster"], plan.head["cluster"]) and plan.me["cluster"] != plan.head["cluster"]:
        listeners.append([plan.me["host"], *split_ports(layout[first])[0], first])
    return {
        "attempt": plan.offer.attempt,
        "node": me,
        "key": derive_node_key(secret, plan.offer.attempt).hex(),
        "head": head,
        "listeners": listeners,
        "targets": targets,
    }


class RelayChild:
    """The relay of this node. It is started again while the head's relay does not know the node yet."""

    def __init__(
        self, loop: Loop, processes: Processes, settings: Settings, plan: Plan, on_lost: Callable[[str], None]
    ) -> None:
        """``on_lost`` is called with the reason if the relay cannot be used, or no longer."""
        self._loop, self._processes, self._on_lost = loop, processes, on_lost
        self._settings = child_settings(plan, settings.secret)
        self._name = settings.name
        self._waiting: list[Waiter] = []
        self._deadline = loop.time() + START_TIMEOUT
        self.pid = 0
        self._input = self._output = -1
        self._partial_line = b""
        self._taken = ""
        self._reason = ""
        """Why the head's relay does not accept this node yet."""
        self.is_ready = self._has_ended = False

    def serves(self, plan: Plan) -> bool:
        """Return whether it has the ports that a plan needs."""
        mine = self._settings["listeners"], self._settings["targets"]
        other = child_settings(plan, b"")
        return mine == (other["listeners"], other["targets"])

    def wait(self, waiter: Waiter) -> None:
        """Call ``waiter`` once the relay is ready, with True, or with False and the reason if its ports are taken."""
        if self.is_ready or self._taken:
            waiter(self.is_ready, self._taken)
            return
        self._waiting.append(waiter)
        if not self.pid and not self._loop.has_alarm("relay-child"):
            self._start()

    def finish(self) -> None:
        """Let the relay end."""
        self._has_ended = True
        self._waiting.clear()
        self._loop.cancel_alarm("relay-child")
        self._close_files()

    def child_ended(self, pid: int, code: int) -> bool:
        """Return whether it was the relay that ended. Start it again while the head's relay does not know it."""
        if pid != self.pid:
            return False
        if self._output >= 0:
            self._read_events(0)
        self.pid = 0
        self._close_files()
        if self._has_ended or self._taken:
            return True
        if self.is_ready or self._loop.time() > self._deadline:
            self._lose(self._reason or f"the relay of node {self._name} ended with {code}")
        else:
            self._loop.set_alarm("relay-child", RETRY_INTERVAL, self._start)
        return True

    def _start(self) -> None:
        input_end, self._input = os.pipe2(os.O_CLOEXEC)
        self._output, output_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._output, False)
        command = [sys.executable, "-I", "-S", PROGRAM]
        try:
            self.pid = self._processes.start(command, dict(os.environ), output_end, input_end, 2)
        finally:
            os.close(input_end)
            os.close(output_end)
        self._partial_line = b""
        self._loop.watch(self._output, self._read_events)
        data = encode(self._settings).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._input, data) :]
        except BrokenPipeError:
            return  # its end is handled later

    def _read_events(self, _events: int) -> None:
        try:
            data = os.read(self._output, 65536)
        except BlockingIOError:
            return
        if not data:
            self._loop.forget(self._output)
            return
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            if not self._has_ended:
                self._handle_event(json.loads(line))

    def _handle_event(self, event: dict[str, Any]) -> None:
        if event["t"] == "ready":
            self.is_ready, self._reason = True, ""
            self._notify()
        elif event["t"] == "taken":
            self._taken = f"{event['why']} on node {self._name}"
            self._notify()
        elif event["t"] == "lost" and self.is_ready:
            self._lose(f"node {self._name}: {event['why']}")
        elif event["t"] == "lost":
            self._reason = f"node {self._name}: {event['why']}"

    def _notify(self) -> None:
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            waiter(self.is_ready, self._taken)

    def _lose(self, reason: str) -> None:
        self.finish()
        self._on_lost(reason)

    def _close_files(self) -> None:
        for file in (self._input, self._output):
            if file >= 0:
                self._loop.forget(file)
                os.close(file)
        self._input = self._output = -1
