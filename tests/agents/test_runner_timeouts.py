"""An agent that was stopped first reads what came meanwhile."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from koalapy.agents.runner_timeouts import SLEEP_SLICE, sleep_awake
from koalapy.agents.runners import RunnerConnection, RunnerServer

HELLO = {"t": "hello", "component": "c", "secret": "s", "node": 0, "host": "h", "name": "n", "phase": "waiting"}


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Handler:
    """Lets everybody in, and keeps what they say."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def authenticate(self, runner: RunnerConnection, hello: dict[str, Any]) -> bool:
        return True

    def receive(self, runner: RunnerConnection, message: dict[str, Any]) -> None:
        self.heard.append(message)

    def disconnected(self, runner: RunnerConnection) -> None:
        pass


async def test_all_that_runners_have_sent_is_handled_before_anything_is_confirmed(tmp_path: Path) -> None:
    """Nobody read while they spoke: one was connected, another has come since."""
    handler, server = Handler(), RunnerServer("127.0.0.1", tmp_path / "agent.json")
    await server.listen(handler)
    address = ("127.0.0.1", json.loads((tmp_path / "agent.json").read_text())["port"])
    lines = b"".join(line({"t": "out", "offset": n, "data": ""}) for n in range(1_000))
    with socket.create_connection(address) as one, socket.create_connection(address) as other:
        one.sendall(line(HELLO))
        await server.drain()
        one.setblocking(False)
        sent = one.send(lines)
        other.sendall(line(HELLO) + line({"t": "running"}))
        await server.drain()
        assert len([m for m in handler.heard if m["t"] == "out"]) == lines[:sent].count(b"\n")
        assert [m["t"] for m in handler.heard].count("running") == 1
    server.close()


async def test_patience_does_not_run_out_while_we_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    steady, ahead = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: steady() + ahead)
    began = steady()
    waiting = asyncio.create_task(sleep_awake(2 * SLEEP_SLICE))
    await asyncio.sleep(0)
    ahead = 1000.0
    await waiting
    assert steady() - began >= 1.5 * SLEEP_SLICE
