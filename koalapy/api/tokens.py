"""The routes of callers: who they are, their tokens, and what they may have."""

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Query
from pydantic import Field

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.derived import view_model
from koalapy.api.fields import Input, Output, Timestamp
from koalapy.api.problems import problem_responses
from koalapy.api.routes import api_router
from koalapy.daemon.auth.identities import DEFAULT_SPAN, Identities, TokenOrder
from koalapy.daemon.auth.login_codes import SPAN, LoginCodes
from koalapy.daemon.jobs.quota import LimitsInUse, ScopeInUse
from koalapy.daemon.observability.audit import about
from koalapy.model.errors import ConflictError, ForbiddenError
from koalapy.model.identity import Identity, Role
from koalapy.ports import StoredToken

USER_PATTERN = r"^[A-Za-z0-9_.+@-]+$"
MAX_TOKENS = 1000
"""Tokens that may be revoked at once."""
UserName = Annotated[fields.Text, Field(min_length=1, max_length=200, pattern=USER_PATTERN)]
Of = Annotated[fields.Name | None, Query(min_length=1, description="only those of this user")]
Every = Annotated[bool, Query(alias="all", description="also those that have expired or were revoked of late")]
Id = Annotated[int, Path(ge=1, le=fields.MAX_ID, description="the token's number")]


class NewToken(Input):
    """A token that is wanted: by default for who asks, with the role that they have, and for others with the least."""

    user: UserName | None = None
    role: Role | None = None
    expires: Annotated[fields.Seconds, Field(gt=0)] | None = DEFAULT_SPAN
    """How long it holds; null for ever. Of others than administrators never longer than what they show."""
    note: fields.Reason = ""


class RevokeOrder(Input):
    """Which tokens are to hold no longer, with all that were made by them; or ``all`` that were ever asked for."""

    tokens: Annotated[list[fields.JobId], Field(max_length=MAX_TOKENS)] = []
    all: bool = False


class TokenView(Output):
    id: int
    user: str
    role: str
    how: str
    """By what its user was known when it was made; empty of those that were asked for."""
    note: str
    created_at: Timestamp
    created_by: str
    expires_at: Timestamp | None
    last_used_at: Timestamp | None
    """To the minute."""
    revoked_at: Timestamp | None
    made_by: int | None
    """The token that was shown when it was asked for, with which it is revoked."""


class CreatedToken(TokenView):
    token: str
    """It is told here, and never again."""


class TokenList(Output):
    tokens: list[TokenView]


def _view(token: StoredToken) -> dict[str, Any]:
    return {name: getattr(token, name) for name in TokenView.model_fields}


def tokens_router(identities: Identities) -> APIRouter:
    router = api_router("tokens", "/tokens")

    @router.post("", status_code=201, response_model=CreatedToken, responses=problem_responses(409))
    async def create_token(caller: Caller, order: NewToken | None = None) -> Any:
        """Make a token: administrators for anybody, others for themselves, with no more than what they show can do."""
        given = order or NewToken()
        user = given.user or caller.user
        role = given.role or (caller.role if user == caller.user else Role.USER)
        wanted = TokenOrder(user, role, given.expires, given.note)
        token, shown = await identities.create(wanted, caller)
        about(f"token {token.id} of {token.user}, {token.role}")
        return _view(token) | {"token": shown}

    @router.get("", response_model=TokenList)
    async def list_tokens(caller: Caller, user: Of = None, every: Every = False) -> Any:
        """The tokens that hold, never themselves: administrators see all, others their own."""
        return {"tokens": [_view(token) for token in identities.list(caller, user, every=every)]}

    @router.post("/revoke", response_model=TokenList, responses=problem_responses(404))
    async def revoke_tokens(caller: Caller, order: RevokeOrder) -> Any:
        """Have tokens hold no longer, at once, also for what is open by them; answers all that were revoked."""
        about("all tokens" if order.all else f"tokens {', '.join(map(str, order.tokens))}")
        if not order.all:
            return {"tokens": [_view(token) for token in await identities.revoke(order.tokens, caller)]}
        if not caller.has_role(Role.ADMIN):
            raise ForbiddenError("all tokens are revoked by administrators", field="all", hint="name your own")
        return {"tokens": [_view(token) for token in await identities.revoke_all()]}

    @router.post("/{token}/revoke", response_model=TokenList)
    async def revoke_token(caller: Caller, token: Id) -> Any:
        """The same of one."""
        return {"tokens": [_view(each) for each in await identities.revoke([token], caller)]}

    return router


NOTE = "for a browser"


Whoami = view_model(
    "Whoami", Identity, "Who calls, and by what they are known.", only={"user", "role", "how", "groups", "expires_at"}
)


class LoginCode(Output):
    """What logs a browser in, once and within a minute."""

    path: str
    """Of this daemon."""
    expires_in: float
    """Seconds."""


class LoggedOut(Output):
    user: str


def login_router(identities: Identities, codes: LoginCodes) -> APIRouter:
    router = api_router("tokens", "")

    @router.get("/whoami", response_model=Whoami)
    async def whoami(caller: Caller) -> Any:
        """Who you are to the daemon, what you may do, how it knows you, and until when."""
        return caller

    @router.post("/logout", response_model=LoggedOut, responses=problem_responses(404, 409))
    async def logout(caller: Caller) -> Any:
        """Have the token that is shown hold no longer, at once."""
        if caller.token is None:
            raise ConflictError(f"{caller.how} is no login that can end", hint="it is taken out where it was given")
        await identities.revoke([caller.token], caller)
        return {"user": caller.user}

    @router.post("/login-codes", response_model=LoginCode)
    async def create_login_code(caller: Caller) -> Any:
        """Have a browser logged in as who asks, without a token being told: by an address that is good once."""
        about(detail=NOTE)
        return {"path": f"/login?{urlencode({'code': codes.make(caller)})}", "expires_in": SPAN}

    return router


LimitsOf = Annotated[fields.Name | None, Query(min_length=1, description="of this user; by default of who asks")]


def limited_user(caller: Identity, user: str | None) -> str:
    """Return the user whose limits a caller asks for; raise ``ForbiddenError`` if they are not for the caller."""
    wanted = user or caller.user
    if wanted != caller.user and not caller.has_role(Role.OPERATOR):
        raise ForbiddenError("the limits of others are for operators", field="user", value=user, hint="leave it out")
    return wanted


class LimitsView(Output):
    user: str
    scopes: list[ScopeInUse]
    """None where nothing is limited."""
    contact: str
    """Where more is asked for."""


def limits_router(limits: LimitsInUse) -> APIRouter:
    router = api_router("tokens", "/limits")

    @router.get("", response_model=LimitsView)
    async def show_limits(caller: Caller, user: LimitsOf = None) -> Any:
        """The limits of who asks, and how much of each is used; operators may ask for anybody's."""
        wanted = limited_user(caller, user)
        return {"user": wanted, "scopes": await limits.read(wanted), "contact": limits.limits.contact}

    return router
