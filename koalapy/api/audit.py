"""Every request that changes something, or is refused, is written down; and the routes that tell of it."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api import fields
from koalapy.api.access import ACCESS, identity_of
from koalapy.api.derived import view_model
from koalapy.api.fields import Output
from koalapy.api.guard import READ_METHODS
from koalapy.api.middleware import client_address
from koalapy.api.routes import api_router
from koalapy.daemon.observability import audit
from koalapy.daemon.observability.audit import Audit, Deed
from koalapy.model.audit import AuditCheck, AuditEntry, AuditFilter, AuditHead
from koalapy.model.errors import UsageError
from koalapy.model.job import MAX_DURATION

STARTS = ("http.response.start", "websocket.http.response.start")
METHODS = {"GET", "POST", "PUT", "DELETE", "other"}
"""What is written down of a request that led nowhere."""
TOLD = {"login", "impersonate-runner"}
"""What agents tell."""
MAX_TARGET = 200
"""Characters of a path that led nowhere."""

Since = Annotated[
    float | None, Query(gt=0, le=MAX_DURATION, allow_inf_nan=False, description="of so many seconds until now")
]
Actor = Annotated[fields.Name, Query(description="only what this user did")]
Action = Annotated[fields.Name, Query(description="only this operation")]
Hash = Annotated[fields.Text, Query(max_length=64, description="the hash of the entry ``after``")]
After = Annotated[int, Query(ge=0, le=fields.MAX_ID, description="only entries with larger ids")]


class AuditMiddleware:
    """Stands before everything, so that it sees what the guard refuses, and holds an answer until that is written."""

    def __init__(self, app: ASGIApp, audit: Audit) -> None:
        self._app, self._audit = app, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        method = scope.get("method", "GET")
        change = method not in READ_METHODS
        deed = Deed(method if method in METHODS else "other", "", change)
        deed.target = scope["path"][:MAX_TARGET]
        if change:
            deed.address = client_address(scope)
        audit.begin(deed)

        async def answer(message: Message) -> None:
            if message["type"] in STARTS and not (deed.written and message["status"] < 400):
                deed.address, deed.by = deed.address or client_address(scope), deed.by or identity_of(scope)
                await self._audit.close(deed, message["status"])
            await send(message)

        await self._app(scope, receive, answer)


AuditView = view_model("AuditView", AuditEntry)
AuditCheckView = view_model("AuditCheckView", AuditCheck)


class AuditPage(Output):
    """The oldest first; ``next`` is for ``after``, also when there are no more yet."""

    entries: list[AuditView]  # type: ignore[valid-type]
    next: int


def _check_action(action: str, routes: Iterable[BaseRoute]) -> None:
    """``UsageError`` for one of which there can be no entries, unless an older version wrote them."""
    operations = {str(getattr(route, "operation_id", None) or getattr(route, "name", "")) for route in routes}
    known = operations | ACCESS.keys() | TOLD | METHODS
    if action not in known:
        near = get_close_matches(action, known, 2)
        hint = f"did you mean {' or '.join(near)}?" if near else "give an operation as the audit has it, as submit_job"
        raise UsageError(f"action is {action!r}, which is no operation", field="action", value=action, hint=hint)


def audit_router(trail: Audit) -> APIRouter:
    router = api_router("audit", "/audit")

    @router.get("", response_model=AuditPage)
    async def list_audit(
        request: Request,
        since: Since = None,
        user: Actor = "",
        action: Action = "",
        after: After = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Any:
        """Who did what, from where, and who was refused, the oldest first."""
        found = await trail.entries(AuditFilter(0.0, user, action, after, limit), since)
        if action and not found and not after:
            _check_action(action, request.app.routes)
        return {"entries": found, "next": found[-1].id if found else after}

    @router.get("/verify", response_model=AuditCheckView)
    async def verify_audit(after: After = 0, after_hash: Hash = "") -> Any:
        """Check entries in order against their hashes, up to 100,000 of them: from the first on, or after one whose
        hash is known from an earlier check or the daemon's log."""
        return await trail.verify(AuditHead(after, after_hash) if after else None)

    return router
