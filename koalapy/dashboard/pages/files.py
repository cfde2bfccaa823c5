"""The page Files: replicas on the clusters, bundles of users and results of jobs, with their storage use."""

from operator import attrgetter
from typing import Annotated

from fastapi import Query
from markupsafe import Markup

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.files import ReplicaView
from koalapy.daemon.services import Services
from koalapy.dashboard import tables
from koalapy.dashboard.cluster_table import cluster_path
from koalapy.dashboard.dashboard import Dashboard, View
from koalapy.dashboard.rendering import format_size, identifier, render_iso_time, state_badge, with_query
from koalapy.dashboard.tables import Column, TableDefinition, TableParameters
from koalapy.model.identity import Role

MAX_BUNDLES = 200

LogicalFile = Annotated[fields.Text, Query(max_length=1000, description="only this logical file")]


def _size_cell(replica: ReplicaView, now: float) -> str:
    entries = "" if replica.parts is None else f", {replica.parts:,} entries"
    return f"{format_size(replica.size)}{entries}"


def _page_of(replica: ReplicaView) -> str:
    return with_query("/files", name=replica.name)


REPLICAS: TableDefinition[ReplicaView] = TableDefinition(
    "replicas",
    (
        Column("name", "Logical file", style="said", href=_page_of),
        Column("cluster", "Cluster", href=lambda replica: cluster_path(replica.cluster)),
        Column("state", "State", format=lambda state: state_badge(state, "usable" if state == "good" else "failed")),
        Column("size", "Size", style="number", html=_size_cell),
        Column("path", "Path", style="said", format=Markup("<code>{}</code>").format),
        Column("verified", "Verified", attrgetter("verified_at"), "nowrap", render_iso_time),
        Column("reason", "Reason", style="said"),
    ),
    "name",
    ident=lambda replica: f"replica-{identifier(replica.name)}-{identifier(replica.cluster)}",
    href=_page_of,
)


def add_files(dashboard: Dashboard, services: Services) -> None:
    """Add the page of replicas, uploaded bundles and stored results."""
    files, bundles, results = services.files, services.bundles, services.results

    @dashboard.page(
        "/files", "files.html", operation="list_replicas", title="Files", key="f", shared=True, table=REPLICAS
    )
    async def show(caller: Caller, table: TableParameters, name: LogicalFile = "") -> View:
        """Return a page of replicas by name and cluster, and the bundles and results that the caller may see."""
        position = tables.parse_position(table.after) if table.after else ("", "")
        if not all(isinstance(text, str) for text in position):
            raise tables.invalid_position(table.after)
        replicas = files.list_replicas(name or None, position, table.limit + 1)
        page, next_position = replicas[: table.limit], ""
        if len(replicas) > table.limit:
            next_position = tables.write_position(page[-1].name, page[-1].cluster)
        visible_bundles = bundles.visible_to(caller)
        sizes = await results.sizes_by_owner()
        user_results = {
            user: size
            for user, size in sorted(sizes.items(), key=lambda pair: -pair[1])
            if caller.has_role(Role.OPERATOR) or user == caller.user
        }
        return {
            "name": name,
            "replicas": [ReplicaView.model_validate(replica) for replica in page],
            "table": tables.make_view(
                REPLICAS, table, "/files", {"name": name}, shown=len(page), next_after=next_position, sortable=()
            ),
            "bundles": visible_bundles[:MAX_BUNDLES],
            "more_bundles": max(0, len(visible_bundles) - MAX_BUNDLES),
            "bundle_room": bundles.storage_use,
            "results": user_results,
            "result_room": results.storage_use,
        }
