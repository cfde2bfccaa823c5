"""Where a request comes from, and whose word on that counts."""

from ipaddress import ip_network
from typing import Any

import pytest

from koalapy.api.middleware import TrustedProxies, client_address

PROXIES = [ip_network("198.51.100.7"), ip_network("203.0.113.0/24"), ip_network("2001:db8::/64")]


async def asked(
    peer: str | None, *forwarded: str, proto: str = "", kind: str = "http", encrypted: bool = True
) -> tuple[str, str] | int:
    """Whose address and which scheme the application sees, or the status of who refused."""
    seen: list[tuple[str, str]] = []
    status: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((client_address(scope), scope["scheme"]))

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
    return seen[0] if seen else status[0]


@pytest.mark.parametrize("proxy", ["198.51.100.7", "203.0.113.99", "2001:db8::9", "::ffff:198.51.100.7"])
async def test_the_proxy_says_for_whom_it_asks(proxy: str) -> None:
    assert await asked(proxy, "192.0.2.1", proto="https") == ("192.0.2.1", "https")
    assert await asked(proxy, "192.0.2.1", proto="https", kind="websocket") == ("192.0.2.1", "wss")


@pytest.mark.evidence("L7")
@pytest.mark.parametrize("peer", ["198.51.100.8", "192.0.2.9", "127.0.0.1", "::1"])
async def test_nobody_else_is_believed(peer: str) -> None:
    assert await asked(peer, "198.51.100.7", "10.0.0.1", proto="https") == (peer, "http")


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
async def test_what_a_client_makes_up_is_not_taken_for_its_address(forwarded: list[str], client: str) -> None:
    assert await asked("198.51.100.7", *forwarded) == (client, "http")


async def test_an_odd_scheme_means_nothing() -> None:
    assert await asked("198.51.100.7", "192.0.2.1", proto="https, javascript") == ("192.0.2.1", "http")


@pytest.mark.evidence("L7")
async def test_who_comes_past_the_proxy_in_clear_is_sent_back() -> None:
    assert await asked("192.0.2.9", encrypted=False) == 403
    assert await asked("::ffff:192.0.2.9", encrypted=False) == 403
    assert await asked(None, encrypted=False) == 403
    assert await asked("127.0.0.1", encrypted=False) == ("127.0.0.1", "http")
    assert await asked("198.51.100.7", "192.0.2.9", encrypted=False) == ("192.0.2.9", "http")


@pytest.mark.parametrize(("peer", "told"), [(None, "unknown"), ("testclient", "unknown"), ("fe80::1%eth0", "fe80::1")])
async def test_an_address_that_is_none_is_told_as_such(peer: str | None, told: str) -> None:
    assert await asked(peer, "10.0.0.1") == (told, "http")
