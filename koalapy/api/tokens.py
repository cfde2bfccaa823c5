"""The routes of tokens: made, listed and revoked, by administrators all, by others their own."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import Field

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.fields import Input, Moment, Output
from koalapy.api.problems import declared
from koalapy.api.routes import api_router
from koalapy.daemon.auth.identities import DEFAULT_SPAN, Identities, TokenOrder
from koalapy.daemon.observability.audit import about
from koalapy.model.errors import ForbiddenError
from koalapy.model.identity import Role
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
    created_at: Moment
    created_by: str
    expires_at: Moment | None
    last_used_at: Moment | None
    """To the minute."""
    revoked_at: Moment | None
    made_by: int | None
    """The token that was shown when it was asked for, with which it is revoked."""


class MadeToken(TokenView):
    token: str
    """It is told here, and never again."""


class TokenList(Output):
    tokens: list[TokenView]


def _view(token: StoredToken) -> dict[str, Any]:
    return {name: getattr(token, name) for name in TokenView.model_fields}


def tokens_router(identities: Identities) -> APIRouter:
    """Make, list and revoke tokens."""
    router = api_router("tokens", "/tokens")

    @router.post("", status_code=201, response_model=MadeToken, responses=declared(409))
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

    @router.post("/revoke", response_model=TokenList, responses=declared(404))
    async def revoke_tokens(caller: Caller, order: RevokeOrder) -> Any:
        """Have tokens hold no longer, at once, also for what is open by them; answers all that were revoked."""
        about("all tokens" if order.all else f"tokens {', '.join(map(str, order.tokens))}")
        if not order.all:
            return {"tokens": [_view(token) for token in await identities.revoke(order.tokens, caller)]}
        if not caller.may(Role.ADMIN):
            raise ForbiddenError("all tokens are revoked by administrators", field="all", hint="name your own")
        return {"tokens": [_view(token) for token in await identities.revoke_all()]}

    @router.post("/{token}/revoke", response_model=TokenList)
    async def revoke_token(caller: Caller, token: Id) -> Any:
        """The same of one."""
        return {"tokens": [_view(each) for each in await identities.revoke([token], caller)]}

    return router
