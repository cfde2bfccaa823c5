"""The middleware that records changes and rejected requests in the audit, and the routes that read the audit."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from koalapy.api import fields
from koalapy.api.access import ACCESS, REJECTION, identity_of
from koalapy.api.derived import view_model
from koalapy.api.fields import Output
from koalapy.api.guard import READ_METHODS
from koalapy.api.middleware import client_address
from koalapy.api.routes import api_router
from koalapy.daemon.observability import audit
from koalapy.daemon.observability.audit import Audit, AuditedRequest
from koalapy.model.audit import AuditCheck, AuditEntry, AuditFilter, AuditHead
from koalapy.model.errors import UsageError
from koalapy.model.times import PAST_TIME_EXAMPLES

STARTS = ("http.response.start", "websocket.http.response.start")
METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE", "other"}
"""Actions of requests that match no route."""
AGENT_ACTIONS = {"login", "impersonate-runner", "relay-traffic"}
"""Actions that agents and the hub report."""
MAX_TARGET_LENGTH = 200
"""Maximum length in characters of the recorded path of a request that matches no route."""

Since = Annotated[fields.PastTime, Query(description=f"only entries at or after this time: {PAST_TIME_EXAMPLES}")]
Until = Annotated[fields.PastTime, Query(description="only entries before this time")]
Actor = Annotated[fields.Name, Query(description="only actions of this user")]
Action = Annotated[fields.Name, Query(description="only this operation")]
Hash = Annotated[fields.Text, Query(max_length=64, description="the hash of the entry ``after``")]
After = Annotated[int, Query(ge=0, le=fields.MAX_ID, description="only entries with larger ids")]


class AuditMiddleware:
    """The middleware that records changes and rejected requests before their response is sent.

    It wraps the guard, so that requests that the guard rejects are recorded too.
    """

    def __init__(self, app: ASGIApp, audit: Audit) -> None:
        self._app, self._audit = app, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        method = scope.get("method", "GET")
        change = method not in READ_METHODS
        entry = AuditedRequest(method if method in METHODS else "other", "", change)
        entry.target = scope["path"][:MAX_TARGET_LENGTH]
        if change:
            entry.address = client_address(scope)
        audit.begin_request(entry)

        async def record_and_send(message: Message) -> None:
            """Record the outcome before the response begins, unless a success is already recorded."""
            status = scope.get(REJECTION) or message.get("status", 0)
            if message["type"] in STARTS and not (entry.written and status < 400):
                entry.address, entry.caller = entry.address or client_address(scope), entry.caller or identity_of(scope)
                await self._audit.close_request(entry, status)
            await send(message)

        await self._app(scope, receive, record_and_send)


AuditView = view_model("AuditView", AuditEntry)
AuditCheckView = view_model("AuditCheckView", AuditCheck)


class AuditPage(Output):
    """Audit entries, oldest first; ``next`` is the value of ``after`` for the next page, even if it is still empty."""

    entries: list[AuditView]  # type: ignore[valid-type]
    next: int


def _check_action(action: str, routes: Iterable[BaseRoute]) -> None:
    """Raise ``UsageError`` for an action that this version never records."""
    operations = {str(getattr(route, "operation_id", None) or getattr(route, "name", "")) for route in routes}
    actions = operations | ACCESS.keys() | AGENT_ACTIONS | METHODS
    if action not in actions:
        similar = get_close_matches(action, actions, 2)
        hint = f"did you mean {' or '.join(similar)}?" if similar else "give an operation, such as submit_job"
        raise UsageError(f"action is {action!r}, which is not an operation", field="action", value=action, hint=hint)


def audit_router(audit_log: Audit) -> APIRouter:
    """Return the routes by which administrators read the audit and verify that it was not changed."""
    router = api_router("audit", "/audit")

    @router.get("", response_model=AuditPage)
    async def list_audit(
        request: Request,
        since: Since = "",
        until: Until = "",
        user: Actor = "",
        action: Action = "",
        after: After = 0,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> Any:
        """List recorded actions and rejected requests with their user and address, oldest first."""
        start, end = audit_log.parse_time(since, "since"), audit_log.parse_time(until, "until")
        entries = await audit_log.read_entries(AuditFilter(start, user, action, after, limit, until=end))
        if action and not entries and not after:
            _check_action(action, request.app.routes)
        return {"entries": entries, "next": entries[-1].id if entries else after}

    @router.get("/verify", response_model=AuditCheckView)
    async def verify_audit(after: After = 0, after_hash: Hash = "") -> Any:
        """Verify the hashes of up to 100,000 entries in order: from the first one, or after an entry whose hash is
        known from an earlier check or the daemon's log."""
        return await audit_log.verify_entries(AuditHead(after, after_hash) if after else None)

    return router
