"""Agents with failures of the resource manager or of their code, and the times of their polls."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from koalapy.agent.components.component import Component
from koalapy.agent.core import lrm_monitor
from koalapy.agent.core.lrm_jobs import LrmJobs
from koalapy.agent.core.spool import Spool
from koalapy.agent.lrm.port import LrmJob, LrmJobState, LrmSubmission
from koalapy.agent.runners.runners import RunnerServer
from koalapy.agent.runners.uplink import Uplink
from koalapy.agent.transfers.stages import ComponentFiles
from koalapy.model.errors import SiteRejected, SiteUnavailable
from koalapy.protocol.messages import Hello
from tests import signals
from tests.agent.conftest import VIRTUAL_DEADLINE, FakeDaemon
from tests.agent.fake_runner import claim_component
from tests.agent.memory_agent import loop_clock, make_reporter, reported_counts, running_agent
from tests.agent.memory_lrm import MemoryLrm
from tests.signals import pass_time

NO_QUEUE = SiteRejected("there is no queue\n  long.q", hint="set clusters.north.queue")
NO_QUEUE_TEXT = "there is no queue long.q; set clusters.north.queue"
NO_ANSWER = SiteUnavailable("squeue did not answer")


@pytest.mark.parametrize("attribute", ["open_error", "error"])
async def test_lrm_failing_from_start_is_reported(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, attribute: str
) -> None:
    setattr(lrm, attribute, NO_QUEUE)
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: reported_counts(daemon) == (0, 0, NO_QUEUE_TEXT))
        assert daemon.inventories == [], "the jobs of the resource manager are unknown"
        setattr(lrm, attribute, None)
        lrm.changed.set()
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))
        assert daemon.inventories == [[]]
        assert lrm.opened == 1
        await daemon.submit_component("7.1.0", 1)
        await daemon.wait_until(lambda: daemon.status("7.1.0").get("state") == "waiting")


@pytest.mark.usefixtures("agent")
async def test_lrm_problem_is_reported_with_last_counts(lrm: MemoryLrm, daemon: FakeDaemon) -> None:
    lrm.error = NO_ANSWER
    lrm.changed.set()
    await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, "squeue did not answer"))
    await daemon.stop_listening()
    daemon.messages.clear()
    daemon.inventories.clear()
    await daemon.listen()
    await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, "squeue did not answer"))
    assert daemon.inventories == [[]]
    lrm.error = None
    lrm.changed.set()
    await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))


async def test_unsure_submission_waits_for_open(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    Spool(tmp_path).make_folder("test", "7.1.0").write_entry(
        submit={"size": 1, "walltime": None, "name": "x", "secret": "s"}
    )
    lrm.open_error = NO_QUEUE
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: reported_counts(daemon) == (0, 0, NO_QUEUE_TEXT))
        lrm.open_error = None
        await daemon.wait_until(lambda: daemon.status("7.1.0").get("state") == "waiting")
        assert [job.name for job in lrm.jobs.values()] == ["koala-test-7.1.0"]


# Polls


class OwnFiles:
    """The files of components that run as the agent's account."""

    def start_fetch(self, component: Component, then: object) -> bool:
        return True


@pytest.fixture
async def lrm_jobs(lrm: MemoryLrm, tmp_path: Path) -> tuple[LrmJobs, Component]:
    """Return a resource manager that is polled only on request, and a component that runs there."""

    def hello() -> Hello:
        raise AssertionError("there is no daemon")

    def submission(component: Component) -> LrmSubmission:
        return LrmSubmission(component.name, component.size, ("true",), {}, tmp_path, tmp_path / "log")

    reporter, monitor = make_reporter(Uplink("", "", hello), lrm)
    component = Component("test", "7.1.0", Spool(tmp_path).make_folder("test", "7.1.0"), 1)
    reporter.add_component(component)
    return LrmJobs(
        lrm,
        monitor,
        reporter,
        submission,
        cast(ComponentFiles, OwnFiles()),
        RunnerServer("127.0.0.1", tmp_path / "agent.json"),
        stop_timeout=1000.0,
        clock=loop_clock(),
    ), component


async def watch_until(condition: Callable[[], bool], jobs: LrmJobs) -> None:
    watching = asyncio.create_task(jobs.watch_lrm())
    await signals.until(condition, VIRTUAL_DEADLINE)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_stop_waits_for_runners_not_connected(
    lrm: MemoryLrm, lrm_jobs: tuple[LrmJobs, Component], tmp_path: Path
) -> None:
    """A new agent knows that the runners have started. They hold the end of their output and reconnect soon."""
    manager, queued = lrm_jobs
    started = Component("test", "8.1.0", Spool(tmp_path).make_folder("test", "8.1.0"), 1)
    started.plan = {"launcher": "processes", "head": started.token}
    for component in (started, queued):
        component.lrm_job, component.stop = component.token, "cancelled"
        manager.end_component(component)
    await watch_until(lambda: bool(lrm.cancelled), manager)
    assert lrm.cancelled == [(queued.token, False)]


async def test_job_end_not_announced_is_polled(lrm: MemoryLrm, lrm_jobs: tuple[LrmJobs, Component]) -> None:
    manager, component = lrm_jobs
    manager.submit_component(component)

    def end_when_looked_for() -> bool:
        if component.lrm_job is not None and component.nodes[0].result is None:
            component.nodes[0].name = "a"
            result = {"code": 0, "error": "", "infrastructure": False, "stopped": False}
            component.record_result(0, {**result, "host": "a", "name": "a"})
            manager._monitor.request_poll()
        elif lrm.polls > 3 and component.lrm_job is not None:
            lrm.end_job(component.lrm_job)
        return component.ended

    await watch_until(end_when_looked_for, manager)
    assert component.error == ""


async def test_restarted_agent_reports_journals_without_lrm(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """Otherwise the daemon would count the components as lost although their runners are connected."""
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.submit_component("7.1.0", 1)
        await daemon.wait_until(lambda: bool(daemon.status("7.1.0").get("lrm_job")))
    lrm.start_job(LrmSubmission("koala-test-8.1.0", 1, (), {}, tmp_path, tmp_path / "out"))
    lrm.is_answering.clear()
    daemon.inventories.clear()
    daemon.complete_flags.clear()
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        assert [(component["token"], component["state"]) for component in daemon.inventories[0]] == [
            ("7.1.0", "waiting")
        ]
        await daemon.wait_until(
            lambda: reported_counts(daemon)[:2] == (0, 0) and "not answering" in reported_counts(daemon)[2]
        )
        lrm.is_answering.set()
        await daemon.wait_until(lambda: len(daemon.inventories) == 2)
        assert {component["token"] for component in daemon.inventories[1]} == {"7.1.0", "8.1.0"}, (
            "with the job that has no record"
        )
        assert daemon.complete_flags == [False, True]
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 0, ""))


async def test_agent_without_journals_waits_for_lrm(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """An agent that lost its folder knows no component, so its empty inventory must not count."""
    lrm.is_answering.clear()
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: "not answering" in reported_counts(daemon)[2])
        assert daemon.inventories == []


async def test_failed_start_of_runner_quotes_its_log(lrm: MemoryLrm, daemon: FakeDaemon, agent: Path) -> None:
    await daemon.submit_component("7.1.0", 1)
    await daemon.wait_until(lambda: bool(daemon.status("7.1.0").get("lrm_job")))
    folder = agent / "test" / "7.1.0"
    (folder / "runner.log").write_bytes(b"x" * 5000 + b"\n  File runner.py\nSyntaxError: invalid \xff\n\n")
    lrm.end_job("1")
    lrm.changed.set()
    error = (await daemon.wait_for_state("7.1.0", "ended"))["error"]
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
    """A result that the daemon's protocol rejects must not end the agent."""
    result = {
        "code": 0,
        "error": "a\ud800",
        "infrastructure": False,
        "stopped": False,
        "host": "10.0.0.1",
        "name": "n1",
    }
    folder = Spool(tmp_path).make_folder("test", "7.1.0")
    (folder.path / "result.0.json").write_text(json.dumps(result | {"output": 5}))
    assert folder.read_result(0) == result | {"error": "a\\ud800", "output": 5}
    (folder.path / "result.0.json").write_text(json.dumps(result | nonsense))
    assert folder.read_result(0) is None
    (folder.path / "result.0.json").write_text("[" * 100_000)
    assert folder.read_result(0) is None


# Unexpected errors


async def test_error_during_submission_ends_component(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(submission: LrmSubmission) -> str:
        raise KeyError("unexpected error")

    monkeypatch.setattr(lrm, "start_job", refuse)
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.submit_component("7.1.0", 1)
        status = await daemon.wait_for_state("7.1.0", "ended")
        assert status["infrastructure"]
        assert status["error"] == "an error in the agent: KeyError('unexpected error'); see the agent's log"


async def test_error_at_component_end_spares_other_components(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Component.on_job_ended

    def refuse(component: Component, job: LrmJob | None, lrm: str) -> None:
        if component.token == "7.1.0":
            raise ZeroDivisionError("unexpected error")
        real(component, job, lrm)

    monkeypatch.setattr(Component, "on_job_ended", refuse)
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        for number, token in enumerate(("7.1.0", "8.1.0"), 1):
            await daemon.submit_component(token, 1)
            await daemon.wait_until(lambda token=token: bool(daemon.status(token).get("lrm_job")))
            lrm.end_job(str(number))
        lrm.changed.set()
        status = await daemon.wait_for_state("7.1.0", "ended")
        assert status["infrastructure"]
        assert "unexpected error" in status["error"]
        assert "ended without a word" in (await daemon.wait_for_state("8.1.0", "ended"))["error"]


@pytest.mark.usefixtures("agent")
async def test_error_during_poll_is_reported_as_problem(
    lrm: MemoryLrm, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ZeroDivisionError("unexpected error")

    with monkeypatch.context() as patch:
        patch.setattr(lrm, "_check", refuse)
        lrm.changed.set()
        await daemon.wait_until(lambda: "unexpected error" in reported_counts(daemon)[2])
    lrm.changed.set()
    await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))


# Silent runners


async def test_runner_that_never_connects_is_fault_of_site(lrm: MemoryLrm, daemon: FakeDaemon, agent: Path) -> None:
    await daemon.submit_component("7.1.0", 2)
    await daemon.wait_until(lambda: bool(daemon.status("7.1.0").get("lrm_job")))
    lrm.changed.set()
    await daemon.wait_until(lambda: bool(daemon.status("7.1.0").get("error")))
    status, address = daemon.status("7.1.0"), json.loads((agent / "agent.json").read_text())
    runner_address = f"{address['host']}:{address['port']}"
    assert status["error"] == f"the runner on a runs but did not connect to the agent at {runner_address}"
    assert status["infrastructure"]


@pytest.mark.usefixtures("agent")
async def test_booting_nodes_are_awaited_and_reported(lrm: MemoryLrm, daemon: FakeDaemon) -> None:
    def pending_status() -> tuple[str, float]:
        status = daemon.status("7.1.0")
        return status.get("pending", ""), status.get("starting", 0.0)

    def change_job(**changes: object) -> None:
        lrm.jobs["1"] = replace(lrm.jobs["1"], **changes)  # type: ignore[arg-type]
        lrm.changed.set()

    lrm.is_answering.clear()
    await daemon.submit_component("7.1.0", 2)
    await daemon.wait_until(lambda: bool(daemon.status("7.1.0").get("lrm_job")))
    change_job(state=LrmJobState.QUEUED, reason="Slurm says Priority")
    lrm.is_answering.set()
    await daemon.wait_until(lambda: pending_status() == ("Slurm says Priority", 0.0))
    change_job(reason="")  # not every poll gives the reason
    looks = lrm.polls
    await daemon.wait_until(lambda: lrm.polls > looks)
    assert pending_status() == ("Slurm says Priority", 0.0)
    change_job(state=LrmJobState.RUNNING, reason="its nodes boot", starting=300.0)
    await daemon.wait_until(lambda: pending_status() == ("its nodes boot", 300.0))
    assert "1" not in {job for job, _ in lrm.cancelled}
    assert not daemon.status("7.1.0").get("error")
    change_job(reason="", starting=0.0)
    await daemon.wait_until(lambda: pending_status() == ("", 0.0))
    await daemon.wait_until(lambda: "did not connect" in daemon.status("7.1.0").get("error", ""))


@pytest.mark.parametrize("reports_exit", [False, True])
async def test_lost_node_without_disconnect_ends_component(
    lrm: MemoryLrm, daemon: FakeDaemon, agent: Path, reports_exit: bool
) -> None:
    """The report of the resource manager counts after a grace in which the runners may still report."""
    runner = await claim_component(daemon, agent)
    lrm.lose_job("1", "NODE_FAIL")
    lrm.changed.set()
    if reports_exit:
        runner.send(t="exit", code=3, error="", infrastructure=False, stopped=False)
    status = await daemon.wait_for_state("7.1.0", "ended")
    assert status["infrastructure"]
    assert "NODE_FAIL" in status["error"]
    runner.writer.transport.abort()


async def test_node_lost_after_success_is_no_failure(lrm: MemoryLrm, daemon: FakeDaemon, agent: Path) -> None:
    runner = await claim_component(daemon, agent)
    await daemon.open_barrier(["true"], "7.1.0")
    await runner.receive("open")
    runner.send(t="exit", code=0, error="", infrastructure=False, stopped=False)
    await daemon.wait_until(lambda: daemon.status("7.1.0").get("program_exit") == 0)
    lrm.lose_job("1", "NODE_FAIL")
    lrm.changed.set()
    await runner.receive("stop")  # the runner is still connected when its loss is noticed
    runner.writer.transport.abort()
    status = await daemon.wait_for_state("7.1.0", "ended")
    assert (status["program_exit"], status["infrastructure"], status["error"]) == (0, False, "")


async def test_runner_of_ended_job_is_stopped(lrm: MemoryLrm, daemon: FakeDaemon, agent: Path) -> None:
    """The nodes of the job are free for others, so a connected runner must end."""
    runner = await claim_component(daemon, agent)
    lrm.end_job("1")
    lrm.changed.set()
    await runner.receive("stop")
    runner.writer.transport.abort()


@pytest.mark.usefixtures("agent")
async def test_probe_of_earlier_daemon_is_not_confirmed(lrm: MemoryLrm, daemon: FakeDaemon) -> None:
    """Each daemon counts its probes from 1."""
    lrm.is_answering.clear()
    looks = lrm.polls
    await daemon.send_messages("north", {"type": "probe", "sequence": 1, "look": True})
    await daemon.wait_until(lambda: lrm.polls > looks)
    await daemon.stop_listening()
    await daemon.listen()
    await daemon.wait_until(lambda: len(daemon.inventories) > 1)
    await daemon.send_messages("north", {"type": "probe", "sequence": 1, "look": True})
    await daemon.submit_component("7.1.0", 1)  # the agent has read the probe before this command
    await daemon.wait_until(lambda: bool(daemon.received("status", "7.1.0")))
    lrm.is_answering.set()
    await daemon.wait_until(lambda: bool(daemon.received("confirmed")))
    await daemon.send_messages("north", {"type": "probe", "sequence": 2, "look": True})
    await daemon.wait_until(lambda: daemon.received("confirmed")[-1]["sequence"] == 2)
    assert [m["sequence"] for m in daemon.received("confirmed")] == [1, 2]


SNAPSHOT_S = 2.0
"""Duration of a snapshot."""


async def send_probe(daemon: FakeDaemon, sequence: int, *, look: bool = False, awaited: bool = False) -> None:
    await daemon.send_messages("north", {"type": "probe", "sequence": sequence, "look": look, "awaited": awaited})
    await daemon.wait_until(lambda: any(m["sequence"] == sequence for m in daemon.received("confirmed")))


async def count_polls(lrm: MemoryLrm) -> int:
    """Return the number of polls in a time shorter than the regular interval."""
    poll_count = lrm.polls
    await pass_time(100.0)
    return lrm.polls - poll_count


async def test_released_nodes_are_noticed_while_jobs_wait(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """The resource manager does not announce released nodes, and the next regular poll is far away."""
    lrm.background = 2
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 0, ""))
        lrm.background = 1
        await send_probe(daemon, 1, awaited=True)
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 1, ""))  # by a poll on the probe
        lrm.background = 0
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))  # by the following frequent polls


@pytest.mark.parametrize("end", ["no waiting jobs", "no daemon"])
async def test_lrm_without_waiting_jobs_is_not_polled(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, end: str
) -> None:
    lrm.background = 1
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 1, ""))
        await send_probe(daemon, 1, awaited=True)
        assert await count_polls(lrm) > 5
        if end == "no daemon":
            await daemon.stop_listening()
            await daemon.listen()
            await daemon.wait_until(lambda: len(daemon.inventories) > 1)
        await send_probe(daemon, 2, look=True)
        assert await count_polls(lrm) == 0


async def test_polls_take_bounded_share_of_time(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    """Frequent probes about waiting jobs must not increase the share of polls."""
    lrm.background, lrm.snapshot_s = 1, SNAPSHOT_S
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 1, ""))
        loop = asyncio.get_running_loop()
        looks, started_at = lrm.polls, loop.time()
        for sequence in range(1, 10_000):
            await send_probe(daemon, sequence, awaited=True)
            await pass_time(0.5)
            if lrm.polls >= looks + 4:
                break
        assert loop.time() - started_at >= 3 * lrm_monitor.MIN_PAUSE_RATIO * SNAPSHOT_S
