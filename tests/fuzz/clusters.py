"""Clusters whose agents are played in memory: honest ones, that do what an agent does and nothing else."""

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
from tests.fuzz.daemon import DEADLINE, Watched

NODES = 8
PHASES = (ComponentState.WAITING, ComponentState.CLAIMED, ComponentState.RUNNING, ComponentState.ENDED)
SIZE = 200_000_000
"""Bytes of every file that there is."""


class Honest(Agent):
    """The agent of a cluster that has ``NODES`` nodes and every file that it is asked for.

    ``limits`` says how far the components of a job come by themselves; those of others come to their end.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.limits: dict[JobId, ComponentState] = {}
        self.stages_held: set[JobId] = set()
        """Jobs whose stages stay on their way."""
        self.components: dict[str, ComponentStatus] = {}
        self.sizes: dict[str, int] = {}
        self.stages: dict[str, StageStatus] = {}
        self.claimed: set[str] = set()
        self.relayed: list[dict[str, Any]] = []
        self.acknowledged: defaultdict[str, int] = defaultdict(int)

    async def send(self, frame: str) -> None:
        await super().send(frame)
        for message in wire.from_daemon.validate_json(frame):
            self._hear(message)

    def hello(self, *known: wire.KnownDaemon) -> wire.Hello:
        return wire.Hello(cluster=self.name, version="1", lrm="drmaa", host="head", pid=1, known=list(known))

    def _hear(self, message: wire.FromDaemon) -> None:
        match message:
            case wire.Welcome():
                self.says(Inventory(tuple(self.components.values()), stages=tuple(self.stages.values())), self.report())
            case wire.Probe():
                self.says(self.report(), wire.Confirmed(sequence=message.sequence))
            case wire.OutputAck():
                self.acknowledged[message.token] = max(self.acknowledged[message.token], message.offset)
            case wire.Ask(what="stat"):
                path = str(message.payload.get("path"))
                found = {"path": path, "size": SIZE, "checksum": checksum(path), "parts": None}
                self.says(wire.Answer(ident=message.ident, payload=found, cluster=message.cluster))
            case wire.Ask():
                self.says(wire.Answer(ident=message.ident, error="no", fault="refused", cluster=message.cluster))
            case wire.Relay():
                self.relayed.append(message.model_dump())
            case wire.Command():
                self._obey(message)
                self.says(wire.Ack(id=message.id))

    def _obey(self, message: wire.Command) -> None:
        token = message.token
        match message:
            case wire.Submit():
                if token not in self.components:
                    self.sizes[token] = message.size
                    self.components[token] = ComponentStatus(token, ComponentState.SUBMITTED, lrm_job=f"lrm-{token}")
                    self.go_on(token)
            case wire.Open():
                self._to(token, ComponentState.RUNNING)
            case wire.Stop():
                known = self.components.get(token) or ComponentStatus(token, ComponentState.ENDED)
                self._tell(replace(known, state=ComponentState.ENDED))
            case wire.Forget():
                self.components.pop(token, None)
            case wire.Stage():
                self.stages[token] = StageStatus(token, "running", SIZE * len(message.files))
                if parse_token(token).job not in self.stages_held:
                    self.bring(message)
                self.says(self.stages[token])
            case wire.Unstage():
                self.stages.pop(token, None)

    def bring(self, order: wire.Stage) -> None:
        moved = tuple(TransferMeasurement(file.source, SIZE, 3.0, SIZE, 2.0) for file in order.files)
        whole = SIZE * len(order.files)
        self.stages[order.token] = StageStatus(order.token, "done", whole, whole, moved=moved)

    def go_on(self, token: str) -> None:
        """As far as it may, and it can by itself."""
        self._to(token, ComponentState.WAITING)
        self._to(token, ComponentState.CLAIMED)

    def _to(self, token: str, state: ComponentState) -> None:
        known, job = self.components.get(token), parse_token(token).job
        if known is None or PHASES.index(state) > PHASES.index(self.limits.get(job, ComponentState.ENDED)):
            return
        if state is ComponentState.CLAIMED:
            self.claimed.add(token)
            hosts = tuple(f"{self.name}-{token}-{node}" for node in range(self.sizes[token]))
            known = replace(known, hosts=hosts)
        if state is ComponentState.ENDED:
            known = replace(known, program_exit=0)
        self._tell(replace(known, state=state))
        if state is ComponentState.RUNNING:
            self.says(output(token, 0, written(token)))
            self._to(token, ComponentState.ENDED)

    def finish(self, job: JobId) -> None:
        """Have a job's components come to their end, from wherever they are."""
        self.limits.pop(job, None)
        for token, status in list(self.components.items()):
            if parse_token(token).job == job:
                if status.state is ComponentState.RUNNING:
                    self._to(token, ComponentState.ENDED)
                elif status.state is ComponentState.WAITING:
                    self._to(token, ComponentState.CLAIMED)

    def _tell(self, status: ComponentStatus) -> None:
        self.components[status.token] = status
        self.says(status, self.report())

    def in_phase(self, phase: str) -> list[str]:
        return [token for token, known in self.components.items() if known.state == phase]

    def report(self) -> ClusterReport:
        holding = [t for t, c in self.components.items() if c.state in (ComponentState.CLAIMED, ComponentState.RUNNING)]
        used = sum(self.sizes[token] for token in holding)
        return ClusterReport(NODES, NODES - used, holding=frozenset(holding))


def checksum(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


def written(token: str) -> bytes:
    """What a component's program writes."""
    return f"genuine output of {token}\n".encode()


def output(token: str, offset: int, text: bytes) -> wire.Output:
    return wire.Output(token=token, offset=offset, data=base64.b64encode(text).decode())


@asynccontextmanager
async def connected(daemon: Watched, agent: Honest) -> AsyncIterator[Honest]:
    """An honest agent until the end of the block, through which its connection must last."""
    serving = asyncio.create_task(daemon.hub.serve(agent.name, agent))
    agent.says(agent.hello())
    yield agent
    await agent.close("")
    await serving


async def when(daemon: Watched, true: Callable[[], object]) -> None:
    """Return when something has become true; raises what ended the engine."""
    async with asyncio.timeout(DEADLINE):
        while not true():
            await daemon.settled()
