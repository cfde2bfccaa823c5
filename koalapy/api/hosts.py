"""By which names the daemon may be addressed: a page whose name was bound to our address anew has another."""

import asyncio
import re
import socket
from collections.abc import Callable, Iterable
from functools import lru_cache
from ipaddress import AddressValueError, IPv4Address, IPv6Address

_HOST = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<name>[^\[\]:/@\s]+))(?::\d{0,5})?")


class Hosts:
    """Admits IP addresses, ``localhost``, the names given, and this machine's own."""

    def __init__(self, names: Iterable[str] = (), own: Callable[[], Iterable[str]] | None = None) -> None:
        self._names = {"localhost", *(_plain(name) for name in names)}
        self._ask_own = own or own_names
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


def own_names() -> set[str]:
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
