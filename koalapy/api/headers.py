"""What every answer tells a browser that comes by, whatever it answers and whoever refuses."""

from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

STARTS = ("http.response.start", "websocket.http.response.start")
NOTHING = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""A content security policy by which a page loads and runs nothing, sends no form, and stands in no frame."""
FOREVER = "public, max-age=31536000, immutable"
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


class AnswerHeaders:
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


_FOREVER = FOREVER.encode()
_ALWAYS = {name.encode(): value.encode() for name, value in ALWAYS.items()}
_UNLESS_GIVEN = {name.encode(): value.encode() for name, value in UNLESS_GIVEN.items()}
