"""Where a request comes from: the address of who connected, or what a proxy that we were told of says of it."""

from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from koalapy.api.headers import AnswerHeaders
from koalapy.api.problems import problem
from koalapy.model.errors import ProblemCode

Address = IPv4Address | IPv6Address
Networks = Sequence[IPv4Network | IPv6Network]

UNKNOWN = "unknown"
"""What is said of a request whose address nobody knows."""


def client_address(scope: Scope) -> str:
    """The IP address that a request comes from, as it is written everywhere (``192.0.2.7``, ``2001:db8::7``)."""
    address = _peer(scope)
    return UNKNOWN if address is None else str(address)


class BehindProxies:
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
    return AnswerHeaders(refusal)
