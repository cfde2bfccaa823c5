"""The tables of clusters and of the nodes of one cluster."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from markupsafe import Markup

from koalapy.daemon.agents.questions import KnownNodes
from koalapy.dashboard.rendering import format_seconds, format_size, identifier, render_age, render_time, state_badge
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
)
from koalapy.model.identity import Identity
from koalapy.model.job import Component, Job, JobId
from koalapy.scheduler.clusters import ClusterStatus
from koalapy.scheduler.queries import Queries
from koalapy.validation.permissions import may_see_all_of


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
        return '<span class="bad">starts no jobs</span>'
    if not row.connected:
        return '<span class="hint">unknown</span>'
    if row.answers is None:
        return "not reported"
    text = f'<span class="good">answers</span> in {format_seconds(row.answers.mean)}'
    if not row.answers.failures:
        return text
    failures = f"{row.answers.failures:,} of {row.answers.count:,} failed"
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
            is_optional=True,
        ),
        Column("known", "Report", lambda row: iso_time(row.known_at), _age_cell, "nowrap"),
        Column(
            "manager", "Resource manager", lambda row: row.problem, _resource_manager_cell, "nowrap", is_sortable=False
        ),
        Column("reason", "Reason", lambda row: row.reason, style="said", is_sortable=False),
    ),
    "state",
    ident=lambda row: f"row-{identifier(natural_key(row.cluster))}",
    href=_path,
)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node of a cluster, with the component that has it."""

    name: str
    """A number for callers who may not see the job."""
    state: str
    """The state of its component, or that of the node: ``idle``, ``local``, ``down``, or ``held`` by another daemon."""
    node_class: str
    job: JobId | None = None
    owner: str = ""
    """Empty if the caller may not see it."""
    rank: int | None = None
    since: float | None = None
    """When the component got the node."""
    memory: int | None = None
    """Bytes; None if unknown."""
    cores: int | None = None
    features: Sequence[str] = ()
    reason: str = ""
    """The resource manager's words on its state."""


def list_nodes(
    cluster: ClusterStatus, known: KnownNodes, queries: Queries, caller: Identity, limit: int
) -> list[NodeRow]:
    """Return the nodes that a resource manager has listed, and those that components have, up to a limit."""
    classes = {node_class.name: node_class for node_class in cluster.node_classes}
    # Without names of classes, a single class applies to all nodes.
    only_class = cluster.node_classes[0] if len(cluster.node_classes) == 1 else None

    def make_row(name: str, state: str, class_name: str, reason: str, held: tuple[Job, Component] | None) -> NodeRow:
        node_class = classes.get(class_name, only_class)
        job, component = held or (None, None)
        return NodeRow(
            name,
            state if component is None else component.state,
            class_name or ("" if node_class is None else node_class.name),
            None if job is None else job.id,
            job.spec.owner if job is not None and may_see_all_of(caller, job) else "",
            None if component is None else component.rank,
            None if component is None else component.claimed_at,
            None if node_class is None else node_class.memory,
            None if node_class is None else node_class.cores,
            () if node_class is None else node_class.features,
            reason,
        )

    # A list may be older than the components, which are the ones that count.
    live = {token: match for token in cluster.live if (match := queries.find(token)) is not None}
    rows = [make_row(node.name, node.state, node.node_class, node.reason, live.get(node.token)) for node in known.nodes]
    listed = {node.token for node in known.nodes}
    for token, (job, component) in live.items():
        if token in listed:
            continue
        for index, host in enumerate(component.hosts[:limit]):
            name = host if may_see_all_of(caller, job) else f"node {index + 1}"
            rows.append(make_row(name, component.state, component.node_class, "", (job, component)))
        if len(rows) >= limit:
            break
    return rows[:limit]


def _state_key(row: NodeRow) -> Value:
    """Return the sort key of the state: nodes that are down first, idle ones last."""
    rank = {"down": 0, "local": 2, "held": 2, "idle": 3}.get(row.state, 1)
    return f"{rank}{natural_key(row.name)}"


NODES: TableDefinition[NodeRow] = TableDefinition(
    "nodes",
    (
        Column("node", "Node", lambda row: row.name, style="nowrap"),
        Column(
            "state",
            "State",
            lambda row: row.state,
            lambda row, _: state_badge("local users" if row.state == "local" else row.state, row.state),
        ),
        Column(
            "job",
            "Job",
            lambda row: row.job,
            lambda row, _: "" if row.job is None else link(f"/jobs/{row.job}", str(row.job)),
            "number",
        ),
        Column("user", "User", lambda row: row.owner),
        Column("component", "Component", lambda row: row.rank, style="number", is_optional=True),
        Column(
            "since",
            "Since",
            lambda row: iso_time(row.since),
            lambda row, _: "" if row.since is None else render_time(row.since),
            "nowrap",
        ),
        Column("class", "Class", lambda row: row.node_class),
        Column("cores", "Cores", lambda row: row.cores, style="number"),
        Column(
            "memory",
            "Memory",
            lambda row: row.memory,
            lambda row, _: "" if row.memory is None else format_size(row.memory),
            "number",
        ),
        Column("features", "Features", lambda row: " ".join(row.features), style="said"),
        Column("reason", "Resource manager says", lambda row: row.reason, style="said"),
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
