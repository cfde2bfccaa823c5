"""The pages Jobs and My jobs: jobs by a filter, and actions on many jobs at once; a user's own jobs, limits and use."""

import secrets
from asyncio import to_thread
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from heapq import nlargest
from operator import attrgetter
from typing import Annotated, Literal

from fastapi import Query
from pydantic import Field

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.jobs import PriorityOrder, changed_job
from koalapy.daemon.forecast.forecasts import Forecasts
from koalapy.daemon.jobs.job_finder import JobFinder
from koalapy.daemon.jobs.job_records import ActionResult
from koalapy.daemon.jobs.jobs import Jobs
from koalapy.daemon.services import Services
from koalapy.dashboard import tables
from koalapy.dashboard.dashboard import Dashboard, Form, FormAnswer, SentForm, View, parse_body
from koalapy.dashboard.job_table import JOBS, job_sort_key, queue_place
from koalapy.dashboard.rendering import with_query
from koalapy.dashboard.rows import build_rows, job_row
from koalapy.dashboard.tables import TableParameters, TableQuery, TableView, Value
from koalapy.model.errors import KoalaError, UsageError
from koalapy.model.identity import Identity, Role
from koalapy.model.job import FINAL_STATES, Job, JobState
from koalapy.model.job_search import MAX_LENGTH, format_term, parse_search
from koalapy.model.job_spec import Priority
from koalapy.scheduler.queue.placement_queues import PlacementQueues
from koalapy.system.event_loop import iterate_in_slices
from koalapy.validation.permissions import may_see_all_of, owns

MAX_UNFINISHED, MAX_ENDED = 50, 10
"""Maximum number of own jobs that are shown."""
MAX_CLUSTERS = 20
"""Maximum number of clusters that a search names."""
MAX_SELECTED = 1000
"""Maximum number of jobs in one bulk action."""
MAX_SEARCHES = 5
"""Maximum number of searches for the ended jobs of a table; each examines thousands."""
MAX_KEYS = 10_000
"""Maximum number of sent forms that are known."""

Act = Callable[..., Awaitable[Sequence[ActionResult]]]
Action = Literal["cancel", "hold", "release", "high", "low"]
WORDS: Mapping[Action, tuple[str, str, str]] = {
    "cancel": ("Cancel jobs", "Cancel", "cancels"),
    "hold": ("Hold jobs", "Hold", "holds"),
    "release": ("Release jobs", "Release", "releases"),
    "high": ("Give jobs high priority", "Give high priority to", "gives high priority to"),
    "low": ("Give jobs low priority", "Give low priority to", "gives low priority to"),
}
"""Title, imperative and third person of each action."""
Text = Annotated[
    fields.Text, Query(max_length=MAX_LENGTH, description="filter of jobs, such as user:alice state:waiting")
]
JobNumber = Annotated[int, Field(ge=-fields.MAX_ID, le=fields.MAX_ID)]
SelectedJobs = Annotated[list[JobNumber], Query(max_length=MAX_SELECTED)]


class ShownStates(fields.Input):
    """The jobs of a form with the states that the page showed: a job that has changed since is not acted on."""

    jobs: dict[JobNumber, JobState] = Field(min_length=1, max_length=MAX_SELECTED)


async def _find_page(
    finder: JobFinder, queues: PlacementQueues, q: str, caller: Identity, query: TableQuery
) -> tuple[list[Job], TableView]:
    """Return a page of jobs. Ended jobs, which the database holds, are listed by their numbers, newest first, or if
    they are at most ``MAX_SELECTED``, by their ends. Raise ``UsageError`` about ``q`` if they are more, or if too many
    jobs have to be examined to find them."""
    search, sortable, total = parse_search(q), None, None
    if search.states & FINAL_STATES and query.sort.removeprefix("-") == "ended":
        jobs, below, sort, sortable = list[Job](), None, query.sort, ("ended",)
        for _ in range(MAX_SEARCHES):
            result = await finder.find_jobs(search, caller, below=below, limit=MAX_SELECTED)
            jobs, below = [*jobs, *result.jobs], result.next_below
            if below is None or len(jobs) >= MAX_SELECTED:
                break
        if below is not None:
            many = "match" if len(jobs) >= MAX_SELECTED else "have to be examined"
            hint = "narrow the filter by a user, a cluster or an end, as with ended:2026-11-24"
            raise UsageError(f"too many ended jobs {many} to sort them by their ends", field="q", value=q, hint=hint)
        total = len(jobs)
        page, position = tables.cut_page([(job.ended_at, job.id, job) for job in jobs], query, sort)
    elif search.states & FINAL_STATES:
        sort = tables.sort_of(JOBS, query, {"id"}) if query.sort else "-id"
        if sort != "-id":
            hint = "exclude ended jobs, as with state:waiting"
            raise UsageError("ended jobs are listed newest first", field="sort", value=query.sort, hint=hint)
        below = tables.parse_number_position(query.after) or None
        result = await finder.find_jobs(search, caller, below=below, limit=query.limit)
        page, sortable = list(result.jobs), ("ended",)
        position = tables.write_position(result.next_below, result.next_below) if result.next_below else ""
    else:
        matching, sort = await finder.find_unfinished(search, caller), tables.sort_of(JOBS, query)
        key, keyed = job_sort_key(sort, caller, queues), list[tuple[Value, int, Job]]()
        async for slice_of_jobs in iterate_in_slices(matching):
            keyed += [(key(job), job.id, job) for job in slice_of_jobs]
        page, position = await to_thread(tables.cut_page, keyed, query, sort)
        total = len(matching)
    return page, tables.make_view(
        JOBS, query, "/queue", {"q": q}, shown=len(page), total=total, next_after=position, sort=sort, sortable=sortable
    )


def add_queue(dashboard: Dashboard, services: Services) -> None:
    """Add the page that lists and searches jobs, and those that change many jobs at a time."""
    finder = JobFinder(services.jobs, dashboard.engine.queries, dashboard.engine.clock)
    _add_list(dashboard, services.jobs, services.forecasts, finder)
    _add_mine(dashboard, services, finder)
    _add_bulk_actions(dashboard, services.jobs, finder)


def _add_list(dashboard: Dashboard, jobs: Jobs, forecasts: Forecasts, finder: JobFinder) -> None:
    """Add the page that lists and searches jobs."""
    queries = dashboard.engine.queries

    @dashboard.page("/queue", "queue.html", operation="list_jobs", title="Jobs", key="q", shared=True, table=JOBS)
    async def queue(caller: Caller, table: TableParameters, q: Text = "") -> View:
        """Return the jobs that a search finds; an invalid search returns its problem instead."""
        problem, page, view = None, list[Job](), None
        try:
            page, view = await _find_page(finder, queries.queues, q, caller, table)
        except UsageError as error:
            if error.field != "q":
                raise
            problem = error
            view = tables.make_view(JOBS, TableQuery(), "/queue", {"q": q}, shown=0, total=0)
        return {
            "q": q,
            "problem": problem.message if problem else "",
            "hint": problem.hint if problem else "",
            "jobs": await build_rows(page, caller, jobs, queries, forecasts.latest_forecast),
            "table": view,
            # The filter for the caller's own jobs; empty for operators, since they share the page
            "own": "" if caller.has_role(Role.OPERATOR) else format_term("user", caller.user),
            "high_priority_allowed": jobs.rules.high_priority.is_allowed_to(caller),
            "clusters": [
                cluster.name
                for cluster in queries.grid.clusters()
                if any(word in cluster.name.lower() for word in q.lower().split() if ":" not in word)
            ][:MAX_CLUSTERS],
        }


def _add_mine(dashboard: Dashboard, services: Services, finder: JobFinder) -> None:
    """Add the page of the caller's own jobs, limits and use."""
    queries, jobs, limits = dashboard.engine.queries, services.jobs, services.limits

    @dashboard.page("/my-jobs", "my_jobs.html", operation="show_limits", title="My jobs", key="y")
    async def mine(caller: Caller) -> View:
        """Return the caller's unfinished jobs as in the queue, the last ended ones, and the limits in use."""
        own_filter = format_term("user", caller.user)
        unfinished = await finder.find_unfinished(parse_search(own_filter), caller)
        unfinished.sort(key=lambda job: queue_place(job, queries.queues))
        ended = await finder.find_jobs(parse_search(f"{own_filter} state:over"), caller, limit=MAX_ENDED)
        states = Counter(job.state for job in unfinished)
        rows = await build_rows(unfinished[:MAX_UNFINISHED], caller, jobs, queries, services.forecasts.latest_forecast)
        active = [job for job in unfinished if job.state.is_active]
        return {
            "user": caller.user,
            "filter": own_filter,
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


def _add_bulk_actions(dashboard: Dashboard, jobs: Jobs, finder: JobFinder) -> None:
    """Add the actions on many jobs, with a preview for the user's confirmation, and a page of changed and unchanged
    jobs."""
    queries, bulk, result_page = dashboard.engine.queries, jobs.bulk, {"template": "queue_done.html", "title": "Result"}
    used = deque[str](maxlen=MAX_KEYS)  # the keys of sent forms
    prefix = secrets.token_urlsafe(6)  # of all keys since the daemon started

    @dashboard.page("/queue/confirm", "queue_confirm.html", operation="list_jobs", title="Act on jobs", live=False)
    async def confirm(
        caller: Caller,
        action: Action,
        q: Text = "",
        job: SelectedJobs = [],  # noqa: B006
        all: bool = False,
    ) -> View:
        """Return the effect of an action on the selected or on all found jobs, without acting."""
        if all:
            # Ended jobs cannot be changed, and may be so many that a page of all matching jobs has no others.
            matching = await finder.find_unfinished(parse_search(q), caller)
            selected = nlargest(MAX_SELECTED, matching, key=attrgetter("id"))
            omitted = len(matching) - len(selected)
        else:
            selected, omitted = list((await jobs.get_many(job)).values()), 0
        if action == "high":
            jobs.rules.check_priority(Priority.HIGH, caller, "leave it low")
        reasons = {job.id: exclusion_reason(action, job, caller) for job in selected}
        affected = [job for job in selected if not reasons[job.id]]
        counts = Counter(reason for reason in reasons.values() if reason)
        left_out = [(count, reason) for reason, count in counts.items()]
        if omitted:
            left_out.append((omitted, f"only {MAX_SELECTED} jobs are changed at once, the newest first"))
        users = Counter(job.spec.owner for job in affected)
        title, order, does = WORDS[action]
        return {
            "title": title,
            "action": action,
            "path": "/queue/priority" if action in ("high", "low") else f"/queue/{action}",
            # The action in the third person, and in the imperative for the button
            "does": does,
            "order": order,
            "count": len(affected),
            "key": prefix + secrets.token_urlsafe(12),
            # The first of the jobs
            "jobs": await build_rows(affected[: tables.DEFAULT_ROWS], caller, jobs, queries, None),
            # Ids and states of all jobs, for the form
            "shown_states": ",".join(f"{job.id}:{job.state}" for job in affected),
            "states": dict(Counter(str(job.state) for job in affected)),
            "users": dict(users),
            # Numbers of selected jobs to which the action does not apply, with reasons
            "left_out": left_out,
            "q": q,
            "needs_reason": action in ("cancel", "hold") and any(not owns(caller, job) for job in affected),
        }

    async def act_once(form: Form, action: Action, act: Act) -> FormAnswer:
        """Return the jobs that an action changed, and those that it did not. Lead to the queue if the form was sent
        before, since a reload would change jobs that have returned to the shown state."""
        pairs = (pair.partition(":")[::2] for pair in form.get("jobs").split(","))
        states = parse_body(ShownStates, {"jobs": dict(pairs)}).jobs
        key, q = form.get("key"), form.get("q")[:MAX_LENGTH]
        if not key.startswith(prefix) or len(key) > 100:
            raise UsageError("the form is older than the daemon", field="key", hint="select the jobs again")
        if key in used:
            return with_query("/queue", q=q)
        used.append(key)
        try:
            jobs = [changed_job(result) for result in await act(list(states), expected=states)]
        except KoalaError:
            used.remove(key)  # nothing was changed, or the states that the form expects prevent a second change
            raise
        return {"title": WORDS[action][0], "jobs": jobs, "q": q}, 200

    @dashboard.action("/queue/cancel", operation="cancel_jobs", **result_page)
    async def cancel(caller: Caller, form: SentForm) -> FormAnswer:
        return await act_once(form, "cancel", partial(bulk.cancel_jobs, caller=caller, reason=form.reason))

    @dashboard.action("/queue/hold", operation="hold_jobs", **result_page)
    async def hold(caller: Caller, form: SentForm) -> FormAnswer:
        return await act_once(form, "hold", partial(bulk.hold_jobs, caller=caller, reason=form.reason))

    @dashboard.action("/queue/release", operation="release_jobs", **result_page)
    async def release(caller: Caller, form: SentForm) -> FormAnswer:
        return await act_once(form, "release", partial(bulk.release_jobs, caller=caller))

    @dashboard.action("/queue/priority", operation="set_priority", **result_page)
    async def priority(caller: Caller, form: SentForm) -> FormAnswer:
        """Set the priority of the selected jobs; raise ``UsageError`` for an unknown priority."""
        value = parse_body(PriorityOrder, {"jobs": [1], "priority": form.get("priority")}).priority
        act = partial(bulk.set_priority, priority=value, caller=caller, reason=form.reason)
        return await act_once(form, "high" if value is Priority.HIGH else "low", act)


def exclusion_reason(action: Action, job: Job, caller: Identity) -> str:
    """Return why an action does not apply to a job; empty if it does."""
    if not may_see_all_of(caller, job):
        return "not yours"
    if job.state.is_final:
        return "already finished"
    if action == "cancel":
        return ""
    if not job.state.is_waiting:
        return "already placed: only waiting jobs can be held, released or given another priority"
    is_done, reason = {
        "hold": (job.state is JobState.HELD, "already held"),
        "release": (job.state is not JobState.HELD, "not held"),
        "high": (job.spec.priority is Priority.HIGH, "already of high priority"),
        "low": (job.spec.priority is Priority.LOW, "already of low priority"),
    }[action]
    return reason if is_done else ""
