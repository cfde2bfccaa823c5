"""The table of clusters."""

from urllib.parse import quote

from markupsafe import escape

from koalapy.dashboard.rendering import format_seconds, identifier, render_age
from koalapy.dashboard.rows import ClusterRow
from koalapy.dashboard.tables import Column, TableDefinition, iso_time, link, state_badge


def _path(row: ClusterRow) -> str:
    return f"/clusters/{quote(row.cluster, safe='')}"


def _jobs_cell(count: int, state: str, row: ClusterRow) -> str:
    """Return a number as a link to the jobs that it counts."""
    return link(f"/queue?q=state:{state}+cluster:{quote(row.cluster, safe='')}", f"{count:,}") if count else "0"


def _age_cell(row: ClusterRow, now: float) -> str:
    if not row.stale:
        return '<span class="fresh">up to date</span>'
    if row.known_at is None:
        return '<span class="stale">stale: never reported</span>'
    return f'<span class="stale">stale: {render_age(row.known_at, now)} old</span>'


def _resource_manager_cell(row: ClusterRow, now: float) -> str:
    if row.problem:
        return f'<span class="bad">{escape(row.problem)}</span>'
    if not row.connected:
        return '<span class="hint">unknown</span>'
    if row.answers is None:
        return "not reported"
    text = f'<span class="good">answers</span> in {format_seconds(row.answers.mean)}'
    if not row.answers.failures:
        return text
    failures = f"failed {row.answers.failures:,} of {row.answers.count:,} times"
    return f"{text}, {link(f'{_path(row)}#calls', failures)}"


CLUSTERS: TableDefinition[ClusterRow] = TableDefinition(
    "clusters",
    (
        Column("cluster", "Cluster", lambda row: row.cluster, lambda row, _: link(_path(row), row.cluster), "nowrap"),
        Column("state", "State", lambda row: row.state, lambda row, _: state_badge(row.state)),
        Column("kind", "Kind", lambda row: row.kind),
        Column("nodes", "Nodes", lambda row: row.total, lambda row, _: f"{row.total:,}", "number"),
        Column(
            "running",
            "Running",
            lambda row: row.nodes.running,
            lambda row, _: _jobs_cell(row.nodes.running, "running", row),
            "number",
        ),
        Column(
            "claimed",
            "Claimed",
            lambda row: row.nodes.claimed,
            lambda row, _: _jobs_cell(row.nodes.claimed, "claiming", row),
            "number",
        ),
        Column("local", "Local users", lambda row: row.nodes.local, lambda row, _: f"{row.nodes.local:,}", "number"),
        Column("down", "Down", lambda row: row.nodes.down, lambda row, _: f"{row.nodes.down:,}", "number"),
        Column("idle", "Idle", lambda row: row.nodes.idle, lambda row, _: f"{row.nodes.idle:,}", "number"),
        Column(
            "waiting",
            "Waiting jobs",
            lambda row: row.waiting,
            lambda row, _: _jobs_cell(row.waiting, "queued", row),
            "number",
        ),
        Column("known", "State as of", lambda row: iso_time(row.known_at), _age_cell, "nowrap"),
        Column("manager", "Resource manager", lambda row: row.problem, _resource_manager_cell, is_sortable=False),
        Column("reason", "Reason", lambda row: row.reason, style="said", is_sortable=False),
    ),
    "state",
    ident=lambda row: f"row-{identifier(row.cluster)}",
    href=_path,
)
