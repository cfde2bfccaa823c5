"""Metrics of clusters: ages, and a bounded set of labels."""

from dataclasses import replace

from deploy.documentation.metrics_page import EMPTY_FIGURES
from koalapy.api.monitoring import list_metrics
from koalapy.model.reports import ClusterReport, LrmCalls, Versions
from koalapy.scheduler.clusters import ClusterStatus


def samples_of(metric: str, *clusters: ClusterStatus) -> dict[tuple[str, ...], float]:
    """Return the values of a metric of these clusters at the time 100, by labels."""
    metrics = list_metrics(replace(EMPTY_FIGURES, now=100.0, clusters=clusters))
    (family,) = [family for family in metrics if family.name == f"koala_{metric}"]
    return {tuple(sample.labels.values()): sample.value for sample in family.samples}


def reporting(name: str, report: ClusterReport) -> ClusterStatus:
    cluster = ClusterStatus(name)
    cluster.report(report, 90.0)
    return cluster


def test_metrics_with_unknown_operations_have_no_such_labels() -> None:
    made_up = [LrmCalls(f"made-up-{number}", 1) for number in range(1000)]
    north = reporting("north", ClusterReport(4, 4, calls=(LrmCalls("snapshot", 3), *made_up)))
    assert samples_of("lrm_calls", north) == {("north", "snapshot"): 3.0}


def test_metrics_of_clusters_leave_out_what_was_not_reported() -> None:
    old = reporting("old", ClusterReport(4, 4))
    new = reporting("new", ClusterReport(4, 4, versions=Versions("1", "slurm 22", "4.1.4")))
    clusters = old, new, ClusterStatus("never")
    assert samples_of("cluster_info", *clusters) == {("new", "1", "slurm 22", "4.1.4"): 1.0}
    assert samples_of("agent_report_age_seconds", *clusters) == {("old",): 10.0, ("new",): 10.0}
