"""The tables of clusters and of the nodes of one cluster."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from urllib.parse import quote

from markupsafe import Markup

from koalapy.daemon.agents.questions import NodeRow
from koalapy.dashboard.rendering import format_seconds, format_size, identifier, render_time, state_badge
from koalapy.dashboard.rows import ClusterRow, natural_key
from koalapy.dashboard.tables import (
    Column,
    TableDefinition,
    TableQuery,
    TableView,
    Value,
    iso_time,
    link,
    render_table,
    show_rows,
    time_column,
)
from koalapy.model.request import ClusterName
from koalapy.model.wording import format_hosts


def cluster_path(cluster: ClusterName) -> str:
    """Return the path of a cluster's page."""
    return f"/clusters/{quote(cluster, safe='')}"


def _jobs_cell(count: int, state: str, row: ClusterRow) -> str:
    """Return a number as a link to the jobs that it counts, if they have a state."""
    text = f"{count:,}"
    return link(f"/queue?q=state:{state}+cluster:{quote(row.cluster, safe='')}", text) if count and state else text


def _nodes(name: str, title: str, state: str = "") -> Column[ClusterRow]:
    """Return the column of the nodes in a state, with a link to their jobs; unknown ones hide the others."""
    get: Callable[[ClusterRow], int] = attrgetter(f"nodes.{name}")

    def html(row: ClusterRow, now: float) -> str:
        return _jobs_cell(get(row), state, row) if bool(row.nodes.unknown) == (name == "unknown") else ""

    return Column(name, title, get, html, "number")


def _age_cell(row: ClusterRow, now: float) -> str:
    if not row.stale:
        return '<span class="fresh">up to date</span>'
    if row.known_at is None:
        return '<span class="stale">stale: never reported</span>'
    return f'<span class="stale">unknown since {render_time(row.known_at)}</span>'


def _resource_manager_cell(row: ClusterRow, now: float) -> str:
    if row.problem:
        return '<span class="bad">starts no jobs</span>'
    if not row.connected:
        return '<span class="hint">unknown</span>'
    if row.answers is None:
        return "not reported"
    text = f'<span class="good">answers</span> in {format_seconds(row.answers.mean)}'
    if not row.answers.failures:
        return text
    failures = f"{row.answers.failures:,} of {row.answers.count:,} failed"
    return f"{text}, {link(f'{cluster_path(row.cluster)}#calls', failures)}"


CLUSTERS: TableDefinition[ClusterRow] = TableDefinition(
    "clusters",
    (
        Column("cluster", "Cluster", html=lambda row, _: link(cluster_path(row.cluster), row.cluster), style="nowrap"),
        Column("state", "State", html=lambda row, _: state_badge(row.state)),
        Column("kind", "Kind", is_optional=True),
        Column("nodes", "Nodes", attrgetter("total"), style="number"),
        _nodes("running", "Running", "running"),
        _nodes("claimed", "Claimed", "claiming"),
        _nodes("local", "Local users"),
        _nodes("down", "Down"),
        _nodes("idle", "Idle"),
        _nodes("unknown", "Unknown"),
        Column(
            "waiting",
            "Waiting jobs",
            html=lambda row, _: _jobs_cell(row.waiting, "queued", row),
            style="number",
            is_optional=True,
        ),
        Column("known", "Report", lambda row: iso_time(row.known_at), _age_cell, "nowrap"),
        Column("manager", "Resource manager", attrgetter("problem"), _resource_manager_cell, is_sortable=False),
        Column("reason", "Reason", style="said", is_sortable=False),
    ),
    "state",
    ident=lambda row: f"row-{identifier(natural_key(row.cluster))}",
    href=lambda row: cluster_path(row.cluster),
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


NODES: TableDefinition[NodeRow] = TableDefinition(
    "nodes",
    (
        Column("node", "Node", attrgetter("name"), style="nowrap"),
        Column(
            "state",
            "State",
            html=lambda row, _: state_badge("local users" if row.state == "local" else row.state, row.state),
        ),
        Column(
            "job",
            "Job",
            html=lambda row, _: "" if row.job is None else link(f"/jobs/{row.job}", str(row.job)),
            style="number",
        ),
        Column("user", "User", attrgetter("owner")),
        Column("component", "Component", attrgetter("rank"), style="number", is_optional=True),
        time_column("since", "Since", "since"),
        Column("class", "Class", attrgetter("node_class"), style="nowrap"),
        Column("cores", "Cores", style="number"),
        Column(
            "memory",
            "Memory",
            html=lambda row, _: "" if row.memory is None else format_size(row.memory),
            style="number",
        ),
        Column("features", "Features", lambda row: " ".join(row.features), style="said"),
        Column("reason", "Resource manager says", style="said"),
    ),
    "state",
    ident=lambda row: f"node-{natural_key(row.name)}-{row.job or 0}-{row.rank or 0}",
)


def show_nodes(rows: Sequence[NodeRow], query: TableQuery, path: str, q: str = "") -> tuple[list[NodeRow], TableView]:
    """Return a page of nodes, by default those that are down first."""
    return show_rows(
        NODES, query, path, {"q": q}, rows, {"node": lambda row: natural_key(row.name), "state": _state_key}
    )


def render_nodes(view: TableView, rows: Sequence[NodeRow], now: float) -> Markup:
    """Return nodes as a table, for a page on which it is not the main content."""
    return render_table(NODES, view, rows, now)
