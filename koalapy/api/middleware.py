"""Middleware around all routes: security headers, client addresses behind proxies, and limits of requests."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api.access import AGENT_PATHS, UPLOAD_PATH, identity_of
from koalapy.api.problems import problem
from koalapy.model.errors import ProblemCode

STARTS = ("http.response.start", "websocket.http.response.start")
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""A content security policy under which a page loads nothing, runs nothing, sends no forms and is not framed."""
CACHE_FOREVER = "public, max-age=31536000, immutable"
"""Cache control of the dashboard's files. Their names contain a digest of their content."""
ALWAYS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
DEFAULTS = {"content-security-policy": NOTHING, "referrer-policy": "no-referrer"}
"""Headers that a route may override."""
HSTS = (b"strict-transport-security", b"max-age=31536000")
"""Sent over TLS only, and not for ``localhost``, where other services use plain HTTP."""


class ResponseHeaders:
    """The outermost middleware, which adds security headers to every response, including errors."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            """Add the headers that every response has, and pass the message on."""
            if message["type"] in STARTS:
                headers = [
                    (name, value)
                    for name, value in message.get("headers", ())
                    if name.lower() not in _ALWAYS or value == _CACHE_FOREVER
                ]
                names = {name.lower() for name, _ in headers}
                headers += [item for item in _ADDED if item[0] not in names]
                if scope.get("scheme") in ("https", "wss"):
                    host = next((value for name, value in scope["headers"] if name == b"host"), b"")
                    if host.partition(b":")[0].lower() != b"localhost":
                        headers.append(HSTS)
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, send_with_headers)


_CACHE_FOREVER = CACHE_FOREVER.encode()
_ALWAYS = {name.encode(): value.encode() for name, value in ALWAYS.items()}
_ADDED = [*_ALWAYS.items(), *((name.encode(), value.encode()) for name, value in DEFAULTS.items())]


Address = IPv4Address | IPv6Address
Networks = Sequence[IPv4Network | IPv6Network]


def client_address(scope: Scope) -> str:
    """Return the canonical IP address of a request's client, such as ``192.0.2.7`` or ``2001:db8::7``."""
    address = _peer(scope)
    return "unknown" if address is None else str(address)


class TrustedProxies:
    """The middleware that applies ``X-Forwarded-For`` and ``X-Forwarded-Proto`` of requests from trusted proxies.

    Headers of other clients are ignored. If the daemon does not speak TLS, it serves only the proxies and this machine,
    since a token sent past the proxies would have been sent unencrypted.
    """

    def __init__(self, app: ASGIApp, proxies: Networks, *, encrypted: bool) -> None:
        """``encrypted``: whether this daemon speaks TLS itself."""
        self._app, self._proxies, self._encrypted = app, proxies, encrypted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            peer = _peer(scope)
            if peer is not None and self._is_proxy(peer):
                scope = self._apply_headers(scope, peer)
            elif not self._encrypted and (peer is None or not peer.is_loopback):
                rejection = problem(
                    ProblemCode.TLS_REQUIRED,
                    "this daemon does not speak TLS and only accepts requests of its proxy",
                    hint="use the proxy's https:// address, or give the daemon a certificate (--tls-cert, --tls-key)",
                )
                await ResponseHeaders(rejection)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_proxy(self, address: Address) -> bool:
        return any(address in network for network in self._proxies)

    def _apply_headers(self, scope: Scope, peer: Address) -> Scope:
        """Return the scope with the client and scheme that a trusted proxy reports."""
        headers = Headers(scope=scope)
        client = peer
        # Use the last address that is not a trusted proxy: a client may have forged those before it.
        for text in reversed(",".join(headers.getlist("x-forwarded-for")).split(",")):
            address = _parse_address(_strip_port(text.strip()))
            if address is None:
                break
            client = address
            if not self._is_proxy(address):
                break
        protocols = headers.getlist("x-forwarded-proto")
        scheme = protocols[-1].rpartition(",")[2].strip().lower() if protocols else ""
        forwarded: Scope = {**scope, "client": (str(client), 0)}
        if scheme in ("http", "https"):
            forwarded["scheme"] = scheme if scope["type"] == "http" else scheme.replace("http", "ws")
        return forwarded


def _peer(scope: Scope) -> Address | None:
    client = scope.get("client")
    return None if client is None else _parse_address(str(client[0]))


@lru_cache(1000)
def _parse_address(text: str) -> Address | None:
    """Parse an address to its canonical form. An IPv4 address mapped to IPv6 by a dual-stack listener becomes IPv4."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _strip_port(text: str) -> str:
    """Remove the port that some proxies append, as in ``192.0.2.7:4711`` or ``[2001:db8::7]:4711``."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


BODY_TIMEOUT_S = 60.0
"""Maximum time for receiving a request's body; bundles may take longer."""
MAX_USER_FRACTION = 4
"""One user may have 1/4 of all concurrent requests, since clients may keep streams open without limit."""


class RequestLimiter:
    """The middleware that rejects requests beyond a number at a time (503) and bodies that take too long (408)."""

    def __init__(self, app: ASGIApp, max_requests: int, body_timeout_s: float = BODY_TIMEOUT_S) -> None:
        self._app = app
        self._max_requests = max_requests
        self._body_timeout_s = body_timeout_s
        self._active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(AGENT_PATHS):
            await self._app(scope, receive, send)
            return
        if self._active >= self._max_requests:
            detail = f"the daemon is serving {self._active} requests, which is its limit"
            await problem(ProblemCode.OVERLOADED, detail, hint="try again later", headers={"Retry-After": "1"})(
                scope, receive, send
            )
            return
        self._active += 1
        try:
            await self._app(scope, receive if scope["path"] == UPLOAD_PATH else self._with_timeout(receive), send)
        finally:
            self._active -= 1

    def _with_timeout(self, receive: Receive) -> Receive:
        """Return a ``receive`` that raises HTTP error 408 unless the body is complete in time."""
        deadline: float | None = asyncio.get_running_loop().time() + self._body_timeout_s

        async def receive_in_time() -> Message:
            """Return the next part of the body; raise HTTP error 408 after the deadline for all of it."""
            nonlocal deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                # FastAPI reports any other exception as invalid JSON.
                raise HTTPException(408, f"the body was not complete within {self._body_timeout_s:g} seconds") from None
            if not message.get("more_body", False):
                deadline = None  # the next message is the end of the connection, at any time
            return message

        return receive_in_time


class UserRequestLimiter:
    """The middleware behind authentication that rejects a user's requests beyond a number at a time (429)."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_user_requests = max(1, max_requests // MAX_USER_FRACTION)
        self._active: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        identity = identity_of(scope)
        if identity is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        user = identity.user
        if self._active[user] >= self._max_user_requests:
            detail = f"the daemon is serving {self._active[user]} requests of {user}, which is the limit of a user"
            hint = "close connections that follow or wait for jobs"
            await problem(ProblemCode.TOO_MANY_REQUESTS, detail, hint=hint, headers={"Retry-After": "1"})(
                scope, receive, send
            )
            return
        self._active[user] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._active[user] -= 1
            if not self._active[user]:
                del self._active[user]
