"""The page Users: current use, limits and tokens; users see their own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import Annotated

from fastapi import Query

from koalapy.api.access import Caller
from koalapy.api.tokens import Id, LimitedUser, TokenView, UserName, WeightOrder, limited_user
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.observability.audit import Audit
from koalapy.daemon.services import Services
from koalapy.dashboard import tables
from koalapy.dashboard.dashboard import Dashboard, SentForm, View, parse_body
from koalapy.dashboard.pages.audit import Before, read_changes
from koalapy.dashboard.rendering import format_iso_time, format_percent, identifier, render_age, with_query
from koalapy.dashboard.tables import Column, TableDefinition, TableParameters, Words
from koalapy.model.history import DAY, Kind, Step
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job, JobState
from koalapy.model.job_search import format_term
from koalapy.system.event_loop import iterate_in_slices

JOBS_PER_SLICE = 1000
HOURS_LIFETIME_S = 60.0
"""Age after which node-hours are counted again."""
MAX_TOKENS = 500
MAX_USERS = 1_000_000
"""Maximum number of users in the count of node-hours."""

IncludeInvalid = Annotated[bool, Query(alias="all", description="include expired and revoked tokens")]


@dataclass(slots=True)
class UserUse:
    """Unfinished jobs of a user and their nodes; ``oldest``: submission time of the oldest queued job."""

    user: str
    queued: int = 0
    held: int = 0
    active: int = 0
    nodes: int = 0
    """Nodes that active jobs have or are claiming."""
    requested_nodes: int = 0
    """Nodes that queued jobs request."""
    oldest: float | None = None
    day_hours: float = 0.0
    """Node-hours of the last 24 hours."""
    day_share: float = 0.0
    """Percent of those of all users."""
    month_hours: float = 0.0
    """Node-hours of the last 30 days."""
    month_share: float = 0.0
    target: float | None = None
    """Percent that the weight of the user gives by fair share; None without fair shares."""
    weight: float | None = None
    is_weight_set: bool = False
    """Whether an operator has set it in place of the configured one."""

    def count(self, job: Job) -> None:
        """Count an unfinished job."""
        if job.state is JobState.QUEUED:
            self.queued += 1
            self.requested_nodes += job.spec.request.total_size
            if self.oldest is None or job.submitted_at < self.oldest:
                self.oldest = job.submitted_at
        elif job.state is JobState.HELD:
            self.held += 1
        else:
            self.active += 1
            self.nodes += 0 if job.tasks is not None else job.spec.request.total_size  # an array itself has no nodes


def _jobs_of(state: str) -> Callable[[UserUse], str]:
    """Return the path of a user's jobs in a state."""
    return lambda use: with_query("/queue", q=f"{format_term('user', use.user)} state:{state}")


def _hold_cell(use: UserUse, now: float) -> str:
    if not use.queued:
        return ""
    query = f"{format_term('user', use.user)} state:queued"
    return tables.link(with_query("/queue/confirm", action="hold", all="true", q=query), "Hold waiting jobs…")


def _page_of(use: UserUse) -> str:
    return with_query("/users", user=use.user)


def _weight_cell(use: UserUse) -> str:
    if use.weight is None:
        return ""
    return f"{use.weight:g}" + (" <small>set</small>" if use.is_weight_set else "")


USERS: TableDefinition[UserUse] = TableDefinition(
    "users",
    (
        Column("user", "User", href=_page_of),
        Column(
            "waiting",
            "Waiting",
            attrgetter("queued"),
            "number",
            href=_jobs_of("queued"),
            sort_key=lambda use: (use.queued + use.active, use.queued),
        ),
        Column("held", "Held", style="number", href=_jobs_of("held")),
        Column("active", "Active", style="number", href=_jobs_of("active")),
        Column("nodes", "Nodes", style="number"),
        Column("requested", "Nodes requested", attrgetter("requested_nodes"), "number"),
        Column(
            "longest",
            "Longest wait",
            lambda use: format_iso_time(use.oldest),
            "number",
            html=lambda use, now: render_age(use.oldest, now) if use.oldest else "",
            sort_key=lambda use: None if use.oldest is None else -use.oldest,
        ),
        Column("day_hours", "Node-hours, 24 h", style="number", format="{:,.1f}".format),
        Column("day_share", "Share, 24 h", style="number", format=format_percent),
        Column("month_hours", "Node-hours, 30 d", style="number", format="{:,.1f}".format),
        Column("month_share", "Share, 30 d", style="number", format=format_percent),
        Column("target", "Target", style="number", format=format_percent),
        Column("weight", "Weight", html=lambda use, _: _weight_cell(use), style="number"),
        Column("action", "Action", html=_hold_cell, style="nowrap", is_sortable=False, is_in_csv=False),
    ),
    "-waiting",
    ident=lambda use: f"user-{identifier(use.user)}",
    href=_page_of,
)


def add_users(dashboard: Dashboard, services: Services, identities: Identities, audit_log: Audit) -> None:
    """Add the page of users, their limits and tokens, and the form that revokes a token."""
    engine, limits = dashboard.engine, services.limits

    hours: tuple[float, Mapping[str, float], Mapping[str, float]] = (-inf, {}, {})

    async def add_hours(users: dict[str, UserUse], *, sees_all: bool) -> None:
        """Set the node-hours and shares of users; with ``sees_all`` add the other users that have any."""
        nonlocal hours
        if not 0 <= engine.clock() - hours[0] < HOURS_LIFETIME_S:
            day = await services.history.read_node_hours(DAY)
            span = services.history.make_span(None, None, 30)
            table = await services.history.read_table(Kind.USER, Step.ALL, span, max_lines=MAX_USERS)
            hours = engine.clock(), day, {line.name: line.node_seconds / 3600 for line in table.lines}
        of_day, of_month = hours[1:]
        all_day, all_month = sum(of_day.values()) or 1.0, sum(of_month.values()) or 1.0
        for user in of_day.keys() | of_month.keys() if sees_all else users:
            use = users.setdefault(user, UserUse(user))
            use.day_hours, use.month_hours = of_day.get(user, 0.0), of_month.get(user, 0.0)
            use.day_share, use.month_share = 100 * use.day_hours / all_day, 100 * use.month_hours / all_month

    async def visible_uses(caller: Identity) -> list[UserUse]:
        """Count the unfinished jobs of each user. Callers that are not operators see only themselves."""
        users = {caller.user: UserUse(caller.user)}
        sees_all = caller.has_role(Role.OPERATOR)
        await add_hours(users, sees_all=sees_all)
        for line in limits.read_shares(caller):
            if line.user in users:
                use = users[line.user]
                use.target, use.weight, use.is_weight_set = 100 * line.target, line.weight, bool(line.set_weight)
        async for jobs in iterate_in_slices(engine.queries.jobs(), JOBS_PER_SLICE):
            for job in jobs:
                owner = job.spec.owner
                if not job.spec.internal and (sees_all or owner == caller.user):
                    (users.get(owner) or users.setdefault(owner, UserUse(owner))).count(job)
        return list(users.values())

    @dashboard.page("/users", "users.html", operation="show_limits", title="Users", key="u", table=USERS)
    async def users(
        caller: Caller,
        table: TableParameters,
        user: LimitedUser = None,
        include_invalid: IncludeInvalid = False,
        q: Words = "",
        changes_before: Before = 0,
    ) -> View:
        """Return the use of each visible user, and the limits and tokens of the chosen user."""
        shown_user = limited_user(caller, user)
        uses = [use for use in await visible_uses(caller) if tables.matches_text(q, (use.user,))]
        page_filter = {"q": q, "user": user or "", "all": "true" if include_invalid else ""}
        page, view = tables.show_rows(USERS, table, "/users", page_filter, uses)
        # As in the REST API, administrators see all tokens, other users their own.
        token_owner = None if user is None and caller.has_role(Role.ADMIN) else shown_user
        tokens = sorted(identities.list_tokens(caller, token_owner, every=include_invalid), key=lambda token: -token.id)
        return {
            "user": shown_user,
            "q": q,
            "users": page,
            "table": view,
            "scopes": await limits.read_limits(shown_user),
            "contact": limits.limits.contact,
            "shares": limits.read_shares(caller),
            "tokens": [TokenView.model_validate(token) for token in tokens[:MAX_TOKENS]],
            "more_tokens": max(0, len(tokens) - MAX_TOKENS),
            "include_invalid": include_invalid,
            # The weight of ``user``, unless operators have set one
            "configured_weight": limits.weights.configured_weight(shown_user),
            "changes": await read_changes(audit_log, caller, changes_before, actor=shown_user),
        }

    @dashboard.action("/users/{user}/weight", operation="set_weight")
    async def weigh(user: UserName, caller: Caller, form: SentForm) -> str:
        """Set the weight of a user, and return the path of the user's page."""
        order = parse_body(WeightOrder, {"weight": form.get("weight") or None, "reason": form.reason})
        await limits.weights.set_weight(user, order.weight, order.reason, caller)
        return with_query("/users", user=user)

    @dashboard.action("/users/tokens/{token}/revoke", operation="revoke_token")
    async def revoke(token: Id, caller: Caller, form: SentForm) -> str:
        """Revoke a token, and return the path of the page of the same user."""
        await identities.revoke_tokens([token], caller)
        user = form.get("user")
        is_name = bool(user) and len(user) <= 200 and user.isprintable()
        return with_query("/users", user=user if is_name else None)
