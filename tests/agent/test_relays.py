"""The agent's side of relayed links: its reports, the attempts at the head, losses, and the demand of a site."""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from koalapy.agent.components.relays import AWAY, NO_RELAY
from koalapy.relay.attempts import Attempt, AttemptPlan, Limits, derive_head_key
from koalapy.runner.relay_protocol import derive_node_key
from tests.agent.conftest import FakeDaemon
from tests.agent.fake_runner import FakeRunner, claim_component, runner_secret
from tests.agent.memory_agent import running_agent
from tests.agent.memory_lrm import MemoryLrm
from tests.relay.fake_relay import HEAD, FakeRelay
from tests.signals import pass_time

T, ATTEMPT = "7.1.0", "7.1"
NAME = f"koala-test-{T}"
ENTRY = AttemptPlan(
    ATTEMPT, b"key", [("north", [(20000, 20013)]), ("south", [(20014, 20027)])], {"south": {}}
).head_entry("north")
RELAY = {"attempt": ATTEMPT, "pairs": [["north", "south", "relayed"]], "bases": [20000]}
WELCOME = {"type": "welcome", "epoch": 1, "instance": "test", "relays": True}


@pytest.fixture
async def head(tmp_path: Path) -> AsyncIterator[FakeRelay]:
    head = FakeRelay(tmp_path / "head.sock", HEAD)
    await head.start()
    yield head
    await head.stop()


@pytest.fixture
def daemon(daemon: FakeDaemon) -> FakeDaemon:
    daemon.greeting = WELCOME
    return daemon


def last_state(daemon: FakeDaemon) -> tuple[bool, str]:
    states = daemon.received("relay_state")
    return (states[-1]["ready"], states[-1]["error"]) if states else (False, "none")


async def open_component(daemon: FakeDaemon, **fields: Any) -> None:
    """Open the barrier for a job with its other node in the south."""
    nodes = [
        {"host": "a", "cluster": "north", "token": T, "node": 0, "slots": 1},
        {"host": "b", "cluster": "south", "token": "7.1.1", "node": 0, "slots": 1},
    ]
    plan = {"job": 7, "generation": 1, "launcher": "openmpi", "head": T, "nodes": nodes, "contexts": []}
    await daemon.send_command("open", T, **plan, **fields)


async def start_relayed_component(daemon: FakeDaemon, directory: Path) -> FakeRunner:
    """Return the runner of a component that has received its plan with relayed links."""
    runner = await claim_component(daemon, directory)
    await open_component(daemon, relay=RELAY, relay_entry=ENTRY)
    await runner.receive("open")
    return runner


def modes_of_files_with(content: bytes, folder: Path) -> list[tuple[int, ...]]:
    """Return the modes of each file below a folder that has this content, and of the folder that it is in."""
    files = [path for path in folder.rglob("*") if path.is_file() and content in path.read_bytes()]
    return [tuple(stat.S_IMODE(each.stat().st_mode) for each in (file, file.parent)) for file in files]


async def test_files_with_the_key_of_relayed_links_are_private(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path
) -> None:
    """Whatever the umask: another account of the head node reads no key."""
    umask = os.umask(0)
    try:
        async with running_agent(MemoryLrm(), daemon, tmp_path, relay=str(head.path), runner_host="127.0.0.1"):
            await start_relayed_component(daemon, tmp_path)
    finally:
        os.umask(umask)
    assert set(modes_of_files_with(ENTRY["keys"]["south"].encode(), tmp_path)) == {(0o600, 0o700)}


async def test_agent_without_relay_or_with_an_older_daemon_reports_nothing(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path
) -> None:
    async with running_agent(MemoryLrm(), daemon, tmp_path / "one"):
        await daemon.wait_until(lambda: bool(daemon.inventories))
    daemon.greeting = {name: value for name, value in WELCOME.items() if name != "relays"}
    async with running_agent(MemoryLrm(), daemon, tmp_path / "other", relay=str(head.path)):
        await daemon.wait_until(lambda: len(daemon.inventories) > 1)
        await head.wait_for("state")
        head.send({"t": "hub", "connected": False, "why": "no answer"})
        await pass_time(60.0)
    assert not daemon.received("relay_state")


async def test_agent_reports_each_change_of_its_relay(daemon: FakeDaemon, head: FakeRelay, tmp_path: Path) -> None:
    head.description = {**HEAD, "listen_for_heads": ["0.0.0.0", 8645]}
    async with running_agent(MemoryLrm(), daemon, tmp_path, relay=str(head.path), transfer_address="127.0.0.1"):
        await daemon.wait_until(lambda: last_state(daemon) == (True, ""))
        state = daemon.received("relay_state")[-1]
        assert (state["certificate"], state["host"], state["port"]) == ("PEM", "127.0.0.1", 8645)
        assert (await head.wait_for("state"))["key"] == derive_head_key("s3cret", "north").hex()
        head.send({"t": "hub", "connected": False, "why": "no answer"})
        await daemon.wait_until(
            lambda: last_state(daemon) == (False, "the relay of the site cannot reach the hub: no answer")
        )
        head.send({"t": "hub", "connected": True})
        await daemon.wait_until(lambda: last_state(daemon) == (True, ""))
        await head.stop()
        await daemon.wait_until(lambda: last_state(daemon) == (False, AWAY))
        await head.start()
        await daemon.wait_until(lambda: last_state(daemon) == (True, ""))


async def test_head_knows_the_attempt_before_a_runner_gets_its_plan(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path
) -> None:
    async with running_agent(MemoryLrm(), daemon, tmp_path, relay=str(head.path), runner_host="127.0.0.1"):
        runner = await claim_component(daemon, tmp_path)
        await daemon.wait_until(lambda: last_state(daemon) == (True, ""))
        await open_component(daemon, relay=RELAY, relay_entry=ENTRY)
        plan = await runner.receive("open")
        assert (plan["relay"], plan["relay_head"]) == (RELAY, ["127.0.0.1", 8644])
        assert "relay_entry" not in plan, "it holds the keys of the site's links"
        own, other = head.attempts[ATTEMPT]["nodes"]
        assert own["key"] == derive_node_key(runner_secret(NAME), ATTEMPT).hex()
        assert "key" not in other
        pairs = [["north", "south"], ["north", "x" * 1000], ["north", "south"]]  # of a runner that lies
        runner.send(t="relay_used", pairs=pairs, unreached=pairs)
        await daemon.wait_until(lambda: daemon.status(T).get("relayed") == [["north", "south"]])
        assert daemon.status(T)["unreached"] == [["north", "south"]]


async def test_agent_that_ended_before_its_relay_was_connected_is_followed_by_one_that_starts_the_program(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path
) -> None:
    lrm = MemoryLrm()
    await head.stop()
    async with running_agent(lrm, daemon, tmp_path, relay=str(head.path), runner_host="127.0.0.1"):
        await claim_component(daemon, tmp_path, life="a life")
        await open_component(daemon, relay=RELAY, relay_entry=ENTRY)
        await pass_time(1.0)
    await head.start()
    async with running_agent(lrm, daemon, tmp_path, relay=str(head.path), runner_host="127.0.0.1"):
        await head.wait_for("state")
        runner = await FakeRunner.connect(tmp_path)
        await runner.introduce(NAME, runner_secret(NAME), life="a life")
        assert (await runner.receive("open"))["relay_head"] == ["127.0.0.1", 8644]


async def test_start_without_relay_goes_on_after_a_time_without_its_address(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path
) -> None:
    await head.stop()
    async with running_agent(MemoryLrm(), daemon, tmp_path, relay=str(head.path)):
        runner = await claim_component(daemon, tmp_path)
        await open_component(daemon, relay=RELAY, relay_entry=ENTRY)
        assert "relay_head" not in await runner.receive("open")


async def test_head_forgets_the_attempt_when_its_component_has_ended(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path
) -> None:
    lrm = MemoryLrm()
    async with running_agent(lrm, daemon, tmp_path, relay=str(head.path)):
        runner = await start_relayed_component(daemon, tmp_path)
        await runner.report_exit()
        assert ATTEMPT in head.attempts
        runner.writer.close()
        lrm.end_job(daemon.status(T)["lrm_job"])
        lrm.changed.set()
        await daemon.wait_until(lambda: not head.attempts)
        assert not daemon.status(T)["infrastructure"]


async def test_restarted_agent_and_head_know_the_attempt_again(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path
) -> None:
    lrm = MemoryLrm()
    async with running_agent(lrm, daemon, tmp_path, relay=str(head.path)):
        runner = await claim_component(daemon, tmp_path)
        await daemon.wait_until(lambda: last_state(daemon) == (True, ""))
        await open_component(daemon, relay=RELAY, relay_entry=ENTRY)
        await runner.receive("open")
        entry = head.attempts[ATTEMPT]
    head.requests = asyncio.Queue()
    async with running_agent(lrm, daemon, tmp_path, relay=str(head.path)):
        assert (await head.wait_for("state"))["attempts"] == [entry], "a changed entry would end its streams"
        waiting = await FakeRunner.connect(tmp_path)
        await waiting.introduce(NAME, runner_secret(NAME), life="")
        await head.stop()
        await head.start()
        assert (await head.wait_for("state"))["attempts"] == [entry]


@pytest.mark.parametrize(
    ("via", "reason", "by_hub"),
    [(["hub"], "the hub is lost", True), (["node", ATTEMPT, "0"], "the relay of node a is lost", False)],
)
async def test_lost_attempt_fails_its_component(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path, via: list[str], reason: str, by_hub: bool
) -> None:
    async with running_agent(MemoryLrm(), daemon, tmp_path, relay=str(head.path)):
        runner = await start_relayed_component(daemon, tmp_path)
        head.send({"t": "lost", "attempt": "8.1", "why": "another", "via": via})
        head.send({"t": "lost", "attempt": ATTEMPT, "why": reason.replace("node a", "node 0"), "via": via})
        assert (await runner.receive("relay_lost"))["why"] == reason
        await daemon.send_messages("north", {"type": "relay_lost", "attempt": ATTEMPT, "reason": "reported twice"})
        await runner.receive("relay_lost")
        await daemon.wait_until(lambda: daemon.status(T)["error"])
        status = daemon.status(T)
        assert (status["infrastructure"], status["error"]) == (True, reason)
        assert status["relay_lost"] == by_hub, "only a loss at the site itself is its fault"


async def test_loss_at_the_hub_that_the_daemon_reports_fails_the_component(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path
) -> None:
    async with running_agent(MemoryLrm(), daemon, tmp_path, relay=str(head.path)):
        runner = await start_relayed_component(daemon, tmp_path)
        await daemon.send_messages("north", {"type": "relay_lost", "attempt": ATTEMPT, "reason": "head south is lost"})
        assert (await runner.receive("relay_lost"))["why"] == "head south is lost"
        await daemon.wait_until(lambda: daemon.status(T)["relay_lost"])


async def test_loss_while_the_agent_was_away_is_learned_from_the_head(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path
) -> None:
    lrm = MemoryLrm()
    async with running_agent(lrm, daemon, tmp_path, relay=str(head.path)):
        _runner = await start_relayed_component(daemon, tmp_path)
    head.lost = {ATTEMPT: {"why": "the hub at grid:8643 is lost: no answer", "via": ["hub"]}}
    async with running_agent(lrm, daemon, tmp_path, relay=str(head.path)):
        await daemon.wait_until(lambda: daemon.status(T)["error"] == head.lost[ATTEMPT]["why"])
        assert daemon.status(T)["relay_lost"]


async def test_attempt_that_the_head_rejects_still_starts(daemon: FakeDaemon, head: FakeRelay, tmp_path: Path) -> None:
    head.rejected.add(ATTEMPT)
    async with running_agent(MemoryLrm(), daemon, tmp_path, relay=str(head.path)):
        _runner = await start_relayed_component(daemon, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": {"south": "no hex"}},
        {"peers": {"south": {"certificate": "no certificate"}}},
        {"peers": {"south": {"host": "head.example.org", "port": 1}}},
        {"peers": {"south": {"host": "127.0.0.1"}}},
        {"attempt": ""},
        {"nodes": []},
    ],
)
async def test_invalid_entry_of_a_daemon_harms_no_other_attempt(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path, changes: dict[str, Any]
) -> None:
    lrm = MemoryLrm()
    async with running_agent(lrm, daemon, tmp_path, relay=str(head.path)):
        runner = await claim_component(daemon, tmp_path)
        await open_component(daemon, relay=RELAY, relay_entry={**ENTRY, "attempt": "6.6", **changes})
        await runner.receive("open")
        await head.stop()
        await head.start()
        await daemon.wait_until(lambda: last_state(daemon) == (True, ""))
        for entry in head.attempts.values():
            Attempt(entry, Limits(), 0.0)


async def test_site_that_demands_relays_and_has_none_says_so(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with running_agent(MemoryLrm(), daemon, tmp_path, relayed_only=True):
        await daemon.wait_until(lambda: last_state(daemon) == (False, NO_RELAY))
        assert daemon.received("relay_state")[-1]["relayed_only"]


@pytest.mark.evidence("L8")
@pytest.mark.parametrize("relay", [None, {**RELAY, "pairs": [["north", "south", "any"]]}, {**RELAY, "pairs": []}])
async def test_site_that_demands_relays_refuses_a_direct_plan(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path, relay: dict[str, Any] | None
) -> None:
    async with running_agent(MemoryLrm(), daemon, tmp_path, relay=str(head.path), relayed_only=True):
        await claim_component(daemon, tmp_path)
        await open_component(daemon, relay=relay)
        await daemon.wait_until(lambda: "demands relayed links" in daemon.status(T)["error"])
        assert daemon.status(T)["infrastructure"]


async def test_site_that_demands_relays_runs_jobs_of_its_own(
    daemon: FakeDaemon, head: FakeRelay, tmp_path: Path
) -> None:
    async with running_agent(MemoryLrm(), daemon, tmp_path, relay=str(head.path), relayed_only=True):
        runner = await claim_component(daemon, tmp_path)
        await daemon.open_barrier(["true"], T)
        await runner.receive("open")
