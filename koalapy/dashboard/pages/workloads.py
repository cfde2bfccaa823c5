"""The pages of workloads: the reports of runs that were sent, and each with its measures and plots."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from koalapy.api.access import Caller
from koalapy.api.workloads import ReportId
from koalapy.daemon.jobs.quota import Room
from koalapy.daemon.workload_reports import KeptReport, WorkloadReports
from koalapy.dashboard.dashboard import Dashboard, SentForm
from koalapy.dashboard.pictures.cumulative import Spread
from koalapy.dashboard.workload_figures import ClusterUse, spreads_of, uses_of

MAX_SHOWN = 200
"""Reports, and groups of jobs."""
MAX_JOBS = 500
MAX_CLUSTERS = 12


@dataclass(frozen=True, slots=True)
class WorkloadsView:
    """Users see their own, operators all."""

    workloads: Sequence[KeptReport]
    more: int
    room: Room


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """A report: what is told of its jobs by application and size, and what is drawn."""

    kept: KeptReport
    run: Mapping[str, Any]
    workload: Mapping[str, Any]
    summary: Mapping[str, Any]
    spreads: Sequence[Spread]
    uses: Sequence[ClusterUse]
    more_clusters: int
    by_application: Sequence[Mapping[str, Any]]
    by_size: Sequence[Mapping[str, Any]]
    more_groups: int
    jobs: Sequence[Mapping[str, Any]]
    more_jobs: int


def view_of(kept: KeptReport, report: Mapping[str, Any]) -> WorkloadView:
    """All that the page tells, of the report alone."""
    applications, sizes, jobs = report["by_application"], report["by_size"], report["jobs"]
    return WorkloadView(
        kept=kept,
        run=report["run"],
        workload={name: told for name, told in report["workload"].items() if told is not None},
        summary=report["summary"],
        spreads=spreads_of(jobs),
        uses=uses_of(report, MAX_CLUSTERS),
        more_clusters=max(0, len(report["utilisation"]["clusters"]) - MAX_CLUSTERS),
        by_application=applications[:MAX_SHOWN],
        by_size=sizes[:MAX_SHOWN],
        more_groups=max(0, len(applications) - MAX_SHOWN) + max(0, len(sizes) - MAX_SHOWN),
        jobs=jobs[:MAX_JOBS],
        more_jobs=max(0, len(jobs) - MAX_JOBS),
    )


def add_workloads(dashboard: Dashboard, reports: WorkloadReports) -> None:
    """At ``/workloads`` and ``/workloads/REPORT``."""

    @dashboard.page("/workloads", "workloads.html", operation="list_workloads", title="Workloads", key="w", live=False)
    async def workloads(caller: Caller) -> WorkloadsView:
        found = reports.seen_by(caller)
        return WorkloadsView(found[:MAX_SHOWN], max(0, len(found) - MAX_SHOWN), reports.room)

    @dashboard.page(
        "/workloads/{report}", "workload.html", operation="show_workload", title="A run of a workload", live=False
    )
    async def workload(report: ReportId, caller: Caller) -> WorkloadView:
        kept, told = await reports.read(caller, report)
        return await asyncio.to_thread(view_of, kept, told)

    @dashboard.action("/workloads/{report}/remove", operation="remove_workload")
    async def remove(report: ReportId, caller: Caller, form: SentForm) -> str:
        await reports.remove(caller, report)
        return "/workloads"
