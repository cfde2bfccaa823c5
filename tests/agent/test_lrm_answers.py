"""Rejections and silence of a resource manager, and statistics of its calls."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import koalapy
from koalapy.agent.components.component import Component, Node
from koalapy.agent.core import lrm_monitor
from koalapy.agent.core.lrm_jobs import Leftovers, select_job
from koalapy.agent.core.lrm_monitor import LrmMonitor
from koalapy.agent.core.spool import Spool
from koalapy.agent.lrm.port import LrmJob, LrmJobState, LrmSubmission
from koalapy.agent.runners.runners import RunnerConnection
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.model.job_sizes import JobSizes
from koalapy.model.reports import MAX_LISTED_NODES, ListedNode, LrmCalls, LrmOperation
from tests.agent.conftest import FakeDaemon
from tests.agent.fake_runner import FakeRunner, claim_component, runner_secret
from tests.agent.memory_agent import make_reporter, reported_counts, running_agent
from tests.agent.memory_lrm import MemoryLrm
from tests.signals import pass_time

T = "7.1.0"
NAME = "koala-test-7.1.0"
SILENT = r"not answering since \d\d:\d\d:\d\d"


# Silence


async def test_silence_of_lrm_is_reported_and_logged_once(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    with capture_logs() as logs:
        async with running_agent(lrm, daemon, tmp_path):
            await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))
            lrm.is_answering.clear()
            lrm.changed.set()
            await daemon.wait_until(lambda: bool(re.fullmatch(SILENT, reported_counts(daemon)[2])))
            await daemon.wait_until(
                lambda: bool(
                    re.fullmatch(
                        f"{SILENT}: the resource manager did not answer .* within 120 s", reported_counts(daemon)[2]
                    )
                )
            )
            for _ in range(2):
                looks = lrm.polls
                lrm.changed.set()
                await daemon.wait_until(lambda looks=looks: lrm.polls > looks)  # type: ignore[misc]
            lrm.is_answering.set()
            lrm.changed.set()
            await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))
    actions = [log["action"] for log in logs]
    assert (actions.count("lrm-lost"), actions.count("lrm-back")) == (1, 1)


def make_monitor() -> LrmMonitor:
    return make_reporter(None)[1]


async def test_slow_lrm_is_not_reported_as_silent() -> None:
    problems: list[str] = []
    monitor = make_monitor()
    monitor.report_problem = lambda: problems.append(monitor.problem)

    async def take_snapshot() -> None:
        await pass_time(20.0)

    for _ in range(3):
        await monitor.poll_lrm(LrmOperation.SNAPSHOT, take_snapshot())
    assert [bool(problem) for problem in problems] == [True, False], "only the first slow call is reported"


def test_long_lrm_error_is_truncated() -> None:
    error = SiteRejected(f"begin {'x' * 100_000} end", hint="do\n this")
    text = lrm_monitor.format_error(error)
    assert len(text) < 3000
    assert text.startswith("begin")
    assert text.endswith("end; do this")


# Rejections


@pytest.mark.parametrize(
    ("fault", "expected", "problem"),
    [
        ("job", (False, "job"), ""),
        ("limit", (False, "limit"), ""),
        ("site", (True, ""), "no such account; ask for one"),
        ("unsuitable", (False, "unsuitable"), ""),
        ("unknown", (False, "unknown"), ""),
        ("", (False, "unknown"), ""),
    ],
)
@pytest.mark.usefixtures("agent")
async def test_rejection_has_fault_of_its_cause(
    lrm: MemoryLrm, daemon: FakeDaemon, fault: str, expected: tuple[bool, str], problem: str
) -> None:
    lrm.submit_rejection = SiteRejected("no such account", hint="ask for one", fault=SiteFault(fault))
    await daemon.submit_component(T)
    ended = await daemon.wait_for_state(T, "ended")
    assert (ended["infrastructure"], ended["refused"]) == expected
    assert ended["error"] == "no such account; ask for one"
    assert reported_counts(daemon) == (2, 2, problem)
    if problem:
        types = [message["type"] for message in daemon.messages]
        first_problem = min(n for n, m in enumerate(daemon.messages) if m["type"] == "report" and m["problem"])
        assert first_problem < len(types) - 1 - types[::-1].index("status"), (
            "the problem is reported before the status, so that no other job is sent"
        )


@pytest.mark.usefixtures("agent")
async def test_rejection_by_site_fault_is_retried_after_pause(lrm: MemoryLrm, daemon: FakeDaemon) -> None:
    lrm.submit_rejection = SiteRejected("no such account", fault=SiteFault.SITE)
    await daemon.submit_component(T)
    await daemon.wait_for_state(T, "ended")
    assert any(report["problem"] == "no such account" for report in daemon.received("report"))
    await pass_time(lrm_monitor.REFUSAL_PAUSE)
    lrm.changed.set()
    await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))
    lrm.submit_rejection = None
    await daemon.submit_component("8.1.0")
    await daemon.wait_for_state("8.1.0", "waiting")


async def test_accepted_job_ends_pause_of_rejections() -> None:
    monitor = make_monitor()
    for _ in range(2):
        monitor.suspend_submission("no such account")
    monitor.on_job_accepted()
    assert monitor.problem == ""
    monitor.suspend_submission("no such account")
    await pass_time(lrm_monitor.REFUSAL_PAUSE)
    assert monitor.problem == "", "the pause has its first length again"


async def test_lrm_that_accepts_no_jobs_is_reported(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    lrm.submit_error = "the DRMAA library cannot be loaded"
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, lrm.submit_error))
        assert daemon.inventories == [[]], "running jobs are known"
        lrm.submit_error = ""
        lrm.changed.set()
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))


@pytest.mark.usefixtures("agent")
async def test_job_that_will_never_start_is_ended(lrm: MemoryLrm, daemon: FakeDaemon) -> None:
    await daemon.submit_component(T)
    await daemon.wait_for_state(T, "waiting")
    lrm.jobs["1"] = LrmJob(
        "1", NAME, LrmJobState.QUEUED, reason="Slurm will not start it: PartitionTimeLimit", fault="job"
    )
    lrm.changed.set()
    await daemon.wait_until(lambda: daemon.status(T).get("refused") == "job")
    assert daemon.status(T)["error"] == "Slurm will not start it: PartitionTimeLimit"
    await daemon.wait_until(lambda: lrm.cancelled == [("1", False)])


async def test_rejection_of_size_says_which_sizes_it_concerns(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path
) -> None:
    lrm.submit_rejection = SiteRejected("at least 2", fault=SiteFault.UNSUITABLE, sizes="few")
    lrm.job_sizes = (JobSizes(2, partition="batch"),)
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))
        assert daemon.received("report")[-1]["job_sizes"] == [{"least": 2, "most": 1_000_000, "partition": "batch"}]
        await daemon.submit_component(T)
        ended = await daemon.wait_for_state(T, "ended")
        assert (ended["refused"], ended["refused_sizes"]) == ("unsuitable", "few")


@pytest.mark.usefixtures("agent")
async def test_job_missing_in_unreadable_snapshot_has_not_ended(lrm: MemoryLrm, daemon: FakeDaemon) -> None:
    await daemon.submit_component(T)
    await daemon.wait_for_state(T, "waiting")
    job, lrm.unreadable = lrm.jobs.pop("1"), 1
    polls = lrm.polls
    lrm.changed.set()
    await daemon.wait_until(lambda: lrm.polls > polls + 1)
    assert daemon.status(T)["state"] == "waiting"
    lrm.jobs["1"], lrm.unreadable = replace(job, reason="suspended by Slurm"), 0
    lrm.changed.set()
    await daemon.wait_until(lambda: daemon.status(T)["pending"] == "suspended by Slurm")
    del lrm.jobs["1"]
    lrm.changed.set()
    ended = await daemon.wait_for_state(T, "ended")
    assert ended["error"] == "the local resource manager no longer knows it"


async def test_job_missing_in_snapshot_from_before_its_submission_has_not_ended(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path
) -> None:
    lrm.max_snapshot_age_s = 1e6
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))
        await daemon.submit_component(T)
        await daemon.wait_for_state(T, "waiting")
    job = lrm.jobs.pop("1")
    polls = lrm.polls
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: lrm.polls > polls)
        lrm.changed.set()
        await daemon.wait_until(lambda: lrm.polls > polls + 1)
        lrm.jobs["1"] = replace(job, reason="suspended by Slurm")
        lrm.changed.set()
        await daemon.wait_until(lambda: daemon.status(T)["pending"] == "suspended by Slurm")
        assert daemon.status(T)["state"] == "waiting"
        del lrm.jobs["1"]
        lrm.max_snapshot_age_s = 0.0
        lrm.changed.set()
        ended = await daemon.wait_for_state(T, "ended")
    assert ended["error"] == "the local resource manager no longer knows it"


async def test_program_ordered_to_end_may_run_while_snapshots_are_from_before_its_submission(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path
) -> None:
    async with running_agent(lrm, daemon, tmp_path):
        runner = await claim_component(daemon, tmp_path, T)
        await daemon.open_barrier(["true"], T)
        await runner.receive("open")
        await daemon.wait_for_ack(await daemon.send_command("stop", T, reason="preempted"))
    del lrm.jobs["1"]
    lrm.max_snapshot_age_s, polls = 1e6, lrm.polls
    async with running_agent(lrm, daemon, tmp_path):
        for number in range(1, 4):
            lrm.changed.set()
            await daemon.wait_until(lambda number=number: lrm.polls > polls + number)
        await pass_time(1.0)
        assert daemon.status(T)["state"] == "waiting"
        lrm.max_snapshot_age_s = 0.0
        lrm.changed.set()
        await daemon.wait_for_state(T, "ended")
    assert lrm.expected == ["1", "1"], "the second agent follows the job of the first"


async def test_job_that_is_gone_has_no_runners_to_await(daemon: FakeDaemon, tmp_path: Path) -> None:
    lrm = MemoryLrm()
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        lrm.on_start = {"gone": True}
        await daemon.submit_component(T)
        await daemon.wait_for_state(T, "waiting")
        lrm.changed.set()
        await pass_time(90.0)
        assert daemon.status(T)["error"] == ""
        lrm.jobs["1"] = replace(lrm.jobs["1"], gone=False)
        lrm.changed.set()
        await pass_time(90.0)
        assert "did not connect" in daemon.status(T)["error"]


# Limits


def ended_at_memory_limit(code: int | None = None) -> LrmJob:
    return LrmJob("7", NAME, LrmJobState.ENDED, exit_code=code, reason="memory limit exceeded", exceeded="memory")


@pytest.mark.parametrize(("code", "exit_code"), [(None, 137), (137, 137), (9, 9)])
def test_memory_limit_is_no_fault_of_cluster(tmp_path: Path, code: int | None, exit_code: int) -> None:
    component = make_component(tmp_path, "7")
    component.on_job_ended(ended_at_memory_limit(code))
    status = component.current_status()
    assert (status.exceeded, status.program_exit, status.infrastructure) == ("memory", exit_code, False)
    assert status.error == "memory limit exceeded"
    recalled = Component.load_journal("test", T, component.folder).current_status()
    assert (recalled.exceeded, recalled.error) == ("memory", status.error)


def test_memory_limit_overrides_errors_of_runners(tmp_path: Path) -> None:
    component = make_component(tmp_path, "7")
    component.fail("the MPI daemon on n2 was lost")
    component.stop = "the attempt is over"
    component.on_job_ended(ended_at_memory_limit())
    status = component.current_status()
    assert (status.exceeded, status.error, status.infrastructure) == ("memory", "memory limit exceeded", False)


def test_memory_limit_does_not_affect_succeeded_component(tmp_path: Path) -> None:
    component = make_component(tmp_path, "7")
    component.exit_code = 0
    component.on_job_ended(ended_at_memory_limit())
    assert (component.current_status().exceeded, component.current_status().program_exit) == ("", 0)


OTHER_LINES = "srun: error: n1: task 0: Killed\nsrun: error: n2: tasks 1-7: Killed\n"


@pytest.mark.parametrize(
    "line",
    [
        "slurmstepd-n1: error: Exceeded job memory limit",
        "slurmstepd: error: Step 12.0 exceeded memory limit (4210044 > 4096000), being killed",
        "slurmstepd: error: StepId=12.0 exceeded memory limit (4210044 > 4096000), being killed",
        "slurmstepd: error: JOB 12 exceeded virtual memory limit (4210044 > 4096000), being killed",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=12.0. Some of your processes may have been killed",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.",
        "srun: error: n1: task 0: Out Of Memory",
    ],
)
@pytest.mark.parametrize("lines", ["{line}\n" + OTHER_LINES, OTHER_LINES + "{line}\n"])
def test_runner_killed_with_memory_line_of_slurm_exceeded_memory_limit(tmp_path: Path, line: str, lines: str) -> None:
    component = make_component(tmp_path, "7")
    (component.folder.path / "runner.log").write_text(lines.format(line=line))
    component.on_job_ended(replace(ended_at_memory_limit(137), reason="killed by signal 9", exceeded=""))
    status = component.current_status()
    assert (status.exceeded, status.program_exit, status.infrastructure) == ("memory", 137, False)
    assert status.error == f"memory limit exceeded: {line}"


@pytest.mark.parametrize(
    "line", ["srun: error: n1: task 0: Killed", "out of memory", "koala: the program says: Exceeded job memory limit"]
)
def test_runner_killed_without_memory_line_of_slurm_is_failure_of_cluster(tmp_path: Path, line: str) -> None:
    component = make_component(tmp_path, "7")
    component.nodes = [Node()]
    (component.folder.path / "runner.log").write_text(f"{line}\n")
    component.on_job_ended(replace(ended_at_memory_limit(137), reason="killed by signal 9", exceeded=""))
    status = component.current_status()
    assert (status.exceeded, status.infrastructure, status.relay_lost) == ("", True, False)


def test_component_preempted_by_local_job_is_no_error_of_cluster(tmp_path: Path) -> None:
    component = make_component(tmp_path, "7")
    component.nodes = [Node()]
    component.on_job_ended(replace(ended_at_memory_limit(143), reason="preempted by another job", exceeded=""))
    status = component.current_status()
    assert (status.infrastructure, status.relay_lost) == (True, True)
    recalled = Component.load_journal("test", T, component.folder).current_status()
    assert (recalled.infrastructure, recalled.relay_lost) == (True, True)


def test_deadline_of_job_is_result_of_program(tmp_path: Path) -> None:
    component = make_component(tmp_path, "7")
    component.walltime = 3600.0
    reason = "the deadline of its Slurm job has passed"
    component.on_job_ended(replace(ended_at_memory_limit(), reason=reason, exceeded="walltime"))
    status = component.current_status()
    assert (status.error, status.program_exit, status.infrastructure) == (reason, 143, False)


# Uncertain submissions


@pytest.mark.usefixtures("agent")
async def test_late_submission_is_found_before_another(lrm: MemoryLrm, daemon: FakeDaemon) -> None:
    lrm.submit_rejection, lrm.accepts_late = SiteUnavailable("sbatch did not answer"), True
    await daemon.submit_component(T)
    # Both tries become jobs while their name is searched for; no third one is submitted.
    await daemon.wait_for_state(T, "waiting")
    lrm.changed.set()
    await daemon.wait_until(lambda: ("2", False) in lrm.cancelled)
    assert [job.name for job in lrm.jobs.values()] == [NAME, NAME]
    assert daemon.status(T)["lrm_job"] == "1", "the oldest job stays"
    assert ("1", False) not in lrm.cancelled


async def test_job_accepted_after_give_up_is_ended(lrm: MemoryLrm, daemon: FakeDaemon, agent: Path) -> None:
    lrm.submit_rejection = SiteUnavailable("sbatch did not answer")
    await daemon.submit_component(T)
    ended = await daemon.wait_for_state(T, "ended")
    assert (ended["infrastructure"], ended["error"]) == (True, "sbatch did not answer")
    await daemon.wait_for_ack(await daemon.send_command("forget", T))
    lrm.start_job(LrmSubmission(NAME, 1, ("true",), {}, agent, agent))
    lrm.changed.set()
    await daemon.wait_until(lambda: lrm.cancelled == [("1", False)])


UNCERTAIN = SiteRejected("it is not known whether it was submitted", fault=SiteFault.SITE)


async def test_component_with_runner_lives_while_lrm_cannot_tell_its_job(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path
) -> None:
    lrm.submit_rejection, lrm.settling_s = SiteUnavailable("the library died"), 30.0
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.submit_component(T)
        runner = await FakeRunner.connect(tmp_path)
        await runner.introduce(NAME, runner_secret(NAME), life="a")
        lrm.find_error = UNCERTAIN
        await daemon.wait_for_state(T, "claimed")
        await pass_time(20.0)
        assert daemon.status(T)["state"] == "claimed"
        await daemon.open_barrier(["true"], T)
        await runner.receive("open")
    daemon.inventories.clear()
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await pass_time(8.0)
        runner = await FakeRunner.connect(tmp_path)
        await runner.introduce(NAME, runner_secret(NAME), life="a", phase="running")
        await daemon.wait_for_state(T, "running")
        await pass_time(20.0)
        assert daemon.status(T)["state"] == "running"
        await runner.report_exit()
        ended = await daemon.wait_for_state(T, "ended")
    assert (ended["program_exit"], ended["error"], lrm.submissions) == (0, "", [])


@pytest.mark.parametrize("ordered_to_end", [False, True])
async def test_component_without_returning_runner_ends_although_lrm_cannot_tell_its_job(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, ordered_to_end: bool
) -> None:
    lrm.submit_rejection, lrm.settling_s = SiteUnavailable("the library died"), 30.0
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        await daemon.submit_component(T)
        runner = await FakeRunner.connect(tmp_path)
        await runner.introduce(NAME, runner_secret(NAME))
        lrm.find_error = UNCERTAIN
        await daemon.wait_for_state(T, "claimed")
        if ordered_to_end:
            await daemon.wait_for_ack(await daemon.send_command("stop", T, reason="cancelled"))
        runner.writer.close()
        ended = await daemon.wait_for_state(T, "ended")
    assert ("did not reconnect" in ended["error"]) is not ordered_to_end


async def test_runner_that_connects_during_search_prevents_another_submission(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path
) -> None:
    lrm.submit_rejection = SiteUnavailable("sbatch did not answer")
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: bool(daemon.inventories))
        lrm.is_finding.clear()
        await daemon.submit_component(T)
        await daemon.wait_until(lambda: lrm.searches == 1)
        runner = await FakeRunner.connect(tmp_path)
        await runner.introduce(NAME, runner_secret(NAME))
        await daemon.wait_for_state(T, "claimed")
        lrm.submit_rejection = None
        lrm.is_finding.set()
        await pass_time(20.0)
    assert lrm.submissions == []


def make_component(tmp_path: Path, lrm_job: str | None, *runners: str) -> Component:
    component = Component("test", T, Spool(tmp_path).make_folder("test", T), len(runners) or 1, lrm_job=lrm_job)
    component.nodes = [Node(runner=RunnerConnection(None, set()), lrm_job=job) for job in runners]  # type: ignore[arg-type]
    return component


@pytest.mark.parametrize(
    ("recorded", "runners", "ids", "ended", "expected", "extra"),
    [
        ("7", (), ("7",), (), "7", ()),
        ("7", (), ("7", "10", "9"), (), "7", ("10", "9")),
        ("9", (), ("10", "9", "7"), (), "7", ("10", "9")),
        ("7", ("9",), ("7", "9"), (), "9", ("7",)),
        ("7", (), ("7", "9"), ("7",), "7", ("9",)),
        ("7", ("9",), ("7", "9"), ("7",), "9", ()),
        ("7", (), ("7", "9"), ("7", "9"), "7", ()),
        ("7", (), ("9",), (), "9", ()),
        ("7", (), (), (), None, ()),
    ],
)
def test_duplicate_jobs_are_ended_except_one(
    tmp_path: Path,
    recorded: str,
    runners: tuple[str, ...],
    ids: tuple[str, ...],
    ended: tuple[str, ...],
    expected: str | None,
    extra: tuple[str, ...],
) -> None:
    states = {True: LrmJobState.ENDED, False: LrmJobState.RUNNING}
    jobs = [LrmJob(id, NAME, states[id in ended]) for id in ids]
    selected, superfluous = select_job(make_component(tmp_path, recorded, *runners), jobs)
    assert (selected.id if selected else None, tuple(job.id for job in superfluous)) == (expected, extra)


# Lingering jobs


@pytest.mark.usefixtures("agent")
async def test_lingering_job_is_reported_and_killed(lrm: MemoryLrm, daemon: FakeDaemon) -> None:
    await daemon.submit_component(T)
    await daemon.wait_for_state(T, "waiting")
    lrm.jobs["1"] = replace(lrm.jobs["1"], state=LrmJobState.ENDED)
    lrm.changed.set()
    await daemon.wait_for_state(T, "ended")
    await daemon.wait_for_ack(await daemon.send_command("forget", T))
    lrm.jobs["1"] = LrmJob("1", NAME, LrmJobState.RUNNING, ("a", "b"), reason="node a does not answer")
    lrm.changed.set()
    await daemon.wait_until(lambda: bool(daemon.report()["notices"]))
    (notice,) = daemon.report()["notices"]
    job = r"the resource manager still holds job 1 \(koala-test-7\.1\.0, 2 nodes\)"
    text = job + r", ordered to end at \d\d:\d\d:\d\d"
    assert re.fullmatch(f"{text}: node a does not answer", notice)
    lrm.force_error = SiteRejected("qdel -f: forcing a job deletion requires manager privileges", hint="ask a manager")
    lrm.changed.set()
    await daemon.wait_until(lambda: ("1", True) in lrm.cancelled)
    assert lrm.cancelled[0] == ("1", False)
    lrm.changed.set()
    await daemon.wait_until(lambda: daemon.report()["notices"][0].endswith("manager privileges: ask a manager"))
    lrm.end_job("1")
    lrm.changed.set()
    await daemon.wait_until(lambda: daemon.report()["notices"] == [])


def test_restarted_component_is_not_ended_as_leftover() -> None:
    leftovers, job = Leftovers(), LrmJob("1", NAME, LrmJobState.RUNNING)
    leftovers.component_ended(NAME)
    assert leftovers.find_overdue([job], []) == [(job, False)]
    leftovers.component_started(NAME)
    assert leftovers.find_overdue([job], []) == []
    assert leftovers.notices() == []


# Missing programs, calls and versions


async def test_missing_rsync_is_reported_until_installed(
    lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    installed = tmp_path / "bin" / "rsync"
    installed.parent.mkdir()
    installed.write_text("#!/bin/sh\n")
    installed.chmod(0o755)
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))
        assert daemon.report()["lacks"] == ["rsync"]
        monkeypatch.setenv("PATH", str(installed.parent))
        lrm.changed.set()
        await daemon.wait_until(lambda: daemon.report()["lacks"] == [])


async def measure_call(monitor: LrmMonitor, operation: LrmOperation, error: SiteError | None = None) -> None:
    async def answer() -> None:
        if error is not None:
            raise error

    await monitor.call_lrm(operation, answer())


async def measured_calls(error: SiteError | None, operation: LrmOperation = LrmOperation.SUBMIT) -> LrmCalls:
    monitor = make_monitor()
    if error is None:
        await measure_call(monitor, operation)
    else:
        with pytest.raises(SiteError):
            await measure_call(monitor, operation, error)
    (calls,) = monitor.summarize_calls()
    return calls


@pytest.mark.parametrize(
    ("error", "operation", "failures"),
    [
        (None, LrmOperation.SUBMIT, 0),
        (SiteUnavailable("no answer"), LrmOperation.SUBMIT, 1),
        (SiteRejected("no such account"), LrmOperation.SUBMIT, 0),
        (SiteRejected("too large", fault=SiteFault.LIMIT), LrmOperation.SUBMIT, 0),
        (SiteRejected("no queue", fault=SiteFault.SITE), LrmOperation.SUBMIT, 1),
        (SiteRejected("no queue"), LrmOperation.SNAPSHOT, 1),
    ],
)
async def test_rejected_job_counts_as_answered_call(
    error: SiteError | None, operation: LrmOperation, failures: int
) -> None:
    calls = await measured_calls(error, operation)
    assert (calls.operation, calls.count, calls.failures) == (operation, 1, failures)
    assert calls.last_error == (error.message if error is not None and failures else "")
    assert (calls.failed_ago is not None) == bool(failures)


async def test_versions_are_reported_when_known(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    lrm.version_known = asyncio.Event()
    async with running_agent(lrm, daemon, tmp_path):
        await daemon.wait_until(lambda: reported_counts(daemon) == (2, 2, ""))
        assert daemon.report()["versions"] == {"agent": koalapy.__version__, "lrm": "", "open_mpi": ""}
        lrm.version_known.set()
        await daemon.wait_until(lambda: daemon.report()["versions"]["lrm"] == "memory 1.0")


async def test_nodes_are_listed_with_components_and_those_down_first(daemon: FakeDaemon, tmp_path: Path) -> None:
    async with running_agent(lrm := MemoryLrm(), daemon, tmp_path / "agent"):
        await daemon.wait_until(lambda: daemon.inventories)
        await daemon.submit_component("1.1.0")
        await daemon.wait_until(lambda: lrm.jobs)
        assert (await daemon.ask_agent("north", "nodes"))["error"] == "its resource manager lists no single nodes"
        idle = tuple(ListedNode(f"n{number}", "idle") for number in range(MAX_LISTED_NODES))
        held = (ListedNode("a", "held", "big"), ListedNode("other", "held"))
        lrm.nodes = (*held, *idle, ListedNode("z", "down", "", "fan"))
        polls = lrm.polls
        lrm.changed.set()
        await daemon.wait_until(lambda: lrm.polls > polls)
        answer = (await daemon.ask_agent("north", "nodes"))["payload"]
    assert len(answer["nodes"]) == MAX_LISTED_NODES
    assert [(node["name"], node["reason"], node["token"]) for node in answer["nodes"][:3]] == [
        ("z", "fan", ""),
        ("a", "", "1.1.0"),
        ("other", "", ""),
    ]
    assert 0 <= answer["age"] < 600
