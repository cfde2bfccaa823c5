"""The finding of ``koala check`` about relayed links."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.check.head_node import check_relay
from koalapy.agent.core.settings import AgentSettings

HEAD = {
    "t": "done",
    "lost": {},
    "hub_connected": True,
    "certificate": "PEM",
    "files": {"needed": 8320, "allowed": 65536},
}


class FakeHead:
    """A control socket that gives one answer to all requests; None: no answer, b"": it closes the connection."""

    def __init__(self, path: Path) -> None:
        self.path, self.answer = path, b""
        self.answers = True
        self.requests: list[dict[str, Any]] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(json.loads(await reader.readline()))
        if self.answers:
            writer.write(self.answer)
            writer.close()
        else:
            await reader.read()
            writer.close()

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[FakeHead]:
    head = FakeHead(tmp_path / "head.sock")
    await head.start()
    yield head
    head.stop()


def make_settings(relay: Path | None, *, relayed_only: bool = False) -> AgentSettings:
    control = None if relay is None else str(relay)
    return AgentSettings("north", "http://127.0.0.1:1", "", Path("/nowhere"), relay=control, relayed_only=relayed_only)


@pytest.mark.parametrize(
    ("answer", "ok", "result", "hint"),
    [
        (HEAD, True, "streams are encrypted between sites", ""),
        ({**HEAD, "certificate": ""}, True, "not encrypted", ""),
        ({**HEAD, "hub_connected": False, "has_key": False}, True, "waits for its key", "start the agent"),
        ({**HEAD, "hub_connected": False}, False, "not connected to the hub", "accept the agent's token"),
        ({**HEAD, "files": {"needed": 8320, "allowed": 1024}}, False, "may open 1024 files", "LimitNOFILE"),
        ({"t": "done", "lost": {}, "files": HEAD["files"]}, False, "is the hub", "clusters.north.relay"),
        ({"t": "error", "why": "there is no request describe"}, False, "no description", "koala-relay-head@north"),
        ({}, False, "no description", "koala-relay-head@north"),
        (None, False, "only its own account", "koala-relay-head@north"),
    ],
)
async def test_head_is_only_described_and_judged_by_its_answer(
    head: FakeHead, answer: dict[str, Any] | None, ok: bool, result: str, hint: str
) -> None:
    head.answer = b"" if answer is None else json.dumps(answer).encode() + b"\n"
    finding = await check_relay(make_settings(head.path, relayed_only=True))
    assert (finding.ok, result in finding.result, hint in finding.hint) == (ok, True, True)
    assert head.requests == [{"t": "describe"}]


async def test_hanging_head_ends_the_check(head: FakeHead) -> None:
    head.answers = False
    finding = await check_relay(make_settings(head.path), timeout_s=0.05)
    assert (finding.ok, "has not answered" in finding.result) == (False, True)


async def test_missing_head_is_reported(tmp_path: Path) -> None:
    finding = await check_relay(make_settings(tmp_path / "none.sock"))
    assert (finding.ok, "No such file" in finding.result) == (False, True)


async def test_site_without_relay_is_right_unless_it_demands_relays() -> None:
    assert (await check_relay(make_settings(None))).ok
    finding = await check_relay(make_settings(None, relayed_only=True))
    assert (finding.ok, "clusters.north.relay" in finding.hint) == (False, True)
