"""The page Queue: jobs by a filter that stands in the address, and what is done to many of them at once."""

import secrets
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fastapi import Query
from pydantic import Field

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.daemon.jobs.job_finder import JobFinder
from koalapy.daemon.jobs.jobs import ActionResult
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard, Form, SentForm
from koalapy.dashboard.rendering import with_query
from koalapy.dashboard.rows import JobRow, job_row
from koalapy.model.errors import NotFoundError, UsageError
from koalapy.model.identity import Identity
from koalapy.model.job import Job, JobId, JobState, Priority
from koalapy.model.job_search import KINDS, MAX_LENGTH, format_term, parse_search
from koalapy.system.event_loop import iterate_in_slices
from koalapy.validation.permissions import may_see_all_of

MAX_ROWS = 200
"""A browser shows so many, and changes in them, without a pause that is felt."""
MAX_CHOSEN = 1000
"""Jobs that are acted on at once."""
ROWS_AT_ONCE = 20
"""Rows that are made before others have their turn: each may ask a policy why its job waits."""
MAX_OUTCOMES, MAX_OWN_OUTCOMES = 1000, 20
"""Of all users, and of one: nobody's acts make those of others be forgotten."""

Action = Literal["cancel", "hold", "release", "high", "low"]
WORDS: Mapping[Action, tuple[str, str, str]] = {
    "cancel": ("Cancel jobs", "Cancel", "cancels"),
    "hold": ("Hold jobs", "Hold", "holds"),
    "release": ("Release jobs", "Release", "releases"),
    "high": ("Give jobs high priority", "Give high priority to", "gives high priority to"),
    "low": ("Give jobs low priority", "Give low priority to", "gives low priority to"),
}
"""Of each action its title, its order, and what it does."""
Text = Annotated[fields.Text, Query(max_length=MAX_LENGTH, description="which jobs, as user:alice state:waiting")]
Before = Annotated[int | None, Query(ge=1, le=fields.MAX_ID, description="only jobs with smaller ids")]
Limit = Annotated[int, Query(ge=1, le=MAX_ROWS)]
JobNumber = Annotated[int, Field(ge=-fields.MAX_ID, le=fields.MAX_ID)]
Chosen = Annotated[list[JobNumber], Query(max_length=MAX_CHOSEN)]


@dataclass(frozen=True, slots=True)
class Example:
    """A filter that is offered."""

    title: str
    q: str


@dataclass(frozen=True, slots=True)
class QueueView:
    """One page of jobs, newest first."""

    q: str
    problem: str
    """What is wrong with the filter; then there are no jobs."""
    hint: str
    jobs: Sequence[JobRow]
    unfinished: int
    """How many that are not over the filter finds, from this page on."""
    next: str
    """Where the next page is; empty on the last."""
    words: Sequence[str]
    """Of the filter, each by an example."""
    examples: Sequence[Example]
    high_priority_allowed: bool
    """Whether the caller may give jobs high priority."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Of the jobs that were chosen, those to which nothing will be done."""

    count: int
    why: str


@dataclass(frozen=True, slots=True)
class ConfirmView:
    """What would become of which jobs."""

    title: str
    action: Action
    path: str
    effect: str
    """``cancels 12 jobs of 3 users``."""
    order: str
    """The same, as somebody says it who wants it."""
    jobs: Sequence[JobRow]
    shown: str
    """The jobs and the states that they are in, for the form."""
    states: Mapping[str, int]
    users: Mapping[str, int]
    left_out: Sequence[LeftOut]
    q: str


@dataclass(frozen=True, slots=True)
class Outcome:
    job: JobId
    state: str
    priority: str
    problem: str
    hint: str


@dataclass(frozen=True, slots=True)
class OutcomeView:
    effect: str
    done: Sequence[Outcome]
    refused: Sequence[Outcome]
    q: str


class _Outcomes:
    """The last ones of each who acted: a page tells them after the form is sent."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[str, OutcomeView]] = OrderedDict()

    def add(self, user: str, view: OutcomeView) -> str:
        ident = secrets.token_urlsafe(12)
        own = [each for each, (owner, _) in self._kept.items() if owner == user]
        for oldest in own[: max(0, len(own) + 1 - MAX_OWN_OUTCOMES)]:
            del self._kept[oldest]
        self._kept[ident] = (user, view)
        while len(self._kept) > MAX_OUTCOMES:
            self._kept.popitem(last=False)
        return ident

    def get(self, user: str, ident: str) -> OutcomeView:
        owner, view = self._kept.get(ident, ("", None))
        if view is None or owner != user:
            raise NotFoundError("what became of that is not kept any more", hint="each job's page tells it")
        return view


def add_queue(dashboard: Dashboard, services: Services) -> None:
    engine, jobs = dashboard.engine, services.jobs
    finder = JobFinder(jobs, engine.queries, engine.clock)

    async def rows_of(found: Sequence[Job], by: Identity) -> list[JobRow]:
        positions = engine.queries.queues.positions(found)
        rows: list[JobRow] = []
        async for some in iterate_in_slices(found, ROWS_AT_ONCE):
            rows += [job_row(jobs.record(job), by, positions.get(job.id)) for job in some]
        return rows

    @dashboard.page("/queue", "queue.html", operation="list_jobs", title="Queue", key="q")
    async def queue(caller: Caller, q: Text = "", before: Before = None, limit: Limit = 100) -> QueueView:
        words, allowed = [kind.example for kind in KINDS.values()], jobs.rules.high_priority.is_allowed_to(caller)
        view = QueueView(q, "", "", (), 0, "", words, _examples(caller), allowed)
        try:
            search = parse_search(q)
            found = await finder.find(search, caller, before=before, limit=limit)
        except UsageError as error:
            return replace(view, problem=error.message, hint=error.hint)
        more = with_query("/queue", q=q, before=found.before, limit=limit if limit != 100 else None)
        rows = await rows_of(found.jobs, caller)
        return replace(view, jobs=rows, unfinished=found.unfinished, next=more if found.before else "")

    @dashboard.page("/queue/confirm", "queue_confirm.html", operation="list_jobs", title="Act on jobs", live=False)
    async def confirm(caller: Caller, action: Action, q: Text = "", job: Chosen = [], all: bool = False) -> ConfirmView:  # noqa: B006
        if all:
            meant = await finder.find(parse_search(q), caller, limit=MAX_CHOSEN)
            chosen, more = list(meant.jobs), max(0, meant.unfinished - len(meant.jobs))
        else:
            chosen, more = list((await jobs.get_many(job)).values()), 0
        if action == "high":
            jobs.rules.check_priority(Priority.HIGH, caller, "leave it low")
        acted_on, left_out = _sorted_out(action, chosen, caller)
        if more:
            left_out.append(LeftOut(more, f"more match: only {MAX_CHOSEN} are acted on at once, the newest first"))
        return _confirmation(action, q, acted_on, left_out, await rows_of(acted_on, caller))

    _add_actions(dashboard, services)


def _add_actions(dashboard: Dashboard, services: Services) -> None:
    bulk, outcomes = services.jobs.bulk, _Outcomes()

    def told(form: Form, by: Identity, action: Action, done: Sequence[ActionResult]) -> str:
        all_of_them = [_outcome(one) for one in done]
        acted, refused = [o for o in all_of_them if not o.problem], [o for o in all_of_them if o.problem]
        view = OutcomeView(WORDS[action][0], acted, refused, form.get("q")[:MAX_LENGTH])
        return f"/queue/done/{outcomes.add(by.user, view)}"

    @dashboard.page("/queue/done/{ident}", "queue_done.html", operation="list_jobs", title="What was done", live=False)
    async def done(caller: Caller, ident: str) -> OutcomeView:
        return outcomes.get(caller.user, ident)

    @dashboard.action("/queue/cancel", operation="cancel_jobs")
    async def cancel(caller: Caller, form: SentForm) -> str:
        shown = _shown(form)
        return told(form, caller, "cancel", await bulk.cancel(list(shown), caller, form.reason, shown))

    @dashboard.action("/queue/hold", operation="hold_jobs")
    async def hold(caller: Caller, form: SentForm) -> str:
        shown = _shown(form)
        return told(form, caller, "hold", await bulk.hold(list(shown), caller, form.reason, shown))

    @dashboard.action("/queue/release", operation="release_jobs")
    async def release(caller: Caller, form: SentForm) -> str:
        shown = _shown(form)
        return told(form, caller, "release", await bulk.release(list(shown), caller, shown))

    @dashboard.action("/queue/priority", operation="set_priority")
    async def priority(caller: Caller, form: SentForm) -> str:
        shown, wanted = _shown(form), form.get("priority")
        if wanted not in ("high", "low"):
            raise UsageError("the form says no priority", field="priority", value=wanted, hint="give high or low")
        found = await bulk.set_priority(list(shown), Priority(wanted), caller, form.reason, shown)
        return told(form, caller, "high" if wanted == "high" else "low", found)


def _sorted_out(action: Action, chosen: Sequence[Job], by: Identity) -> tuple[list[Job], list[LeftOut]]:
    reasons = [(job, _not_for(action, job, by)) for job in chosen]
    left_out = Counter(why for _, why in reasons if why)
    return [job for job, why in reasons if not why], [LeftOut(count, why) for why, count in left_out.items()]


def _confirmation(
    action: Action, q: str, acted_on: Sequence[Job], left_out: Sequence[LeftOut], rows: Sequence[JobRow]
) -> ConfirmView:
    users = Counter(job.spec.owner for job in acted_on)
    title, order, does = WORDS[action]
    return ConfirmView(
        title=title,
        action=action,
        path="/queue/priority" if action in ("high", "low") else f"/queue/{action}",
        effect=_effect(does, len(acted_on), len(users)),
        order=_effect(order, len(acted_on), len(users)),
        jobs=rows,
        shown=",".join(f"{job.id}:{job.state}" for job in acted_on),
        states=dict(Counter(str(job.state) for job in acted_on)),
        users=dict(users),
        left_out=left_out,
        q=q,
    )


def _examples(by: Identity) -> Sequence[Example]:
    return (
        Example("all that are not over", ""),
        Example("yours", format_term("user", by.user)),
        Example("waiting", "state:waiting"),
        Example("held", "state:held"),
        Example("active", "state:active"),
        Example("failed", "state:failed"),
        Example("waiting for more than an hour", "state:waiting age>1h"),
        Example("of high priority", "priority:high"),
    )


def _not_for(action: Action, job: Job, by: Identity) -> str:
    if not may_see_all_of(by, job):
        return "not yours"
    if job.state.is_final:
        return "over already"
    if action == "cancel":
        return ""
    if not job.state.is_waiting:
        return "not waiting any more: only jobs that wait are held, released, or given another priority"
    already = {
        "hold": (job.state is JobState.HELD, "held already"),
        "release": (job.state is not JobState.HELD, "not held"),
        "high": (job.spec.priority is Priority.HIGH, "of high priority already"),
        "low": (job.spec.priority is Priority.LOW, "of low priority already"),
    }[action]
    return already[1] if already[0] else ""


def _effect(does: str, count: int, users: int) -> str:
    if not count:
        return "does nothing: it is for none of these jobs"
    jobs, owners = ("1 job" if count == 1 else f"{count} jobs"), ("1 user" if users == 1 else f"{users} users")
    return f"{does} {jobs} of {owners}"


def _shown(form: Form) -> dict[JobId, JobState]:
    told = form.get("jobs")
    try:
        pairs = [each.split(":") for each in told.split(",") if each]
        found = {int(job): JobState(state) for job, state in pairs}
    except ValueError as error:
        raise UsageError("the form does not say which jobs", field="jobs", hint="choose them again") from error
    if any(abs(job) > fields.MAX_ID for job in found):
        raise UsageError("the form names jobs that cannot be", field="jobs", hint="choose them again")
    if not found or len(found) > MAX_CHOSEN:
        raise UsageError(f"the form names {len(found)} jobs", field="jobs", hint=f"choose 1 to {MAX_CHOSEN}")
    return found


def _outcome(done: ActionResult) -> Outcome:
    if done.record is None:
        error = done.error
        return Outcome(done.job, "", "", error.message if error else "", error.hint if error else "")
    job = done.record.job
    return Outcome(done.job, str(job.state), str(job.spec.priority), "", "")
