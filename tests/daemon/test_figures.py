"""Metrics of clusters: ages, and a bounded set of labels."""

from types import SimpleNamespace
from typing import Any, cast

from koalapy.api.monitoring import Exposition
from koalapy.daemon.alerts.alerts import Alerts
from koalapy.daemon.alerts.health import HealthMonitor
from koalapy.daemon.engine.engine import Outbox
from koalapy.daemon.observability.figures import Figures, figures_of
from koalapy.daemon.observability.instruments import Instruments
from koalapy.model.alert import AlertRules
from koalapy.model.disk import DiskLimits
from koalapy.model.reports import ClusterReport, LrmCalls, Versions
from koalapy.scheduler.clusters import ClusterStatus


def make_grid(*clusters: ClusterStatus, now: float = 100.0) -> Any:
    """Return a substitute for an engine with these clusters and no jobs."""
    grid = SimpleNamespace(clusters=lambda: clusters)
    return SimpleNamespace(
        queries=SimpleNamespace(jobs=list, grid=grid, rules=SimpleNamespace(unreachable_after=5.0)),
        clock=lambda: now,
        pending_items=0,
        outbox=Outbox((), 1),
        database=SimpleNamespace(problem="", lease_lost=False, lease_renewed_at=None),
        cycle_started_at=None,
        draining=False,
        epoch=1,
        stored_queued=0,
        stored_active=0,
    )


async def collect_figures(*clusters: ClusterStatus) -> Figures:
    engine = make_grid(*clusters)
    alerts = Alerts((), AlertRules(), engine.clock)
    return await figures_of(engine, HealthMonitor(cast(Any, engine), engine.queries, {}, DiskLimits()), alerts)


def list_samples(present: Figures) -> set[tuple[str, str]]:
    """Return name and ``operation`` label of each metric that has a cluster label."""
    families = Exposition(present, Instruments()).collect()
    return {
        (s.name, s.labels.get("operation", "")) for metric in families for s in metric.samples if "cluster" in s.labels
    }


async def test_figures_with_unknown_operations_have_no_such_labels() -> None:
    north = ClusterStatus("north")
    made_up = [LrmCalls(f"made-up-{number}", 1) for number in range(1000)]
    north.report(ClusterReport(4, 4, calls=(LrmCalls("snapshot", 3), *made_up)), 90.0)
    collected = await collect_figures(north)
    (cluster,) = collected.clusters
    assert [call.operation for call in cluster.calls] == ["snapshot"]
    assert cluster.reported_ago == 10.0
    assert {operation for _, operation in list_samples(collected)} == {"", "snapshot"}


async def test_figures_of_agent_without_versions_have_none() -> None:
    old, new = ClusterStatus("old"), ClusterStatus("new")
    old.report(ClusterReport(4, 4), 90.0)
    new.report(ClusterReport(4, 4, versions=Versions("1", "slurm 22", "4.1.4")), 90.0)
    collected = await collect_figures(old, new, ClusterStatus("never"))
    assert [(cluster.versions is None, len(cluster.calls), cluster.reported_ago) for cluster in collected.clusters] == [
        (True, 0, 10.0),
        (False, 0, 10.0),
        (True, 0, None),
    ]
    text = [metric for metric in Exposition(collected, Instruments()).collect() if metric.name == "koala_cluster_info"]
    assert [sample.labels["cluster"] for sample in text[0].samples] == ["new"]
