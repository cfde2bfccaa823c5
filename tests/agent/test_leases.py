"""Leases at an agent, which ends components when its daemon was silent for too long."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.components.component import Component
from koalapy.agent.core.leases import LEASE_FILE, RENEWAL_TIMEOUT, Leases
from koalapy.agent.core.spool import JournalFolder
from koalapy.protocol.messages import LeaseRenewed, RenewLease
from koalapy.runner.lease import SilenceClock
from koalapy.system.clock import Clock
from koalapy.system.process import read_boot_id
from tests.agent.conftest import FakeDaemon
from tests.agent.fake_runner import claim_component
from tests.agent.memory_agent import make_reporter, running_agent
from tests.agent.memory_lrm import MemoryLrm

TOKEN = "7.1.0"


class RecordingUplink:
    """An uplink that records the numbers of renewal requests."""

    def __init__(self) -> None:
        self.questions: list[int] = []

    def send_soon(self, message: RenewLease, *, urgent: bool = False) -> None:
        self.questions.append(message.number)


class LeasedAgent(Clock):
    """The leases of an agent with one component, and a clock that the test advances."""

    def __init__(self, directory: Path, lease: float | None = 100.0, now: float = 1000.0) -> None:
        self.now_s, self.directory = now, directory
        self.daemon = RecordingUplink()
        self.ended: list[Component] = []
        self.restart_agent()
        path = directory / "folder"
        path.mkdir(exist_ok=True)
        self.component = Component("test", TOKEN, JournalFolder(path), 1, lease=lease)
        self.reporter.add_component(self.component)

    def since_boot(self) -> float:
        return self.now_s

    def restart_agent(self) -> None:
        """Start another agent over the same directory."""
        self.reporter, _ = make_reporter(self.daemon, clock=self)
        self.reporter.instance = "test"
        self.leases = Leases(self.directory, self.reporter, self.ended.append, self)
        if hasattr(self, "component"):
            self.reporter.add_component(self.component)

    def answer_renewal(self) -> None:
        """Answer the last renewal request as the daemon does."""
        self.leases.on_renewed(LeaseRenewed(number=self.daemon.questions[-1]))

    def end_expired(self) -> bool:
        """End expired components and return whether the component has ended."""
        self.leases.end_expired()
        return self.component in self.ended


@pytest.fixture
def leased_agent(tmp_path: Path) -> LeasedAgent:
    return LeasedAgent(tmp_path)


def test_component_ends_when_daemon_is_silent_for_lease(leased_agent: LeasedAgent) -> None:
    leased_agent.leases.on_welcome()
    leased_agent.answer_renewal()
    leased_agent.now_s += 99.9
    assert not leased_agent.end_expired()
    leased_agent.now_s += 0.1
    assert leased_agent.end_expired()
    assert leased_agent.component.error == "its lease is over: the daemon was silent for 100 s"
    assert leased_agent.component.infrastructure


def test_component_that_is_being_stopped_keeps_its_reason_and_grace(leased_agent: LeasedAgent) -> None:
    leased_agent.component.stop = "cancelled by alice"
    leased_agent.now_s += 1000
    assert not leased_agent.end_expired()
    assert (leased_agent.component.stop, leased_agent.component.error) == ("cancelled by alice", "")


def test_component_with_succeeded_program_is_stopped_once_with_one_grace(leased_agent: LeasedAgent) -> None:
    """Its job is cancelled at the end of the grace: runners of other nodes may hang."""
    component = leased_agent.component
    component.plan, component.exit_code = {"lease_warning": {"signal": "TERM", "grace": 60.0}}, 0
    leased_agent.now_s += 100
    assert leased_agent.end_expired()
    grace = component.grace
    leased_agent.now_s += 10
    leased_agent.leases.end_expired()
    assert (leased_agent.ended, component.grace is grace is not None) == ([component], True)
    assert (component.exit_code, component.error) == (0, "")


def test_component_without_lease_never_ends_by_silence(tmp_path: Path) -> None:
    leased_agent = LeasedAgent(tmp_path, lease=None)
    leased_agent.now_s += 1e9
    assert not leased_agent.end_expired()


def test_renewal_by_other_daemon_does_not_extend_lease(leased_agent: LeasedAgent) -> None:
    leased_agent.leases.on_welcome()
    leased_agent.answer_renewal()
    leased_agent.reporter.instance = "other"
    leased_agent.now_s += 100
    leased_agent.leases.on_welcome()
    leased_agent.answer_renewal()
    assert leased_agent.leases.silence_for(leased_agent.component) == 100
    assert leased_agent.end_expired()


def test_restarted_agent_continues_lease(leased_agent: LeasedAgent) -> None:
    leased_agent.leases.on_welcome()
    leased_agent.answer_renewal()
    leased_agent.now_s += 70
    leased_agent.restart_agent()
    assert leased_agent.leases.silence_for(leased_agent.component) == 70
    leased_agent.now_s += 30
    assert leased_agent.end_expired()


@pytest.mark.parametrize("note", [None, "", "{", '{"boot": "another", "heard_at": 1}', '{"boot": null}', "[1]"])
def test_lease_without_valid_note_counts_from_agent_start(tmp_path: Path, note: str | None) -> None:
    (tmp_path / "test").mkdir()
    if note is not None:
        (tmp_path / "test" / LEASE_FILE).write_text(note)
    leased_agent = LeasedAgent(tmp_path)
    assert leased_agent.leases.silence_for(leased_agent.component) is None
    leased_agent.now_s += 99
    assert not leased_agent.end_expired()
    leased_agent.now_s += 1
    assert leased_agent.end_expired()


def test_lease_note_from_future_counts_as_now(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    note = {"boot": read_boot_id(), "heard_at": 5000.0}
    (tmp_path / "test" / LEASE_FILE).write_text(json.dumps(note))
    assert LeasedAgent(tmp_path).leases.silence_for(LeasedAgent(tmp_path).component) == 0


@pytest.mark.parametrize("renewed", [True, False])
def test_resumed_agent_ends_components_only_without_renewal(leased_agent: LeasedAgent, renewed: bool) -> None:
    leased_agent.leases.on_welcome()
    leased_agent.answer_renewal()
    leased_agent.leases._look_due = leased_agent.now_s + 10
    leased_agent.now_s += 1000
    assert not leased_agent.end_expired()
    if renewed:
        leased_agent.leases.request_renewal()
        leased_agent.answer_renewal()
    leased_agent.leases._look_due = leased_agent.now_s + RENEWAL_TIMEOUT
    leased_agent.now_s += RENEWAL_TIMEOUT
    assert bool(leased_agent.end_expired()) != renewed


DELAYS = st.floats(0.0, 300.0)


@given(steps=st.lists(st.tuples(DELAYS, DELAYS, DELAYS, DELAYS, st.booleans(), st.booleans()), max_size=15))
def test_agent_and_runner_never_count_beyond_daemon(
    steps: list[tuple[float, float, float, float, bool, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Links are cut or slow, and agents are stopped or replaced. Agent and runner run their real code."""
    leased_agent = LeasedAgent(tmp_path_factory.mktemp("agent"))
    runner = SilenceClock(leased_agent.now_s, lambda: leased_agent.now_s)
    daemon_heard_at = leased_agent.now_s  # the runner has just reported
    for to_daemon, to_agent, to_runner, pause, is_cut, is_replaced in steps:
        leased_agent.leases.on_welcome()
        leased_agent.now_s += to_daemon
        daemon_heard_at = daemon_heard_at if is_cut else leased_agent.now_s
        leased_agent.now_s += to_agent
        if not is_cut:
            leased_agent.answer_renewal()
        if is_replaced:
            leased_agent.restart_agent()
        query = runner.start_query()
        leased_agent.now_s += pause
        silence = leased_agent.leases.silence_for(leased_agent.component)
        leased_agent.now_s += to_runner
        if silence is not None:
            runner.record_answer(query, silence)
        assert runner.contact_at <= daemon_heard_at + 1e-6
        if silence is not None:
            assert leased_agent.now_s - to_runner - silence <= daemon_heard_at + 1e-6


async def test_claim_ends_when_daemon_stops_renewing(daemon: FakeDaemon, tmp_path: Path) -> None:
    """The claim has no program, and its nodes are released."""
    daemon.lease = 60.0
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim_component(daemon, tmp_path, TOKEN)
        daemon.renews = False
        await runner.receive("stop")
        runner.writer.close()
        lrm.end_job("1")
        lrm.changed.set()
        assert (await daemon.wait_for_state(TOKEN, "ended"))["infrastructure"]
