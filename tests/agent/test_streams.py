"""Streams through the agent: the site's setting, limits, and the ends of runners and daemon."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from koalapy.agent.components.component import Component
from koalapy.agent.components.streams import MAX_UNSENT, Interactive, Streams
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.spool import Spool
from koalapy.agent.runners.runners import RunnerConnection
from koalapy.protocol import messages as wire

TOKEN = "7.1.0.a"


class Runner:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.reads = True
        self.unsent_bytes = 0

    def send_message(self, message: dict[str, Any]) -> None:
        self.sent.append(message["message"])
        if not self.reads:
            self.unsent_bytes += len(json.dumps(message))


class Site:
    """The streams of an agent with one component of three nodes, of which the last has a runner without streams."""

    def __init__(self, path: Path, interactive: Interactive = "owner", max_streams: int = 100) -> None:
        self.component = Component("i", TOKEN, Spool(path).make_folder("i", TOKEN), 3)
        self.runners = [Runner() for _ in range(3)]
        for index, (node, runner) in enumerate(zip(self.component.nodes, self.runners, strict=True)):
            node.name, node.host, node.phase, node.has_streams = f"n{index}", f"10.0.0.{index}", "running", index < 2
            node.runner = cast(RunnerConnection, runner)
        self.reported: list[Any] = []
        self.reads = True
        uplink = SimpleNamespace(
            send_soon=lambda message, urgent: self.reported.append(message), offer_message=self.offer
        )
        reporter = SimpleNamespace(uplink=uplink, find_component=lambda token: {TOKEN: self.component}.get(token))
        self.streams = Streams(cast(Reporter, reporter), "north", interactive, max_streams=max_streams)

    def offer(self, message: Any, _: str) -> bool:
        """Report a message of a runner, unless the daemon does not read."""
        if self.reads:
            self.reported.append(message)
        return self.reads

    def open(self, name: str = "s", **fields: Any) -> str:
        """Order a stream; return the reason for which the agent rejects it, empty if it does not."""
        count = len(self.reported)
        order = {"stream": name, "token": TOKEN, "kind": "terminal", "user": "ada", "is_owner": True, **fields}
        self.streams.receive_from_daemon(wire.StreamOpen(**order))
        return str(self.reported[-1].error) if len(self.reported) > count else ""

    def say(self, index: int, kind: str, **fields: Any) -> None:
        """Send a message of a node's runner."""
        message = {"type": kind, "stream": "s", **fields}
        self.streams.receive_from_runner(cast(RunnerConnection, self.runners[index]), message)


@pytest.mark.evidence("U18")
@pytest.mark.parametrize("kind", ["terminal", "input"])
@pytest.mark.parametrize("is_owner", [True, False])
@pytest.mark.parametrize("interactive", ["owner", "administrators", "none"])
def test_agent_opens_terminals_as_the_site_allows(
    tmp_path: Path, interactive: Interactive, is_owner: bool, kind: str
) -> None:
    site = Site(tmp_path, interactive)
    reason = site.open(is_owner=is_owner, kind=kind)
    is_allowed = kind == "input" or interactive == "administrators" or (is_owner and interactive == "owner")
    assert (not reason) is is_allowed, reason
    assert len(site.runners[0].sent) == is_allowed
    assert is_allowed or f"clusters.north.interactive is {interactive}" in reason


@pytest.mark.parametrize(
    ("node", "index", "reason"),
    [
        ("", 0, ""),
        ("1", 1, ""),
        ("n1", 1, ""),
        ("10.0.0.1", 1, ""),
        ("3", 0, "'3' is no node of the job on north: give one of n0, n1, n2, or its index"),
        ("-1", 0, "'-1' is no node"),
        ("x" * 900, 0, "is no node"),
        ("2", 2, "by a version of koalapy without terminals"),
    ],
)
def test_agent_finds_the_node_or_says_what_is_wrong(tmp_path: Path, node: str, index: int, reason: str) -> None:
    site = Site(tmp_path)
    said = site.open(node=node)
    assert reason in said
    assert len(site.runners[index].sent) == (not reason)


def test_agent_rejects_streams_of_ended_components_and_above_its_limit(tmp_path: Path) -> None:
    site = Site(tmp_path, max_streams=1)
    assert site.open("a") == ""
    assert "already" in site.open("a")
    assert "1 streams already, which is its limit" in site.open("b")
    site.streams.receive_from_daemon(wire.StreamEnd(stream="a"))
    assert "does not run on north any more" in site.open("c", token="8.1.0.a")
    site.component.stop = "cancelled"
    assert "does not run on north any more" in site.open("d")


def test_agent_passes_messages_of_a_stream_between_its_ends_only(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.open()
    site.say(1, "stream_data", offset=0, data="aGk=")
    assert site.reported == [], "another node may not send on it"
    site.say(0, "stream_opened", node="n0")
    site.say(0, "stream_data", offset=0, data="aGk=")
    site.streams.receive_from_daemon(wire.StreamData(stream="s", offset=0, data="bHM="))
    assert [message.type for message in site.reported] == ["stream_opened", "stream_data"]
    assert [message["type"] for message in site.runners[0].sent] == ["stream_open", "stream_data"]
    site.say(0, "stream_end", code=0)
    site.say(0, "stream_data", offset=2, data="aGk=")
    site.streams.receive_from_daemon(wire.StreamData(stream="s", offset=2, data="bHM="))
    assert len(site.reported) == 3
    assert len(site.runners[0].sent) == 2


def test_agent_ends_the_streams_of_a_lost_runner_and_of_a_lost_daemon(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.open("a")
    site.open("b", node="1")
    site.streams.on_runner_lost(cast(RunnerConnection, site.runners[0]))
    (end,) = site.reported
    assert (end.stream, end.error) == ("a", "the connection to node n0 was lost")
    site.streams.on_daemon_lost()
    assert site.runners[1].sent[-1] == {"type": "stream_end", "stream": "b", "code": None, "error": ""}
    assert site.open("b") == "", "its name is free again"


def test_stream_to_a_daemon_that_does_not_read_ends(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.open()
    site.reads = False
    site.say(0, "stream_data", offset=0, data="eHh4")
    site.say(0, "stream_data", offset=3, data="eHh4")
    (end,) = site.reported
    assert (end.type, end.error) == ("stream_end", "the daemon does not read what it is sent")
    assert [message["type"] for message in site.runners[0].sent] == ["stream_open", "stream_end"]


@pytest.mark.evidence("U19")
def test_stream_to_a_runner_that_does_not_read_ends(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.open()
    runner = site.runners[0]
    runner.reads = False
    for index in range(10_000):
        site.streams.receive_from_daemon(wire.StreamData(stream="s", offset=index * 1500, data="eHh4" * 500))
    (end,) = site.reported
    assert (end.type, end.error) == ("stream_end", "node n0 does not read what it is sent")
    assert runner.sent[-1]["type"] == "stream_end"
    assert MAX_UNSENT < runner.unsent_bytes < MAX_UNSENT + 10_000
    assert "does not read what it is sent: try again later" in site.open("t")
    assert site.open("u", node="1") == "", "other nodes have streams"
    runner.unsent_bytes = 0
    assert site.open("t") == ""
