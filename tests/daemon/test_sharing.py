"""Sharing reports: their input from the store, and their answer."""

import asyncio
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from koalapy.daemon.forecast.sharing import Sharing
from koalapy.daemon.jobs.history import History, Span
from koalapy.model.errors import BusyError, UsageError
from koalapy.model.history import DAY
from koalapy.model.job import Job, JobState
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from koalapy.policies.registry import builtin_policies
from koalapy.ports import Batch
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.events import JobSubmitted
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.scheduler import Scheduler
from koalapy.scheduler.state import SchedulerState
from koalapy.simulation.sharing import ExclusionReason, SharingQuestion, SharingReport, Site, answer_sharing
from tests.daemon.test_history import THURSDAY, make_job, make_record
from tests.memory_stores import memory_stores

THAT_DAY = Span(date(2024, 10, 10), date(2024, 10, 10))


class Place:
    """A daemon's stores and scheduler, at noon of the Friday."""

    def __init__(self) -> None:
        self.stores, self.now = memory_stores(), (THURSDAY + 1.5) * DAY
        clusters = [ClusterStatus("north", 2.0), ClusterStatus("south")]
        self.scheduler = Scheduler(SchedulerState(Rules(), builtin_policies(), clusters), nonces=lambda: "n")
        self.asked: list[SharingQuestion] = []
        self.was_asked, self.answers = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.sharing = Sharing(self.stores.history, self.scheduler.queries, lambda: self.now, self._work)
        self.write_jobs(clusters=[make_record("north", 10), make_record("south", 5)], time=(THURSDAY - 1) * DAY)

    async def _work(self, question: SharingQuestion) -> SharingReport:
        self.asked.append(question)
        self.was_asked.set()
        await self.answers.wait()
        return answer_sharing(question)

    def write_jobs(self, *jobs: Job, time: float | None = None, **fields: Any) -> None:
        self.stores.jobs.write(Batch(at=time or self.now, epoch=1, jobs={entry.id: entry for entry in jobs}, **fields))


@pytest.fixture
def place() -> Place:
    return Place()


def of_north(ident: int, day: int = THURSDAY, hours: float = 1, **spec: Any) -> Job:
    return make_job(
        ident, day=day, hours=hours, clusters={"south": 2}, state=JobState.SUCCEEDED, home_site="north", **spec
    )


async def test_sharing_report_counts_jobs_submitted_in_span(place: Place) -> None:
    place.write_jobs(
        of_north(1, day=THURSDAY - 1),
        of_north(2, day=THURSDAY - 1, hours=14),
        of_north(3),
        of_north(4, hours=20),
        of_north(5, day=THURSDAY + 1, hours=-1),
    )
    await place.sharing.make_report(THAT_DAY)
    (question,) = place.asked
    assert [job.id for job in sorted(question.jobs, key=lambda job: job.id)] == [2, 3, 4]
    assert (question.start, question.end) == (THURSDAY * DAY, (THURSDAY + 1) * DAY)
    assert question.sites == {"north": Site(10, 2.0), "south": Site(5)}
    (north, _) = (await place.sharing.make_report(THAT_DAY)).sites
    assert (north.jobs, north.elsewhere) == (2, 2)
    assert north.alone == pytest.approx((3600 / 2 + 72000 / 2) / 2 + 5)


async def test_sharing_report_uses_most_nodes_of_span(place: Place) -> None:
    for day, nodes in ((THURSDAY - 0.5, 4), (THURSDAY + 0.2, 8), (THURSDAY + 0.6, 6), (THURSDAY + 1.1, 40)):
        place.write_jobs(clusters=[make_record("north", nodes)], time=day * DAY)
    await place.sharing.make_report(THAT_DAY)
    assert place.asked[0].sites == {"north": Site(8, 2.0), "south": Site(5)}


async def test_sharing_report_of_today_names_unfinished_jobs(place: Place) -> None:
    spec = JobSpec(FlexibleRequest(1), ("true",), policy="worst-fit", home_site="north")
    specs = [replace(spec, internal=True), replace(spec, home_site=""), spec, spec]
    events = [JobSubmitted(Job(ident, entry, place.now - 60)) for ident, entry in enumerate(specs, 1)]
    place.scheduler.step(events, place.now)
    report = await place.sharing.make_report(Span(date(2024, 10, 10), date(2024, 10, 11)))
    assert report.end == place.now
    assert [(entry.reason, entry.count, entry.jobs) for entry in report.exclusions] == [
        (ExclusionReason.NOT_OVER, 2, [3, 4])
    ]
    tomorrow = await place.sharing.make_report(Span(date(2024, 10, 12), date(2024, 10, 12)))
    assert (tomorrow.start, tomorrow.end, tomorrow.exclusions) == ((THURSDAY + 2) * DAY, (THURSDAY + 2) * DAY, [])


async def test_sharing_report_reads_pages_up_to_limit(place: Place) -> None:
    place.write_jobs(*(of_north(ident) for ident in range(1, 8)))

    def sharing(max_jobs: int) -> Sharing:
        parts = place.stores.history, place.scheduler.queries, lambda: place.now, place._work
        return Sharing(*parts, page_size=3, max_jobs=max_jobs)

    assert (await sharing(7).make_report(THAT_DAY)).sites[0].jobs == 7
    with pytest.raises(UsageError, match="more than 6 jobs") as refused:
        await sharing(6).make_report(THAT_DAY)
    assert (refused.value.field, refused.value.value) == ("first", "2024-10-10")


async def test_sharing_report_is_reused_for_a_minute(place: Place) -> None:
    first = await place.sharing.make_report(THAT_DAY)
    assert await place.sharing.make_report(THAT_DAY) is first
    await place.sharing.make_report(Span(date(2024, 10, 9), date(2024, 10, 10)))
    assert len(place.asked) == 2
    place.now += 61.0
    await place.sharing.make_report(Span(date(2024, 10, 9), date(2024, 10, 10)))
    place.now -= 3600.0  # the clock is set back
    await place.sharing.make_report(Span(date(2024, 10, 9), date(2024, 10, 10)))
    assert len(place.asked) == 4


async def test_sharing_reports_run_one_at_a_time(place: Place) -> None:
    place.answers.clear()
    days = [Span(date(2024, 10, day), date(2024, 10, 10)) for day in (8, 9, 9)]
    asking = [asyncio.create_task(place.sharing.make_report(span)) for span in days]
    await place.was_asked.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(place.asked) == 1
    place.answers.set()
    first, two, same = await asyncio.gather(*asking)
    assert two is same
    assert first.start < two.start


async def test_sharing_report_after_failure_is_computed_again(place: Place) -> None:
    async def fails(_: SharingQuestion) -> SharingReport:
        raise BusyError("that takes longer than 1 s", retry_after=60.0)

    place.sharing._work, works = fails, place.sharing._work
    with pytest.raises(BusyError):
        await place.sharing.make_report(THAT_DAY)
    place.sharing._work = works
    assert (await place.sharing.make_report(THAT_DAY)).sites


@pytest.mark.processes
async def test_sharing_report_is_computed_in_subprocess(place: Place) -> None:
    place.write_jobs(*(of_north(ident) for ident in range(1, 8)))
    apart = await Sharing(place.stores.history, place.scheduler.queries, lambda: place.now).make_report(THAT_DAY)
    assert apart == await place.sharing.make_report(THAT_DAY)


def test_make_span_has_first_and_last_day() -> None:
    history = History(memory_stores().history, lambda: (THURSDAY + 1.5) * DAY, list)
    assert history.make_span(None, None, 1).seconds == ((THURSDAY + 1) * DAY, (THURSDAY + 2) * DAY)
