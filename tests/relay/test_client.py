"""The daemon's side of a relay's control socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from koalapy.relay.attempts import Attempt
from koalapy.relay.client import RelayClient, RelayRejected
from koalapy.relay.entries import AttemptPlan, HeadIdentity, NodePlan, add_node_keys, derive_head_key
from koalapy.relay.limits import Limits

pytestmark = pytest.mark.nightly


class FakeRelay:
    """A relay's control socket that records requests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.lost: dict[str, str] = {}
        self.writer: asyncio.StreamWriter | None = None
        self.server: asyncio.Server | None = None

    async def start(self) -> None:
        self.server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        while line := await reader.readline():
            request = json.loads(line)
            self.requests.put_nowait(request)
            answer = {"t": "done", "id": request["id"]}
            if request["t"] == "state":
                answer["lost"] = self.lost
            elif request["t"] == "metrics":
                answer |= {"t": "metrics", "text": "koala_relay_streams 1\n"}
            elif request.get("attempt") == "wrong":
                answer |= {"t": "error", "why": "it is wrong"}
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    def send(self, event: dict[str, Any]) -> None:
        assert self.writer is not None
        self.writer.write(json.dumps(event).encode() + b"\n")


class Connected:
    """A client of a fake relay."""

    def __init__(self, relay: FakeRelay) -> None:
        self.relay = relay
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.state: Callable[[], dict[str, Any]] = lambda: {"heads": {}, "attempts": []}
        self.client = RelayClient(relay.path, lambda: self.state(), self.events.put_nowait)


@pytest.fixture
async def connected(tmp_path: Path) -> AsyncIterator[Connected]:
    relay = FakeRelay(tmp_path / "relay.sock")
    made = Connected(relay)
    task = asyncio.create_task(made.client.keep_connected())
    await relay.start()
    yield made
    task.cancel()
    assert relay.server is not None
    relay.server.close()


async def test_client_sends_the_state_first_and_then_changes(connected: Connected) -> None:
    await connected.client.connected.wait()
    await connected.client.add({"attempt": "7.1.k3"})
    await connected.client.remove("7.1.k3")
    requests = [await connected.relay.requests.get() for _ in range(3)]
    assert [request["t"] for request in requests] == ["state", "add", "remove"]
    assert await connected.client.metrics() == "koala_relay_streams 1\n"


async def test_client_reports_events_and_losses_before_its_connection(connected: Connected) -> None:
    connected.relay.lost = {"6.1.k3": "the hub is lost"}
    await connected.client.connected.wait()
    connected.relay.send({"t": "removed", "attempt": "7.1.k3", "streams": 2, "bytes": []})
    state = await connected.events.get()
    assert (state["t"], state["lost"]) == ("state", connected.relay.lost)
    assert await connected.events.get() == {"t": "lost", "attempt": "6.1.k3", "why": "the hub is lost"}
    assert (await connected.events.get())["t"] == "removed"


async def test_client_after_a_restart_of_the_relay_sends_the_state_again(connected: Connected) -> None:
    await connected.client.connected.wait()
    connected.state = lambda: {"heads": {}, "attempts": [{"attempt": "8.1.new"}]}
    assert connected.relay.writer is not None
    connected.relay.writer.close()
    await connected.relay.requests.get()
    assert (await connected.relay.requests.get())["attempts"] == [{"attempt": "8.1.new"}]


async def test_client_with_rejected_request_raises(connected: Connected) -> None:
    await connected.client.connected.wait()
    with pytest.raises(RelayRejected, match="it is wrong"):
        await connected.client.remove("wrong")


async def test_client_without_relay_ignores_changes(tmp_path: Path) -> None:
    client = RelayClient(tmp_path / "none.sock", dict, lambda _: None)
    await client.add({"attempt": "7.1.k3"})
    assert await client.metrics() == ""


def test_plan_makes_entries_that_relays_accept() -> None:
    nodes = [NodePlan("north", [(21000, 21007)]), NodePlan("south", [(21008, 21015), (20000, 20003)])]
    plan = AttemptPlan("7.1.k3", b"key", nodes, {"south": HeadIdentity()}, streams=64)
    hub = Attempt(plan.hub_entry(), Limits(), 0.0)
    north = Attempt(add_node_keys(plan.head_entry("north"), {0: b"node"}), Limits(), 0.0)
    assert hub.pair_key("north", "south") == north.pair_key("north", "south", "north")
    assert (north.nodes[0].key, north.nodes[1].key) == (b"node", None)
    assert north.max_streams == hub.max_streams == 64
    assert 20001 in hub.nodes[1].ports
    assert "key" not in plan.head_entry("north")


def test_head_key_depends_on_token_and_cluster() -> None:
    keys = {derive_head_key(token, cluster) for token in ("a" * 16, "b" * 16) for cluster in ("north", "south")}
    assert len(keys) == 4
