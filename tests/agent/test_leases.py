"""Leases at an agent: it counts the silence of its daemon, and ends what has no lease any more."""

import json
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.agent.components.component import Component
from koalapy.agent.core import leases
from koalapy.agent.core.leases import LEASE_FILE, RENEWAL_TIMEOUT, Leases
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.spool import JournalFolder
from koalapy.agent.runners.uplink import Uplink
from koalapy.protocol.messages import LeaseRenewed, RenewLease
from koalapy.runner.lease import SilenceClock
from koalapy.system.clock import Clock
from tests.agent.conftest import FakeDaemon, Site, alive
from tests.agent.memory_agent import serving
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.played_runner import claim, run_program
from tests.signals import pass_time

TOKEN = "7.1.0"
COUNT = ["sh", "-c", "trap '' TERM; echo $$; while :; do sleep 0.05; done"]


class Questions:
    """An uplink that keeps the numbers of the questions that are put into it."""

    def __init__(self) -> None:
        self.questions: list[int] = []

    def send_soon(self, message: RenewLease, *, urgent: bool = False) -> None:
        self.questions.append(message.number)


class Scene(Clock):
    """An agent with one component, and its clock, which stands still by itself."""

    def __init__(self, directory: Path, lease: float | None = 100.0, now: float = 1000.0) -> None:
        self.now_s, self.directory = now, directory
        self.daemon = Questions()
        self.ended: list[Component] = []
        self.begin()
        path = directory / "folder"
        path.mkdir(exist_ok=True)
        self.component = Component("test", TOKEN, JournalFolder(path), 1, lease=lease)
        self.reporter.add_component(self.component)

    def since_boot(self) -> float:
        return self.now_s

    def begin(self) -> None:
        """Be another agent, over the same directory."""
        self.reporter = Reporter(cast(Uplink, self.daemon))
        self.reporter.instance = "test"
        self.leases = Leases(self.directory, self.reporter, self.ended.append, self)
        if hasattr(self, "component"):
            self.reporter.add_component(self.component)

    def is_answered(self) -> None:
        """The daemon answers the last question."""
        self.leases.on_renewed(LeaseRenewed(number=self.daemon.questions[-1]))

    def look(self) -> bool:
        """Whether the component has been ended."""
        self.leases.end_expired()
        return self.component in self.ended


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_component_ends_when_daemon_is_silent_for_lease(scene: Scene) -> None:
    scene.leases.on_welcome()
    scene.is_answered()
    scene.now_s += 99.9
    assert not scene.look()
    scene.now_s += 0.1
    assert scene.look()
    assert scene.component.error == "its lease is over: the daemon was silent for 100 s"
    assert scene.component.infrastructure


def test_answer_counts_from_its_question(scene: Scene) -> None:
    scene.leases.on_welcome()
    scene.now_s += 60
    scene.is_answered()
    assert scene.leases.silence_for(scene.component) == 60


def test_component_without_lease_never_ends_by_silence(tmp_path: Path) -> None:
    scene = Scene(tmp_path, lease=None)
    scene.now_s += 1e9
    assert not scene.look()


def test_another_daemon_renews_nothing_of_the_first(scene: Scene) -> None:
    scene.leases.on_welcome()
    scene.is_answered()
    scene.reporter.instance = "other"
    scene.now_s += 100
    scene.leases.on_welcome()
    scene.is_answered()
    assert scene.leases.silence_for(scene.component) == 100
    assert scene.look()


def test_next_agent_goes_on_counting(scene: Scene) -> None:
    scene.leases.on_welcome()
    scene.is_answered()
    scene.now_s += 70
    scene.begin()
    assert scene.leases.silence_for(scene.component) == 70
    scene.now_s += 30
    assert scene.look()


@pytest.mark.parametrize("noted", [None, "", "{", '{"boot": "another", "heard_at": 1}', '{"boot": null}', "[1]"])
def test_agent_without_note_renews_no_runner_and_counts_from_its_beginning(tmp_path: Path, noted: str | None) -> None:
    (tmp_path / "test").mkdir()
    if noted is not None:
        (tmp_path / "test" / LEASE_FILE).write_text(noted)
    scene = Scene(tmp_path)
    assert scene.leases.silence_for(scene.component) is None
    scene.now_s += 99
    assert not scene.look()
    scene.now_s += 1
    assert scene.look()


def test_note_of_later_moment_than_now_is_none_of_the_future(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    note = {"boot": leases._boot_id(), "heard_at": 5000.0}
    (tmp_path / "test" / LEASE_FILE).write_text(json.dumps(note))
    assert Scene(tmp_path).leases.silence_for(Scene(tmp_path).component) == 0


def test_agent_that_was_stopped_asks_before_it_ends_anything(scene: Scene) -> None:
    scene.leases.on_welcome()
    scene.is_answered()
    scene.leases._look_due = scene.now_s + 10
    scene.now_s += 1000
    assert not scene.look()
    scene.leases.request_renewal()
    scene.is_answered()
    scene.leases._look_due = scene.now_s + RENEWAL_TIMEOUT
    scene.now_s += RENEWAL_TIMEOUT
    assert not scene.look()


def test_agent_that_was_stopped_ends_what_is_not_renewed_then(scene: Scene) -> None:
    scene.leases.on_welcome()
    scene.is_answered()
    scene.leases._look_due = scene.now_s + 10
    scene.now_s += 1000
    assert not scene.look()
    scene.leases._look_due = scene.now_s + RENEWAL_TIMEOUT
    scene.now_s += RENEWAL_TIMEOUT
    assert scene.look()


delays = st.floats(0.0, 300.0)


@given(rounds=st.lists(st.tuples(delays, delays, delays, delays, st.booleans(), st.booleans()), max_size=15))
def test_runner_and_agent_count_from_no_later_moment_than_daemon(
    rounds: list[tuple[float, float, float, float, bool, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Over links that are cut and slow, agents that are stopped or replaced: with the agent's and runner's own code."""
    scene = Scene(tmp_path_factory.mktemp("agent"))
    runner = SilenceClock(scene.now_s, lambda: scene.now_s)
    daemon_heard_at = scene.now_s  # it heard of the runner when it reported
    for to_daemon, to_agent, to_runner, pause, is_cut, is_replaced in rounds:
        scene.leases.on_welcome()
        scene.now_s += to_daemon
        daemon_heard_at = daemon_heard_at if is_cut else scene.now_s
        scene.now_s += to_agent
        if not is_cut:
            scene.is_answered()
        if is_replaced:
            scene.begin()
        asked = runner.start_query()
        scene.now_s += pause
        silence = scene.leases.silence_for(scene.component)
        scene.now_s += to_runner
        if silence is not None:
            runner.record_answer(asked, silence)
        assert runner.contact_at <= daemon_heard_at + 1e-6
        if silence is not None:
            assert scene.now_s - to_runner - silence <= daemon_heard_at + 1e-6


@pytest.mark.processes
async def test_program_ends_when_daemon_answers_no_more(daemon: FakeDaemon, site: Site) -> None:
    """The connection stays open, and agent and runner are well."""
    daemon.lease = 2.0
    await daemon.submit(TOKEN)
    assert (await daemon.reaches(TOKEN, "claimed"))["lease"] == 2.0
    await daemon.open(COUNT, TOKEN)
    await daemon.wait_until(lambda: daemon.output.get(TOKEN, b"").endswith(b"\n"))
    daemon.renews = False
    status = await daemon.reaches(TOKEN, "ended")
    assert status["infrastructure"]
    assert "its lease is over" in status["error"]
    assert alive(daemon.output[TOKEN]) == []


async def test_claim_ends_when_daemon_answers_no_more(daemon: FakeDaemon, tmp_path: Path) -> None:
    """No program runs, and its nodes are given back."""
    daemon.lease = 60.0
    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim(daemon, tmp_path, TOKEN)
        daemon.renews = False
        await runner.receive("stop")
        runner.writer.close()
        lrm.end("1")
        lrm.changed.set()
        assert (await daemon.reaches(TOKEN, "ended"))["infrastructure"]


async def test_program_goes_on_while_daemon_answers(daemon: FakeDaemon, tmp_path: Path) -> None:
    daemon.lease = 60.0
    async with serving(lrm := MemoryLrm(), daemon, tmp_path):
        runner = await claim(daemon, tmp_path, TOKEN)
        await pass_time(10 * daemon.lease)
        assert len(daemon.received("renew_lease")) > 15
        await run_program(daemon, lrm, runner, token=TOKEN)
        assert (await daemon.reaches(TOKEN, "ended"))["program_exit"] == 0
