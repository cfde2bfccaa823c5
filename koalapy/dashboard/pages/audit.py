"""The page Audit, for administrators: recorded actions with user, address and outcome, newest first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Query

from koalapy.api import fields
from koalapy.api.audit import Action, Actor
from koalapy.daemon.observability.audit import Audit
from koalapy.dashboard.dashboard import Dashboard
from koalapy.dashboard.rendering import with_query
from koalapy.model.audit import AuditEntry, AuditFilter
from koalapy.model.identity import Role

SPANS = {"": "", "3600": "the last hour", "86400": "the last day", "604800": "the last week"}

Target = Annotated[fields.Text, Query(max_length=200, description="only actions on this target, such as job 7")]
Result = Annotated[Literal["", "done", "refused", "failed"], Query(description="only actions with this outcome")]
Since = Annotated[Literal["", "3600", "86400", "604800"], Query(description="only entries of the last seconds")]
Before = Annotated[int, Query(ge=0, le=fields.MAX_ID, description="only entries with smaller ids; 0: all")]
Limit = Annotated[int, Query(ge=1, le=1000)]


@dataclass(frozen=True, slots=True)
class AuditPageView:
    """A page of audit entries, and the filter."""

    entries: Sequence[AuditEntry]
    user: str
    action: str
    target: str
    outcome: str
    since: str
    spans: dict[str, str]
    next: str
    """Path of the next page; empty on the last."""


def add_audit(dashboard: Dashboard, audit_log: Audit) -> None:
    """Add the page of recorded actions and rejected requests, for administrators."""

    @dashboard.page("/audit", "audit.html", operation="list_audit", title="Audit", key="a", role=Role.ADMIN)
    async def audit(
        user: Actor = "",
        action: Action = "",
        target: Target = "",
        outcome: Result = "",
        since: Since = "",
        before: Before = 0,
        limit: Limit = 100,
    ) -> AuditPageView:
        """Return the entries that match the filters, newest first, with the path of the next page."""
        audit_filter = AuditFilter(
            0.0, user, action, limit=limit + 1, target=target, outcome=outcome, newest_first=True, before=before
        )
        entries = await audit_log.read_entries(audit_filter, float(since) if since else None)
        next_page = with_query(
            "/audit",
            user=user,
            action=action,
            target=target,
            outcome=outcome,
            since=since,
            limit=limit if limit != 100 else None,
            before=entries[limit - 1].id if len(entries) > limit else None,
        )
        next_page = next_page if len(entries) > limit else ""
        return AuditPageView(entries[:limit], user, action, target, outcome, since, SPANS, next_page)
