"""What an agent tells of its resource manager's answers, and of what runs on its cluster."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import koalapy
from koalapy.agent.core import lrm_health
from koalapy.agent.core.lrm_health import CallRecord
from koalapy.model.errors import SiteError, SiteFault, SiteRejected, SiteUnavailable
from koalapy.model.reports import ClusterReport, LrmCalls, LrmOperation, Versions
from koalapy.protocol import messages as wire
from tests.agent.conftest import FakeDaemon
from tests.agent.memory_agent import counts, loop_clock, serving
from tests.agent.memory_lrm import MemoryLrm
from tests.signals import pass_time

REPORT = ClusterReport(total=2, idle=2)
CALLS = (LrmCalls("snapshot", 7, 1, 1.5, 0.9, "squeue did not answer", 3.0),)


@pytest.fixture
def lrm() -> MemoryLrm:
    return MemoryLrm()


async def ask(record: CallRecord, operation: LrmOperation, error: SiteError | None = None) -> None:
    async def answer() -> None:
        if error is not None:
            raise error

    await record.measured(operation, answer())


async def told(error: SiteError | None, operation: LrmOperation = LrmOperation.SUBMIT) -> LrmCalls:
    record = CallRecord()
    if error is None:
        await ask(record, operation)
    else:
        with pytest.raises(SiteError):
            await ask(record, operation, error)
    (calls,) = record.told()
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
async def test_refusal_of_job_is_an_answer(error: SiteError | None, operation: LrmOperation, failures: int) -> None:
    calls = await told(error, operation)
    assert (calls.operation, calls.count, calls.failures) == (operation, 1, failures)
    assert calls.last_error == (error.message if error is not None and failures else "")
    assert (calls.failed_ago is not None) == bool(failures)


async def test_the_longest_call_is_forgotten_after_a_while_and_the_sum_is_not() -> None:
    await pass_time(-asyncio.get_running_loop().time() % lrm_health.LARGEST_SPAN)
    record = CallRecord(loop_clock())

    async def long() -> None:
        await pass_time(8.0)

    await record.measured(LrmOperation.SNAPSHOT, long())
    await pass_time(lrm_health.LARGEST_SPAN)
    assert record.told() == (LrmCalls("snapshot", 1, 0, 8.0, 8.0),)
    await pass_time(lrm_health.LARGEST_SPAN)
    assert record.told() == (LrmCalls("snapshot", 1, 0, 8.0, 0.0),)


async def test_calls_are_part_of_reports_and_make_none(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:

    def of(operation: str) -> dict[str, Any]:
        found = [calls for calls in daemon.report().get("calls", ()) if calls["operation"] == operation]
        return found[0] if found else {"count": 0, "failures": 0}

    async with serving(lrm, daemon, tmp_path):
        await daemon.until(lambda: (daemon.report().get("versions") or {}).get("lrm") == "memory 1.0")
        assert of("open")["count"] == of("version")["count"] == 1
        looks = lrm.looks
        for sequence in range(3):
            await daemon.say("north", {"type": "probe", "sequence": sequence + 1, "look": True})
        await daemon.until(lambda: len(daemon.said("confirmed")) == 3)
        assert lrm.looks > looks
        reports = [{**report, "calls": None} for report in daemon.said("report")[1:]]
        assert all(one != other for one, other in pairwise(reports)), "what changes with every look is no news"
        lrm.fault = SiteUnavailable("squeue did not answer")
        lrm.changed.set()
        await daemon.until(lambda: counts(daemon)[2] != "")
        assert of("snapshot")["failures"] == 1
        assert of("snapshot")["last_error"] == "squeue did not answer"
        assert of("snapshot")["count"] > looks


async def test_absent_lrm_is_reported_again_and_again(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    lrm.fault = SiteUnavailable("squeue did not answer")
    async with serving(lrm, daemon, tmp_path):
        for _ in range(3):
            said = len(daemon.said("report"))
            lrm.changed.set()
            await daemon.until(lambda said=said: len(daemon.said("report")) > said)  # type: ignore[misc]


async def test_versions_are_told_as_far_as_they_are_known(lrm: MemoryLrm, daemon: FakeDaemon, tmp_path: Path) -> None:
    lrm.versions = asyncio.Event()
    async with serving(lrm, daemon, tmp_path):
        await daemon.until(lambda: counts(daemon) == (2, 2, ""))
        assert daemon.report()["versions"] == {"agent": koalapy.__version__, "lrm": "", "open_mpi": ""}
        lrm.versions.set()
        await daemon.until(lambda: daemon.report()["versions"]["lrm"] == "memory 1.0")


def sent(report: ClusterReport) -> dict[str, Any]:
    (message,) = json.loads(wire.frame(wire.from_agent, [report]))
    return dict(message)


def taken(message: dict[str, Any]) -> ClusterReport:
    (report,) = wire.from_agent.validate_json(json.dumps([message]))
    assert isinstance(report, ClusterReport)
    return report


def test_an_agent_of_before_says_nothing_and_a_later_one_more() -> None:
    known = replace(REPORT, versions=Versions("1.0", "slurm 22.05", "4.1.4"), calls=CALLS)
    message = sent(known)
    assert taken(message).calls == CALLS
    assert taken(message).versions == known.versions
    old = {name: value for name, value in message.items() if name not in ("versions", "calls")}
    assert (taken(old).versions, taken(old).calls) == (None, ())
    later = {**message["calls"][0], "operation": "hibernate", "median": 1.0}
    assert taken({**message, "calls": [later]}).calls[0].operation == "hibernate"


def test_a_version_is_cut_and_not_refused() -> None:
    message = sent(REPORT) | {"versions": {"lrm": "x" * 1_000_000}}
    assert taken(message).versions == Versions(lrm="x" * 100)
