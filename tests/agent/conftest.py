"""A fake daemon, and agents over embedded clusters."""

import asyncio
import base64
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import Server, ServerConnection, serve

from koalapy.agent.core.agent import run_agent
from koalapy.agent.core.settings import DEFAULT_TIMEOUTS, RUNNER, AgentSettings, AgentTimeouts
from koalapy.agent.lrm.local.adapter import LocalLrm
from koalapy.agent.lrm.local.cluster import LocalCluster
from koalapy.agent.transfers import stages
from koalapy.agent.transfers.daemon_files import DaemonFiles
from tests.agent.lrm.conftest import stop_locald
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.transfers.fake_daemon_files import FakeDaemonFiles
from tests.signals import until
from tests.virtual_time import VirtualTimeLoop

DEADLINE = 30.0
VIRTUAL_DEADLINE = 7200.0
"""Longer than any timeout of an agent: virtual time costs little."""
MPI_ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMPI_MCA_coll": "^han,sm",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


class FakeDaemon:
    """A daemon that welcomes agents, records their messages, acknowledges output and forwards relays."""

    def __init__(self) -> None:
        self.epoch = 1
        self.instance, self.life = "test", ""
        self.lease: float | None = None
        """Lease of the submitted components, in seconds."""
        self.renews = True
        """Whether it renews leases on request."""
        self.output_limit = 64 * 1024**2
        self.takes_output = True
        self.is_full = False
        """Whether its disk takes no output now."""
        self.messages: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.inventories: list[list[dict[str, Any]]] = []
        self.complete_flags: list[bool] = []
        """Whether each inventory was complete."""
        self.output: dict[str, bytes] = {}
        self.change_answer: Callable[[dict[str, Any]], dict[str, Any]] = lambda payload: payload
        """Changes the payload of an answer that is forwarded to another agent."""
        self.greeting: dict[str, Any] = {}
        """The message that replaces its welcome."""
        self._server: Server | None = None
        self._sockets: dict[str, ServerConnection] = {}
        self._clusters: dict[str, str] = {}
        """The cluster of each submitted token."""
        self._ids = 0
        self.port = 0

    async def listen(self) -> None:
        self._server = await serve(self._serve, "127.0.0.1", self.port, compression=None, max_size=None)
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def stop_listening(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()
        self._sockets.clear()

    async def send_messages(self, cluster: str, *messages: dict[str, Any]) -> None:
        await self._sockets[cluster].send(json.dumps(messages))

    async def send_command(self, type: str, token: str, **fields: Any) -> int:
        self._ids += 1
        message = {"type": type, "id": self._ids, "epoch": self.epoch, "token": token, **fields}
        await self.send_messages(self._clusters.get(token, "north"), message)
        return self._ids

    async def submit_component(self, token: str, size: int = 1, cluster: str = "north", **fields: Any) -> int:
        self._clusters[token] = cluster
        return await self.send_command("submit", token, **{"size": size, "name": "test", "lease": self.lease, **fields})

    async def open_barrier(self, command: list[str], *tokens: str, launcher: str = "processes") -> None:
        """Open the barrier for a job of these components; the first is its head."""
        nodes = [
            {"host": host, "cluster": self._clusters[t], "token": t, "node": i, "slots": 1}
            for t in tokens
            for i, host in enumerate(self.status(t)["hosts"])
        ]
        program = {"command": command, "environment": {}, "workdir": None, "output": None}
        contexts = [
            {"token": t, **program, "nodes": [i for i, n in enumerate(nodes) if n["token"] == t]} for t in tokens
        ]
        job, generation = tokens[0].split(".")[:2]
        plan = {"job": int(job), "generation": int(generation), "launcher": launcher, "head": tokens[0]}
        for token in tokens:
            await self.send_command("open", token, nodes=nodes, contexts=contexts, **plan)

    def received(self, kind: str, token: str | None = None) -> list[dict[str, Any]]:
        return [m for m in self.messages if m["type"] == kind and token in (None, m.get("token"))]

    def report(self, cluster: str = "north") -> dict[str, Any]:
        """Return the last report of a cluster, or an empty one."""
        return next((m for m in reversed(self.received("report")) if m["cluster"] == cluster), {})

    async def request_stage(self, token: str, *files: dict[str, Any], cluster: str = "north", **fields: Any) -> int:
        self._clusters[token] = cluster
        return await self.send_command("stage", token, files=list(files), **fields)

    async def wait_for_stage(self, token: str, state: str = "done") -> dict[str, Any]:
        await self.wait_until(lambda: any(m["state"] == state for m in self.received("stage_status", token)))
        return self.received("stage_status", token)[-1]

    async def ask_agent(self, cluster: str, kind: str, **payload: Any) -> dict[str, Any]:
        """Send a request of the daemon and return the answer of the agent."""
        self._ids += 1
        ident = str(self._ids)
        await self.send_messages(
            cluster, {"type": "ask", "ident": ident, "what": kind, "payload": payload, "cluster": ""}
        )
        await self.wait_until(lambda: any(m["ident"] == ident for m in self.received("answer")))
        return next(m for m in self.received("answer") if m["ident"] == ident)

    def status(self, token: str) -> dict[str, Any]:
        return next(iter(reversed(self.received("status", token))), {})

    async def wait_until(self, condition: Callable[[], object]) -> None:
        is_virtual = isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
        try:
            await until(condition, VIRTUAL_DEADLINE if is_virtual else DEADLINE)
        except TimeoutError:
            pytest.fail(f"condition not met; last messages: {self.messages[-5:]}")

    async def wait_for_state(self, token: str, state: str) -> dict[str, Any]:
        await self.wait_until(lambda: self.status(token).get("state") == state)
        return self.status(token)

    async def wait_for_ack(self, ident: int) -> str:
        await self.wait_until(lambda: any(m["id"] == ident for m in self.received("ack")))
        return str(next(m["error"] for m in self.received("ack") if m["id"] == ident))

    def _welcome(self) -> dict[str, Any]:
        identity = {"epoch": self.epoch, "instance": self.instance, "life": self.life}
        return {"type": "welcome", "output_limit": self.output_limit, **identity}

    async def _serve(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        self.headers.append(f"{socket.request.path} {socket.request.headers['Authorization']}")
        cluster = socket.request.path.split("/")[4]
        self._sockets[cluster] = socket
        async for frame in socket:
            for message in json.loads(frame):
                await self._take(cluster, message)

    async def _take(self, cluster: str, message: dict[str, Any]) -> None:
        self.messages.append({**message, "cluster": cluster})
        token = message.get("token", "")
        match message["type"]:
            case "hello":
                await self.send_messages(cluster, self.greeting or self._welcome())
            case "inventory":
                self.inventories.append(message["components"])
                self.complete_flags.append(message["whole"])
                self.messages += message["components"] + message["stages"]
            case "renew_lease" if self.renews:
                await self.send_messages(cluster, {"type": "lease_renewed", "number": message["number"]})
            case "output" if self.is_full:
                await self.send_messages(cluster, {"type": "output_ack", "token": token, "offset": 0})
            case "output" if self.takes_output:
                output, offset = self.output.get(token, b""), message["offset"]
                if offset - message["gap"] > len(output):
                    return
                self.output[token] = output[:offset].ljust(offset, b"?") + base64.b64decode(message["data"])
                await self.send_messages(
                    cluster, {"type": "output_ack", "token": token, "offset": len(self.output[token])}
                )
            case "relay":
                await self.send_messages(self._clusters[token], message)
            case "ask":
                await self.send_messages(message["cluster"], {**message, "cluster": cluster})
            case "answer" if message["cluster"]:
                payload = self.change_answer(message["payload"])
                await self.send_messages(message["cluster"], {**message, "payload": payload, "cluster": cluster})


class Site:
    """An embedded cluster of four nodes and its agent, which may be replaced."""

    def __init__(self, directory: Path, daemon: FakeDaemon, name: str = "north", network: str = "127.0.1") -> None:
        self.cluster = LocalCluster(directory / f"locald-{name}", name, 4, network=network, preload=RUNNER)
        self.daemon = daemon
        self.replicas = directory / f"replicas-{name}"
        self.replicas.mkdir(exist_ok=True)
        self.settings = AgentSettings(
            name,
            f"http://127.0.0.1:{daemon.port}",
            "s3cret",
            directory / f"agent-{name}",
            environment={"SITE": name, **MPI_ENVIRONMENT},
            replica_directories=[self.replicas],
        )
        self.timeouts = DEFAULT_TIMEOUTS
        self._agent: asyncio.Task[None] | None = None

    async def restart(self, timeouts: AgentTimeouts) -> None:
        """Replace the agent by one with other timeouts."""
        await self.stop()
        self.timeouts = timeouts
        await self.start()

    async def start(self) -> None:
        inventory_count = len(self.daemon.inventories)
        self._agent = asyncio.create_task(self.run())
        self._agent.add_done_callback(print_failure)
        await self.daemon.wait_until(lambda: len(self.daemon.inventories) > inventory_count)

    async def run(self) -> None:
        """Run the agent until cancelled."""
        await run_agent(self.settings, LocalLrm(self.cluster, "koala-"), timeouts=self.timeouts)

    async def stop(self) -> None:
        assert self._agent is not None
        self._agent.cancel()
        await asyncio.gather(self._agent, return_exceptions=True)

    async def run_component(self, token: str, command: list[str], size: int = 1) -> dict[str, Any]:
        """Run one component from submit to end and return its last status."""
        await self.daemon.submit_component(token, size, self.settings.cluster)
        await self.daemon.wait_for_state(token, "claimed")
        await self.daemon.open_barrier(command, token)
        return await self.daemon.wait_for_state(token, "ended")


def print_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        print("agent failed:", repr(error))


@pytest.fixture
async def daemon() -> AsyncIterator[FakeDaemon]:
    fake = FakeDaemon()
    await fake.listen()
    yield fake
    await fake.stop_listening()


@pytest.fixture
async def site(tmp_path: Path, daemon: FakeDaemon) -> AsyncIterator[Site]:
    site = Site(tmp_path, daemon)
    await site.start()
    yield site
    await site.stop()
    await asyncio.to_thread(stop_locald, site.cluster)


@pytest.fixture
async def other_site(tmp_path: Path, daemon: FakeDaemon) -> AsyncIterator[Site]:
    site = Site(tmp_path, daemon, "south", "127.0.2")
    await site.start()
    yield site
    await site.stop()
    await asyncio.to_thread(stop_locald, site.cluster)


def running_pids(pids: bytes) -> list[int]:
    """Return the existing processes among IDs separated by blanks."""
    return [int(pid) for pid in pids.split() if os.path.exists(f"/proc/{int(pid)}")]


@pytest.fixture
def daemon_files(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemonFiles]:
    """Yield a server of bundles and results, for agents that start after it."""
    fake = FakeDaemonFiles()
    monkeypatch.setattr(stages, "DaemonFiles", lambda url, cluster, token, trust: DaemonFiles(fake.url, cluster, token))
    yield fake
    fake.close()


@pytest.fixture
async def lrm() -> MemoryLrm:
    return MemoryLrm()


@pytest.fixture
async def agent(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> AsyncIterator[Path]:
    """Run an agent over the resource manager in memory, and yield its directory once the daemon has its report."""
    from tests.agent.memory_agent import reported_counts, running_agent

    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))
        yield tmp_path
