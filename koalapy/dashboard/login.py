"""Logging in and out with a browser: by a token, a code of a terminal's, or a provider; it gets a token of its own."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from koalapy.api.access import Caller
from koalapy.api.guard import LOGIN_PATH, TokenAuthenticator, cookie_of, login_cookie, state_cookie
from koalapy.api.middleware import client_address
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.login import LoginCodes
from koalapy.daemon.auth.provider_login import ProviderLogins
from koalapy.daemon.observability.audit import about, under_way
from koalapy.dashboard.dashboard import Dashboard, SentForm, read_form
from koalapy.model.errors import SiteUnavailable, TokenRejected
from koalapy.model.identity import Identity

NOTE = "a browser"
AT_PROVIDER = f"{LOGIN_PATH}/provider"
BACK = f"{LOGIN_PATH}/callback"
"""Where a provider sends a browser back to: what must be registered there."""
Text = Annotated[str, Query(max_length=4000)]


def destination(wanted: str) -> str:
    """Where to go after the login: a page of ours, whatever was asked for."""
    is_ours = wanted.startswith("/") and not wanted.startswith("//") and "\\" not in wanted and wanted.isprintable()
    return wanted if is_ours and not wanted.startswith(LOGIN_PATH) else "/"


@dataclass(frozen=True, slots=True)
class LoginServices:
    """How browsers are logged in, and for how long: ``lifetime`` in seconds."""

    identities: Identities
    shown: TokenAuthenticator
    codes: LoginCodes
    provider: ProviderLogins | None
    lifetime: float


class BrowserLogin:
    def __init__(self, dashboard: Dashboard, ways: LoginServices) -> None:
        self._dashboard, self._identities, self._shown = dashboard, ways.identities, ways.shown
        self._codes, self._provider, self._lifetime = ways.codes, ways.provider, ways.lifetime
        self._clock = dashboard.engine.clock
        self._add(dashboard.router)

    def _add(self, router: APIRouter) -> None:
        router.add_api_route(LOGIN_PATH, self.ask, operation_id="dashboard_login")
        router.add_api_route(LOGIN_PATH, self.log_in, methods=["POST"], operation_id="dashboard_login")
        router.add_api_route("/logout", self.log_out, methods=["POST"], operation_id="logout")
        if self._provider is not None:
            router.add_api_route(AT_PROVIDER, self.go_to_provider, operation_id="dashboard_login")
            router.add_api_route(BACK, self.come_back, operation_id="dashboard_login")

    def _page(self, request: Request, status: int = 200, *, then: str = "/", **more: object) -> HTMLResponse:
        told = {"problem": None, "code": "", "whose": None, "title": "Log in", "next": then} | more
        return self._dashboard.plain(request, "login.html", status, has_provider=self._provider is not None, **told)

    async def ask(self, request: Request, next: Text = "/", code: Text = "") -> Response:
        """Ask for a token, or whether to go on as whom a terminal's code names."""
        whose = self._codes.whose(code) if code else None
        if code and whose is None:
            problem = {"detail": "This address was good once, for a minute.", "hint": "koala dashboard makes one"}
            return self._page(request, 401, problem=problem)
        return self._page(request, then=destination(next), code=code if whose else "", whose=whose)

    async def log_in(self, request: Request) -> Response:
        """Take a token or a code, and give the browser a login."""
        form = await read_form(request)
        where = destination(form.get("next"))
        if code := form.get("code"):
            known = self._codes.take(code)
            if known is None:
                return await self.ask(request, where, code)
            return await self._admit(request, known, where)
        found = await self._shown.identity(client_address(request.scope), form.get("token"))
        if isinstance(found, Identity):
            return await self._admit(request, found, where)
        why = {"detail": "Nobody has this token, or it holds no longer.", "hint": "koala token create makes one"}
        if found.status_code == 429:
            why = {"detail": "Too many wrong tokens were shown from your address.", "hint": "wait a minute"}
        elif found.status_code == 503:
            why = {"detail": "The OpenID provider's keys cannot be had.", "hint": "try again in a while"}
        return self._page(request, found.status_code, then=where, problem=why)

    async def go_to_provider(self, request: Request, next: Text = "/") -> Response:
        """Send the browser to the provider."""
        assert self._provider is not None
        back = str(request.url.replace(path=BACK, query=""))
        where, state = self._provider.begin(back, destination(next))
        return RedirectResponse(where, 303, {"Set-Cookie": state_cookie(request.scope, state)})

    async def come_back(self, request: Request, state: Text = "", code: Text = "", error: Text = "") -> Response:
        """Take what the provider says of who has come back from it."""
        assert self._provider is not None
        try:
            if error or not code or not state or cookie_of(request.scope, "state") != state:
                raise TokenRejected(error[:100] or "this login was not begun in this browser")
            identity, where = await self._provider.finish(state, code)
        except (TokenRejected, SiteUnavailable) as refusal:
            status = 401 if isinstance(refusal, TokenRejected) else 503
            about(detail=refusal.message)
            return self._page(request, status, problem={"detail": refusal.message, "hint": "try again"})
        # Browsers send the new cookie with what a page of ours leads to, not with what the provider's leads to.
        answer = await self._admit(request, identity, where)
        page = self._dashboard.plain(request, "logged_in.html", title="Logged in", next=where)
        page.headers["Set-Cookie"] = answer.headers["Set-Cookie"]
        return page

    async def _admit(self, request: Request, who: Identity, where: str) -> Response:
        under_way(who, "dashboard_login", "", change=True)
        now = self._clock()
        ends = min(now + self._lifetime, who.expires_at or float("inf"))
        made, token = await self._identities.issue(
            who.user, who.role, ends, who.user, how=who.how, note=NOTE, made_by=who.token
        )
        about(f"token {made.id}", NOTE)
        headers = {"Set-Cookie": login_cookie(request.scope, token, ends - now)}
        return RedirectResponse(where, 303, headers)

    async def log_out(self, request: Request, caller: Caller, form: SentForm) -> Response:
        """Have the browser's login hold no longer."""
        if caller.token is not None:
            await self._identities.revoke([caller.token], caller)
        headers = {"Set-Cookie": login_cookie(request.scope, "", 0)}
        return RedirectResponse(LOGIN_PATH, 303, headers)
