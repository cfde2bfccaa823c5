"""Requests to a standby daemon: it reads jobs and clusters from the database, and names the active daemon otherwise."""

import re
from collections.abc import Callable
from html import escape
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from koalapy.api.middleware import ResponseHeaders
from koalapy.api.problems import problem
from koalapy.model.errors import ProblemCode

READS = re.compile(r"/livez|/openapi\.json|/docs|/api/v1/(livez|clusters(/[^/]+)?|jobs(/\d+(/timeline|/attempts)?)?)")
"""Paths of what the database alone answers."""
ORDERS = ("sort", "offset")
"""Parameters of lists that need the queue of the active daemon; here the newest jobs come first."""
RETRY_AFTER_S = 1


class StandbyGate:
    """Passes reads to an application, and rejects all other requests with the address of the active daemon."""

    def __init__(self, find_app: Callable[[], ASGIApp | None], find_active: Callable[[], tuple[str, str]]) -> None:
        """``find_app``: None while the database cannot be read. ``find_active``: host and URL of the active daemon."""
        self._find_app, self._find_active = find_app, find_active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        is_read = scope.get("method") in ("GET", "HEAD") and READS.fullmatch(scope["path"]) is not None
        app = self._find_app()
        if app is None or not is_read or any(name == "wait" for name, _ in query):
            await ResponseHeaders(self._make_rejection(scope))(scope, receive, send)
            return
        parameters = [(name, value) for name, value in query if name not in ORDERS]
        await app({**scope, "query_string": urlencode(parameters).encode()}, receive, send)

    def _make_rejection(self, scope: Scope) -> Response:
        """Return the problem that names the active daemon, or a page with a link to it for browsers."""
        holder, address = self._find_active()
        active = address or holder
        detail = f"this daemon stands by; {f'{active} is active' if active else 'none is active now'}"
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        if "text/html" in Headers(scope=scope).get("accept", "") and not scope["path"].startswith("/api/"):
            link = f'<p><a href="{escape(address)}">{escape(address)}</a></p>' if address else ""
            return HTMLResponse(f"<!doctype html><title>koala</title><p>{escape(detail)}</p>{link}", 503, headers)
        hint = f"use {address}" if address else "try again: this daemon takes over when the active one has ended"
        return problem(ProblemCode.DAEMON_STANDBY, detail, hint=hint, headers=headers, fields={"active": address})
