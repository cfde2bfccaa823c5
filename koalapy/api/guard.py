"""Authentication of requests: their host, token or cookie and origin, and the size of their body."""

import asyncio
import re
import socket
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from math import ceil

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api.access import AGENT_PATHS, REJECTION, UPLOAD_PATH, identity_of, session_of, set_identity, set_session
from koalapy.api.middleware import client_address
from koalapy.api.problems import for_browser, problem
from koalapy.daemon.auth.identities import Identities
from koalapy.daemon.auth.pace import Pace
from koalapy.model.errors import ProblemCode, SiteUnavailable, TokenRejected
from koalapy.model.identity import Identity

_HOST = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<name>[^\[\]:/@\s]+))(?::\d{0,5})?")


def machine_names() -> set[str]:
    """Return the names of this machine, from its configuration and from DNS."""
    host = socket.gethostname()
    names = {host, host.partition(".")[0]}
    try:
        canonical, aliases, _ = socket.gethostbyaddr(host)
    except (OSError, UnicodeError):
        return names
    return names | {canonical, *aliases}


class AllowedHosts:
    """The hosts by which clients may address this daemon: IP addresses, ``localhost``, ``names`` and this machine's.

    ``find_machine_names`` runs once, in a thread and only for a name that is not in ``names``: DNS may be slow.
    """

    def __init__(
        self, names: Iterable[str] = (), find_machine_names: Callable[[], Iterable[str]] = machine_names
    ) -> None:
        self._names = {"localhost", *(_normalize_host(name) for name in names)}
        self._find_machine_names = find_machine_names
        self._machine_names: asyncio.Future[frozenset[str]] | None = None

    async def contains(self, header: str) -> bool:
        """Return whether a ``Host`` header names this daemon."""
        parts = _HOST.fullmatch(header.strip())
        if parts is None:
            return False
        if (address := parts["six"]) is not None:
            return _is_address(IPv6Address, address)
        if _is_address(IPv4Address, parts["name"]):
            return True
        name = _normalize_host(parts["name"])
        if name in self._names:
            return True
        if self._machine_names is None:
            find = self._find_machine_names
            self._machine_names = asyncio.ensure_future(
                asyncio.to_thread(lambda: frozenset(_normalize_host(name) for name in find()))
            )
        return name in await asyncio.shield(self._machine_names)


def _normalize_host(name: str) -> str:
    return name.lower().rstrip(".")


@lru_cache(256)
def _is_address(kind: type[IPv4Address] | type[IPv6Address], text: str) -> bool:
    """Return whether a text is an IP address of this version."""
    try:
        kind(text)
    except AddressValueError:
        return False
    return True


LOGIN_PATH = "/login"
"""The path to which a browser may send a form without being logged in."""
STATE_LIFETIME_S = 600.0
"""Time that a user has to log in at a provider."""


def _cookie_name(scope: Scope, purpose: str) -> str:
    """Return a name with the port, since browsers share cookies between the ports of a host."""
    prefix = "__Host-" if scope["scheme"] == "https" else ""
    port = Headers(scope=scope).get("host", "").rpartition(":")[2]
    return "_".join(filter(None, (f"{prefix}koala", purpose, port if port.isdecimal() else "")))


def read_cookie(scope: Scope, purpose: str = "") -> str:
    """Return this daemon's cookie for a browser session, or for another purpose; empty if there is none or two.

    Other services on the same host may set cookies of any form; they neither hide this cookie nor replace it.
    """
    headers = Headers(scope=scope).getlist("cookie")
    if len(headers) != 1:
        return ""
    pairs = (pair.partition("=") for pair in headers[0].split(";"))
    values = [value.strip() for name, _, value in pairs if name.strip() == _cookie_name(scope, purpose)]
    return values[0] if len(values) == 1 else ""


def login_cookie(scope: Scope, token: str, seconds: float) -> str:
    """Return the ``Set-Cookie`` header of a browser session; with 0 seconds, the header that deletes the cookie."""
    return _format_cookie(scope, "", token, seconds, "Strict")


def state_cookie(scope: Scope, state: str) -> str:
    """Return the ``Set-Cookie`` header that ties a login at a provider to the browser that began it."""
    return _format_cookie(scope, "state", state, STATE_LIFETIME_S, "Lax")


def _format_cookie(scope: Scope, purpose: str, value: str, seconds: float, site: str) -> str:
    """Return a ``Set-Cookie`` header that scripts cannot read; ``site`` is its SameSite policy."""
    secure = "; Secure" if scope["scheme"] == "https" else ""
    name = _cookie_name(scope, purpose)
    return f"{name}={value}; Max-Age={int(seconds)}; Path=/; HttpOnly; SameSite={site}{secure}"


class TokenAuthenticator:
    """Authentication by tokens, with a limit of wrong tokens from each address.

    A client with a random token is authenticated even if its address is over the limit.
    """

    def __init__(self, identities: Identities, pace: Pace) -> None:
        self._identities, self._pace = identities, pace

    async def authenticate(self, address: str, token: str) -> Identity | JSONResponse:
        """Return the identity of a token sent from an address, or the problem to respond with."""
        if not token:
            return not_logged_in()
        reason = ""
        identity = self._identities.find_identity(token)
        if identity is None:
            try:
                identity = await self._identities.verify_token(token)
            except TokenRejected as error:
                reason = error.message
            except SiteUnavailable as error:
                return problem(error.code, error.message, hint=error.hint, headers={"Retry-After": "10"})
        if identity is not None and not identity.guessable:
            return identity
        if wait := self._pace.block_time(address):
            return problem(
                ProblemCode.TOO_MANY_WRONG_TOKENS,
                f"too many wrong tokens were sent from {address}",
                hint="stop the program that uses an old token, or wait a minute",
                headers={"Retry-After": str(ceil(wait))},
            )
        if identity is None:
            self._pace.count_failure(address)
            return not_logged_in(reason)
        return identity

    def authenticate_browser(self, token: str) -> Identity | None:
        """Return the identity of a session cookie's token. These are random, so that guesses need no limit."""
        identity = self._identities.find_identity(token) if token else None
        return identity if identity is not None and identity.token is not None else None


def not_logged_in(reason: str = "") -> JSONResponse:
    """Return the response 401 for a request without a valid token."""
    return problem(
        ProblemCode.NOT_LOGGED_IN,
        f"no valid token was sent: {reason}" if reason else "no valid token was sent",
        hint="set KOALA_TOKEN, or send Authorization: Bearer TOKEN",
        headers={"WWW-Authenticate": "Bearer"},
    )


READ_METHODS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing."""
REQUESTED_WITH = "X-Requested-With"
"""A header with any value: a page of another origin cannot send it without a CORS permission."""
NON_FORM_TYPES = ("application/json", "application/x-tar")
MAX_BODY_BYTES = 1024 * 1024
TOO_LARGE = f"the body is larger than {MAX_BODY_BYTES} bytes; put large data into files that the job reads"


class Guard:
    """The middleware that authenticates callers, and rejects foreign hosts, foreign origins and large bodies.

    Web pages of other origins cannot use the API from a browser. A page with a name that resolves to the daemon's
    address (DNS rebinding) sends a foreign ``Host``. A page cannot send a token without a CORS permission, which the
    daemon never grants. A WebSocket of a page has an ``Origin``. Requests that a page can send without a permission
    change nothing, however the browser authenticates.
    """

    def __init__(self, app: ASGIApp, identities: Identities, hosts: AllowedHosts, pace: Pace) -> None:
        self._app = app
        self._pace = pace
        self._identities = identities
        self._authenticator = TokenAuthenticator(identities, pace)
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if rejection := await self._check_request(scope, headers):
            scope[REJECTION] = rejection.status_code
            is_page = scope["type"] == "http" and rejection.status_code == HTTPStatus.UNAUTHORIZED and "app" in scope
            await (for_browser(Request(scope), rejection) if is_page else rejection)(scope, receive, send)
        elif scope["path"].startswith(AGENT_PATHS):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket" or scope["path"] == UPLOAD_PATH:
            await self._serve_while_valid(scope, receive, send)
        elif scope["method"] in READ_METHODS:
            await self._serve_while_valid(scope, _limit_size(receive), send)
        else:
            # A change is completed even if the token is revoked during the request.
            await self._app(scope, _limit_size(receive), send)

    async def _serve_while_valid(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a long request, and cancel it when its token expires or is revoked."""
        identity = identity_of(scope)
        if identity is None:
            await self._app(scope, receive, send)
            return
        task, is_invalid, has_begun = asyncio.current_task(), False, False
        assert task is not None

        def cancel() -> None:
            """End the request because its token is not valid any more."""
            nonlocal is_invalid
            is_invalid = True
            task.cancel()

        async def note_and_send(message: Message) -> None:
            """Pass a message on, and remember that the response has begun."""
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            with self._identities.end_on_expiry(identity, cancel):
                await self._app(scope, receive, note_and_send)
        except asyncio.CancelledError:
            if not is_invalid or task.uncancel():
                raise
            # A response that has begun stays without its end, so that the client notices that it is incomplete.
            if not has_begun:
                await not_logged_in()(scope, receive, send)

    async def _check_request(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """Authenticate a request, and return the problem for which it is rejected, None if it is accepted."""
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return problem(
                ProblemCode.INVALID_HOST,
                f"the request has {len(hosts)} Host headers",
                field="Host",
                hint="send one Host header",
            )
        if not await self._hosts.contains(hosts[0]):
            return problem(
                ProblemCode.UNKNOWN_HOST,
                "the Host header does not name this daemon",
                field="Host",
                value=hosts[0][:300],
                hint="use an IP address or localhost, or add the name to allowed_hosts in the daemon's configuration",
            )
        path = scope["path"]
        if scope["type"] == "websocket" and "origin" in headers:
            return problem(ProblemCode.FOREIGN_ORIGIN, "web pages may not connect", field="Origin")
        # The agents' routes check the tokens of their clusters.
        if path.startswith(AGENT_PATHS):
            return None
        if scope["type"] == "websocket":
            return await self._check_socket(scope, headers)
        is_change, is_api = scope["method"] not in READ_METHODS, path.startswith("/api/")
        identity = await self._authenticate_request(scope, headers, accept_cookie=not (is_change and is_api))
        if isinstance(identity, Identity):
            if rejection := self._check_rate(identity):
                return rejection
            check_origin = _check_form_origin if session_of(scope) else _check_request_origin
            if is_change and (rejection := check_origin(scope, headers)):
                return rejection
            set_identity(scope, identity)
        elif is_api or (is_change and path != LOGIN_PATH):
            return identity
        elif is_change and (rejection := _check_form_origin(scope, headers)):
            return rejection
        length = headers.get("content-length", "0")
        if path != UPLOAD_PATH and (not length.isdecimal() or int(length[:20]) > MAX_BODY_BYTES):
            return problem(ProblemCode.BODY_TOO_LARGE, TOO_LARGE, field="body")
        return None

    async def _check_socket(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        """Authenticate the WebSocket of a client, which has no cookie, and return the problem if it is rejected."""
        identity = await self._authenticate_request(scope, headers, accept_cookie=False)
        if not isinstance(identity, Identity):
            return identity
        if rejection := self._check_rate(identity):
            return rejection
        set_identity(scope, identity)
        return None

    async def _authenticate_request(
        self, scope: Scope, headers: Headers, *, accept_cookie: bool
    ) -> Identity | JSONResponse:
        """Authenticate by the bearer token, or by the session cookie of a browser; return the caller or the problem."""
        authorizations = headers.getlist("authorization")
        if not authorizations and accept_cookie and (token := read_cookie(scope)):
            if (identity := self._authenticator.authenticate_browser(token)) is None:
                return not_logged_in()
            set_session(scope, token)
            return identity
        # Ignore repeated headers, since a proxy may have checked a different one.
        scheme, _, token = authorizations[0].partition(" ") if len(authorizations) == 1 else ("", "", "")
        token = token.strip() if scheme.lower() == "bearer" else ""
        return await self._authenticator.authenticate(client_address(scope), token)

    def _check_rate(self, identity: Identity) -> JSONResponse | None:
        """Return a problem if the user has reached a rate limit; otherwise count the request."""
        if (excess_and_wait := self._pace.find_excess(identity.user)) is None:
            return None
        excess, wait = excess_and_wait
        return problem(
            ProblemCode.RATE_LIMIT_EXCEEDED,
            f"the limit {excess.name} of {excess.scope.display_name} is {excess.limit:g}",
            field=f"limits.{excess.name}",
            value={"limit": excess.limit},
            hint=excess.hint,
            headers={"Retry-After": str(ceil(wait))},
        )


def _check_form_origin(scope: Scope, headers: Headers) -> JSONResponse | None:
    """Return the problem with a form that no page of this daemon sent, else None. Browsers send a form's origin."""
    if "origin" not in headers:
        return problem(
            ProblemCode.FOREIGN_ORIGIN,
            "the form has no Origin header",
            field="Origin",
            hint="send it from the dashboard in a browser",
        )
    return _check_origin(scope, headers)


def _check_origin(scope: Scope, headers: Headers) -> JSONResponse | None:
    """Return a problem if a browser sent the request from a page of another origin."""
    origin = headers.get("origin")
    if origin is not None and origin.lower() != f"{scope['scheme']}://{headers['host']}".lower():
        return problem(
            ProblemCode.FOREIGN_ORIGIN,
            "pages of another origin may not change anything",
            field="Origin",
            value=origin[:300],
        )
    if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return problem(
            ProblemCode.FOREIGN_ORIGIN, "pages of another site may not change anything", field="Sec-Fetch-Site"
        )
    return None


def _check_request_origin(scope: Scope, headers: Headers) -> JSONResponse | None:
    """Return the problem with a change that a page of another origin may have sent, else None."""
    if rejection := _check_origin(scope, headers):
        return rejection
    content_type = ",".join(headers.getlist("content-type")).partition(";")[0].strip().lower()
    is_no_form = content_type in NON_FORM_TYPES or content_type.endswith("+json")
    # Browsers send other methods and types to another origin only with a CORS permission, which is never granted.
    if scope["method"] != "POST" or REQUESTED_WITH in headers or is_no_form:
        return None
    return problem(
        ProblemCode.FOREIGN_ORIGIN,
        "a web page of another origin could have sent this request",
        field="Content-Type",
        hint=f"send Content-Type: application/json; without a body, send {REQUESTED_WITH}: koala",
    )


def _limit_size(receive: Receive) -> Receive:
    """Return a ``receive`` that raises 413 for a body that is too large, independently of its Content-Length."""
    size = 0

    async def receive_and_count() -> Message:
        """Return the next part of the body; raise HTTP error 413 when all parts together are too large."""
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY_BYTES:
            # FastAPI reports any other exception as invalid JSON.
            raise HTTPException(413, TOO_LARGE)
        return message

    return receive_and_count
