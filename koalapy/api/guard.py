"""Who may come in: the hosts, tokens and cookies that requests show, and how large a body may be."""

import asyncio
import re
import socket
from collections.abc import Callable, Iterable
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from math import ceil

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api.access import AGENT_PATHS, UPLOAD_PATH, identity_of, session_of, set_identity, set_session
from koalapy.api.middleware import client_address
from koalapy.api.problems import problem
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.pace import Pace
from koalapy.model.errors import ProblemCode, SiteUnavailable, TokenRejected
from koalapy.model.identity import Identity

_HOST = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<name>[^\[\]:/@\s]+))(?::\d{0,5})?")


class AllowedHosts:
    """Admits IP addresses, ``localhost``, the names given, and this machine's own."""

    def __init__(self, names: Iterable[str] = (), own: Callable[[], Iterable[str]] | None = None) -> None:
        self._names = {"localhost", *(_plain(name) for name in names)}
        self._ask_own = own or machine_names
        self._own: asyncio.Future[frozenset[str]] | None = None
        """Asked for once, when it matters first: the name service may be slow."""

    async def admits(self, header: str) -> bool:
        """Whether a ``Host`` header names this daemon."""
        parts = _HOST.fullmatch(header.strip())
        if parts is None:
            return False
        if (address := parts["six"]) is not None:
            return _is_address(IPv6Address, address)
        if _is_address(IPv4Address, parts["name"]):
            return True
        name = _plain(parts["name"])
        return name in self._names or name in await self._own_names()

    async def _own_names(self) -> frozenset[str]:
        if self._own is None:
            ask = self._ask_own
            self._own = asyncio.ensure_future(asyncio.to_thread(lambda: frozenset(_plain(name) for name in ask())))
        return await asyncio.shield(self._own)


def machine_names() -> set[str]:
    """What this machine is called, by itself and by the name service."""
    host = socket.gethostname()
    names = {host, host.partition(".")[0]}
    try:
        canonical, aliases, _ = socket.gethostbyaddr(host)
    except (OSError, UnicodeError):
        return names
    return names | {canonical, *aliases}


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


@lru_cache(256)
def _is_address(kind: type[IPv4Address] | type[IPv6Address], text: str) -> bool:
    try:
        kind(text)
    except AddressValueError:
        return False
    return True


LOGIN_PATH = "/login"
"""Where a form may be sent without being logged in."""
STATE_SPAN = 600.0
"""Seconds that somebody has at a provider."""


def _name(scope: Scope, what: str) -> str:
    """One for each daemon: browsers do not tell the ports of a host apart."""
    prefix = "__Host-" if scope["scheme"] == "https" else ""
    port = Headers(scope=scope).get("host", "").rpartition(":")[2]
    return "_".join(filter(None, (f"{prefix}koala", what, port if port.isdecimal() else "")))


def cookie_of(scope: Scope, what: str = "") -> str:
    """A cookie of this daemon's: of a browser's login, or ``what`` is named; empty without one, and of two.

    Whatever others of the same host have the browser keep, in whatever form, neither hides it nor stands for it.
    """
    given = Headers(scope=scope).getlist("cookie")
    if len(given) != 1:
        return ""
    pairs = (each.partition("=") for each in given[0].split(";"))
    found = [value.strip() for name, _, value in pairs if name.strip() == _name(scope, what)]
    return found[0] if len(found) == 1 else ""


def login_cookie(scope: Scope, token: str, seconds: float) -> str:
    """The header that gives a browser a login; with no seconds left, the one that takes it away."""
    return _cookie(scope, "", token, seconds, "Strict")


def state_cookie(scope: Scope, state: str) -> str:
    """The header by which a browser is known again that comes back from a provider, whose page leads it here."""
    return _cookie(scope, "state", state, STATE_SPAN, "Lax")


def _cookie(scope: Scope, what: str, value: str, seconds: float, site: str) -> str:
    secure = "; Secure" if scope["scheme"] == "https" else ""
    return f"{_name(scope, what)}={value}; Max-Age={int(seconds)}; Path=/; HttpOnly; SameSite={site}{secure}"


class TokenAuthenticator:
    """Whoever guesses is not listened to after a while. That keeps none out whose token cannot be guessed."""

    def __init__(self, identities: Identities, pace: Pace) -> None:
        self._identities, self._pace = identities, pace

    async def identity(self, address: str, shown: str) -> Identity | JSONResponse:
        """Who shows a token, from an address."""
        if not shown:
            return not_logged_in()
        why = ""
        identity = self._identities.of(shown)
        if identity is None:
            try:
                identity = await self._identities.verify(shown)
            except TokenRejected as error:
                why = error.message
            except SiteUnavailable as error:
                return problem(error.code, error.message, hint=error.hint, headers={"Retry-After": "10"})
        if identity is not None and not identity.guessable:
            return identity
        if wait := self._pace.guessing(address):
            return problem(
                ProblemCode.TOO_MANY_WRONG_TOKENS,
                f"too many tokens that nobody has were shown from {address}",
                hint="see that no program there shows an old one",
                headers={"Retry-After": str(ceil(wait))},
            )
        if identity is None:
            self._pace.failed(address)
            return not_logged_in(why)
        return identity

    def authenticate_browser(self, shown: str) -> Identity | None:
        """Who shows a token by a cookie: of those that were made for browsers no one can guess any."""
        identity = self._identities.of(shown) if shown else None
        return identity if identity is not None and identity.token is not None else None


def not_logged_in(why: str = "") -> JSONResponse:
    return problem(
        ProblemCode.NOT_LOGGED_IN,
        f"no valid token was shown: {why}" if why else "no valid token was shown",
        hint="set KOALA_TOKEN, or send Authorization: Bearer TOKEN",
        headers={"WWW-Authenticate": "Bearer"},
    )


READ_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""
REQUESTED_WITH = "X-Requested-With"
"""Any value of it will do: a page of another origin cannot send it without our leave."""
TYPES_OF_NO_FORM = ("application/json", "application/x-tar")
MAX_BODY_SIZE = 1024 * 1024
"""Bytes."""

TOO_LARGE = f"the body is larger than {MAX_BODY_SIZE} bytes; put large data into files that the job reads"


class Guard:
    """Lets in who addresses this daemon and shows a token, and no body that is too large, announced or not.

    So a web page gets nowhere, in whatever browser it is: one whose name was bound to our address sends a ``Host`` that
    is not ours, no page can send a token without our leave (for which it asks in vain), and a WebSocket that a page
    opens tells its origin. However a browser may show who sits before it, nothing is changed by what a page of another
    origin can send.
    """

    def __init__(self, app: ASGIApp, identities: Identities, hosts: AllowedHosts, pace: Pace) -> None:
        self._app = app
        self._pace = pace
        self._identities = identities
        self._shown = TokenAuthenticator(identities, pace)
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if refusal := await self._refusal(scope, headers):
            await refusal(scope, receive, send)
        elif scope["type"] == "websocket" or scope["path"].startswith(AGENT_PATHS):
            await self._app(scope, receive, send)
        elif scope["path"] == UPLOAD_PATH:
            await self._while_it_holds(scope, receive, send)
        elif scope["method"] in READ_METHODS:
            await self._while_it_holds(scope, _measured(receive), send)
        else:
            # What is being changed is not left half done.
            await self._app(scope, _measured(receive), send)

    async def _while_it_holds(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve what may take long, and break off when what was shown holds no longer."""
        identity = identity_of(scope)
        if identity is None:
            await self._app(scope, receive, send)
            return
        serving, over, began = asyncio.current_task(), False, False
        assert serving is not None

        def end() -> None:
            nonlocal over
            over = True
            serving.cancel()

        async def sending(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            with self._identities.using(identity, end):
                await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            if not over or serving.uncancel():
                raise
            # Of an answer that has begun the end is left out, so that nobody takes it for the whole.
            if not began:
                await not_logged_in()(scope, receive, send)

    async def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return problem(
                ProblemCode.INVALID_HOST, "a request names its host once", field="Host", hint="send one Host header"
            )
        if not await self._hosts.admits(hosts[0]):
            return _not_this_host(hosts[0])
        if scope["type"] == "websocket":
            return (
                problem(ProblemCode.FOREIGN_ORIGIN, "web pages may not connect", field="Origin")
                if "origin" in headers
                else None
            )
        path = scope["path"]
        # The agents' routes look at tokens of their own.
        if path.startswith(AGENT_PATHS):
            return None
        changes, of_api = scope["method"] not in READ_METHODS, path.startswith("/api/")
        found = await self._identity(scope, headers, by_cookie=not (changes and of_api))
        if isinstance(found, Identity):
            if refusal := self._too_fast(found):
                return refusal
            refused = _from_another_page if session_of(scope) else _from_elsewhere
            if changes and (refusal := refused(scope, headers)):
                return refusal
            set_identity(scope, found)
        elif of_api or (changes and path != LOGIN_PATH):
            return found
        elif changes and (refusal := _from_another_page(scope, headers)):
            return refusal
        announced = headers.get("content-length", "0")
        if path != UPLOAD_PATH and (not announced.isdecimal() or int(announced[:20]) > MAX_BODY_SIZE):
            return problem(ProblemCode.BODY_TOO_LARGE, TOO_LARGE, field="body")
        return None

    async def _identity(self, scope: Scope, headers: Headers, *, by_cookie: bool) -> Identity | JSONResponse:
        """Who asks; a browser shows it by its cookie, and only pages of ours have it change something."""
        if not headers.getlist("authorization") and by_cookie and (shown := cookie_of(scope)):
            if (identity := self._shown.authenticate_browser(shown)) is None:
                return not_logged_in()
            set_session(scope, shown)
            return identity
        return await self._shown.identity(client_address(scope), _shown(headers))

    def _too_fast(self, identity: Identity) -> JSONResponse | None:
        if (found := self._pace.excess(identity.user)) is None:
            return None
        excess, wait = found
        return problem(
            ProblemCode.RATE_LIMIT_EXCEEDED,
            f"the limit {excess.name} of {excess.scope.display_name} is {excess.limit:g}",
            field=f"limits.{excess.name}",
            value={"limit": excess.limit},
            hint=excess.hint,
            headers={"Retry-After": str(ceil(wait))},
        )


def _shown(headers: Headers) -> str:
    """Return the token of a request; none of two, since a proxy may have looked at the other."""
    told = headers.getlist("authorization")
    scheme, _, shown = told[0].partition(" ") if len(told) == 1 else ("", "", "")
    return shown.strip() if scheme.lower() == "bearer" else ""


def _from_another_page(scope: Scope, headers: Headers) -> JSONResponse | None:
    """Why a form is not taken; None when a page of ours has sent it, for browsers tell where a form comes from."""
    if "origin" not in headers:
        return problem(
            ProblemCode.FOREIGN_ORIGIN,
            "who sends a form tells of which page it is",
            field="Origin",
            hint="use a browser",
        )
    return _of_another_origin(scope, headers)


def _of_another_origin(scope: Scope, headers: Headers) -> JSONResponse | None:
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"{scope['scheme']}://{headers['host']}".lower():
        return problem(
            ProblemCode.FOREIGN_ORIGIN, "pages of another origin change nothing", field="Origin", value=origin[:300]
        )
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return problem(ProblemCode.FOREIGN_ORIGIN, "pages of another site change nothing", field="Sec-Fetch-Site")
    return None


def _from_elsewhere(scope: Scope, headers: Headers) -> JSONResponse | None:
    """Why a change is not taken that a page of another origin may have asked for; None when none can have."""
    if refusal := _of_another_origin(scope, headers):
        return refusal
    # What else changes something a browser sends for no other origin without asking, and it asks in vain.
    if scope["method"] != "POST" or REQUESTED_WITH in headers or _is_of_no_form(headers):
        return None
    return problem(
        ProblemCode.FOREIGN_ORIGIN,
        "a web page could have sent this",
        field="Content-Type",
        hint=f"send Content-Type: application/json, or without a body {REQUESTED_WITH}: koala",
    )


def _is_of_no_form(headers: Headers) -> bool:
    told = ",".join(headers.getlist("content-type")).partition(";")[0].strip().lower()
    return told in TYPES_OF_NO_FORM or told.endswith("+json")


def _not_this_host(named: str) -> JSONResponse:
    return problem(
        ProblemCode.UNKNOWN_HOST,
        "the daemon is not known by the host that was asked for",
        field="Host",
        value=named[:300],
        hint="use an IP address or localhost, or add the name to allowed_hosts in the daemon's configuration",
    )


def _measured(receive: Receive) -> Receive:
    """Receive a body, but for one that grows too large without having said so."""
    size = 0

    async def measured() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY_SIZE:
            # FastAPI passes this one on, and takes any other error for broken JSON.
            raise HTTPException(413, TOO_LARGE)
        return message

    return measured
