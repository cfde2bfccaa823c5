"""The page My jobs: a user's own jobs, limits and use."""

from collections import Counter

from koalapy.api.access import Caller
from koalapy.daemon.jobs.job_finder import JobFinder
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard, View
from koalapy.dashboard.job_table import queue_place
from koalapy.dashboard.rows import build_rows, job_row
from koalapy.model.job import JobState
from koalapy.model.job_search import format_term, parse_search

MAX_UNFINISHED, MAX_ENDED = 50, 10


def add_mine(dashboard: Dashboard, services: Services) -> None:
    """Add the page of the caller's own jobs, limits and use."""
    engine, jobs, limits = dashboard.engine, services.jobs, services.limits
    queues = engine.queries.queues
    finder = JobFinder(jobs, engine.queries, engine.clock)

    @dashboard.page("/my-jobs", "my_jobs.html", operation="show_limits", title="My jobs", key="y")
    async def mine(caller: Caller) -> View:
        """Return the caller's unfinished jobs as in the queue, the last ended ones, and the limits in use."""
        own = format_term("user", caller.user)
        unfinished = await finder.find_unfinished(parse_search(own), caller)
        unfinished.sort(key=lambda job: queue_place(job, queues))
        ended = await finder.find_jobs(parse_search(f"{own} state:over"), caller, limit=MAX_ENDED)
        states = Counter(job.state for job in unfinished)
        rows = await build_rows(
            unfinished[:MAX_UNFINISHED], caller, jobs, engine.queries, services.forecasts.latest_forecast
        )
        active = [job for job in unfinished if job.state.is_active]
        return {
            "user": caller.user,
            "filter": own,
            "running": states[JobState.RUNNING],
            "about_to_run": len(active) - states[JobState.RUNNING],
            "waiting": states[JobState.QUEUED],
            "held": states[JobState.HELD],
            # Nodes that active jobs have or are claiming
            "nodes": sum(job.spec.request.total_size for job in active),
            "unfinished": rows,
            "more_unfinished": len(unfinished) - len(rows),
            # The jobs with the highest numbers that have ended
            "ended": [job_row(jobs.make_record(job), caller) for job in ended.jobs],
            "scopes": await limits.read_limits(caller.user),
            "contact": limits.limits.contact,
        }
