"""Report whether each site benefits from taking part in the grid, by simulating recorded jobs."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from koalapy.daemon.engine.database import query
from koalapy.daemon.forecast.subprocess_worker import run_in_subprocess
from koalapy.daemon.jobs.history import Span
from koalapy.model.errors import UsageError
from koalapy.model.history import EndedJob
from koalapy.model.job import JobId
from koalapy.model.request import ClusterName
from koalapy.ports import HistoryStore
from koalapy.scheduler.queries import Queries
from koalapy.simulation.sharing import SharingQuestion, SharingReport, Site
from koalapy.simulation.wire import answer_sharing_question, read_sharing_report, write_sharing_question
from koalapy.system.event_loop import iterate_in_slices

MAX_JOBS = 100_000
"""The most jobs of one report."""
PAGE_SIZE = 1000
"""Jobs that one query reads."""
FRESH_S = 60.0
"""Seconds for which a report is reused."""


@dataclass(frozen=True, slots=True)
class _StoredReport:
    span: Span
    made_at: float
    report: SharingReport


class Sharing:
    """The sharing reports of one daemon, simulated in a child process, one at a time."""

    def __init__(
        self,
        store: HistoryStore,
        queries: Queries,
        clock: Callable[[], float],
        work: Callable[[SharingQuestion], Awaitable[SharingReport]] | None = None,
        *,
        page_size: int = PAGE_SIZE,
        max_jobs: int = MAX_JOBS,
    ) -> None:
        """``page_size``: jobs that one query reads; ``max_jobs``: jobs of a report at most."""
        self._page_size, self._max_jobs = page_size, max_jobs
        self._store, self._queries, self._clock = store, queries, clock
        self._work = work or _answer_in_subprocess
        self._one_at_a_time = asyncio.Lock()
        self._latest: _StoredReport | None = None

    async def make_report(self, span: Span) -> SharingReport:
        """Report on jobs submitted in a span. Raise ``UsageError`` for too many jobs, ``BusyError`` on timeout."""
        async with self._one_at_a_time:
            now, latest = self._clock(), self._latest
            if latest is None or latest.span != span or not 0 <= now - latest.made_at < FRESH_S:
                report = await self._work(await self._build_question(span, now))
                latest = self._latest = _StoredReport(span, now, report)
            return latest.report

    async def _build_question(self, span: Span, now: float) -> SharingQuestion:
        """Collect what the fair-share figures of a span are computed from: ended jobs, sites and unfinished jobs."""
        start, end = span.seconds
        jobs = await self._read_ended_jobs(span, now)
        under_way: list[JobId] = []
        async for chunk in iterate_in_slices(self._queries.jobs()):
            here = [job for job in chunk if start <= job.submitted_at < end]
            under_way += [job.id for job in here if job.spec.home_site and not job.spec.internal]
        sites = await self._read_sites(span)
        return SharingQuestion(jobs, sites, self._queries.rules, start, max(start, min(end, now)), under_way)

    async def _read_ended_jobs(self, span: Span, now: float) -> list[EndedJob]:
        """Return the ended jobs that were submitted in the span: all of them ended after its first day began."""
        start, end = span.seconds
        jobs: list[EndedJob] = []
        position = (start, 0)
        while True:
            page: Sequence[EndedJob] = await query(self._store.ended_jobs, position, now + 1.0, self._page_size)
            jobs += [job for job in page if job.submitted_at < end]
            if len(jobs) > self._max_jobs:
                hint = "ask for fewer days, by first and last"
                too_many = f"that is more than {self._max_jobs} jobs"
                raise UsageError(too_many, field="first", value=str(span.first), hint=hint)
            if len(page) < self._page_size:
                return jobs
            position = (page[-1].ended_at, page[-1].id)

    async def _read_sites(self, span: Span) -> dict[ClusterName, Site]:
        """Return the sites with their most nodes in the span, or those they had last."""
        first, last = span.days
        nodes: dict[ClusterName, int] = {}
        for day, name, count in await query(self._store.nodes_by_day, last):
            nodes[name] = count if day <= first else max(nodes.get(name, 0), count)
        clusters = self._queries.grid.clusters()
        return {
            cluster.name: Site(node_count, cluster.speed)
            for cluster in clusters
            if (node_count := nodes.get(cluster.name, cluster.last_report.total)) > 0
        }


async def _answer_in_subprocess(question: SharingQuestion) -> SharingReport:
    return read_sharing_report(await run_in_subprocess(answer_sharing_question, write_sharing_question(question)))
