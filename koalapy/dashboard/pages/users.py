"""The page Users: what each has just now, what limits say, and tokens; users see their own."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Query

from koalapy.api.access import Caller
from koalapy.api.tokens import Id, LimitedUser, TokenView, limited_user
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.jobs.quota import ScopeInUse
from koalapy.daemon.services import Services
from koalapy.dashboard.dashboard import Dashboard, SentForm
from koalapy.dashboard.rendering import with_query
from koalapy.model.identity import Identity, Role
from koalapy.model.job import Job, JobState
from koalapy.system.event_loop import iterate_in_slices

AT_ONCE = 1000
MAX_USERS = 500
MAX_TOKENS = 500

Every = Annotated[bool, Query(alias="all", description="also tokens that hold no longer")]


@dataclass(frozen=True, slots=True)
class UserUse:
    """What somebody's jobs that are not over do; ``oldest`` is since when the first of those that wait has waited."""

    user: str
    queued: int
    held: int
    active: int
    nodes: int
    """That active jobs have, or were promised."""
    wanted: int
    """Nodes that jobs that wait ask for."""
    oldest: float | None


@dataclass(frozen=True, slots=True)
class UsersView:
    """Who asks, or everybody, and of one all that there is."""

    user: str
    """Of whom limits and tokens are shown."""
    users: Sequence[UserUse]
    more_users: int
    scopes: Sequence[ScopeInUse]
    contact: str
    """Where more is asked for."""
    tokens: Sequence[TokenView]
    more_tokens: int
    every: bool


@dataclass(slots=True)
class _Counts:
    states: dict[JobState, int] = field(default_factory=lambda: defaultdict(int))
    nodes: int = 0
    wanted: int = 0
    oldest: float | None = None

    def add(self, job: Job) -> None:
        self.states[job.state] += 1
        size = job.spec.request.total_size
        if job.state.is_active:
            self.nodes += size
        if job.state is JobState.QUEUED:
            self.wanted += size
            self.oldest = job.submitted_at if self.oldest is None else min(self.oldest, job.submitted_at)

    def told(self, user: str) -> UserUse:
        states = self.states
        active = sum(count for state, count in states.items() if state.is_active)
        queued, held = states.get(JobState.QUEUED, 0), states.get(JobState.HELD, 0)
        return UserUse(user, queued, held, active, self.nodes, self.wanted, self.oldest)


def add_users(dashboard: Dashboard, services: Services, identities: Identities) -> None:
    engine, limits = dashboard.engine, services.limits

    async def uses(by: Identity) -> list[UserUse]:
        counts: dict[str, _Counts] = {by.user: _Counts()}
        async for some in iterate_in_slices(engine.queries.jobs(), AT_ONCE):
            for job in some:
                if not job.spec.internal and (by.has_role(Role.OPERATOR) or job.spec.owner == by.user):
                    counts.setdefault(job.spec.owner, _Counts()).add(job)
        found = [count.told(user) for user, count in counts.items()]
        return sorted(found, key=lambda use: (-use.queued - use.active, use.user))

    @dashboard.page("/users", "users.html", operation="show_limits", title="Users", key="u")
    async def users(caller: Caller, user: LimitedUser = None, every: Every = False) -> UsersView:
        wanted = limited_user(caller, user)
        found = await uses(caller)
        # As by the REST API: administrators see all tokens, others their own.
        of = None if user is None and caller.has_role(Role.ADMIN) else wanted
        tokens = sorted(identities.list(caller, of, every=every), key=lambda token: -token.id)
        return UsersView(
            user=wanted,
            users=found[:MAX_USERS],
            more_users=max(0, len(found) - MAX_USERS),
            scopes=await limits.read(wanted),
            contact=limits.limits.contact,
            tokens=[TokenView.model_validate(token) for token in tokens[:MAX_TOKENS]],
            more_tokens=max(0, len(tokens) - MAX_TOKENS),
            every=every,
        )

    @dashboard.action("/users/tokens/{token}/revoke", operation="revoke_token")
    async def revoke(token: Id, caller: Caller, form: SentForm) -> str:
        await identities.revoke([token], caller)
        user = form.get("user")
        is_name = bool(user) and len(user) <= 200 and user.isprintable()
        return with_query("/users", user=user if is_name else None)
