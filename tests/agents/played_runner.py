"""A node's runner, played by a test that knows its secret, or does not."""

import asyncio
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from koalapy.agents.runner_secrets import RunnerSecrets
from koalapy.runtime.session import TAG_LENGTH, Line, Session, make_nonce
from tests.agents.conftest import DEADLINE
from tests.agents.memory_lrm import MemoryLrm

HERE = {"host": "a", "name": "a", "pid": 7, "phase": "waiting", "start": 0}


@cache
def secret_of(component: str, node: int = 0, token: str = "s3cret") -> bytes:
    """Of a cluster ``north`` whose resource manager keeps no key."""
    secret = RunnerSecrets(MemoryLrm(), "north", token).of(component, node)
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
        async with asyncio.timeout(DEADLINE):
            line = (await self.reader.readline()).rstrip(b"\n")
        return dict(json.loads(self.session.open(line) if self.session else line)) if line else {}

    async def hears(self, *kinds: str) -> dict[str, Any]:
        """The next message of one of these kinds."""
        while message := await self.read():
            if message["t"] in kinds:
                return message
        raise AssertionError(f"the agent hung up before {kinds}")

    async def meet(self, component: str, secret: bytes, node: int = 0) -> None:
        """Hello and challenge: from now on all that is said is sealed."""
        nonce = make_nonce()
        self.send(t="hello", component=component, node=node, nonce=nonce)
        async with asyncio.timeout(DEADLINE):
            challenge = (await self.reader.readline()).rstrip(b"\n")
        nonces = nonce, json.loads(challenge[TAG_LENGTH:])["nonce"]
        self.session = Session(secret, component, node, nonces, is_agent=False)
        self.session.open(challenge)

    async def greet(self, component: str, secret: bytes, node: int = 0, **here: Any) -> None:
        """The same, and who we are."""
        await self.meet(component, secret, node)
        self.send(t="here", **{"life": os.urandom(4).hex(), **HERE, **here})

    async def is_cut_off(self) -> None:
        async with asyncio.timeout(DEADLINE):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass
