"""Client addresses and schemes of requests behind trusted proxies."""

from ipaddress import ip_network
from typing import Any

import pytest

from koalapy.api.middleware import TrustedProxies, client_address

PROXIES = [ip_network("198.51.100.7"), ip_network("203.0.113.0/24"), ip_network("2001:db8::/64")]


async def forward_request(
    peer: str | None, *forwarded: str, proto: str = "", kind: str = "http", encrypted: bool = True
) -> tuple[str, str] | int:
    """Return the client address and scheme that the application sees, or the status of a rejection."""
    requests: list[tuple[str, str]] = []
    status: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        requests.append((client_address(scope), scope["scheme"]))

    async def send(message: Any) -> None:
        status.append(message.get("status", 0))

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    headers = [(b"x-forwarded-for", text.encode()) for text in forwarded]
    headers += [(b"x-forwarded-proto", proto.encode())] if proto else []
    scheme = "http" if kind == "http" else "ws"
    scope = {"type": kind, "headers": headers, "scheme": scheme, "client": None if peer is None else (peer, 4711)}
    await TrustedProxies(app, PROXIES, encrypted=encrypted)(scope, receive, send)
    assert scope["client"] is None or scope["client"][0] == peer, "the server's own scope stays as it is"
    return requests[0] if requests else status[0]


@pytest.mark.parametrize("proxy", ["198.51.100.7", "203.0.113.99", "2001:db8::9", "::ffff:198.51.100.7"])
async def test_client_address_behind_trusted_proxy_is_forwarded_address(proxy: str) -> None:
    assert await forward_request(proxy, "192.0.2.1", proto="https") == ("192.0.2.1", "https")
    assert await forward_request(proxy, "192.0.2.1", proto="https", kind="websocket") == ("192.0.2.1", "wss")


@pytest.mark.evidence("L7")
@pytest.mark.parametrize("peer", ["198.51.100.8", "192.0.2.9", "127.0.0.1", "::1"])
async def test_forwarded_address_from_untrusted_peer_is_ignored(peer: str) -> None:
    assert await forward_request(peer, "198.51.100.7", "10.0.0.1", proto="https") == (peer, "http")


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        (["10.6.6.6, 192.0.2.1"], "192.0.2.1"),
        (["10.6.6.6", "192.0.2.1"], "192.0.2.1"),
        (["10.6.6.6, 192.0.2.1, 203.0.113.5"], "192.0.2.1"),
        (["203.0.113.5"], "203.0.113.5"),
        (["192.0.2.1:4711"], "192.0.2.1"),
        (["[2001:db8:9::1]:4711"], "2001:db8:9::1"),
        (["2001:db8:9::1"], "2001:db8:9::1"),
        (["::ffff:192.0.2.1"], "192.0.2.1"),
        (["10.6.6.6, alice\nroot"], "198.51.100.7"),
        (["10.6.6.6, unknown, 203.0.113.5"], "203.0.113.5"),
        ([""], "198.51.100.7"),
        ([], "198.51.100.7"),
    ],
)
async def test_forwarded_address_made_up_by_client_is_ignored(forwarded: list[str], client: str) -> None:
    assert await forward_request("198.51.100.7", *forwarded) == (client, "http")


async def test_forwarded_scheme_of_unknown_form_is_ignored() -> None:
    assert await forward_request("198.51.100.7", "192.0.2.1", proto="https, javascript") == ("192.0.2.1", "http")


@pytest.mark.evidence("L7")
async def test_unencrypted_request_past_proxy_returns_403() -> None:
    assert await forward_request("192.0.2.9", encrypted=False) == 403
    assert await forward_request("::ffff:192.0.2.9", encrypted=False) == 403
    assert await forward_request(None, encrypted=False) == 403
    assert await forward_request("127.0.0.1", encrypted=False) == ("127.0.0.1", "http")
    assert await forward_request("198.51.100.7", "192.0.2.9", encrypted=False) == ("192.0.2.9", "http")


@pytest.mark.parametrize(
    ("peer", "expected"), [(None, "unknown"), ("testclient", "unknown"), ("fe80::1%eth0", "fe80::1")]
)
async def test_client_address_without_valid_peer_is_unknown(peer: str | None, expected: str) -> None:
    assert await forward_request(peer, "10.0.0.1") == (expected, "http")
