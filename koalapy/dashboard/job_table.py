"""The table of jobs: its columns, and the order of jobs in the queue."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from urllib.parse import quote

from koalapy.dashboard.rendering import render_age, render_time, state_badge
from koalapy.dashboard.rows import JobRow
from koalapy.dashboard.tables import Column, TableDefinition, Value, link, time_column
from koalapy.model.application import application_of
from koalapy.model.identity import Identity
from koalapy.model.job import Job, JobState
from koalapy.model.job_search import format_term
from koalapy.model.job_spec import Priority
from koalapy.model.wording import format_duration, shorten
from koalapy.scheduler.queue.placement_queues import PRIORITIES, PlacementQueues
from koalapy.validation.permissions import may_see_all_of


def _user_cell(row: JobRow, now: float) -> str:
    if row.redacted:
        return '<span class="hint">another user</span>'
    return link(f"/queue?q={quote(format_term('user', row.user), safe='')}", row.user)


def _waited_cell(row: JobRow, now: float) -> str:
    if row.waits:
        return render_age(row.submitted_at, now)
    return "" if row.waited is None else format_duration(row.waited)


def _ran_cell(row: JobRow, now: float) -> str:
    if row.ran is not None:
        return format_duration(row.ran)
    return render_age(row.started_at, now) if row.started_at else ""


def _expected_cell(row: JobRow, now: float) -> str:
    if row.expected is None:
        return ""
    return f"≈ {render_time(row.expected, exact=False)}" if row.expected > now else "due now"


def _format_clusters(clusters: str) -> str:
    return clusters.replace(",", ", ")


def _shorten_reason(reason: str) -> str:
    """Return the reason without a long list of clusters in parentheses, which the page of the job has."""
    return shorten(reason.partition(" (")[0], MAX_REASON_WIDTH) if len(reason) > MAX_REASON_WIDTH else reason


MAX_REASON_WIDTH = 100
"""Maximum number of characters of a reason in a row."""
JOBS: TableDefinition[JobRow] = TableDefinition(
    "jobs",
    (
        Column("id", "ID", attrgetter("label"), "number", href=lambda job: f"/jobs/{job.id}"),
        Column("state", "State", format=state_badge, is_sortable=False),
        Column("user", "User", html=_user_cell),
        Column("name", "Name", style="name"),
        Column("application", "Program", is_optional=True),
        Column("policy", "Policy", is_optional=True),
        Column("priority", "Priority"),
        Column("nodes", "Nodes", style="number"),
        Column("position", "Position", style="number"),
        time_column("submitted", "Submitted", "submitted_at", is_optional=True),
        time_column("expected", "Expected start", "expected", html=_expected_cell, is_sortable=False),
        Column("waited", "Waited", style="number", html=_waited_cell),
        time_column("started", "Started", "started_at", is_optional=True),
        Column("ran", "Ran", style="number", html=_ran_cell),
        time_column("ended", "Ended", "ended_at"),
        Column("restarts", "Restarts", style="number", is_optional=True),
        Column("home", "Home site", attrgetter("home_site"), is_optional=True),
        Column("clusters", "Clusters", attrgetter("where"), format=_format_clusters, is_sortable=False),
        Column("reason", "Reason", style="why", format=_shorten_reason, is_sortable=False),
    ),
    "position",
    ident=lambda job: f"job-{job.id}",
    href=lambda job: f"/jobs/{job.id}",
    selectable=lambda job: "" if job.redacted else str(job.id),
)


def queue_place(job: Job, queues: PlacementQueues) -> tuple[float, ...]:
    """Return the sort key of the queue: running jobs, newest first, jobs about to run, waiting jobs by position, held.

    The position is that of the placement queues, those of high priority first.
    """
    if job.state.is_active:
        return (0 if job.state is JobState.RUNNING else 1, -job.id)
    queue = queues[job.spec.priority]
    if job.id in queue:
        section, standing, place = queue.key(job.id)
        return (2, PRIORITIES.index(job.spec.priority), section, *standing, *place)
    return (3, job.id)


def job_sort_key(sort: str, caller: Identity, queues: PlacementQueues) -> Callable[[Job], Value]:
    """Return the sort key of unfinished jobs for a column. Private fields of other users' jobs count as missing."""
    name = sort.removeprefix("-")
    if name == "position":
        return lambda job: queue_place(job, queues)
    if (public := _PUBLIC_KEYS.get(name)) is not None:
        return public
    private = _PRIVATE_KEYS[name]
    return lambda job: private(job) if may_see_all_of(caller, job) else None


_PUBLIC_KEYS: Mapping[str, Callable[[Job], Value]] = {
    "id": lambda job: job.id,
    "nodes": lambda job: job.spec.request.total_size,
    "priority": lambda job: 1 if job.spec.priority is Priority.HIGH else 0,
    "submitted": lambda job: job.submitted_at,
    "started": lambda job: job.started_at,
    # The longest wait first in the descending order, as with the oldest submission.
    "waited": lambda job: -job.submitted_at if job.placed_at is None else None,
    "ran": lambda job: None if job.started_at is None else -job.started_at,
    "ended": lambda job: job.ended_at,
    "home": lambda job: job.spec.home_site or None,
}
_PRIVATE_KEYS: Mapping[str, Callable[[Job], Value]] = {
    "user": lambda job: job.spec.owner,
    "name": lambda job: job.spec.name.casefold() or None,
    "application": lambda job: application_of(job.spec).casefold() or None,
    "policy": lambda job: job.spec.policy,
    "restarts": lambda job: job.restarts,
}
