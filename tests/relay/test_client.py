"""The daemon's side of a relay's control socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from koalapy.relay.attempts import Attempt, AttemptPlan, Limits, add_node_keys
from koalapy.relay.client import ANSWER_TIMEOUT_S, HEARTBEAT_INTERVAL_S, RelayClient, RelayRejected
from tests.relay.fake_relay import FakeRelay
from tests.signals import pass_time, until


class Connected:
    """A client of a fake relay."""

    def __init__(self, relay: FakeRelay) -> None:
        self.relay = relay
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.state: Callable[[], dict[str, Any]] = lambda: {"heads": {}, "attempts": []}
        self.client = RelayClient(relay.path, lambda: self.state(), self.events.put_nowait)


def iter_queue(queue: asyncio.Queue[dict[str, Any]]) -> list[dict[str, Any]]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


@pytest.fixture
async def connected(tmp_path: Path) -> AsyncIterator[Connected]:
    relay = FakeRelay(tmp_path / "relay.sock")
    made = Connected(relay)
    task = asyncio.create_task(made.client.keep_connected())
    await relay.start()
    yield made
    assert not task.done()
    task.cancel()
    await relay.stop()


async def test_client_sends_the_state_first_and_then_changes(connected: Connected) -> None:
    await connected.client.connected.wait()
    await connected.client.add({"attempt": "7.1.k3"})
    await connected.client.remove("7.1.k3")
    requests = [await connected.relay.requests.get() for _ in range(3)]
    assert [request["t"] for request in requests] == ["state", "add", "remove"]
    assert await connected.client.metrics() == "koala_relay_streams 1\n"


async def test_client_sends_changes_while_the_relay_reads_the_state(connected: Connected) -> None:
    connected.relay.is_answering = False
    await connected.relay.wait_for("state")
    adding = asyncio.create_task(connected.client.add({"attempt": "7.1.k3"}))
    assert (await connected.relay.wait_for("add"))["attempt"] == {"attempt": "7.1.k3"}
    adding.cancel()


async def test_client_reports_events_and_losses_before_its_connection(connected: Connected) -> None:
    connected.relay.lost = {"6.1.k3": {"why": "no answer", "via": ["hub"]}}
    await connected.client.connected.wait()
    connected.relay.send({"t": "removed", "attempt": "7.1.k3", "streams": 2, "bytes": []})
    state = await connected.events.get()
    assert (state["t"], state["lost"]) == ("state", connected.relay.lost)
    assert await connected.events.get() == {"t": "lost", "attempt": "6.1.k3", "why": "no answer", "via": ["hub"]}
    assert (await connected.events.get())["t"] == "removed"


async def test_client_reports_a_state_before_an_event_that_came_in_one_piece_with_it(connected: Connected) -> None:
    connected.relay.following = [{"t": "hub", "connected": True}]
    assert [(await connected.events.get())["t"] for _ in range(2)] == ["state", "hub"]


async def test_client_after_a_restart_of_the_relay_sends_the_state_again(connected: Connected) -> None:
    await connected.client.connected.wait()
    connected.state = lambda: {"heads": {}, "attempts": [{"attempt": "8.1.new"}]}
    assert connected.relay.writer is not None
    connected.relay.writer.close()
    await connected.relay.wait_for("state")
    assert (await connected.relay.wait_for("state"))["attempts"] == [{"attempt": "8.1.new"}]


async def test_client_with_rejected_request_raises(connected: Connected) -> None:
    await connected.client.connected.wait()
    with pytest.raises(RelayRejected, match="it is wrong"):
        await connected.client.remove("wrong")


@pytest.mark.parametrize("is_requesting", [False, True])
async def test_client_of_a_hanging_relay_connects_anew(connected: Connected, is_requesting: bool) -> None:
    await connected.client.connected.wait()
    await pass_time(3 * (HEARTBEAT_INTERVAL_S + ANSWER_TIMEOUT_S))
    assert connected.client.connected.is_set(), "the relay answers"
    connected.relay.is_answering = False
    adding = asyncio.create_task(connected.client.add({"attempt": "7.1.k3"})) if is_requesting else None
    await pass_time(HEARTBEAT_INTERVAL_S + ANSWER_TIMEOUT_S + 1)
    assert adding is None or adding.done()
    assert not connected.client.connected.is_set()
    connected.relay.is_answering = True
    await until(connected.client.connected.is_set, 60.0)
    assert [event["t"] for event in iter_queue(connected.events)] == ["state", "away", "state"]


async def test_client_of_an_older_relay_that_rejects_heartbeats_stays_connected(connected: Connected) -> None:
    connected.relay.rejected_kinds = {"describe"}
    await connected.client.connected.wait()
    await pass_time(3 * HEARTBEAT_INTERVAL_S)
    assert [event["t"] for event in iter_queue(connected.events)] == ["state"]


async def test_client_without_relay_ignores_changes(tmp_path: Path) -> None:
    client = RelayClient(tmp_path / "none.sock", dict, lambda _: None)
    await client.add({"attempt": "7.1.k3"})
    assert await client.metrics() == ""


def test_plan_makes_entries_that_relays_accept() -> None:
    nodes = [("north", [(21000, 21007)]), ("south", [(21008, 21015), (20000, 20003)])]
    plan = AttemptPlan("7.1.k3", b"key", nodes, {"south": {}}, streams=64)
    hub = Attempt(plan.hub_entry(), Limits(), 0.0)
    north = Attempt(add_node_keys(plan.head_entry("north"), {0: b"node"}), Limits(), 0.0)
    assert hub.pair_key("north", "south") == north.pair_key("north", "south", "north")
    assert (north.nodes[0].key, north.nodes[1].key) == (b"node", None)
    assert north.max_streams == hub.max_streams == 64
    assert 20001 in hub.nodes[1].ports
    assert "key" not in plan.head_entry("north")
