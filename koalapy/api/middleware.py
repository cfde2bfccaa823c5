"""What stands around all routes: headers of answers, addresses behind proxies, and how many requests are served."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
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
"""A content security policy by which a page loads and runs nothing, sends no form, and stands in no frame."""
CACHE_FOREVER = "public, max-age=31536000, immutable"
"""Files that pages load are kept, for their content gives them their names; nothing else is."""
ALWAYS = {
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
UNLESS_GIVEN = {"content-security-policy": NOTHING, "referrer-policy": "no-referrer"}
"""What a route may say of its own answer."""
HSTS = (b"strict-transport-security", b"max-age=31536000")
"""Sent by TLS only, and not for ``localhost``, where the port of another service speaks plain HTTP."""


class ResponseHeaders:
    """Around everything else of the application, also what answers when a route fails."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] in STARTS:
                message["headers"] = _complete(message.get("headers", ()))
                if _is_encrypted(scope):
                    message["headers"].append(HSTS)
            await send(message)

        await self._app(scope, receive, sending)


def _is_encrypted(scope: Scope) -> bool:
    host = next((value for name, value in scope["headers"] if name == b"host"), b"")
    return scope.get("scheme") in ("https", "wss") and host.partition(b":")[0].lower() != b"localhost"


def _complete(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name.lower() not in _ALWAYS or value == _FOREVER]
    given = {name.lower() for name, _ in kept}
    always = ((name, value) for name, value in _ALWAYS.items() if name not in given)
    return [*kept, *always, *((name, value) for name, value in _UNLESS_GIVEN.items() if name not in given)]


_FOREVER = CACHE_FOREVER.encode()
_ALWAYS = {name.encode(): value.encode() for name, value in ALWAYS.items()}
_UNLESS_GIVEN = {name.encode(): value.encode() for name, value in UNLESS_GIVEN.items()}


Address = IPv4Address | IPv6Address
Networks = Sequence[IPv4Network | IPv6Network]

UNKNOWN = "unknown"
"""What is said of a request whose address nobody knows."""


def client_address(scope: Scope) -> str:
    """The IP address that a request comes from, as it is written everywhere (``192.0.2.7``, ``2001:db8::7``)."""
    address = _peer(scope)
    return UNKNOWN if address is None else str(address)


class TrustedProxies:
    """Believes ``X-Forwarded-For`` and ``X-Forwarded-Proto`` of the proxies alone; of anybody else they mean nothing.

    Without TLS of our own only the proxies and this machine are served: a token that came past them came in clear.
    """

    def __init__(self, app: ASGIApp, proxies: Networks, *, encrypted: bool) -> None:
        """``encrypted``: whether this daemon speaks TLS itself."""
        self._app, self._proxies, self._encrypted = app, proxies, encrypted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            peer = _peer(scope)
            if peer is not None and self._is_proxy(peer):
                scope = self._forwarded(scope, peer)
            elif not self._encrypted and (peer is None or not peer.is_loopback):
                await _past_the_proxy()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_proxy(self, address: Address) -> bool:
        return any(address in network for network in self._proxies)

    def _forwarded(self, scope: Scope, peer: Address) -> Scope:
        headers = Headers(scope=scope)
        client = self._client(",".join(headers.getlist("x-forwarded-for")), peer)
        told = headers.getlist("x-forwarded-proto")
        scheme = told[-1].rpartition(",")[2].strip().lower() if told else ""
        changed: Scope = {**scope, "client": (str(client), 0)}
        if scheme in ("http", "https"):
            changed["scheme"] = scheme if scope["type"] == "http" else scheme.replace("http", "ws")
        return changed

    def _client(self, forwarded: str, peer: Address) -> Address:
        """The last one that is no proxy of ours: whoever is named before it may be an invention."""
        client = peer
        for told in reversed(forwarded.split(",")):
            address = _address(_without_port(told.strip()))
            if address is None:
                return client
            client = address
            if not self._is_proxy(address):
                break
        return client


def _peer(scope: Scope) -> Address | None:
    client = scope.get("client")
    return None if client is None else _address(str(client[0]))


@lru_cache(1000)
def _address(text: str) -> Address | None:
    """One address has one form: a listener for both families tells of IPv4 as of a part of IPv6."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def _without_port(text: str) -> str:
    """``192.0.2.7:4711`` and ``[2001:db8::7]:4711`` without the port, as some proxies tell it."""
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text


def _past_the_proxy() -> ASGIApp:
    refusal = problem(
        ProblemCode.TLS_REQUIRED,
        "this daemon speaks no TLS, and is asked by its proxy only",
        hint="ask the proxy, by https://; or give the daemon a certificate (--tls-cert, --tls-key)",
    )
    return ResponseHeaders(refusal)


BODY_TIMEOUT = 60.0
"""Seconds; large ones, for which there is a route of their own, may take as long as they go on."""

SHARE = 4
"""One in so many of all requests at a time may be one user's: streams, for one, last as long as he likes."""


class RequestLimiter:
    """Answers 503 to a user's request beyond so many at a time, and 408 to a body that does not come to its end."""

    def __init__(self, app: ASGIApp, max_requests: int, body_timeout: float = BODY_TIMEOUT) -> None:
        self._app = app
        self._max_requests = max_requests
        self._body_within = body_timeout
        self._served = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(AGENT_PATHS):
            await self._app(scope, receive, send)
            return
        if self._served >= self._max_requests:
            detail = f"{self._served} requests are being served, and no more are at a time"
            await problem(ProblemCode.OVERLOADED, detail, hint="try again", headers={"Retry-After": "1"})(
                scope, receive, send
            )
            return
        self._served += 1
        try:
            await self._app(scope, receive if scope["path"] == UPLOAD_PATH else self._timely(receive), send)
        finally:
            self._served -= 1

    def _timely(self, receive: Receive) -> Receive:
        deadline: float | None = asyncio.get_running_loop().time() + self._body_within

        async def timely() -> Message:
            nonlocal deadline
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                # FastAPI passes this one on, and takes any other error for broken JSON.
                raise HTTPException(408, f"the body was not complete within {self._body_within:g} seconds") from None
            if not message.get("more_body", False):
                deadline = None  # what comes now is the end of the connection, whenever that is
            return message

        return timely


class UserRequestLimiter:
    """Answers 429 to a user who has his share of all requests under way; it stands behind what knows who asks."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._most = max(1, max_requests // SHARE)
        self._served: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        identity = identity_of(scope)
        if identity is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        user = identity.user
        if self._served[user] >= self._most:
            detail = f"{self._served[user]} requests of {user} are being served, and no user has more at a time"
            hint = "end some that follow or wait for something"
            await problem(ProblemCode.TOO_MANY_REQUESTS, detail, hint=hint, headers={"Retry-After": "1"})(
                scope, receive, send
            )
            return
        self._served[user] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._served[user] -= 1
            if not self._served[user]:
                del self._served[user]
