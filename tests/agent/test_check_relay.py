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


def encode(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"


async def test_connected_head_is_usable_and_only_described(head: FakeHead) -> None:
    head.answer = encode(HEAD)
    finding = await check_relay(make_settings(head.path, relayed_only=True))
    assert finding.ok
    assert "streams are encrypted between sites" in finding.result
    assert head.requests == [{"t": "describe"}]


@pytest.mark.parametrize(
    ("answer", "problem", "hint"),
    [
        ({**HEAD, "hub_connected": False}, "not connected to the hub", "accept the agent's token"),
        ({**HEAD, "files": {"needed": 8320, "allowed": 1024}}, "may open 1024 files", "LimitNOFILE"),
        ({"t": "done", "lost": {}, "files": HEAD["files"]}, "is the hub", "clusters.north.relay"),
        ({"t": "error", "why": "there is no request describe"}, "no description", "koala-relay-head@north"),
        ({}, "no description", "koala-relay-head@north"),
    ],
)
async def test_unusable_head_is_reported_with_a_remedy(
    head: FakeHead, answer: dict[str, Any], problem: str, hint: str
) -> None:
    head.answer = encode(answer)
    finding = await check_relay(make_settings(head.path))
    assert not finding.ok
    assert problem in finding.result
    assert hint in finding.hint


async def test_head_without_key_waits_for_the_agent(head: FakeHead) -> None:
    head.answer = encode({**HEAD, "hub_connected": False, "has_key": False})
    finding = await check_relay(make_settings(head.path))
    assert finding.ok
    assert "start the agent" in finding.hint


async def test_head_of_another_account_closes_the_connection(head: FakeHead) -> None:
    finding = await check_relay(make_settings(head.path))
    assert (finding.ok, "only its own account" in finding.result) == (False, True)


async def test_head_without_tls_is_usable_but_named(head: FakeHead) -> None:
    head.answer = encode({**HEAD, "certificate": ""})
    finding = await check_relay(make_settings(head.path))
    assert finding.ok
    assert "not encrypted" in finding.result


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
    assert not finding.ok
    assert "clusters.north.relay" in finding.hint
