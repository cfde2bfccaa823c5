"""A runner that a test controls, with the right or a wrong secret."""

import asyncio
import base64
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from koalapy.agent.runners.runners import RunnerSecrets, lrm_name
from koalapy.runner.session import TAG_LENGTH, Line, Session, make_nonce
from tests.agent.conftest import VIRTUAL_DEADLINE, FakeDaemon
from tests.agent.memory_lrm import MemoryLrm

HERE = {"host": "a", "name": "a", "pid": 7, "phase": "waiting", "start": 0}


@cache
def runner_secret(component: str, node: int = 0, token: str = "s3cret") -> bytes:
    """Return the secret of a runner of cluster ``north``, where the resource manager keeps no key."""
    secret = RunnerSecrets(MemoryLrm(), "north", token).secret_of(component, node)
    assert secret is not None
    return secret


class FakeRunner:
    """A connection of a runner to the agent's port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.session: Session | None = None

    @classmethod
    async def connect(cls, directory: Path) -> "FakeRunner":
        """Connect to the agent with this directory."""
        address = json.loads((directory / "agent.json").read_bytes())
        return cls(*await asyncio.open_connection(address["host"], address["port"], limit=2**26))

    def send(self, **message: Any) -> None:
        self.send_line(json.dumps(message).encode())

    def send_line(self, line: bytes) -> None:
        self.writer.write(line + b"\n" if self.session is None else self.session.seal(Line(line)))

    async def read(self) -> dict[str, Any]:
        """Return the next message, or an empty one when the agent has disconnected."""
        async with asyncio.timeout(VIRTUAL_DEADLINE):
            line = (await self.reader.readline()).rstrip(b"\n")
        return dict(json.loads(self.session.open(line) if self.session else line)) if line else {}

    async def receive(self, *kinds: str) -> dict[str, Any]:
        """Return the next message of one of these kinds."""
        while message := await self.read():
            if message["t"] in kinds:
                return message
        raise AssertionError(f"the agent disconnected before {kinds}")

    async def authenticate(self, component: str, secret: bytes, node: int = 0) -> None:
        """Exchange hello and challenge. All later messages are sealed."""
        nonce = make_nonce()
        self.send(t="hello", component=component, node=node, nonce=nonce)
        async with asyncio.timeout(VIRTUAL_DEADLINE):
            challenge = (await self.reader.readline()).rstrip(b"\n")
        nonces = nonce, json.loads(challenge[TAG_LENGTH:])["nonce"]
        self.session = Session(secret, component, node, nonces, is_agent=False)
        self.session.open(challenge)

    async def introduce(self, component: str, secret: bytes, node: int = 0, **here: Any) -> None:
        """Authenticate and describe the runner."""
        await self.authenticate(component, secret, node)
        self.send(t="here", **{"life": os.urandom(4).hex(), **HERE, **here})

    async def wait_for_disconnect(self) -> None:
        async with asyncio.timeout(VIRTUAL_DEADLINE):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass

    async def send_output(self, offset: int, data: bytes) -> None:
        """Send a piece of output, and wait until the agent has it."""
        self.send(t="out", offset=offset, data=base64.b64encode(data).decode())
        await self.receive("output")

    async def report_exit(self, code: int = 0) -> None:
        """Report the end of the program, and wait until the agent has it."""
        self.send(t="exit", code=code, error="", infrastructure=False, stopped=False)
        await self.receive("exit_ack")


async def claim_component(
    daemon: FakeDaemon, directory: Path, token: str = "7.1.0", life: str = "", **submit: Any
) -> FakeRunner:
    """Return the runner of a component of one node, once that component is claimed. ``life``: random by default."""
    await daemon.wait_until(lambda: bool(daemon.inventories))
    await daemon.submit_component(token, 1, **submit)
    await daemon.wait_until(lambda: bool(daemon.status(token).get("lrm_job")))
    runner = await FakeRunner.connect(directory)
    name = lrm_name(daemon.instance, token)
    await runner.introduce(name, runner_secret(name), **({"life": life} if life else {}))
    await daemon.wait_for_state(token, "claimed")
    return runner


async def run_program(
    daemon: FakeDaemon, lrm: MemoryLrm, runner: FakeRunner, output: bytes = b"", token: str = "7.1.0"
) -> None:
    """Report a program from its start to its success, and end its job."""
    await daemon.open_barrier(["true"], token)
    await runner.receive("open")
    if output:
        await runner.send_output(0, output)
    await runner.report_exit()
    runner.writer.close()
    lrm.end_job(daemon.status(token)["lrm_job"])
    lrm.changed.set()
