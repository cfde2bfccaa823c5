"""Logging in and out with a browser: a token is shown once, and the browser gets one of its own."""

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from starlette.datastructures import Headers

from koalapy.api.access import Caller
from koalapy.api.addresses import client_address
from koalapy.api.cookie import LOGIN, login_cookie
from koalapy.api.shown import ShownTokens
from koalapy.dashboard.dashboard import Dashboard, SentForm, read_form
from koalapy.model.identity import Identity
from koalapy.service.audit import about, under_way
from koalapy.service.identities import Identities

NOTE = "a browser"


def destination(wanted: str) -> str:
    """Where to go after the login: a page of ours, whatever was asked for."""
    is_ours = wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted and wanted.isprintable()
    return wanted if is_ours and not wanted.startswith(LOGIN) else "/"


def add_login(dashboard: Dashboard, identities: Identities, shown: ShownTokens, lifetime: float) -> None:
    """``lifetime``: seconds for which a browser's login holds."""
    router: APIRouter = dashboard.router
    clock = dashboard.engine.clock

    @router.get(LOGIN, operation_id="dashboard_login")
    async def ask(request: Request, next: str = "/") -> Response:
        """Ask for a token."""
        return dashboard.plain(request, "login.html", title="Log in", next=destination(next), problem=None)

    @router.post(LOGIN, operation_id="dashboard_login")
    async def log_in(request: Request) -> Response:
        """Take a token, and give the browser a login."""
        form = await read_form(request)
        found = await shown.identity(client_address(request.scope), form.get("token"))
        where = destination(form.get("next"))
        if not isinstance(found, Identity):
            why = {"detail": "Nobody has this token, or it holds no longer.", "hint": "koala token create makes one"}
            if found.status_code == 429:
                why = {"detail": "Too many wrong tokens were shown from your address.", "hint": "wait a minute"}
            return dashboard.plain(request, "login.html", found.status_code, title="Log in", next=where, problem=why)
        under_way(found, "dashboard_login", "", change=True)
        now = clock()
        ends = min(now + lifetime, found.expires_at or float("inf"))
        made, token = await identities.issue(
            found.user, found.role, ends, found.user, how=found.how, note=NOTE, made_by=found.token
        )
        about(f"token {made.id}", NOTE)
        headers = {"Set-Cookie": login_cookie(request.scope, Headers(scope=request.scope), token, ends - now)}
        return RedirectResponse(where, 303, headers)

    @router.post("/logout", operation_id="logout")
    async def log_out(request: Request, caller: Caller, form: SentForm) -> Response:
        """Have the browser's login hold no longer."""
        if caller.token is not None:
            await identities.revoke([caller.token], caller)
        headers = {"Set-Cookie": login_cookie(request.scope, Headers(scope=request.scope), "", 0)}
        return RedirectResponse(LOGIN, 303, headers)
