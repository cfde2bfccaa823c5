"""The pages Clusters, one cluster and Maintenance, with the actions drain, resume and clear."""

from dataclasses import replace
from functools import partial
from typing import Annotated

from pydantic import BeforeValidator

from koalapy.api import fields
from koalapy.api.access import Caller
from koalapy.api.clusters import DrainOrder, Name, ResumeOrder, record_for
from koalapy.daemon.agents.questions import list_visible_nodes
from koalapy.daemon.forecast.forecasts import DrainPreview
from koalapy.daemon.observability.audit import Audit
from koalapy.daemon.services import Services
from koalapy.dashboard.attention import group_alerts
from koalapy.dashboard.charts import use_chart
from koalapy.dashboard.cluster_table import CLUSTERS, NODES, cluster_path, group_nodes
from koalapy.dashboard.dashboard import Dashboard, Form, SentForm, Simulate, View, parse_body
from koalapy.dashboard.pages.audit import Before, read_changes
from koalapy.dashboard.pages.scheduler import failures_of
from koalapy.dashboard.pages.timeline import drains_of, hide_details
from koalapy.dashboard.rendering import with_query
from koalapy.dashboard.rows import Survey, cluster_row, fold_clusters, natural_key, sum_counts
from koalapy.dashboard.tables import TableParameters, TableQuery, Words, matches_text, show_rows
from koalapy.dashboard.time_range import Since, Until, parse_range
from koalapy.model.identity import Identity, Role
from koalapy.model.request import ClusterName
from koalapy.scheduler.cluster_conditions import HealthStatus

MAX_NODES_SHOWN = 24
MAX_ERRORS = 20
SHOWN_DETAILS = ("directory", "replica_directories")
"""Details of a cluster that the page lists under Profile."""
SHOWN_HEALTH = ("errors", "unusable", "trials", "probation", "probation_at")

Moment = Annotated[fields.PointInTime | None, BeforeValidator(lambda text: text or None)]
"""A point in time of a form; None if the field is empty."""


def shown_health(health: HealthStatus, *, is_operator: bool) -> View:
    """Return the errors and the probation of a cluster; the last error only for operators. Other values, such as
    proofs, have tokens and what users asked for."""
    note = health.note if is_operator else health.summary
    return {name: getattr(health, name) for name in SHOWN_HEALTH} | {"note": note}


def add_clusters(dashboard: Dashboard, services: Services, survey: Survey, audit_log: Audit) -> None:
    """Add the pages of clusters and of their drains, and the actions of operators on a cluster."""
    _add_lists(dashboard, services, survey)
    _add_cluster(dashboard, services, survey, audit_log)
    _add_drains(dashboard, services)


def _add_lists(dashboard: Dashboard, services: Services, survey: Survey) -> None:
    """Add the pages of all clusters, and of all nodes of a cluster."""
    engine, queries = dashboard.engine, dashboard.engine.queries

    @dashboard.page("/clusters", "clusters.html", operation="list_clusters", title="Clusters", key="c", table=CLUSTERS)
    async def clusters(table: TableParameters, q: Words = "") -> View:
        """Return the clusters with all words of a filter in their names, kinds, states or reasons."""
        now = engine.clock()
        rows = [cluster_row(queries.grid[record.name], record, survey, now) for record in services.jobs.list_clusters()]
        rows = [row for row in rows if matches_text(q, (row.cluster, row.kind, row.state, row.reason))]
        rows.sort(key=lambda row: natural_key(row.cluster))
        is_plain = table == TableQuery() and not q and len(rows) > table.limit
        listed, folds = fold_clusters(rows, table.limit) if is_plain else (rows, [])
        page, view = show_rows(CLUSTERS, table, "/clusters", {"q": q}, listed if folds else rows)
        view = replace(view, total=len(rows))
        return {"q": q, "clusters": page, "folds": folds, "table": view, "nodes": sum_counts(rows)}

    @dashboard.page("/clusters/{name}/nodes", "nodes.html", operation="show_cluster", title="Nodes", table=NODES)
    async def cluster_nodes(name: Name, caller: Caller, table: TableParameters, q: Words = "") -> View:
        """Return the nodes of a cluster with all words of a filter in their names, states, classes or reasons."""
        services.jobs.get_cluster(name)
        listed, node_list = await list_visible_nodes(services.node_lists, queries, name, caller)
        rows = [
            row
            for row in listed
            if matches_text(q, (row.name, row.state, row.owner, row.node_class, row.reason, *row.features))
        ]
        page, view = show_rows(NODES, table, f"{cluster_path(name)}/nodes", {"q": q}, rows)
        return {
            "cluster": name,
            "q": q,
            "nodes": page,
            "table": view,
            "known": replace(node_list, nodes=()),
            "total": queries.grid[name].last_report.total,
        }


def _add_cluster(dashboard: Dashboard, services: Services, survey: Survey, audit_log: Audit) -> None:
    """Add the page of one cluster."""
    engine, queries = dashboard.engine, dashboard.engine.queries

    @dashboard.page("/clusters/{name}", "cluster.html", operation="show_cluster", title="Cluster", shared=True)
    async def cluster(
        name: Name, caller: Caller, changes_before: Before = 0, since: Since = "", until: Until = ""
    ) -> View:
        """Return the state of one cluster; raise ``NotFoundError`` if there is none of this name."""
        record, now = record_for(caller, services.jobs.get_cluster(name)), engine.clock()
        is_operator = caller.has_role(Role.OPERATOR)
        status = queries.grid[name]
        time_range = parse_range(since, until, now)
        sums = await services.samples.read(time_range.start, time_range.end, (name,))
        failed = await services.history.list_failed_components(name, MAX_ERRORS)
        rows, listing = await list_visible_nodes(services.node_lists, queries, name, caller)
        query, nodes_path = TableQuery(limit=MAX_NODES_SHOWN), f"{cluster_path(name)}/nodes"
        nodes, node_table = show_rows(NODES, query, nodes_path, {}, group_nodes(rows))
        visible_alerts = services.alerts.visible_to(caller)
        groups, silenced = group_alerts((alert for alert in visible_alerts if alert.cluster == name), queries.grid)
        marks = [(drain.since, f"drained {drain.author}") for drain in drains_of(status)]
        marks += [(group.alert.since, group.alert.summary) for group in groups]
        return {
            "lane": cluster_row(status, record, survey, now),
            # Why its agent is not connected, and when it sent its last message
            "absence": (status.absence, status.contact.last_heard),
            "homes": survey.site_use(name),
            "groups": groups,
            "silenced": silenced,
            "drained": status.drained,
            "planned_drains": status.planned_drains,
            "health": shown_health(status.health, is_operator=is_operator),
            "threshold": queries.rules.error_threshold,
            "limit": "" if status.health.limit is None else str(status.health.limit),
            # The reason why nodes reported as idle are not used
            "doubt": "" if status.health.doubt is None else str(status.health.doubt),
            "failures": failures_of(engine.instruments, name),
            # Messages of its agent for users
            "notices": status.last_report.notices,
            "missing_programs": sorted(status.last_report.lacks),
            "versions": status.last_report.versions,
            "calls": record.details.get("calls"),
            "reported_at": status.reported_at,
            "disks": status.last_report.disks,
            "nodes": nodes,
            "node_table": node_table,
            "known_nodes": replace(listing, nodes=()),
            "range": time_range,
            "uses": use_chart("Nodes by use", sums, name, marks),
            # The last components that ended early, the newest first; only operators see why, which may be a
            # user's data
            "errors": [hide_details(component, caller) for component in failed],
            "profile": status.profile,
            "speed": status.speed,
            # Available nodes by class, and partly used ones; empty if the cluster has no node classes
            "node_classes": (*status.nodes.node_classes, *status.nodes.parts),
            "uplink": queries.grid.uplinks.get(name),
            "details": {name: value for name, value in record.details.items() if name in SHOWN_DETAILS},
            # The connected agent; None unless an operator asks
            "agent": services.hub.describe_agent(name) if is_operator else None,
            "certificate": None
            if (certificate := services.certificate) is None or not is_operator
            else (certificate.fingerprint, certificate.expires_at),
            "changes": await read_changes(audit_log, caller, changes_before, target=f"cluster {name}"),
        }


def _add_drains(dashboard: Dashboard, services: Services) -> None:
    """Add the page of all drains, the preview of one with its simulation, and the actions of operators on clusters."""
    grid = dashboard.engine.queries.grid

    @dashboard.page(
        "/clusters/{name}/drain", "drain.html", operation="preview_drain", title="Drain a cluster", live=False
    )
    async def preview(name: Name, begin: Moment = None, end: Moment = None, complete: bool = False) -> DrainPreview:
        """Return the jobs that a drain of the cluster would affect, without a simulation unless ``complete``."""
        if complete:
            return await services.forecasts.preview_drain(name, begin=begin, end=end)
        return services.forecasts.describe_drain(name, begin, end)

    @dashboard.simulation("/clusters/{name}/drain/result", "drain_result.html", operation="preview_drain")
    async def prepare(name: Name, begin: Moment = None, end: Moment = None) -> Simulate:
        """Return the simulation of a drain."""
        services.jobs.get_cluster(name)
        return partial(services.forecasts.preview_drain, name, begin=begin, end=end)

    @dashboard.action("/clusters/{name}/clear", operation="clear_cluster")
    async def clear(name: Name, form: SentForm) -> str:
        await services.jobs.clear_cluster(name)
        return cluster_path(name)

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
        times = {key: value for key in ("begin", "end") if (value := form.get(key))}
        order = parse_body(DrainOrder, {"reason": form.get("reason"), "requeue": bool(form.get("requeue")), **times})
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
