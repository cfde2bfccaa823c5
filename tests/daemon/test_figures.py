"""Figures of clusters: as old as they are, and no more of them than there are kinds."""

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


def seen(*clusters: ClusterStatus, now: float = 100.0) -> Any:
    """An engine with these clusters and no jobs."""
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


async def figures(*clusters: ClusterStatus) -> Figures:
    engine = seen(*clusters)
    alerts = Alerts((), AlertRules(), engine.clock)
    return await figures_of(engine, HealthMonitor(cast(Any, engine), engine.queries, {}, DiskLimits()), alerts)


def samples(of: Figures) -> set[tuple[str, str]]:
    """Names, and what each cluster is told apart by."""
    told = Exposition(of, Instruments()).collect()
    return {(s.name, s.labels.get("operation", "")) for metric in told for s in metric.samples if "cluster" in s.labels}


async def test_what_an_agent_makes_up_is_in_no_label() -> None:
    north = ClusterStatus("north")
    made_up = [LrmCalls(f"made-up-{number}", 1) for number in range(1000)]
    north.report(ClusterReport(4, 4, calls=(LrmCalls("snapshot", 3), *made_up)), 90.0)
    told = await figures(north)
    (cluster,) = told.clusters
    assert [call.operation for call in cluster.calls] == ["snapshot"]
    assert cluster.reported_ago == 10.0
    assert {operation for _, operation in samples(told)} == {"", "snapshot"}


async def test_an_agent_that_says_nothing_of_them_has_neither_calls_nor_versions() -> None:
    old, new = ClusterStatus("old"), ClusterStatus("new")
    old.report(ClusterReport(4, 4), 90.0)
    new.report(ClusterReport(4, 4, versions=Versions("1", "slurm 22", "4.1.4")), 90.0)
    told = await figures(old, new, ClusterStatus("never"))
    assert [(each.versions is None, len(each.calls), each.reported_ago) for each in told.clusters] == [
        (True, 0, 10.0),
        (False, 0, 10.0),
        (True, 0, None),
    ]
    text = [metric for metric in Exposition(told, Instruments()).collect() if metric.name == "koala_cluster_info"]
    assert [sample.labels["cluster"] for sample in text[0].samples] == ["new"]
