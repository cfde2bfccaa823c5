"""The tables of clusters and of the nodes of one cluster."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from urllib.parse import quote

from markupsafe import Markup

from koalapy.daemon.agents.questions import NodeRow
from koalapy.dashboard.rendering import (
    format_iso_time,
    format_seconds,
    format_size,
    identifier,
    render_time,
    state_badge,
)
from koalapy.dashboard.rows import ClusterRow, natural_key, severity
from koalapy.dashboard.tables import Column, TableDefinition, Value, link, time_column
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_hosts


def cluster_path(cluster: ClusterName) -> str:
    """Return the path of a cluster's page."""
    return f"/clusters/{quote(cluster, safe='')}"


def _path(row: ClusterRow) -> str:
    return cluster_path(row.cluster)


def _jobs_of(state: str) -> Callable[[ClusterRow], str]:
    return lambda row: f"/queue?q=state:{state}+cluster:{quote(row.cluster, safe='')}"


def _count_of(state: str) -> Callable[[ClusterRow], int | None]:
    """Return the number of nodes in a state; None for a cluster of which it is unknown."""
    return lambda row: None if row.nodes.unknown else getattr(row.nodes, state)


def _age_cell(row: ClusterRow, now: float) -> str:
    if not row.stale:
        return '<span class="fresh">up to date</span>'
    age = "stale: never reported" if row.known_at is None else f"unknown since {render_time(row.known_at)}"
    return f'<span class="stale">{age}</span>'


def _manager_cell(row: ClusterRow, now: float) -> str:
    if row.problem:
        return '<span class="bad">starts no jobs</span>'
    if not row.connected:
        return '<span class="hint">unknown</span>'
    if row.answers is None:
        return "not reported"
    text = f'<span class="good">answers</span> in {format_seconds(row.answers.mean)}'
    failures = f"{row.answers.failures:,} failed" if row.answers.failures else ""
    text += f", {link(f'{cluster_path(row.cluster)}#calls', failures)}" if failures else ""
    return f'<span class="nowrap">{text}</span>'


CLUSTERS: TableDefinition[ClusterRow] = TableDefinition(
    "clusters",
    (
        Column("cluster", "Cluster", style="nowrap", href=_path, sort_key=lambda row: natural_key(row.cluster)),
        Column("state", "State", format=state_badge, sort_key=severity),
        Column("kind", "Kind", is_optional=True),
        Column("nodes", "Nodes", attrgetter("total"), "number"),
        Column("running", "Running", _count_of("running"), "number", href=_jobs_of("running")),
        Column("claimed", "Claimed", _count_of("claimed"), "number", href=_jobs_of("claiming")),
        Column("local", "Local users", _count_of("local"), "number"),
        Column("down", "Down", _count_of("down"), "number"),
        Column("idle", "Idle", _count_of("idle"), "number"),
        Column(
            "unknown", "Unknown", attrgetter("nodes.unknown"), "number", lambda count: f"{count:,}" if count else ""
        ),
        Column("waiting", "Waiting jobs", style="number", href=_jobs_of("queued"), is_optional=True),
        Column("known", "Report", lambda row: format_iso_time(row.known_at), html=_age_cell),
        Column("manager", "Resource manager", attrgetter("problem"), html=_manager_cell, is_sortable=False),
        Column("reason", "Reason", style="said", is_sortable=False),
    ),
    "state",
    ident=lambda row: f"row-{identifier(natural_key(row.cluster))}",
    href=_path,
)


def group_nodes(rows: Sequence[NodeRow]) -> list[NodeRow]:
    """Return a row for all nodes with the same values except their names, with all names: ``n[0-3,7], 5 nodes``."""
    groups: dict[NodeRow, list[str]] = {}
    for row in rows:
        groups.setdefault(replace(row, name=""), []).append(row.name)
    return [
        replace(row, name=names[0] if len(names) == 1 else f"{format_hosts(names)}, {len(names):,} nodes")
        for row, names in groups.items()
    ]


def _state_key(row: NodeRow) -> Value:
    """Return the sort key of the state: nodes that are down first, idle ones last."""
    rank = {"down": 0, "local": 2, "held": 2, "idle": 3}.get(row.state, 1)
    return f"{rank}{natural_key(row.name)}"


def _format_state(state: str) -> Markup:
    return state_badge("local users" if state == "local" else state, state)


NODES: TableDefinition[NodeRow] = TableDefinition(
    "nodes",
    (
        Column("node", "Node", attrgetter("name"), "nowrap", sort_key=lambda row: natural_key(row.name)),
        Column("state", "State", format=_format_state, sort_key=_state_key),
        Column("job", "Job", style="number", format=str, href=lambda row: f"/jobs/{row.job}"),
        Column("user", "User", attrgetter("owner")),
        Column("component", "Component", attrgetter("rank"), "number", is_optional=True),
        time_column("since", "Since", "since"),
        Column("class", "Class", attrgetter("node_class"), "nowrap"),
        Column("cores", "Cores", style="number"),
        Column("memory", "Memory", style="number", format=format_size),
        Column("features", "Features", lambda row: " ".join(row.features), "said"),
        Column("reason", "Resource manager says", style="said"),
    ),
    "state",
    ident=lambda row: f"node-{natural_key(row.name)}-{row.job or 0}-{row.rank or 0}",
)
