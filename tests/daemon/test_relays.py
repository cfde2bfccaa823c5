"""The daemon's side of relayed links: offers to jobs, attempts at the hub, losses, traffic and alerts."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from koalapy.config.settings import Settings
from koalapy.daemon.agents.wire import plan_nodes
from koalapy.daemon.alerts.daemon_checks import check_relays
from koalapy.daemon.core import check_settings
from koalapy.daemon.network import relays
from koalapy.daemon.network.relays import JobRelay, Relays
from koalapy.daemon.observability.audit import Audit
from koalapy.daemon.observability.instruments import Instruments
from koalapy.model.alert import Alert, Severity
from koalapy.model.audit import AuditFilter
from koalapy.model.cluster import ClusterPair, LinkPath
from koalapy.model.errors import UsageError
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState
from koalapy.model.job_spec import JobSpec, Launcher
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import FlexibleRequest
from koalapy.protocol.messages import PlanNode, RelayLost, RelayState
from koalapy.relay.attempts import Attempt as RelayAttempt
from koalapy.relay.attempts import Limits, add_node_keys
from koalapy.relay.client import ANSWER_TIMEOUT_S, HEARTBEAT_INTERVAL_S
from koalapy.runner.relay_links import node_ports
from tests.certificates import CertificateAuthority
from tests.memory_stores import memory_stores
from tests.relay.fake_relay import FakeRelay
from tests.signals import pass_time, poll, until

PROFILES = {name: ClusterProfile(2) for name in ("north", "south")}
PLACED = (
    Component(0, "north", 1, ComponentState.CLAIMED, request_index=0, hosts=("n1",)),
    Component(1, "south", 2, ComponentState.CLAIMED, request_index=1, hosts=("s1", "s2")),
)
ATTEMPT = "7.1.k3"
READY = RelayState(ready=True)
ABSENT = RelayState(ready=False, error="the relay of the site cannot reach the hub")
PAIR = ("north", "south")


def make_job(state: JobState = JobState.RUNNING, nonce: str = "k3", **spec: Any) -> Job:
    attempt = Attempt(1, PLACED, 0.0, barrier_at=1.0, nonce=nonce)
    return Job(7, JobSpec(FlexibleRequest(3), ("true",), **spec), 0.0, state, generation=1, attempt=attempt)


def nodes_of(job: Job) -> list[PlanNode]:
    return plan_nodes(job, PROFILES)


class Side:
    """A daemon's relays at a fake hub, and their messages to agents."""

    def __init__(self, control: str | None, modes: dict[ClusterPair, Any] | None = None, **options: Any) -> None:
        self.sent: list[tuple[str, RelayLost]] = []
        self.paths: dict[ClusterPair, LinkPath] = {}
        self.relays = Relays(
            control,
            modes or {},
            b"secret",
            nodes_of,
            lambda cluster, message: self.sent.append((cluster, message)),
            lambda _: self.paths,
            may_log=lambda cluster: cluster != "south",
            **options,
        )
        for cluster in PAIR:
            self.relays.set_state(cluster, READY)

    def plan(self, job: Job | None = None) -> JobRelay | None:
        job = job or make_job()
        return self.relays.plan_job(job, nodes_of(job))

    async def alerts(self) -> list[Alert]:
        return [alert async for alert in check_relays(self.relays, 5.0)]


@pytest.fixture
async def hub(tmp_path: Path) -> AsyncIterator[FakeRelay]:
    hub = FakeRelay(tmp_path / "hub.sock")
    await hub.start()
    yield hub
    await hub.stop()


@asynccontextmanager
async def connected_side(hub: FakeRelay, *jobs: Job, **options: Any) -> AsyncIterator[Side]:
    """Run a daemon's relays, which begin with these unfinished jobs, until the hub has their state."""
    side = Side(str(hub.path), **options)
    running = asyncio.create_task(side.relays.run({"north": "n" * 16, "south": "s" * 16}, lambda: jobs))
    await until(lambda: not side.relays.hub_problem, 60.0)
    yield side
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_job_gets_an_offer_and_its_attempt_reaches_the_hub(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        offer = side.plan()
        assert offer is not None
        assert (offer.plan["attempt"], offer.plan["pairs"]) == (ATTEMPT, [(*PAIR, "any")])
        assert (await hub.wait_for("add"))["attempt"]["attempt"] == ATTEMPT
        at_hub = RelayAttempt(hub.attempts[ATTEMPT], Limits(), 0.0)
        entry = offer.head_entry("south")
        assert entry is not None
        at_south = RelayAttempt(add_node_keys(entry, {1: b"k", 2: b"k"}), Limits(), 0.0)
        assert at_hub.pair_key(*PAIR) == at_south.pair_key(*PAIR, "south")
        assert len(offer.plan["bases"]) == 4
        for base in offer.plan["bases"]:
            for index, (first, last) in enumerate(node_ports(base, [2, 2, 2])):
                assert all(port in at_hub.nodes[index].ports for port in (first, last))


async def test_hub_forgets_an_attempt_at_its_end(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        side.plan()
        await until(lambda: ATTEMPT in hub.attempts)
        side.relays.note_job(make_job(), None)
        side.relays.note_job(make_job(JobState.SUCCEEDED), None)
        await until(lambda: not hub.attempts)


async def test_hub_forgets_an_attempt_that_another_follows(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        side.plan()
        follower = make_job(nonce="k4")
        side.relays.note_job(follower, None)
        side.plan(follower)
        await until(lambda: list(hub.attempts) == ["7.1.k4"])


async def test_restarted_daemon_gives_the_hub_the_same_attempt(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        side.plan()
        await until(lambda: ATTEMPT in hub.attempts)
        entry = hub.attempts[ATTEMPT]
    waiting = replace(make_job(JobState.CLAIMING), id=8, attempt=Attempt(1, PLACED, 0.0, nonce="k5"))
    async with connected_side(hub, make_job(), waiting):
        assert hub.attempts == {ATTEMPT: entry}, "a changed entry would end its streams"


async def test_restarted_hub_gets_keys_and_attempts_again(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        side.plan()
        keys = (await hub.wait_for("state"))["heads"]
        assert keys.keys() == set(PAIR)
        await until(lambda: ATTEMPT in hub.attempts)
        await hub.stop()
        await until(lambda: bool(side.relays.hub_problem))
        await hub.start()
        state = await hub.wait_for("state")
        assert (state["heads"], [entry["attempt"] for entry in state["attempts"]]) == (keys, [ATTEMPT])


async def test_hanging_hub_is_noticed_and_offers_end(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        hub.is_answering = False
        await pass_time(HEARTBEAT_INTERVAL_S + ANSWER_TIMEOUT_S + 1)
        assert str(hub.path) in side.relays.hub_problem
        assert side.plan() is None
        (alert,) = await side.alerts()
        assert (alert.severity, alert.target) == (Severity.CRITICAL, "relay hub")
        hub.is_answering = True
        await until(lambda: not side.relays.hub_problem, 60.0)
        assert await side.alerts() == []


async def test_rejected_attempt_leaves_the_connection(hub: FakeRelay) -> None:
    hub.rejected.add(ATTEMPT)
    async with connected_side(hub) as side:
        assert side.plan() is not None
        await hub.wait_for("add")
        await pass_time(1.0)
        assert not side.relays.hub_problem


async def test_site_without_relay_gets_no_offer_and_an_alert(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        side.relays.set_state("south", ABSENT)
        assert side.plan() is None
        (alert,) = await side.alerts()
        assert (alert.severity, alert.cluster, alert.cause) == (Severity.WARNING, "south", ABSENT.error)
        side.relays.set_state("south", None)
        assert (side.plan(), await side.alerts()) == (None, []), "its agent is away, which has an alert of its own"


async def test_site_that_demands_relays_is_never_direct(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        for ready in (True, False):
            side.relays.set_state("south", RelayState(ready=ready, relayed_only=True))
            offer = side.plan()
            assert offer is not None
            assert offer.plan["pairs"] == [(*PAIR, "relayed")]


@pytest.mark.parametrize("launcher", list(Launcher))
async def test_demanded_relays_without_a_hub_make_an_offer_that_cannot_be_used(launcher: Launcher) -> None:
    side = Side(None)
    assert side.plan(make_job(launcher=launcher)) is None
    side.relays.set_state("south", RelayState(ready=False, relayed_only=True))
    offer = side.plan(make_job(launcher=launcher))
    assert offer is not None
    assert (offer.plan["pairs"], offer.plan["bases"]) == ([(*PAIR, "relayed")], [])
    assert offer.head_entry("north") is None


async def test_other_launcher_is_not_relayed_but_never_direct_against_a_demand(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        job = make_job(launcher=Launcher.PROCESSES)
        assert side.plan(job) is None
        side.paths = {PAIR: LinkPath.RELAYED}
        assert side.plan(job) is None, "that nodes do not reach each other matters to Open MPI only"
        side.relays.set_state("south", RelayState(ready=True, relayed_only=True))
        offer = side.plan(job)
        assert offer is not None
        assert (offer.plan["pairs"], offer.plan["bases"]) == ([(*PAIR, "relayed")], [])
        assert not hub.attempts


async def test_job_with_too_many_ranks_for_the_ports_has_no_layout(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        offer = side.plan(make_job(processes_per_node=8000))
        assert offer is not None
        assert (offer.plan["bases"], offer.head_entry("north")) == ([], None)


async def test_address_of_a_site_that_is_no_ip_address_is_not_passed_on(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        side.relays.set_state("north", RelayState(ready=True, host="192.0.2.1", port=8645))
        side.relays.set_state("south", RelayState(ready=True, host="head.example.org", port=8645))
        offer = side.plan()
        assert offer is not None
        entries = [entry for name in PAIR if (entry := offer.head_entry(name)) is not None]
        peers = {name: peer for entry in entries for name, peer in entry["peers"].items()}
        assert peers == {"north": {"host": "192.0.2.1", "port": 8645}, "south": {}}


@pytest.mark.parametrize("host", ["127.0.0.1", "169.254.169.254", "224.0.0.1", "0.0.0.0", "::1", ""])
@pytest.mark.parametrize("is_mapped", [False, True])
async def test_address_of_another_site_never_means_the_heads_own_machine(
    hub: FakeRelay, host: str, *, is_mapped: bool
) -> None:
    host = f"::ffff:{host}" if is_mapped and "." in host else host
    async with connected_side(hub) as side:
        side.relays.set_state("north", RelayState(ready=True, host=host, port=22))
        offer = side.plan()
        assert offer is not None
        entry = offer.head_entry("south")
        assert entry is not None
        assert entry["peers"]["north"] == {}


async def test_attempt_has_at_most_the_streams_that_its_ranks_need(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        offer = side.plan()
        assert offer is not None
        ranks = [sum(node["slots"] for node in nodes_of(make_job()) if node["cluster"] == name) for name in PAIR]
        limit = 2 * (len(nodes_of(make_job())) + ranks[0] * ranks[1])
        assert 0 < limit < Limits().streams
        assert {(offer.head_entry(name) or {})["streams"] for name in PAIR} == {limit}


@pytest.mark.parametrize("copies", [0, 1, 2])
async def test_site_is_ready_with_one_readable_certificate(hub: FakeRelay, tmp_path: Path, copies: int) -> None:
    certificate = CertificateAuthority(tmp_path).issue().certificate.read_text()
    async with connected_side(hub) as side:
        side.relays.set_state("north", RelayState(ready=True, certificate=certificate * copies or "no certificate"))
        assert side.relays.is_ready("north") is (copies == 1)
        assert ("cannot be read" in side.relays.site_problems().get("north", "")) is (copies != 1)
        assert (side.plan() is None) is (copies != 1)


@pytest.mark.evidence("G12")
def test_changes_of_relays_are_logged_within_the_budget_of_the_cluster() -> None:
    side = Side(None)
    with capture_logs() as lines:
        for cluster in PAIR:
            side.relays.set_state(cluster, ABSENT)
    assert [line["cluster"] for line in lines] == ["north"], "that of south is spent"


def test_unchanged_certificate_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    side, state = Side(None), RelayState(ready=True, certificate=CertificateAuthority(tmp_path).file.read_text())
    side.relays.set_state("north", state)
    monkeypatch.delattr(relays, "pinned_context")
    side.relays.set_state("north", state.model_copy(update={"ready": False}))
    assert side.relays.state_of("north") == state.model_copy(update={"ready": False})
    with pytest.raises(NameError):
        side.relays.set_state("south", state)


async def test_lost_attempt_is_reported_to_the_agents_that_have_relays(hub: FakeRelay) -> None:
    async with connected_side(hub) as side:
        side.plan()
        await until(lambda: ATTEMPT in hub.attempts)
        side.relays.set_state("south", None)
        hub.send({"t": "lost", "attempt": "8.1.zz", "why": "the relay of south is lost", "via": ["head", "south"]})
        hub.send({"t": "lost", "attempt": ATTEMPT, "why": "the relay of south is lost", "via": ["head", "south"]})
        await until(lambda: bool(side.sent))
        assert side.sent == [("north", RelayLost(attempt=ATTEMPT, reason="the relay of south is lost"))]


async def test_traffic_of_ended_attempts_is_counted_and_recorded_in_the_audit_log(hub: FakeRelay) -> None:
    audit, instruments = Audit(memory_stores().audit, time.time), Instruments()
    async with connected_side(hub, audit=audit, instruments=instruments):
        hub.send({"t": "removed", "attempt": "8.1.k4", "streams": 0, "bytes": []})
        moved = [["north", "south", 700], ["south", "north", 30]]
        hub.send({"t": "removed", "attempt": ATTEMPT, "streams": 2, "bytes": moved})
        (entry,) = await poll(lambda: audit.read_entries(AuditFilter()))
    assert instruments.relayed == {PAIR: 700, PAIR[::-1]: 30}
    assert (entry.action, entry.target) == ("relay-traffic", "job 7")
    assert entry.detail == f"attempt {ATTEMPT}: 2 streams; bytes: north to south 700, south to north 30"


async def test_metrics_of_the_hub_are_read_while_it_answers(hub: FakeRelay) -> None:
    instruments = Instruments()
    async with connected_side(hub) as side:
        await instruments.read_hub(side.relays.read_hub_metrics)
        assert instruments.hub == {"koala_relay_streams": 1.0}
    await instruments.read_hub(Relays(None, {}, b"", nodes_of, may_log=bool).read_hub_metrics)
    assert instruments.hub == {}


@pytest.mark.parametrize("site", [{"relay": "/run/koala-relay/north.sock"}, {"relayed_only": True}])
def test_embedded_cluster_with_relay_is_rejected(site: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is not for embedded clusters") as caught:
        check_settings(Settings(clusters={"north": {"kind": "local", **site}}))
    assert caught.value.field == f"clusters.north.{next(iter(site))}"
    check_settings(Settings(clusters={"north": {"kind": "local", "embedded": False, **site}}))
