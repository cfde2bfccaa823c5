"""A node's runner, played by a test that knows its secret, or does not."""

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
def secret_of(component: str, node: int = 0, token: str = "s3cret") -> bytes:
    """Of a cluster ``north`` whose resource manager keeps no key."""
    secret = RunnerSecrets(MemoryLrm(), "north", token).secret_of(component, node)
    assert secret is not None
    return secret


class PlayedRunner:
    """One connection to the agent's port."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.session: Session | None = None

    @classmethod
    async def connect(cls, directory: Path) -> "PlayedRunner":
        """To the agent that has this directory."""
        address = json.loads((directory / "agent.json").read_bytes())
        return cls(*await asyncio.open_connection(address["host"], address["port"], limit=2**26))

    def send(self, **message: Any) -> None:
        self.send_line(json.dumps(message).encode())

    def send_line(self, line: bytes) -> None:
        self.writer.write(line + b"\n" if self.session is None else self.session.seal(Line(line)))

    async def read(self) -> dict[str, Any]:
        """The next message; empty when the agent has hung up."""
        async with asyncio.timeout(VIRTUAL_DEADLINE):
            line = (await self.reader.readline()).rstrip(b"\n")
        return dict(json.loads(self.session.open(line) if self.session else line)) if line else {}

    async def receive(self, *kinds: str) -> dict[str, Any]:
        """The next message of one of these kinds."""
        while message := await self.read():
            if message["t"] in kinds:
                return message
        raise AssertionError(f"the agent hung up before {kinds}")

    async def meet(self, component: str, secret: bytes, node: int = 0) -> None:
        """Hello and challenge: from now on all that is said is sealed."""
        nonce = make_nonce()
        self.send(t="hello", component=component, node=node, nonce=nonce)
        async with asyncio.timeout(VIRTUAL_DEADLINE):
            challenge = (await self.reader.readline()).rstrip(b"\n")
        nonces = nonce, json.loads(challenge[TAG_LENGTH:])["nonce"]
        self.session = Session(secret, component, node, nonces, is_agent=False)
        self.session.open(challenge)

    async def greet(self, component: str, secret: bytes, node: int = 0, **here: Any) -> None:
        """The same, and who we are."""
        await self.meet(component, secret, node)
        self.send(t="here", **{"life": os.urandom(4).hex(), **HERE, **here})

    async def is_cut_off(self) -> None:
        async with asyncio.timeout(VIRTUAL_DEADLINE):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass

    async def output(self, offset: int, data: bytes) -> None:
        """Send a piece of output, and wait until the agent has it."""
        self.send(t="out", offset=offset, data=base64.b64encode(data).decode())
        await self.receive("output")

    async def exit(self, code: int = 0) -> None:
        """Report the end of the program, and wait until the agent has it."""
        self.send(t="exit", code=code, error="", infrastructure=False, stopped=False)
        await self.receive("exit_ack")


async def claim(daemon: FakeDaemon, directory: Path, token: str = "7.1.0", **submit: Any) -> PlayedRunner:
    """Return the runner of a component of one node, once that component is claimed."""
    await daemon.wait_until(lambda: bool(daemon.inventories))
    await daemon.submit(token, 1, **submit)
    await daemon.wait_until(lambda: bool(daemon.status(token).get("lrm_job")))
    runner = await PlayedRunner.connect(directory)
    name = lrm_name(daemon.instance, token)
    await runner.greet(name, secret_of(name))
    await daemon.reaches(token, "claimed")
    return runner


async def run_program(
    daemon: FakeDaemon, lrm: MemoryLrm, runner: PlayedRunner, output: bytes = b"", token: str = "7.1.0"
) -> None:
    """Play a program from its start to its success, and the end of its job."""
    await daemon.open(["true"], token)
    await runner.receive("open")
    if output:
        await runner.output(0, output)
    await runner.exit()
    runner.writer.close()
    lrm.end(daemon.status(token)["lrm_job"])
    lrm.changed.set()
