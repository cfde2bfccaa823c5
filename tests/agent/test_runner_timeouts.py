"""Timeouts of runners when the agent itself was stopped: pending messages are read first."""

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


def make_session(*, is_agent: bool) -> Session:
    return Session(b"s", "c", 0, ("0" * 64, "n"), is_agent=is_agent)


def introduce(connection: socket.socket) -> Session:
    """Answer the challenge and describe the runner."""
    runner_session = make_session(is_agent=False)
    runner_session.open(connection.recv(1000).rstrip())
    connection.sendall(runner_session.seal(HERE))
    return runner_session


class Handler:
    """Admits all runners and records their messages."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def create_challenge(self, runner: RunnerConnection, hello: dict[str, Any]) -> tuple[Session, str]:
        return make_session(is_agent=True), "n"

    def admit_runner(self, runner: RunnerConnection, here: dict[str, Any]) -> bool:
        return True

    def on_forgery(self, runner: RunnerConnection) -> None:
        raise AssertionError

    def receive_message(self, runner: RunnerConnection, message: dict[str, Any]) -> None:
        self.heard.append(message)

    def on_disconnect(self, runner: RunnerConnection) -> None:
        pass


async def test_probe_is_confirmed_after_pending_runner_messages(tmp_path: Path) -> None:
    """One runner was connected and another connects while the agent does not read."""
    handler, server = Handler(), RunnerServer("127.0.0.1", tmp_path / "agent.json")
    await server.listen(handler)
    address = ("127.0.0.1", json.loads((tmp_path / "agent.json").read_text())["port"])
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        for connection in (first, second):  # runners also send without delay
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        first.sendall(HELLO.ended)
        runner_session = await asyncio.to_thread(introduce, first)
        await server.read_pending()
        lines = [runner_session.seal(Line(b'{"t":"out","offset":%d,"data":""}' % n)) for n in range(1_000)]
        first.setblocking(False)
        sent_bytes = first.send(b"".join(lines))
        second.sendall(HELLO.ended)

        def send_running() -> None:
            second.sendall(introduce(second).seal(Line(b'{"t":"running"}')))

        reporting = asyncio.get_running_loop().run_in_executor(None, send_running)
        await server.read_pending()
        await reporting  # the runner is admitted by then and has sent more
        await server.read_pending()
        assert len([m for m in handler.heard if m["t"] == "out"]) == b"".join(lines)[:sent_bytes].count(b"\n")
        assert [m["t"] for m in handler.heard].count("running") == 1
    server.close()


async def test_sleep_excludes_time_while_process_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    loop_time, ahead = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: loop_time() + ahead)
    started_at = loop_time()
    waiting = asyncio.create_task(sleep_awake(2 * SLEEP_SLICE))
    await asyncio.sleep(0)
    ahead = 1000.0
    await waiting
    assert loop_time() - started_at >= 1.5 * SLEEP_SLICE
