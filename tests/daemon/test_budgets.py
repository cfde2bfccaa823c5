"""Budgets of clusters: a site that floods the daemon is served slowly, other sites and users as before."""

import asyncio
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from koalapy.daemon.agents import agent_messages, budgets
from koalapy.daemon.agents.budgets import ALLOWANCES, NO_CLUSTER, Budgets, Use, count_messages
from koalapy.model.alert import AlertKind
from koalapy.model.job import ComponentState
from koalapy.model.reports import ComponentStatus, Inventory
from koalapy.protocol import messages as wire
from koalapy.protocol.frames import MAX_HELLO_SIZE, encode_frame
from tests import signals
from tests.daemon.test_hub import Agent, connect_agent, report_nodes, running_daemon, wait_for_state

BUSY_COMPONENTS = 500
FLOOD_SIZE = 24_000
"""Messages beyond the allowance by four seconds."""


def encode_flood() -> str:
    return encode_frame(wire.from_agent, [wire.Confirmed(sequence=1)] * FLOOD_SIZE)


def loop_time() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.evidence("G6", "G12")
async def test_flooding_agent_is_read_slowly_and_other_agents_at_once(tmp_path: Path) -> None:
    async with (
        running_daemon(tmp_path / "koala.db") as daemon,
        daemon.agent_of("north") as north,
        daemon.agent_of("south") as south,
    ):
        await connect_agent(daemon, "north", north)
        await connect_agent(daemon, "south", south)
        began = loop_time()
        north.says_frame(encode_flood())
        north.say_to_daemon(report_nodes(3))
        south.say_to_daemon(report_nodes(2))
        await wait_for_state(daemon, "south", ("usable", 2, ""))
        assert loop_time() - began < 1.0
        await wait_for_state(daemon, "north", ("usable", 3, ""))
        assert loop_time() - began >= 3.9


@pytest.mark.evidence("G12")
async def test_budget_of_cluster_outlasts_its_connection(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        async with daemon.agent_of("north") as north:
            await connect_agent(daemon, "north", north)
            north.says_frame(encode_flood())
            await signals.until(lambda: daemon.sessions.budgets._debt("north", Use.MESSAGES) > 0)
        began = loop_time()
        async with daemon.agent_of("north") as again:
            again.say_to_daemon(wire.Confirmed(sequence=1))
            again.say_to_daemon(Inventory(components=()), report_nodes(3))
            await wait_for_state(daemon, "north", ("usable", 3, ""))
            assert loop_time() > began


@pytest.mark.evidence("G12")
async def test_frame_of_cluster_beyond_its_budget_waits_before_it_is_parsed(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        rate, at_once = ALLOWANCES[Use.PROCESSOR]
        daemon.sessions.budgets.spend("north", Use.PROCESSOR, at_once + 5.0 * rate)
        began = loop_time()
        async with daemon.agent_of("north") as north:
            north.says_frame("not JSON")
            await signals.until(lambda: north.closed)
        assert loop_time() - began >= 4.9


@pytest.mark.evidence("G12")
async def test_handling_of_messages_counts_as_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = count(step=5.0)
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north") as north:
        await connect_agent(daemon, "north", north)
        monkeypatch.setattr(agent_messages, "time", SimpleNamespace(time=time.time, thread_time=lambda: next(readings)))
        north.say_to_daemon(wire.Confirmed(sequence=1))
        await signals.until(lambda: daemon.sessions.budgets._debt("north", Use.PROCESSOR) > 0)


@pytest.mark.evidence("G12")
async def test_inventory_counts_as_the_open_commands_that_it_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = tuple(ComponentStatus(f"9.1.{index}.fa", ComponentState.RUNNING) for index in range(70))
    spent: list[tuple[str, Use, float]] = []
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north") as north:
        await connect_agent(daemon, "north", north)
        north.say_to_daemon(Inventory(unknown))
        await signals.until(lambda: daemon.engine.outbox.count_open("north") == 70)
        monkeypatch.setattr(daemon.sessions.budgets, "spend", lambda *use: spent.append(use))
        north.say_to_daemon(Inventory(()))
        await signals.until(lambda: ("north", Use.MESSAGES, 70) in spent)


async def test_busy_site_within_budget_is_not_delayed(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north") as north:
        await connect_agent(daemon, "north", north)
        began = loop_time()
        for token in (f"9.1.{index}.fa" for index in range(BUSY_COMPONENTS)):
            states = [ComponentStatus(token, state) for state in (ComponentState.WAITING, ComponentState.CLAIMED)]
            output = [wire.Output(token=token, offset=offset, data="YWJj" * 256) for offset in (0, 768)]
            north.say_to_daemon(wire.Ack(id=1), *states, *output)
        north.say_to_daemon(report_nodes(3))
        await wait_for_state(daemon, "north", ("usable", 3, ""))
        assert loop_time() - began < 0.5
        assert [alert async for alert in daemon.sessions.budgets.check_overruns(0.0)] == []


@pytest.mark.evidence("G12")
async def test_flooding_agent_fills_no_log_and_raises_alert(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon, daemon.agent_of("north") as north:
        await connect_agent(daemon, "north", north)
        rejected = wire.RejectedRunner(token="9.1.0.fa", node=0, how="forged", address="a" * 900)
        foreign = wire.Relay(token="9.1.0.fa", node=0, payload={}, sender="9.1.1.fa", sender_node=0)
        refused = wire.Ask(ident="1", what="stat", payload={"path": "/a"}, cluster="south")
        with capture_logs() as lines:
            north.say_to_daemon(*[rejected, foreign, refused, wire.Ack(id=1, error="no")] * 300)
            north.say_to_daemon(report_nodes(3))
            await wait_for_state(daemon, "north", ("usable", 3, ""))
        assert 50 < len(lines) <= ALLOWANCES[Use.LOG_LINES][1] + 2 * loop_time()
        (alert,) = [alert async for alert in daemon.sessions.budgets.check_overruns(1000.0)]
        assert (alert.kind, alert.cluster) == (AlertKind.AGENT_FLOODS, "north")
        assert "log lines" in alert.cause


async def test_alert_of_flooding_agent_lasts_from_first_to_last_overrun() -> None:
    now = 0.0
    all_budgets = Budgets(lambda: now)
    for overrun_at in (10.0, 30.0, 50.0):
        now = overrun_at
        all_budgets.spend("north", Use.LOG_LINES, 1000)
        assert not all_budgets.try_to_spend("north", Use.LOG_LINES)
    now = 50.0 + budgets.OVERRUN_END_S
    (alert,) = [alert async for alert in all_budgets.check_overruns(1000.0)]
    assert alert.since == 1000.0 - (now - 10.0)
    now += 1.0
    assert [alert async for alert in all_budgets.check_overruns(1001.0)] == []


async def test_first_frame_beyond_limit_is_not_parsed(tmp_path: Path) -> None:
    async with running_daemon(tmp_path / "koala.db") as daemon:
        agent = Agent()
        agent.says_frame("[" * (MAX_HELLO_SIZE + 1))
        await daemon.hub.serve_connection("north", agent)
        assert agent.closed == f"the agent's first message has 1048577 characters, the limit is {MAX_HELLO_SIZE}"


def test_connections_beyond_budget_are_refused() -> None:
    now, (rate, at_once) = 0.0, ALLOWANCES[Use.CONNECTIONS]
    all_budgets = Budgets(lambda: now)
    accepted = [all_budgets.try_to_spend("north", Use.CONNECTIONS) for _ in range(100)]
    assert accepted == [True] * int(at_once) + [False] * (100 - int(at_once))
    assert all_budgets.try_to_spend("south", Use.CONNECTIONS)
    now = 1 / rate
    assert [all_budgets.try_to_spend("north", Use.CONNECTIONS) for _ in range(2)] == [True, False]


async def test_strangers_raise_no_alert_about_a_site() -> None:
    all_budgets = Budgets()
    assert not all(all_budgets.try_to_spend(NO_CLUSTER, Use.LOG_LINES) for _ in range(1000))
    assert [alert async for alert in all_budgets.check_overruns(0.0)] == []


async def test_debt_of_cluster_is_bounded() -> None:
    all_budgets = Budgets()
    all_budgets.spend("north", Use.BYTES, 1e18)
    assert all_budgets._debt("north", Use.BYTES) == pytest.approx(budgets.MAX_DEBT_S)
    began = loop_time()
    await all_budgets.await_allowance("north")
    assert loop_time() - began == pytest.approx(budgets.MAX_PAUSE_S)


def test_message_count_follows_the_work() -> None:
    question = wire.Ask(ident="1", what="stat", payload={})
    inventory = Inventory(tuple(ComponentStatus(f"9.1.{index}", ComponentState.WAITING) for index in range(30)))
    output, relay = wire.Output(token="9.1.0", offset=0, data=""), wire.RelayState(ready=True)
    assert count_messages([question, inventory, output, relay]) == 20 + 200 + 30 + 20


def test_allowances_are_those_of_the_threat_model() -> None:
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    for use, row in (
        (Use.MESSAGES, "| {:,g} | {:,g} |"),
        (Use.BYTES, "| bytes | {:g} MiB | {:g} MiB |"),
        (Use.PROCESSOR, "| {:g} s | {:g} s |"),
        (Use.CONNECTIONS, "| connections | {:g} | {:g} |"),
        (Use.LOG_LINES, "| log lines | {:g} | {:g} |"),
    ):
        unit = 1024**2 if use is Use.BYTES else 1
        assert row.format(*(amount / unit for amount in ALLOWANCES[use])) in text
