"""The page Maintenance: the drains in force and those that are planned, and the form that plans one."""

from koalapy.api.access import Caller
from koalapy.api.clusters import DrainOrder, Name, ResumeOrder
from koalapy.daemon.services import Services
from koalapy.dashboard.cluster_table import cluster_path
from koalapy.dashboard.dashboard import Dashboard, Form, SentForm, View, parse_body
from koalapy.dashboard.pages.timeline import drains_of
from koalapy.dashboard.rendering import with_query
from koalapy.dashboard.rows import natural_key
from koalapy.model.identity import Identity
from koalapy.model.request import ClusterName


def add_maintenance(dashboard: Dashboard, services: Services) -> None:
    """Add the page of all drains, and the actions of operators that drain and resume clusters."""
    grid = dashboard.engine.queries.grid

    @dashboard.page("/maintenance", "maintenance.html", operation="list_clusters", title="Maintenance", key="m")
    async def show() -> View:
        records = services.jobs.list_clusters()
        drains: list[View] = [
            {
                "cluster": record.name,
                "nodes": record.total,
                # Components of jobs that have nodes there now
                "active": len(cluster.nodes.live),
                "drain": drain,
                "is_planned": drain is not cluster.drained,
            }
            for record in records
            for cluster in [grid[record.name]]
            for drain in drains_of(cluster)
        ]
        drains.sort(key=lambda row: (row["drain"].since, row["cluster"]))
        return {"drains": drains, "clusters": sorted((record.name for record in records), key=natural_key)}

    async def order_drain(name: ClusterName, caller: Identity, form: Form) -> None:
        """Drain a cluster as a form orders. Raise ``UsageError`` for an invalid field."""
        given = {key: value for key in ("begin", "end") if (value := form.get(key))}
        order = parse_body(DrainOrder, {"reason": form.get("reason"), "requeue": bool(form.get("requeue")), **given})
        await services.jobs.drain_cluster(name, caller, **order.model_dump())

    @dashboard.action("/clusters/{name}/drain", operation="drain_cluster")
    async def drain(name: Name, caller: Caller, form: SentForm) -> str:
        await order_drain(name, caller, form)
        return cluster_path(name)

    @dashboard.action("/clusters/{name}/drain/preview", operation="preview_drain")
    async def predict(name: Name, form: SentForm) -> str:
        return with_query(f"{cluster_path(name)}/drain", begin=form.get("begin"), end=form.get("end"))

    @dashboard.action("/maintenance", operation="drain_cluster")
    async def plan(caller: Caller, form: SentForm) -> str:
        await order_drain(form.get("cluster"), caller, form)
        return "/maintenance"

    @dashboard.action("/clusters/{name}/resume", operation="resume_cluster")
    async def resume(name: Name, form: SentForm) -> str:
        keys = ("planned", "begin", "ordered")
        order = parse_body(ResumeOrder, {key: value for key in keys if (value := form.get(key))})
        await services.jobs.resume_cluster(name, **order.model_dump())
        return "/maintenance" if order.planned or order.begin else cluster_path(name)
