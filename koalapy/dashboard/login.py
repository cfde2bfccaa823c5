"""Browser sessions: login by a token, by a one-time code of the command line or at an OpenID provider; logout."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from koalapy.api.access import Caller
from koalapy.api.guard import LOGIN_PATH, TokenAuthenticator, login_cookie, read_cookie, state_cookie
from koalapy.api.middleware import client_address
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.login import LoginCodes
from koalapy.daemon.observability.audit import describe_request, identify_request
from koalapy.dashboard.dashboard import Dashboard, SentForm, read_form
from koalapy.model.errors import SiteUnavailable, TokenRejected
from koalapy.model.identity import Identity

if TYPE_CHECKING:
    from koalapy.daemon.auth.oidc import ProviderLogins

SESSION_NOTE = "a browser"
PROVIDER_PATH = f"{LOGIN_PATH}/provider"
CALLBACK_PATH = f"{LOGIN_PATH}/callback"
"""The path to which a provider redirects the browser; it must be registered there."""
Text = Annotated[str, Query(max_length=4000)]


def safe_destination(path: str) -> str:
    """Return the page to open after the login: the requested path if it is one of this daemon, else ``/``."""
    is_local = path.startswith("/") and not path.startswith("//") and "\\" not in path and path.isprintable()
    return path if is_local and not path.startswith(LOGIN_PATH) else "/"


@dataclass(frozen=True, slots=True)
class LoginServices:
    """The services by which browsers log in, and the lifetime of their sessions."""

    identities: Identities
    authenticator: TokenAuthenticator
    codes: LoginCodes
    provider: "ProviderLogins | None"
    lifetime_s: float


class BrowserLogin:
    """The routes by which browsers log in and out."""

    def __init__(self, dashboard: Dashboard, services: LoginServices) -> None:
        self._dashboard, self._services = dashboard, services
        self._clock = dashboard.engine.clock
        router = dashboard.router
        router.add_api_route(LOGIN_PATH, self.show_login, operation_id="dashboard_login")
        router.add_api_route(LOGIN_PATH, self.log_in, methods=["POST"], operation_id="dashboard_login")
        router.add_api_route("/logout", self.log_out, methods=["POST"], operation_id="logout")
        if services.provider is not None:
            router.add_api_route(PROVIDER_PATH, self.redirect_to_provider, operation_id="dashboard_login")
            router.add_api_route(CALLBACK_PATH, self.finish_provider_login, operation_id="dashboard_login")

    def _login_page(self, request: Request, status: int = 200, *, then: str = "/", **values: object) -> HTMLResponse:
        """Return the login page; ``then`` is the path to open after the login."""
        context = {"problem": None, "code": "", "identity": None, "title": "Log in", "next": then} | values
        has_provider = self._services.provider is not None
        return self._dashboard.render_plain(request, "login.html", status, has_provider=has_provider, **context)

    async def show_login(self, request: Request, next: Text = "/", code: Text = "") -> Response:
        """Show a form for a token; with a valid one-time code, ask whether to log in as its user."""
        identity = self._services.codes.find_identity(code) if code else None
        if code and identity is None:
            problem = {
                "detail": "This link was valid once, for one minute.",
                "hint": "run koala dashboard again for a new one",
            }
            return self._login_page(request, 401, problem=problem)
        return self._login_page(request, then=safe_destination(next), code=code if identity else "", identity=identity)

    async def log_in(self, request: Request) -> Response:
        """Authenticate by a token or a one-time code, and begin a browser session."""
        form = await read_form(request)
        destination = safe_destination(form.get("next"))
        if code := form.get("code"):
            identity = self._services.codes.redeem_code(code)
            if identity is None:
                return await self.show_login(request, destination, code)
            return await self._begin_session(request, identity, destination)
        address = client_address(request.scope)
        result = await self._services.authenticator.authenticate(address, form.get("token"))
        if isinstance(result, Identity):
            return await self._begin_session(request, result, destination)
        problem = {"detail": "This token is unknown, expired or revoked.", "hint": "create one: koala token create"}
        if result.status_code == 429:
            problem = {"detail": "Too many wrong tokens were sent from your address.", "hint": "wait a minute"}
        elif result.status_code == 503:
            problem = {"detail": "The OpenID provider's keys are not available.", "hint": "try again later"}
        return self._login_page(request, result.status_code, then=destination, problem=problem)

    async def redirect_to_provider(self, request: Request, next: Text = "/") -> Response:
        """Redirect the browser to the OpenID provider."""
        assert self._services.provider is not None
        callback = str(request.url.replace(path=CALLBACK_PATH, query=""))
        url, state = self._services.provider.begin_login(callback, safe_destination(next))
        return RedirectResponse(url, 303, {"Set-Cookie": state_cookie(request.scope, state)})

    async def finish_provider_login(
        self, request: Request, state: Text = "", code: Text = "", error: Text = ""
    ) -> Response:
        """Begin a browser session with the identity that the OpenID provider returns."""
        assert self._services.provider is not None
        try:
            if error or not code or not state or read_cookie(request.scope, "state") != state:
                raise TokenRejected(error[:100] or "this login did not begin in this browser")
            identity, destination = await self._services.provider.finish_login(state, code)
        except (TokenRejected, SiteUnavailable) as problem:
            status = 401 if isinstance(problem, TokenRejected) else 503
            describe_request(detail=problem.message)
            return self._login_page(request, status, problem={"detail": problem.message, "hint": "try again"})
        # Browsers do not send a SameSite cookie with a redirect that began at the provider, so a page links on.
        response = await self._begin_session(request, identity, destination)
        page = self._dashboard.render_plain(request, "logged_in.html", title="Logged in", next=destination)
        page.headers["Set-Cookie"] = response.headers["Set-Cookie"]
        return page

    async def _begin_session(self, request: Request, identity: Identity, destination: str) -> Response:
        """Issue a token for a browser session; return the redirect to ``destination`` that sets its cookie.

        The session ends no later than the login that began it.
        """
        identify_request(identity, "dashboard_login", "", change=True)
        now = self._clock()
        expires_at = min(now + self._services.lifetime_s, identity.expires_at or float("inf"))
        stored, token = await self._services.identities.issue_token(
            identity.user,
            identity.role,
            expires_at,
            identity.user,
            how=identity.how,
            note=SESSION_NOTE,
            made_by=identity.token,
        )
        describe_request(f"token {stored.id}", SESSION_NOTE)
        headers = {"Set-Cookie": login_cookie(request.scope, token, expires_at - now)}
        return RedirectResponse(destination, 303, headers)

    async def log_out(self, request: Request, caller: Caller, form: SentForm) -> Response:
        """Revoke the token of the browser session."""
        if caller.token is not None:
            await self._services.identities.revoke_tokens([caller.token], caller)
        return RedirectResponse(LOGIN_PATH, 303, {"Set-Cookie": login_cookie(request.scope, "", 0)})
