"""Pass streams between the daemon and the runners of this cluster, as far as the site allows them."""

from dataclasses import dataclass, field
from typing import Any, Literal

import structlog
from pydantic import TypeAdapter

from koalapy.agent.components.component import Component, Node
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.runners.runners import RunnerConnection
from koalapy.protocol import messages as wire
from koalapy.system.clock import SYSTEM_CLOCK, Clock

log = structlog.get_logger()

Interactive = Literal["owner", "administrators", "none"]
"""Users who may open terminals on a site's nodes: owners of jobs, administrators of the grid as well, or no user."""
MAX_STREAMS = 1000
"""Streams of one agent."""
MAX_UNSENT = 4 * 1024 * 1024
"""Bytes that may wait for a runner that does not read, before a stream to it ends."""
_from_node: TypeAdapter[wire.StreamFromNode] = TypeAdapter(wire.StreamFromNode)


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A stream and its end on this cluster."""

    component: Component
    node: int
    runner: RunnerConnection
    order: wire.StreamOpen
    opened_at: float


@dataclass(eq=False, slots=True)
class Streams:
    """The streams that pass through this agent, which keeps none of their bytes."""

    _reporter: Reporter
    _cluster: str
    _interactive: Interactive
    _clock: Clock = SYSTEM_CLOCK
    max_streams: int = MAX_STREAMS
    _open: dict[str, OpenStream] = field(default_factory=dict)

    def receive_from_daemon(self, message: wire.StreamToNode) -> None:
        """Open a stream, or pass a message of its client on. Ignore messages of a stream that has ended."""
        if isinstance(message, wire.StreamOpen):
            error = self._open_stream(message)
            if error:
                self._reporter.uplink.send_soon(wire.StreamEnd(stream=message.stream, error=error), urgent=True)
        elif (stream := self._open.get(message.stream)) is not None:
            if isinstance(message, wire.StreamEnd):
                self._send_to_runner(stream.runner, message)
                self._forget_stream(message.stream, "the client has ended it")
            elif stream.runner.unsent_bytes > MAX_UNSENT:
                error = f"node {stream.component.nodes[stream.node].name} does not read what it is sent"
                self._reporter.uplink.send_soon(wire.StreamEnd(stream=message.stream, error=error), urgent=True)
                self._send_to_runner(stream.runner, wire.StreamEnd(stream=message.stream))
                self._forget_stream(message.stream, error)
            else:
                self._send_to_runner(stream.runner, message)

    def receive_from_runner(self, runner: RunnerConnection, content: dict[str, Any]) -> None:
        """Pass a message of a stream's own node on to the daemon."""
        message = _from_node.validate_python(content)
        stream = self._open.get(message.stream)
        if stream is None or stream.runner is not runner:
            return
        if not self._reporter.uplink.offer_message(message, stream.component.token):
            self._send_to_runner(runner, wire.StreamEnd(stream=message.stream))
            message = wire.StreamEnd(stream=message.stream, error="the daemon does not read what it is sent")
            self._reporter.uplink.send_soon(message, urgent=True)
        if isinstance(message, wire.StreamEnd):
            self._forget_stream(message.stream, message.error or f"exit code {message.code}")

    def on_runner_lost(self, runner: RunnerConnection) -> None:
        """End the streams of a runner that has disconnected."""
        for name, stream in list(self._open.items()):
            if stream.runner is runner:
                error = f"the connection to node {stream.component.nodes[stream.node].name} was lost"
                self._reporter.uplink.send_soon(wire.StreamEnd(stream=name, error=error), urgent=True)
                self._forget_stream(name, error)

    def on_daemon_lost(self) -> None:
        """End all streams, since their clients cannot be reached."""
        for name, stream in list(self._open.items()):
            self._send_to_runner(stream.runner, wire.StreamEnd(stream=name))
            self._forget_stream(name, "the connection to the daemon was lost")

    def _open_stream(self, order: wire.StreamOpen) -> str:
        """Pass an order on to its node, and remember it; return the reason if that is not possible."""
        if order.kind == "terminal" and (reason := self._rejection_reason(order)):
            return reason
        if order.stream in self._open:
            return f"there is a stream {order.stream[:40]} already"
        if len(self._open) >= self.max_streams:
            return f"{self._cluster} has {self.max_streams} streams already, which is its limit: try again later"
        component = self._reporter.find_component(order.token)
        if component is None or component.ended or component.stop is not None:
            return f"the job does not run on {self._cluster} any more"
        index = _find_node(component.nodes, order.node)
        if index is None:
            names = ", ".join(node.name for node in component.nodes[:8])
            return f"{order.node[:60]!r} is no node of the job on {self._cluster}: give one of {names}, or its index"
        node = component.nodes[index]
        if node.runner is None:
            return f"node {node.name or index} is not connected to its agent"
        if not node.has_streams:
            return f"the job was started on {node.name} by a version of koalapy without terminals: submit it again"
        if node.runner.unsent_bytes > MAX_UNSENT:
            return f"node {node.name or index} does not read what it is sent: try again later"
        self._open[order.stream] = OpenStream(component, index, node.runner, order, self._clock.monotonic())
        self._send_to_runner(node.runner, order)
        log.info("stream opened", action="stream-opened", **self._describe(self._open[order.stream]))
        return ""

    def _rejection_reason(self, order: wire.StreamOpen) -> str:
        """Return why the site does not allow a terminal; empty if it does."""
        setting = f"clusters.{self._cluster}.interactive is {self._interactive}"
        if self._interactive == "none":
            return f"the site does not allow terminals on its nodes: {setting}"
        if not order.is_owner and self._interactive != "administrators":
            return f"the site allows terminals to the owners of jobs only: {setting}"
        return ""

    def _forget_stream(self, name: str, reason: str) -> None:
        if (stream := self._open.pop(name, None)) is not None:
            seconds = round(self._clock.monotonic() - stream.opened_at, 3)
            log.info("stream ended", action="stream-ended", reason=reason, seconds=seconds, **self._describe(stream))

    @staticmethod
    def _describe(stream: OpenStream) -> dict[str, object]:
        order, node = stream.order, stream.component.nodes[stream.node].name
        return {"token": order.token, "node": node, "kind": order.kind, "user": order.user}

    @staticmethod
    def _send_to_runner(runner: RunnerConnection, message: wire.StreamToNode) -> None:
        runner.send_message({"t": "stream", "message": message.model_dump()})


def _find_node(nodes: list[Node], name: str) -> int | None:
    """Return the index of a node by its index, name or address; the first for an empty name; None if there is none."""
    if not name:
        return 0 if nodes else None
    by_name = next((index for index, node in enumerate(nodes) if name in (node.name, node.host)), None)
    if by_name is None and name.isdecimal() and len(name) < 8 and int(name) < len(nodes):
        return int(name)
    return by_name
