"""The page Audit, for administrators, and the changes of a job, cluster or user on its page, for operators."""

from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Literal

from fastapi import Query

from koalapy.api import fields
from koalapy.api.audit import Action, Actor
from koalapy.daemon.observability.audit import Audit
from koalapy.dashboard import tables
from koalapy.dashboard.dashboard import Dashboard, View
from koalapy.dashboard.rendering import state_badge, with_query
from koalapy.dashboard.tables import Column, TableDefinition, TableParameters
from koalapy.model.audit import AuditEntry, AuditFilter
from koalapy.model.identity import Identity, Role

PATH = "/scheduler/audit"

Target = Annotated[fields.Text, Query(max_length=200, description="only actions on this target, such as job 7")]
Result = Annotated[Literal["", "done", "refused", "failed"], Query(description="only actions with this outcome")]
Since = Annotated[Literal["", "3600", "86400", "604800"], Query(description="only entries of the last seconds")]

MAX_CHANGES = 20
"""Number of changes that a page of a job, cluster or user shows at once."""
Before = Annotated[int, Query(alias="changes", ge=0, le=fields.MAX_ID, description="only changes before this entry")]


async def read_changes(
    audit_log: Audit, caller: Identity, before: int, *, target: str = "", actor: str = ""
) -> View | None:
    """Return changes of a target or by a user before an entry (0: the newest); None unless operators ask."""
    if not caller.has_role(Role.OPERATOR):
        return None
    audit_filter = AuditFilter(actor=actor, target=target, limit=MAX_CHANGES + 1, newest_first=True, before=before)
    entries = await audit_log.read_entries(audit_filter)
    page = [replace(entry, role="", address="", how="") for entry in entries[:MAX_CHANGES]]
    return {
        "entries": page,
        # The value of ``changes`` in the query for older entries; 0 if there are none
        "older": page[-1].id if len(entries) > MAX_CHANGES else 0,
        "is_newest": before == 0,
    }


def _in_words(action: str) -> str:
    return action.replace("_", " ")


def _outcome_cell(entry: AuditEntry, now: float) -> str:
    style = {"done": "succeeded", "failed": "failed"}.get(entry.outcome, "held")
    return state_badge(entry.outcome, style) + (f" ×{entry.times:,}" if entry.times > 1 else "")


AUDIT: TableDefinition[AuditEntry] = TableDefinition(
    "entries",
    (
        tables.time_column("time", "Time", "at"),
        Column("user", "User", attrgetter("actor"), href=lambda entry: with_query(PATH, user=entry.actor)),
        Column("role", "Role"),
        Column(
            "action", "Action", style="nowrap", format=_in_words, href=lambda row: with_query(PATH, action=row.action)
        ),
        Column("target", "Target", style="said"),
        Column("outcome", "Outcome", html=_outcome_cell),
        Column("detail", "Detail", style="said"),
        Column("address", "Address"),
        Column("how", "Authenticated by"),
        Column("times", "Count", style="number", is_optional=True),
    ),
    "-time",
    ident=lambda entry: f"entry-{entry.id}",
)
SORTABLE = ("time",)


def add_audit(dashboard: Dashboard, audit_log: Audit) -> None:
    """Add the page of recorded actions and rejected requests, for administrators."""

    @dashboard.page(PATH, "audit.html", operation="list_audit", title="Audit", table=AUDIT)
    async def audit(
        table: TableParameters,
        user: Actor = "",
        action: Action = "",
        target: Target = "",
        outcome: Result = "",
        since: Since = "",
    ) -> View:
        """Return the entries that match the filters, by default newest first."""
        sort, position = tables.sort_of(AUDIT, table, SORTABLE), tables.parse_number_position(table.after)
        is_newest_first = sort.startswith("-")
        before, after = (position, 0) if is_newest_first else (0, position)
        audit_filter = AuditFilter(
            0.0, user, action, after, table.limit + 1, target, outcome, newest_first=is_newest_first, before=before
        )
        entries = await audit_log.read_entries(audit_filter, float(since) if since else None)
        page = entries[: table.limit]
        page_filter = {"user": user, "action": action, "target": target, "outcome": outcome, "since": since}
        next_after = tables.write_position(page[-1].id, page[-1].id) if len(entries) > table.limit else ""
        view = tables.make_view(
            AUDIT, table, PATH, page_filter, shown=len(page), next_after=next_after, sortable=SORTABLE
        )
        return {"entries": page, "table": view}
