"""The route of limits: what a user may have, and has."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.fields import Output
from koalapy.api.routes import api_router
from koalapy.daemon.jobs.limits import LimitsInUse
from koalapy.model.errors import ForbiddenError
from koalapy.model.identity import Role

Of = Annotated[fields.Name | None, Query(min_length=1, description="of this user; by default of who asks")]


class LimitView(Output):
    """Bytes, nodes, node-hours, jobs, or requests in a second, by its name."""

    name: str
    limit: float
    used: float | None
    """Null of what is not added up, as requests."""


class ScopeView(Output):
    """Limits of a user, or of a group, all of whose members share them."""

    kind: Literal["user", "group"]
    name: str
    limits: list[LimitView]


class LimitsView(Output):
    user: str
    scopes: list[ScopeView]
    """None where nothing is limited."""
    contact: str
    """Where more is asked for."""


def limits_router(limits: LimitsInUse) -> APIRouter:
    """What a user may have, and has."""
    router = api_router("tokens", "/limits")

    @router.get("", response_model=LimitsView)
    async def show_limits(caller: Caller, user: Of = None) -> Any:
        """The limits of who asks, and how much of each is used; operators may ask for anybody's."""
        wanted = user or caller.user
        if wanted != caller.user and not caller.may(Role.OPERATOR):
            raise ForbiddenError(
                "the limits of others are for operators", field="user", value=user, hint="leave it out"
            )
        return {"user": wanted, "scopes": await limits.of(wanted), "contact": limits.limits.contact}

    return router
