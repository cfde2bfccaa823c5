"""A simulated agent: a TCP server for runner processes."""

import asyncio
import base64
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from koalapy.runner.session import Line, Session, open_file
from tests.needs import OPEN_MPI_4, OPEN_MPI_4_PREFIX, needs
from tests.signals import until

RUNNER = Path(__file__).parents[2] / "koalapy" / "runner" / "runner.py"
DEADLINE = 60.0
SERIES = [5, pytest.param(4, marks=needs(OPEN_MPI_4))]
SERIES_4 = {"KOALA_MPI_PREFIX": str(OPEN_MPI_4_PREFIX), "KOALA_MPI_SERIES": "4"}
"""The settings of a cluster with Open MPI 4, as in Debian 12."""
MPI_ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMPI_MCA_coll": "^han,sm",
    "OMPI_MCA_btl": "tcp,self",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}


class FakeNode:
    """A runner process and its messages; ``output`` is assembled from the pieces by their offsets."""

    def __init__(self, agent: "FakeAgent", token: str, node: int, host: str) -> None:
        self.agent, self.token, self.node, self.host = agent, token, node, host
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.secret = os.urandom(32)
        self.session: Session | None = None
        self.hellos: list[dict[str, Any]] = []
        self.messages: list[dict[str, Any]] = []
        self.output = b""
        self.ack_output = True
        self.ack_exit = True

    def send(self, **message: Any) -> None:
        assert self.writer is not None
        assert self.session is not None
        self.writer.write(self.session.seal(Line(json.dumps(message).encode())))

    def said(self, kind: str) -> list[dict[str, Any]]:
        return [m for m in self.messages if m["t"] == kind]

    async def expect(self, kind: str) -> dict[str, Any]:
        await self.agent.until(lambda: bool(self.said(kind)), f"{kind} from {self.host}; {self.messages}")
        return self.said(kind)[-1]

    async def ended(self) -> int:
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), DEADLINE)

    def take(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        if message["t"] == "out":
            self.output = self.output[: message["offset"]] + base64.b64decode(message["data"])
            if self.ack_output:
                self.send(t="output", offset=len(self.output))
        elif message["t"] == "renew":
            self.send(t="lease", number=message["number"], silence=self.agent.silence)
        elif message["t"] == "exit" and self.ack_exit:
            self.send(t="exit_ack")
        elif message["t"] == "relay":
            self.agent.relay(self, message)


class FakeAgent:
    """An agent that accepts runners, delivers their relays, and can disconnect and return."""

    def __init__(self, directory: Path, lease: float | None = 60, python: str = sys.executable) -> None:
        self.python = python
        self.directory, self.lease = directory, lease
        self.silence: float | None = 0.0
        """Silence of the daemon that it reports."""
        self.nodes: dict[tuple[str, int], FakeNode] = {}
        self.server: asyncio.Server | None = None
        self.meddle: Callable[[FakeNode, dict[str, Any]], dict[str, Any] | None] = lambda sender, payload: payload
        """Changes the payload of a relay; None drops it."""

    async def listen(self, host: str = "127.0.0.1") -> None:
        self.server = await asyncio.start_server(self._serve, host, 0, limit=2**24)
        host, port = self.server.sockets[0].getsockname()
        (self.directory / "agent.json").write_text(json.dumps({"host": host, "port": port}))

    async def leave(self) -> None:
        """Stop listening and break every connection."""
        assert self.server is not None
        self.server.close()
        for node in self.nodes.values():
            if node.writer is not None:
                node.writer.transport.abort()
                node.writer = None

    async def start(self, token: str, node: int, host: str, prefix: Sequence[str] = (), **environment: str) -> FakeNode:
        """Start a runner as a resource manager would, and wait for its hello; embedded by default."""
        spool = self.directory / token
        spool.mkdir(exist_ok=True)
        fake = self.nodes[token, node] = FakeNode(self, token, node, host)
        (spool / f"secret.{node}").write_text(fake.secret.hex())
        settings = {
            "KOALA_AGENT_FILE": str(self.directory / "agent.json"),
            "KOALA_COMPONENT_TOKEN": token,
            "KOALA_COMPONENT_NAME": token,
            "KOALA_LEASE": "none" if self.lease is None else str(self.lease),
            "KOALA_SPOOL": str(spool),
        }
        if environment.keys().isdisjoint({"SLURM_NODEID", "KOALA_NODE_INDEX"}):
            settings |= {"LOCALD_NODE_INDEX": str(node), "LOCALD_NODE": host, "LOCALD_NODE_NAME": f"node-{host}"}
        fake.process = await asyncio.create_subprocess_exec(
            *prefix, self.python, "-I", "-S", str(RUNNER), "node", env={**os.environ, **settings, **environment}
        )
        await self.until(lambda: bool(fake.hellos), f"hello from {host}")
        return fake

    async def until(self, condition: Callable[[], bool], description: str) -> None:
        """Wait for a condition; name it as ``what`` if it stays false."""
        try:
            await until(condition, DEADLINE)
        except TimeoutError:
            raise AssertionError(f"never came: {description}") from None

    def relay(self, sender: FakeNode, message: dict[str, Any]) -> None:
        target = self.nodes[message["token"], message["node"]]
        payload = self.meddle(sender, message["payload"])
        if target.writer is not None and payload is not None:
            target.send(t="relay", sender=sender.token, sender_node=sender.node, payload=payload)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = json.loads(await reader.readline())
        node = self.nodes[hello["component"], hello["node"]]
        session = Session(node.secret, node.token, node.node, (hello["nonce"], "n"), is_agent=True)
        writer.write(session.seal(Line(b'{"t":"challenge","nonce":"n"}')))
        node.hellos.append(json.loads(session.open((await reader.readline()).rstrip(b"\n"))))
        node.writer, node.session = writer, session
        node.send(t="welcome", lease=self.lease, output=len(node.output))
        try:
            while (line := await reader.readline()) and node.writer is writer:
                node.take(json.loads(session.open(line.rstrip(b"\n"))))
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def listening_agent(directory: Path, host: str = "127.0.0.1") -> AsyncIterator[FakeAgent]:
    fake = FakeAgent(directory)
    await fake.listen(host)
    yield fake
    for node in fake.nodes.values():
        if node.process is not None and node.process.returncode is None:
            node.process.terminate()
            await node.ended()
    await fake.leave()


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[FakeAgent]:
    async with listening_agent(tmp_path) as fake:
        yield fake


def make_plan(
    nodes: list[FakeNode], *commands: list[str], launcher: str = "processes", **context: Any
) -> dict[str, Any]:
    """Return the ``open`` message for these nodes: one context for each token, in order, each with its command."""
    tokens = list(dict.fromkeys(n.token for n in nodes))
    contexts = [
        {
            "token": token,
            "command": commands[min(i, len(commands) - 1)],
            "environment": {},
            "workdir": None,
            "output": None,
            "nodes": [k for k, n in enumerate(nodes) if n.token == token],
            **context,
        }
        for i, token in enumerate(tokens)
    ]
    clusters = dict(zip(tokens, ["north", "south", "east"], strict=False))
    places = [
        {"host": n.host, "cluster": clusters[n.token], "token": n.token, "node": n.node, "slots": 1} for n in nodes
    ]
    head = {"job": 7, "generation": 1, "launcher": launcher, "head": tokens[0]}
    return {"t": "open", **head, "nodes": places, "contexts": contexts}


def read_left_file(node: FakeNode, name: str) -> bytes:
    """Read a file that a runner left in the folder of its component."""
    return open_file(node.secret, name, (node.agent.directory / node.token / name).read_bytes())


def living_pids(pids: bytes | str) -> list[int]:
    """Return those of the blank-separated process ids that still exist."""
    return [int(pid) for pid in pids.split() if os.path.exists(f"/proc/{int(pid)}")]
