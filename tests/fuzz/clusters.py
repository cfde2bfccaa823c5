"""Honest agents in memory that execute the commands of the daemon."""

import asyncio
import base64
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from koalapy.model.job import ComponentState, JobId, parse_token
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory, StageStatus, TransferMeasurement
from koalapy.protocol import messages as wire
from tests.daemon.test_hub import Agent
from tests.fuzz.daemon import MAX_WAIT_S, WatchedDaemon

NODE_COUNT = 8
PHASES = (ComponentState.WAITING, ComponentState.CLAIMED, ComponentState.RUNNING, ComponentState.ENDED)
FILE_SIZE_BYTES = 200_000_000
"""The size of every file."""


class HonestAgent(Agent):
    """The agent of a cluster that has ``NODES`` nodes and every requested file.

    ``limits`` holds by job the last state that its components reach without commands; other components end.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.limits: dict[JobId, ComponentState] = {}
        self.stages_held: set[JobId] = set()
        """Jobs with stages that do not complete."""
        self.components: dict[str, ComponentStatus] = {}
        self.sizes: dict[str, int] = {}
        self.stages: dict[str, StageStatus] = {}
        self.claimed: set[str] = set()
        self.relayed: list[dict[str, Any]] = []
        self.acknowledged: defaultdict[str, int] = defaultdict(int)

    async def send(self, frame: str) -> None:
        await super().send(frame)
        for message in wire.from_daemon.validate_json(frame):
            self._handle(message)

    def make_hello(self, *daemons: wire.KnownDaemon) -> wire.Hello:
        return wire.Hello(cluster=self.name, version="1", lrm="drmaa", host="head", pid=1, known=list(daemons))

    def _handle(self, message: wire.FromDaemon) -> None:
        match message:
            case wire.Welcome():
                self.say_to_daemon(
                    Inventory(tuple(self.components.values()), stages=tuple(self.stages.values())), self.make_report()
                )
            case wire.Probe():
                self.say_to_daemon(self.make_report(), wire.Confirmed(sequence=message.sequence))
            case wire.OutputAck():
                self.acknowledged[message.token] = max(self.acknowledged[message.token], message.offset)
            case wire.Ask(what="stat"):
                path = str(message.payload.get("path"))
                payload = {"path": path, "size": FILE_SIZE_BYTES, "checksum": make_checksum(path), "parts": None}
                self.say_to_daemon(wire.Answer(ident=message.ident, payload=payload, cluster=message.cluster))
            case wire.Ask():
                self.say_to_daemon(
                    wire.Answer(ident=message.ident, error="no", fault="refused", cluster=message.cluster)
                )
            case wire.Relay():
                self.relayed.append(message.model_dump())
            case wire.Command():
                self._execute(message)
                self.say_to_daemon(wire.Ack(id=message.id))

    def _execute(self, message: wire.Command) -> None:
        token = message.token
        match message:
            case wire.Submit():
                if token not in self.components:
                    self.sizes[token] = message.size
                    self.components[token] = ComponentStatus(token, ComponentState.SUBMITTED, lrm_job=f"lrm-{token}")
                    self.advance(token)
            case wire.Open():
                self._set_state(token, ComponentState.RUNNING)
            case wire.Stop():
                status = self.components.get(token) or ComponentStatus(token, ComponentState.ENDED)
                self._report(replace(status, state=ComponentState.ENDED))
            case wire.Forget():
                self.components.pop(token, None)
            case wire.Stage():
                self.stages[token] = StageStatus(token, "running", FILE_SIZE_BYTES * len(message.files))
                if parse_token(token).job not in self.stages_held:
                    self.complete_stage(message)
                self.say_to_daemon(self.stages[token])
            case wire.Unstage():
                self.stages.pop(token, None)

    def complete_stage(self, order: wire.Stage) -> None:
        moved = tuple(
            TransferMeasurement(file.source, FILE_SIZE_BYTES, 3.0, FILE_SIZE_BYTES, 2.0) for file in order.files
        )
        total_bytes = FILE_SIZE_BYTES * len(order.files)
        self.stages[order.token] = StageStatus(order.token, "done", total_bytes, total_bytes, moved=moved)

    def advance(self, token: str) -> None:
        """Advance a component to the states that it reaches without a command."""
        self._set_state(token, ComponentState.WAITING)
        self._set_state(token, ComponentState.CLAIMED)

    def _set_state(self, token: str, state: ComponentState) -> None:
        status, job = self.components.get(token), parse_token(token).job
        if status is None or PHASES.index(state) > PHASES.index(self.limits.get(job, ComponentState.ENDED)):
            return
        if state is ComponentState.CLAIMED:
            self.claimed.add(token)
            hosts = tuple(f"{self.name}-{token}-{node}" for node in range(self.sizes[token]))
            status = replace(status, hosts=hosts)
        if state is ComponentState.ENDED:
            status = replace(status, program_exit=0)
        self._report(replace(status, state=state))
        if state is ComponentState.RUNNING:
            self.say_to_daemon(output_message(token, 0, expected_output(token)))
            self._set_state(token, ComponentState.ENDED)

    def finish_job(self, job: JobId) -> None:
        """Let a job's components advance to their end."""
        self.limits.pop(job, None)
        for token, status in list(self.components.items()):
            if parse_token(token).job == job:
                if status.state is ComponentState.RUNNING:
                    self._set_state(token, ComponentState.ENDED)
                elif status.state is ComponentState.WAITING:
                    self._set_state(token, ComponentState.CLAIMED)

    def _report(self, status: ComponentStatus) -> None:
        self.components[status.token] = status
        self.say_to_daemon(status, self.make_report())

    def list_in_state(self, phase: str) -> list[str]:
        return [token for token, status in self.components.items() if status.state == phase]

    def make_report(self) -> ClusterReport:
        holding = [
            t
            for t, status in self.components.items()
            if status.state in (ComponentState.CLAIMED, ComponentState.RUNNING)
        ]
        used = sum(self.sizes[token] for token in holding)
        return ClusterReport(NODE_COUNT, NODE_COUNT - used, holding=frozenset(holding))


def make_checksum(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


def expected_output(token: str) -> bytes:
    """Return the output of a component's program."""
    return f"genuine output of {token}\n".encode()


def output_message(token: str, offset: int, text: bytes) -> wire.Output:
    return wire.Output(token=token, offset=offset, data=base64.b64encode(text).decode())


@asynccontextmanager
async def connected_agent(daemon: WatchedDaemon, agent: HonestAgent) -> AsyncIterator[HonestAgent]:
    """Connect an honest agent for the duration of the block."""
    serving = asyncio.create_task(daemon.hub.serve_connection(agent.name, agent))
    agent.say_to_daemon(agent.make_hello())
    yield agent
    await agent.close("")
    await serving


async def wait_until(daemon: WatchedDaemon, condition: Callable[[], object]) -> None:
    """Wait until a condition is true. Raise the error that ended the engine."""
    async with asyncio.timeout(MAX_WAIT_S):
        while not condition():
            await daemon.wait_until_settled()
