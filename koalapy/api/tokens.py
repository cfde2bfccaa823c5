"""The routes of callers: their identity, tokens, browser logins and limits."""

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Query
from pydantic import Field

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.derived import view_model
from koalapy.api.fields import Input, Output, as_json
from koalapy.api.problems import problem_responses
from koalapy.api.routes import api_router
from koalapy.daemon.auth.identities import DEFAULT_SPAN, Identities, TokenOrder
from koalapy.daemon.auth.login import LOGIN_CODE_TTL_S, LoginCodes
from koalapy.daemon.jobs.quota import LimitsInUse, ScopeInUse
from koalapy.daemon.observability.audit import describe_request
from koalapy.model.errors import ConflictError, ForbiddenError
from koalapy.model.identity import Identity, Role
from koalapy.model.limits import ShareLine
from koalapy.store.records import StoredToken

USER_PATTERN = r"^[A-Za-z0-9_.+@-]+$"
MAX_TOKENS = 1000
"""Maximum number of tokens in one request to revoke."""
UserName = Annotated[fields.Text, Field(min_length=1, max_length=200, pattern=USER_PATTERN)]
TokenOwner = Annotated[fields.Name | None, Query(min_length=1, description="only tokens of this user")]
IncludeInvalid = Annotated[bool, Query(alias="all", description="include expired and recently revoked tokens")]
Id = Annotated[int, Path(ge=1, le=fields.MAX_ID, description="the token's number")]


class NewToken(Input):
    """A token to create: by default for the caller with the caller's role; for other users with the role ``user``."""

    user: UserName | None = None
    role: Role | None = None
    expires: Annotated[fields.Seconds, Field(gt=0)] | None = DEFAULT_SPAN
    """Lifetime; null: never expires. A token expires no later than the token that creates it, except for
    administrators."""
    note: fields.Reason = ""


class RevokeOrder(Input):
    """The tokens to revoke, together with all tokens that were created by them; or ``all`` created tokens."""

    tokens: Annotated[list[fields.JobId], Field(max_length=MAX_TOKENS)] = []
    all: bool = False


TokenView = view_model("TokenView", StoredToken, "An issued token, without its secret.", without={"digest"})


class CreatedToken(TokenView):  # type: ignore[misc, valid-type]
    token: str
    """The token itself, which is never shown again."""


class TokenList(Output):
    tokens: list[TokenView]  # type: ignore[valid-type]


def tokens_router(identities: Identities) -> APIRouter:
    """Return the routes that create, list and revoke tokens."""
    router = api_router("tokens", "/tokens")

    @router.post("", status_code=201, response_model=CreatedToken, responses=problem_responses(409))
    async def create_token(caller: Caller, order: NewToken | None = None) -> Any:
        """Create a token: administrators for any user, other users for themselves and with at most their own rights."""
        order = order or NewToken()
        user = order.user or caller.user
        role = order.role or (caller.role if user == caller.user else Role.USER)
        token, secret = await identities.create_token(TokenOrder(user, role, order.expires, order.note), caller)
        describe_request(f"token {token.id} of {token.user}, {token.role}")
        return as_json(TokenView.model_validate(token)) | {"token": secret}

    @router.get("", response_model=TokenList)
    async def list_tokens(caller: Caller, user: TokenOwner = None, include_invalid: IncludeInvalid = False) -> Any:
        """List valid tokens without their secrets: administrators see all tokens, other users their own."""
        return {"tokens": identities.list_tokens(caller, user, every=include_invalid)}

    @router.post("/revoke", response_model=TokenList, responses=problem_responses(404))
    async def revoke_tokens(caller: Caller, order: RevokeOrder) -> Any:
        """Revoke tokens at once, close their open streams, and return all that were revoked."""
        describe_request("all tokens" if order.all else f"tokens {', '.join(map(str, order.tokens))}")
        if not order.all:
            return {"tokens": await identities.revoke_tokens(order.tokens, caller)}
        if not caller.has_role(Role.ADMIN):
            raise ForbiddenError("only administrators may revoke all tokens", field="all", hint="list your own tokens")
        return {"tokens": await identities.revoke_all()}

    @router.post("/{token}/revoke", response_model=TokenList)
    async def revoke_token(caller: Caller, token: Id) -> Any:
        """Revoke a token and the tokens created with it."""
        return {"tokens": await identities.revoke_tokens([token], caller)}

    return router


Whoami = view_model(
    "Whoami",
    Identity,
    "The authenticated caller and how it was authenticated.",
    only={"user", "role", "how", "groups", "expires_at"},
)


class LoginCode(Output):
    """A link that logs a browser in once."""

    path: str
    """Path and query below the daemon's address."""
    expires_in: float
    """Seconds."""


class LoggedOut(Output):
    user: str


def login_router(identities: Identities, codes: LoginCodes) -> APIRouter:
    """Return the routes that show the caller, log out, and create links that log a browser in."""
    router = api_router("tokens", "")

    @router.get("/whoami", response_model=Whoami)
    async def whoami(caller: Caller) -> Any:
        """Show the caller's user, role and groups, how it was authenticated, and when its token expires."""
        return caller

    @router.post("/logout", response_model=LoggedOut, responses=problem_responses(404, 409))
    async def logout(caller: Caller) -> Any:
        """Revoke the token of this request at once."""
        if caller.token is None:
            raise ConflictError(
                f"{caller.how} cannot log out",
                hint="remove the token from the daemon's configuration, or log out at its provider",
            )
        await identities.revoke_tokens([caller.token], caller)
        return {"user": caller.user}

    @router.post("/login-codes", response_model=LoginCode)
    async def create_login_code(caller: Caller) -> Any:
        """Create a link that logs a browser in as the caller once, within a minute."""
        describe_request(detail="for a browser")
        return {"path": f"/login?{urlencode({'code': codes.create_code(caller)})}", "expires_in": LOGIN_CODE_TTL_S}

    return router


LimitedUser = Annotated[fields.Name | None, Query(min_length=1, description="the user; by default the caller")]


def limited_user(caller: Identity, user: str | None) -> str:
    """Return the user of the requested limits: by default the caller. Raise ``ForbiddenError`` for other users unless
    the caller is an operator."""
    if user and user != caller.user and not caller.has_role(Role.OPERATOR):
        raise ForbiddenError(
            "only operators may see the limits of other users",
            field="user",
            value=user,
            hint="leave user out to see your own",
        )
    return user or caller.user


class LimitsView(Output):
    user: str
    scopes: list[ScopeInUse]
    """Scopes with limits; empty if nothing is limited."""
    contact: str
    """Contact for higher limits."""


class WeightOrder(Input):
    """A weight of a user in fair share, and why."""

    weight: Annotated[float, Field(ge=0, le=1e9)] | None
    """Null: as configured."""
    reason: fields.GivenReason


class SharesView(Output):
    shares: list[ShareLine]
    """Each group before its members, those whose jobs come first at the top; empty without fair shares."""


def limits_router(limits: LimitsInUse) -> APIRouter:
    """Return the routes that show limits of a user and their use, and the fair shares."""
    router = api_router("tokens", "/limits")

    @router.get("", response_model=LimitsView)
    async def show_limits(caller: Caller, user: LimitedUser = None) -> Any:
        """Show the caller's limits and how much of each is used; operators may name another user."""
        user = limited_user(caller, user)
        return {"user": user, "scopes": await limits.read_limits(user), "contact": limits.limits.contact}

    @router.get("/shares", response_model=SharesView)
    async def list_shares(caller: Caller) -> Any:
        """List the use of groups and users compared with their weights; other users for operators only."""
        return {"shares": limits.read_shares(caller)}

    @router.post("/shares/{user}", response_model=SharesView, responses=problem_responses(409))
    async def set_weight(caller: Caller, user: UserName, order: WeightOrder) -> Any:
        """Set the weight of a user in fair share, which counts from the next scheduling cycle on."""
        await limits.weights.set_weight(user, order.weight, order.reason, caller)
        return {"shares": limits.read_shares(caller)}

    return router
