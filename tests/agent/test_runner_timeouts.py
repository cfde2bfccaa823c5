"""An agent that was stopped first reads what came meanwhile."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.core.lrm_jobs import SLEEP_SLICE, sleep_awake
from koalapy.agent.runners.runners import RunnerConnection, RunnerServer
from koalapy.runner.session import Line, Session

HELLO = Line(json.dumps({"t": "hello", "component": "c", "node": 0, "nonce": "0" * 64}).encode())
HERE = Line(json.dumps({"t": "here", "life": "l", "host": "h", "name": "n", "phase": "waiting"}).encode())


def session(*, is_agent: bool) -> Session:
    return Session(b"s", "c", 0, ("0" * 64, "n"), is_agent=is_agent)


def introduce(connection: socket.socket) -> Session:
    """What a runner does once it is challenged."""
    own = session(is_agent=False)
    own.open(connection.recv(1000).rstrip())
    connection.sendall(own.seal(HERE))
    return own


class Handler:
    """Lets everybody in, and keeps what they say."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def create_challenge(self, runner: RunnerConnection, hello: dict[str, Any]) -> tuple[Session, str]:
        return session(is_agent=True), "n"

    def admit_runner(self, runner: RunnerConnection, here: dict[str, Any]) -> bool:
        return True

    def on_forgery(self, runner: RunnerConnection) -> None:
        raise AssertionError

    def receive_message(self, runner: RunnerConnection, message: dict[str, Any]) -> None:
        self.heard.append(message)

    def on_disconnect(self, runner: RunnerConnection) -> None:
        pass


async def test_probe_is_confirmed_after_all_runner_messages(tmp_path: Path) -> None:
    """Nobody read while they spoke: one was connected, another has come since."""
    handler, server = Handler(), RunnerServer("127.0.0.1", tmp_path / "agent.json")
    await server.listen(handler)
    address = ("127.0.0.1", json.loads((tmp_path / "agent.json").read_text())["port"])
    with socket.create_connection(address) as one, socket.create_connection(address) as other:
        for each in (one, other):  # as runners have it: nothing that was sent waits for its way
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.sendall(HELLO.ended)
        own = await asyncio.to_thread(introduce, one)
        await server.read_pending()
        lines = [own.seal(Line(b'{"t":"out","offset":%d,"data":""}' % n)) for n in range(1_000)]
        one.setblocking(False)
        sent = one.send(b"".join(lines))
        other.sendall(HELLO.ended)

        def report() -> None:
            other.sendall(introduce(other).seal(Line(b'{"t":"running"}')))

        reporting = asyncio.get_running_loop().run_in_executor(None, report)
        await server.read_pending()
        await reporting  # it is let in by then, and says more
        await server.read_pending()
        assert len([m for m in handler.heard if m["t"] == "out"]) == b"".join(lines)[:sent].count(b"\n")
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
