"""An agent whose resource manager is out of order reports it and goes on; when it polls."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from koalapy.agent.components.component import Component
from koalapy.agent.components.job_folders import JobFolders
from koalapy.agent.components.job_places import ComponentFolders
from koalapy.agent.core import lrm_polling
from koalapy.agent.core.lrm_jobs import LrmJobs
from koalapy.agent.core.reporter import Reporter
from koalapy.agent.core.spool import Spool
from koalapy.agent.lrm.port import LrmJob, LrmJobState, LrmSubmission
from koalapy.agent.runners.uplink import Uplink
from koalapy.agent.transfers.stages import Stages
from koalapy.model.errors import SiteRejected, SiteUnavailable
from koalapy.protocol.messages import Hello
from tests import signals
from tests.agent.conftest import VIRTUAL_DEADLINE, FakeDaemon
from tests.agent.memory_agent import counts, loop_clock, serving
from tests.agent.memory_lrm import MemoryLrm
from tests.agent.played_runner import claim
from tests.signals import pass_time

NO_QUEUE = SiteRejected("there is no queue\n  long.q", hint="set clusters.north.queue")
SAID = "there is no queue long.q; set clusters.north.queue"
AWAY = SiteUnavailable("squeue did not answer")


@pytest.fixture
def lrm() -> MemoryLrm:
    return MemoryLrm()


@pytest.mark.parametrize("attribute", ["unopened", "fault"])
async def test_from_the_very_first(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, attribute: str) -> None:
    setattr(lrm, attribute, NO_QUEUE)
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: counts(daemon) == (0, 0, SAID))
        assert daemon.inventories == [], "what it holds is not known"
        setattr(lrm, attribute, None)
        lrm.changed.set()
        await daemon.wait_until(lambda: counts(daemon) == (2, 2, ""))
        assert daemon.inventories == [[]]
        assert lrm.opened == 1
        await daemon.submit("7.1.0", 1)
        await daemon.wait_until(lambda: daemon.status("7.1.0").get("state") == "waiting")


async def test_returning_daemon_is_told_of_trouble_at_once(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    lrm.fault = NO_QUEUE
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: counts(daemon) == (0, 0, SAID))
        await daemon.leave()
        daemon.messages.clear()
        await daemon.listen()
        await daemon.wait_until(lambda: counts(daemon) == (0, 0, SAID))


async def test_trouble_is_reported_with_the_last_counts(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: counts(daemon) == (2, 2, ""))
        lrm.fault = AWAY
        lrm.changed.set()
        await daemon.wait_until(lambda: counts(daemon) == (2, 2, "squeue did not answer"))
        await daemon.leave()
        daemon.messages.clear()
        daemon.inventories.clear()
        await daemon.listen()
        await daemon.wait_until(lambda: counts(daemon) == (2, 2, "squeue did not answer"))
        assert daemon.inventories == [[]]
        lrm.fault = None
        lrm.changed.set()
        await daemon.wait_until(lambda: counts(daemon) == (2, 2, ""))


async def test_unsure_submission_waits_for_open(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    Spool(tmp_path).make_folder("test", "7.1.0").write_entry(
        submit={"size": 1, "walltime": None, "name": "x", "secret": "s"}
    )
    lrm.unopened = NO_QUEUE
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: counts(daemon) == (0, 0, SAID))
        lrm.unopened = None
        await daemon.wait_until(lambda: daemon.status("7.1.0").get("state") == "waiting")
        assert [job.name for job in lrm.jobs.values()] == ["koala-test-7.1.0"]


# When it looks


@pytest.fixture
async def jobs(lrm: MemoryLrm, tmp_path: Path) -> tuple[LrmJobs, Component]:
    """A resource manager that is asked only when we say so, with one component that runs there."""

    def hello() -> Hello:
        raise AssertionError("there is no daemon")

    def submission(component: Component) -> LrmSubmission:
        return LrmSubmission(component.name, component.size, ("true",), {}, tmp_path, tmp_path / "log")

    reporter = Reporter(Uplink("", "", hello))
    component = Component("test", "7.1.0", Spool(tmp_path).make_folder("test", "7.1.0"), 1)
    reporter.add_component(component)
    places = ComponentFolders(JobFolders.for_own_account(), cast(Stages, None), reporter)
    return LrmJobs(
        lrm, reporter, submission, places, poll_interval=1000.0, stop_timeout=1000.0, clock=loop_clock()
    ), component


async def until(condition: Callable[[], bool], jobs: LrmJobs) -> None:
    watching = asyncio.create_task(jobs.watch_lrm())
    await signals.until(condition, VIRTUAL_DEADLINE)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_stop_waits_for_runners_not_heard(
    lrm: MemoryLrm, jobs: tuple[LrmJobs, Component], tmp_path: Path
) -> None:
    """A new agent knows that they were let go; they hold the end of their program's output, and reconnect soon."""
    own, queued = jobs
    started = Component("test", "8.1.0", Spool(tmp_path).make_folder("test", "8.1.0"), 1)
    started.plan = {"launcher": "processes", "head": started.token}
    for component in (started, queued):
        component.lrm_job, component.stop = component.token, "cancelled"
        own.end_component(component)
    await until(lambda: bool(lrm.cancelled), own)
    assert lrm.cancelled == [(queued.token, False)]


async def test_end_that_lrm_does_not_announce_is_polled(lrm: MemoryLrm, jobs: tuple[LrmJobs, Component]) -> None:
    own, component = jobs
    own.submit_component(component)

    def end_when_looked_for() -> bool:
        if component.lrm_job is not None and component.nodes[0].result is None:
            component.nodes[0].name = "a"
            result = {"code": 0, "error": "", "infrastructure": False, "stopped": False}
            component.record_result(0, {**result, "host": "a", "name": "a"})
            own.polls.request_poll()
        elif lrm.polls > 3 and component.lrm_job is not None:
            lrm.end(component.lrm_job)
        return component.ended

    await until(end_when_looked_for, own)
    assert component.error == ""


async def test_polls_grow_rarer_and_stop_when_idle(lrm: MemoryLrm, jobs: tuple[LrmJobs, Component]) -> None:
    own, component = jobs
    assert own.polls.seconds_to_next() >= 2 * 1000.0
    component.lrm_job, component.nodes[0].phase = "1", "ended"
    waits = []
    for _ in range(20):
        waits.append(own.polls.seconds_to_next())
        await signals.pass_time(waits[-1])
    assert waits[0] == pytest.approx(0.1)
    waits = [round(wait, 6) for wait in waits]
    assert waits == sorted(waits)
    assert waits[-1] == pytest.approx(1000.0), "never more often than the resource manager is polled"
    component.mark_ended()
    own._reporter.publish_status(component)
    assert own.polls.seconds_to_next() >= 2 * 1000.0


async def test_restarted_agent_reports_journals_without_lrm(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """Components counted as lost after a while, though their runners were heard."""
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.submit("7.1.0", 1)
        await daemon.wait_until(lambda: bool(daemon.status("7.1.0").get("lrm_job")))
    lrm.take(LrmSubmission("koala-test-8.1.0", 1, (), {}, tmp_path, tmp_path / "out"))
    lrm.answering.clear()
    daemon.inventories.clear()
    daemon.whole.clear()
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        assert [(each["token"], each["state"]) for each in daemon.inventories[0]] == [("7.1.0", "waiting")]
        await daemon.wait_until(lambda: counts(daemon)[:2] == (0, 0) and "not answering" in counts(daemon)[2])
        lrm.answering.set()
        await daemon.wait_until(lambda: len(daemon.inventories) == 2)
        assert {each["token"] for each in daemon.inventories[1]} == {"7.1.0", "8.1.0"}, "with what has no record"
        assert daemon.whole == [False, True]
        await daemon.wait_until(lambda: counts(daemon) == (2, 0, ""))


async def test_agent_without_journals_waits_for_lrm(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """An agent whose folder was lost knows of nothing, and that is no reason to give anything up."""
    lrm.answering.clear()
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: "not answering" in counts(daemon)[2])
        assert daemon.inventories == []


async def test_failed_start_of_runner_quotes_its_log(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.submit("7.1.0", 1)
        await daemon.wait_until(lambda: bool(daemon.status("7.1.0").get("lrm_job")))
        folder = tmp_path / "test" / "7.1.0"
        (folder / "runner.log").write_bytes(b"x" * 5000 + b"\n  File runner.py\nSyntaxError: invalid \xff\n\n")
        lrm.end("1")
        lrm.changed.set()
        error = (await daemon.reaches("7.1.0", "ended"))["error"]
        assert "ended without a word (exit code 0): no reason given; " in error
        assert error.endswith("the last line of its runner.log: SyntaxError: invalid \ufffd")


@pytest.mark.parametrize(
    "nonsense",
    [
        {"host": "-o ProxyCommand=x"},
        {"host": 7},
        {"name": ["n"]},
        {"code": "zero"},
        {"code": 2**40},
        {"output": "many"},
        {"output": -1},
        {"stopped": None},
    ],
)
def test_result_written_by_program_is_ignored(tmp_path: Path, nonsense: dict[str, object]) -> None:
    """One that the daemon's protocol has no room for ended the agent, and the next one."""
    own = {"code": 0, "error": "a\ud800", "infrastructure": False, "stopped": False, "host": "10.0.0.1", "name": "n1"}
    folder = Spool(tmp_path).make_folder("test", "7.1.0")
    (folder.path / "result.0.json").write_text(json.dumps(own | {"output": 5}))
    assert folder.read_result(0) == own | {"error": "a\\ud800", "output": 5}
    (folder.path / "result.0.json").write_text(json.dumps(own | nonsense))
    assert folder.read_result(0) is None
    (folder.path / "result.0.json").write_text("[" * 100_000)
    assert folder.read_result(0) is None


# Errors that nobody thought of


async def test_error_during_submission_ends_component(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its task had died, and whoever told it to stop waited for ever."""

    def refuse(submission: LrmSubmission) -> str:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr(lrm, "take", refuse)
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.submit("7.1.0", 1)
        status = await daemon.reaches("7.1.0", "ended")
        assert status["infrastructure"]
        assert status["error"] == "an error in the agent: KeyError('nobody thought of this'); see the agent's log"


async def test_error_before_submission_ends_component(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> str:
        raise LookupError("nobody thought of this")

    monkeypatch.setattr("koalapy.agent.core.agent.LrmSubmission", refuse)
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.submit("7.1.0", 1)
        assert "nobody thought of this" in (await daemon.reaches("7.1.0", "ended"))["error"]
        await daemon.command("stop", "7.1.0", reason="cancelled")
        assert await daemon.reaches("7.1.0", "ended")


async def test_error_at_component_end_spares_other_components(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent had died of it, and each one that was started then."""
    real = Component.on_job_ended

    def refuse(component: Component, job: LrmJob | None) -> None:
        if component.token == "7.1.0":
            raise ZeroDivisionError("nobody thought of this")
        real(component, job)

    monkeypatch.setattr(Component, "on_job_ended", refuse)
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        for number, token in enumerate(("7.1.0", "8.1.0"), 1):
            await daemon.submit(token, 1)
            await daemon.wait_until(lambda token=token: bool(daemon.status(token).get("lrm_job")))
            lrm.end(str(number))
        lrm.changed.set()
        status = await daemon.reaches("7.1.0", "ended")
        assert status["infrastructure"]
        assert "nobody thought of this" in status["error"]
        assert "ended without a word" in (await daemon.reaches("8.1.0", "ended"))["error"]


async def test_error_during_poll_is_reported_as_problem(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ZeroDivisionError("nobody thought of this")

    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: counts(daemon) == (2, 2, ""))
        with monkeypatch.context() as patch:
            patch.setattr(lrm, "_check", refuse)
            lrm.changed.set()
            await daemon.wait_until(lambda: "nobody thought of this" in counts(daemon)[2])
        lrm.changed.set()
        await daemon.wait_until(lambda: counts(daemon) == (2, 2, ""))


# Runners that are not heard of


async def test_runner_that_never_connects_is_fault_of_site(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.submit("7.1.0", 2)
        await daemon.wait_until(lambda: bool(daemon.status("7.1.0").get("lrm_job")))
        lrm.changed.set()
        await daemon.wait_until(lambda: bool(daemon.status("7.1.0").get("error")))
        said, address = daemon.status("7.1.0"), json.loads((tmp_path / "agent.json").read_text())
        where = f"{address['host']}:{address['port']}"
        assert said["error"] == f"the runner on a runs but did not connect to the agent at {where}"
        assert said["infrastructure"]


async def test_booting_nodes_are_awaited_and_reported(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:

    def waits() -> tuple[str, float]:
        status = daemon.status("7.1.0")
        return status.get("pending", ""), status.get("starting", 0.0)

    def becomes(**changes: object) -> None:
        lrm.jobs["1"] = replace(lrm.jobs["1"], **changes)  # type: ignore[arg-type]
        lrm.changed.set()

    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        lrm.answering.clear()
        await daemon.submit("7.1.0", 2)
        await daemon.wait_until(lambda: bool(daemon.status("7.1.0").get("lrm_job")))
        becomes(state=LrmJobState.QUEUED, reason="Slurm says Priority")
        lrm.answering.set()
        await daemon.wait_until(lambda: waits() == ("Slurm says Priority", 0.0))
        becomes(reason="")  # it does not say so at each look
        looks = lrm.polls
        await daemon.wait_until(lambda: lrm.polls > looks)
        assert waits() == ("Slurm says Priority", 0.0)
        becomes(state=LrmJobState.RUNNING, reason="its nodes boot", starting=300.0)
        await daemon.wait_until(lambda: waits() == ("its nodes boot", 300.0))
        assert "1" not in {job for job, _ in lrm.cancelled}
        assert not daemon.status("7.1.0").get("error")
        becomes(reason="", starting=0.0)
        await daemon.wait_until(lambda: waits() == ("", 0.0))
        await daemon.wait_until(lambda: "did not connect" in daemon.status("7.1.0").get("error", ""))


@pytest.mark.parametrize("last_words", [False, True])
async def test_dead_node_without_hang_up_is_given_up(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, last_words: bool
) -> None:
    """The resource manager's word counts, after a while in which its runners might have said something."""
    async with serving(lrm, daemon, tmp_path):
        runner = await claim(daemon, tmp_path)
        lrm.fails("1", "NODE_FAIL")
        lrm.changed.set()
        if last_words:
            runner.send(t="exit", code=3, error="", infrastructure=False, stopped=False)
        status = await daemon.reaches("7.1.0", "ended")
        assert status["infrastructure"]
        assert "NODE_FAIL" in status["error"]
        runner.writer.transport.abort()


async def test_node_lost_after_success_is_no_failure(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm, daemon, tmp_path):
        runner = await claim(daemon, tmp_path)
        await daemon.open(["true"], "7.1.0")
        await runner.receive("open")
        runner.send(t="exit", code=0, error="", infrastructure=False, stopped=False)
        await daemon.wait_until(lambda: daemon.status("7.1.0").get("program_exit") == 0)
        lrm.fails("1", "NODE_FAIL")
        lrm.changed.set()
        await runner.receive("stop")  # it is still there when its loss is seen
        runner.writer.transport.abort()
        status = await daemon.reaches("7.1.0", "ended")
        assert (status["program_exit"], status["infrastructure"], status["error"]) == (0, False, "")


async def test_runner_of_ended_job_is_stopped(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """Its nodes are given to others: as long as it talked, nobody would hang up."""
    async with serving(lrm, daemon, tmp_path):
        runner = await claim(daemon, tmp_path)
        lrm.end("1")
        lrm.changed.set()
        await runner.receive("stop")
        runner.writer.transport.abort()


async def test_probe_of_earlier_daemon_is_not_confirmed(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """Both count their questions from 1."""
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        lrm.answering.clear()
        looks = lrm.polls
        await daemon.say("north", {"type": "probe", "sequence": 1, "look": True})
        await daemon.wait_until(lambda: lrm.polls > looks)
        await daemon.leave()
        await daemon.listen()
        await daemon.wait_until(lambda: len(daemon.inventories) > 1)
        await daemon.say("north", {"type": "probe", "sequence": 1, "look": True})
        await daemon.submit("7.1.0", 1)  # what is said before that has been heard
        await daemon.wait_until(lambda: bool(daemon.received("status", "7.1.0")))
        lrm.answering.set()
        await daemon.wait_until(lambda: bool(daemon.received("confirmed")))
        await daemon.say("north", {"type": "probe", "sequence": 2, "look": True})
        await daemon.wait_until(lambda: daemon.received("confirmed")[-1]["sequence"] == 2)
        assert [m["sequence"] for m in daemon.received("confirmed")] == [1, 2]


A_LOOK = 2.0
"""Seconds."""


async def probe(daemon: FakeDaemon, sequence: int, *, look: bool = False, awaited: bool = False) -> None:
    await daemon.say("north", {"type": "probe", "sequence": sequence, "look": look, "awaited": awaited})
    await daemon.wait_until(lambda: any(m["sequence"] == sequence for m in daemon.received("confirmed")))


async def count_looks(lrm: MemoryLrm) -> int:
    """Return how often the agent polls by itself in a while shorter than its regular interval."""
    before = lrm.polls
    await pass_time(100.0)
    return lrm.polls - before


async def test_nodes_given_back_are_seen_while_jobs_wait(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """The resource manager says nothing of it, and the next regular look would be in half an hour."""
    lrm.background = 2
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: counts(daemon) == (2, 0, ""))
        lrm.background = 1
        await probe(daemon, 1, awaited=True)
        await daemon.wait_until(lambda: counts(daemon) == (2, 1, ""))  # at once
        lrm.background = 0
        await daemon.wait_until(lambda: counts(daemon) == (2, 2, ""))  # within a second


async def test_lrm_without_foreign_jobs_is_not_polled_more(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: counts(daemon) == (2, 2, ""))
        await probe(daemon, 1, look=True, awaited=True)
        assert await count_looks(lrm) == 0
        lrm.down = 1
        await probe(daemon, 2, look=True, awaited=True)
        assert await count_looks(lrm) > 5


@pytest.mark.parametrize("end", ["nobody waits", "no daemon"])
async def test_lrm_without_waiting_jobs_is_idle(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, end: str) -> None:
    lrm.background = 1
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: counts(daemon) == (2, 1, ""))
        await probe(daemon, 1, awaited=True)
        assert await count_looks(lrm) > 5
        if end == "no daemon":
            await daemon.leave()
            await daemon.listen()
            await daemon.wait_until(lambda: len(daemon.inventories) > 1)
        await probe(daemon, 2, look=True)
        assert await count_looks(lrm) == 0


async def test_looking_takes_a_bounded_share_of_the_time(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """However often it is told that jobs wait."""
    lrm.background, lrm.takes = 1, A_LOOK
    async with serving(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: counts(daemon) == (2, 1, ""))
        loop = asyncio.get_running_loop()
        looks, began = lrm.polls, loop.time()
        for sequence in range(1, 10_000):
            await probe(daemon, sequence, awaited=True)
            await pass_time(0.5)
            if lrm.polls >= looks + 4:
                break
        assert loop.time() - began >= 3 * lrm_polling.MIN_PAUSE_RATIO * A_LOOK
