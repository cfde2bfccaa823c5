"""The routes of who is logged in: who that is, and the end of it."""

from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter

from koalapy.api.access import Caller
from koalapy.api.fields import Moment, Output
from koalapy.api.problems import declared
from koalapy.api.routes import api_router
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.login_codes import SPAN, LoginCodes
from koalapy.daemon.observability.audit import about
from koalapy.model.errors import ConflictError
from koalapy.model.identity import Role

NOTE = "for a browser"


class Whoami(Output):
    """Who calls, and by what they are known."""

    user: str
    role: Role
    how: str
    groups: list[str]
    expires_at: Moment | None


class LoginCode(Output):
    """What logs a browser in, once and within a minute."""

    path: str
    """Of this daemon."""
    expires_in: float
    """Seconds."""


class LoggedOut(Output):
    user: str


def login_router(identities: Identities, codes: LoginCodes) -> APIRouter:
    """Ask who one is, and log out."""
    router = api_router("tokens", "")

    @router.get("/whoami", response_model=Whoami)
    async def whoami(caller: Caller) -> Any:
        """Who you are to the daemon, what you may do, how it knows you, and until when."""
        return {name: getattr(caller, name) for name in Whoami.model_fields}

    @router.post("/logout", response_model=LoggedOut, responses=declared(404, 409))
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
