"""The arithmetic of reports, compared with values calculated by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.workload import measures, tables
from koalapy.workload.measures import Samples, measured_row, planned_row, quantile_of, report_of
from koalapy.workload.plan import Arrival

Json = dict[str, Any]


def make_job(
    number: int,
    *,
    wait: float | None = 2.0,
    response: float | None = 10.0,
    places: dict[str, int] | None = None,
    application: str = "wave",
    sizes: tuple[int, ...] = (2, 2),
    priority: str = "low",
    policy: str = "worst-fit",
    state: str = "succeeded",
    restarts: int = 0,
    **fields: Any,
) -> Json:
    """Return a report row of a job."""
    request = {"type": "nonfixed", "components": [{"size": size} for size in sizes]}
    arrival = Arrival(float(number), application, {"request": request, "priority": priority})
    row: Json = {
        "id": 100 + number,
        "state": state,
        "policy": policy,
        "request": request,
        "queue_time": 1.0,
        "startup_overhead": 1.0,
        "wait_time": wait,
        "response_time": response,
        "start_delay": 0.0,
        "placement_tries": 1,
        "claiming_tries": 1,
        "restarts": restarts,
        "components": [{"cluster": c, "size": n} for c, n in (places or {"north": 2, "south": 2}).items()],
        **fields,
    }
    components = [{"staged_at": None}, {"staged_at": "2026-11-21T12:00:02.500Z"}, {}]
    attempts = [{"placed_at": "2026-11-21T12:00:01.000Z", "components": components}]
    return measured_row(planned_row(number, arrival), number + 0.25, row, attempts)


def make_cluster(name: str, total: int, used: int, background: int) -> Json:
    return {
        "name": name,
        "total": total,
        "used": used,
        "background": background,
        "idle": total - used - background,
        "down": 0,
    }


def test_measured_row_has_the_spans_of_the_job() -> None:
    result = make_job(3)
    assert (result["wait_time"], result["execution_time"], result["response_time"]) == (2.0, 8.0, 10.0)
    assert (result["nodes"], result["components"], result["submitted"], result["late"]) == (4, 2, 3.25, 0.25)
    assert (result["clusters"], result["coallocated"], result["transfer_time"]) == ({"north": 2, "south": 2}, True, 1.5)


def test_measured_row_of_components_on_one_cluster_is_not_coallocated() -> None:
    result = make_job(1, places={"north": 4})
    assert (result["coallocated"], result["clusters"]) == (False, {"north": 4})


def test_measured_row_of_job_never_started_has_no_clusters() -> None:
    result = make_job(1, wait=None, state="cancelled")
    assert (result["clusters"], result["coallocated"], result["execution_time"]) == ({}, None, None)


def test_compute_means_covers_only_jobs_that_ran() -> None:
    result = measures.compute_means(
        [
            make_job(1, wait=1.0, response=4.0),
            make_job(2, wait=3.0, response=12.0, places={"north": 4}, restarts=2),
            make_job(3, state="failed", exit_code=1, wait=2.0, response=5.0, restarts=1),
            make_job(4, state="cancelled", wait=None, response=99.0),
            planned_row(5, Arrival(0.0, "wave", {"request": {"type": "flexible", "total_size": 3}})),
        ]
    )
    assert result["states"] == {"cancelled": 1, "failed": 1, "not submitted": 1, "succeeded": 2}
    assert (result["jobs"], result["ran"]) == (5, 3)
    assert (result["wait_time"], result["execution_time"], result["response_time"]) == (2.0, 5.0, 7.0)
    assert result["coallocated"] == pytest.approx(2 / 3, abs=1e-6)
    assert result["clusters_combined"] == pytest.approx(5 / 3, abs=1e-6)
    # Three of six runs failed.
    assert result["failures"] == 0.5
    assert result["response_quantiles"] == {"0.5": 5.0, "0.95": 12.0}


def test_compute_means_excludes_jobs_failed_before_start() -> None:
    """A job may reach its limit of placement tries. Its response time is then not that of a program."""
    result = measures.compute_means([make_job(1), make_job(2, state="failed", wait=None, response=100.0, restarts=1)])
    assert (result["ran"], result["response_time"], result["wait_time"], result["execution_time"]) == (
        1,
        10.0,
        2.0,
        8.0,
    )
    assert result["states"] == {"failed": 1, "succeeded": 1}
    assert result["failures"] == pytest.approx(1 / 3, abs=1e-6)


def test_compute_means_excludes_aborted_jobs() -> None:
    """The last attempt of an aborted job counts as a failure, although no restart follows it."""
    reason = "infrastructure-failure: north: the runner was lost (gave up after 2 restarts)"
    aborted = make_job(2, state="failed", response=500.0, restarts=2, reason=reason)
    late = make_job(3, state="failed", response=100.0, reason="walltime of 98 s exceeded")
    result = measures.compute_means([make_job(1), aborted, late])
    assert (result["ran"], result["response_time"], result["states"]) == (1, 10.0, {"failed": 2, "succeeded": 1})
    # Three of five attempts failed.
    assert result["failures"] == 0.6


def test_compute_means_without_jobs_is_unknown() -> None:
    result = measures.compute_means([])
    assert (result["jobs"], result["response_time"], result["coallocated"], result["failures"]) == (0, None, None, None)


def test_by_size_groups_as_in_the_paper() -> None:
    groups = measures.by_size([make_job(1), make_job(2, priority="high"), make_job(3, sizes=(1, 1)), make_job(4)])
    assert [(g["nodes"], g["components"], g["priority"], g["ran"]) for g in groups] == [
        (2, 2, "low", 1),
        (4, 2, "high", 1),
        (4, 2, "low", 2),
    ]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_quantile_is_smallest_value_covering_the_fraction(values: list[float], part: float) -> None:
    ordered = sorted(values)
    quantile = quantile_of(ordered, part)
    assert quantile in values
    assert quantile is not None
    assert sum(v <= quantile for v in values) >= part * len(values) - 1e-6
    assert sum(v < quantile for v in values) < part * len(values) + 1e-6


def test_utilisation_weights_samples_by_duration() -> None:
    samples = Samples()
    samples.add_sample(0.0, [make_cluster("north", 4, 0, 0), make_cluster("south", 2, 2, 0)])
    samples.add_sample(1.0, [make_cluster("north", 4, 4, 0), make_cluster("south", 2, 0, 2)])
    samples.add_sample(4.0, [make_cluster("north", 4, 1, 1), make_cluster("south", 2, 0, 0)])
    result = samples.utilisation()
    assert result["clusters"]["north"] == {"nodes": 4, "ours": 12 / 16, "background": 0.0}
    assert result["clusters"]["south"] == {"nodes": 2, "ours": 0.25, "background": 0.75}
    assert result["all"] == {"nodes": 6, "ours": round(14 / 24, 6), "background": 0.25}
    assert Samples(samples.to_json()).utilisation() == result
    assert samples.cut_at(1.0).at == [0.0, 1.0]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.floats(0.001, 100)), min_size=1, max_size=20))
def test_utilisation_of_restored_samples_is_the_same(looks: list[tuple[int, int, float]]) -> None:
    samples, time = Samples(), 0.0
    for used, background, span in looks:
        samples.add_sample(time, [make_cluster("north", 8, used, background)])
        time += span
    again = Samples(samples.to_json()).utilisation()
    assert samples.cut_at(time).utilisation() == again
    for who in ("ours", "background"):
        assert samples.utilisation()["all"][who] == pytest.approx(again["all"][who], abs=1e-5)


def test_utilisation_counts_a_promised_node_once() -> None:
    samples = Samples()
    for time in (0.0, 1.0):
        samples.add_sample(time, [make_cluster("north", 4, 6, 1)])
    assert samples.utilisation()["all"] == {"nodes": 4, "ours": 0.75, "background": 0.25}


def test_utilisation_of_later_cluster_counts_from_its_start() -> None:
    samples = Samples()
    samples.add_sample(0.0, [make_cluster("north", 2, 1, 0)])
    samples.add_sample(1.0, [make_cluster("north", 2, 1, 0), make_cluster("south", 2, 2, 0)])
    samples.add_sample(2.0, [])
    result = samples.utilisation()
    assert result["clusters"]["south"]["ours"] == 1.0
    assert result["all"]["ours"] == pytest.approx(4 / 6, abs=1e-6)


def make_report(policy: str, response: float, label: str = "") -> Json:
    samples = Samples()
    for time in (0.0, 10.0, 20.0, 30.0):
        samples.add_sample(time, [make_cluster("north", 4, 2, 1)])
    run = {
        "began": "2026-11-21T12:00:00+00:00",
        "seconds": 30.0,
        "complete": True,
        "interrupted": label,
        "background_target": 0.2,
        "late": 1,
        "latest": 2.5,
        "daemon_away": 0.0,
    }
    jobs = [
        make_job(1, response=response, policy=policy),
        make_job(2, response=response, policy=policy, application="prime"),
    ]
    return report_of(jobs, samples, {"seed": 1, "arrivals": "poisson"}, run)


def test_report_ignores_samples_after_the_last_job() -> None:
    result = make_report("worst-fit", 10.0)
    # The last job ended at 2.25 + 10 s.
    assert result["samples"]["at"] == [0.0, 10.0]
    assert result["utilisation"]["all"] == {"nodes": 4, "ours": 0.5, "background": 0.25}


def test_compare_reports_relates_runs_to_the_first() -> None:
    result = measures.compare_reports(
        [("a", make_report("worst-fit", 10.0)), ("b", make_report("cluster-minimization", 15.0))]
    )
    rows = {(row["run"], row["application"]): row["change"] for row in result["rows"]}
    assert rows == {
        ("worst-fit", "prime"): None,
        ("worst-fit", "wave"): None,
        ("worst-fit", "all"): None,
        ("cluster-minimization", "prime"): 0.5,
        ("cluster-minimization", "wave"): 0.5,
        ("cluster-minimization", "all"): 0.5,
    }
    text = tables.format_comparison(result)
    assert "+50.0 %" in text
    assert "| cluster-minimization |" in text


def test_compare_reports_of_one_policy_labels_by_name() -> None:
    result = measures.compare_reports([("a", make_report("worst-fit", 10.0)), ("b", make_report("worst-fit", 15.0))])
    assert [run["label"] for run in result["runs"]] == ["a", "b"]


def test_format_report_contains_the_measurements() -> None:
    text = tables.format_report(make_report("worst-fit", 10.0), "worst-fit")
    texts = ("2 jobs in 30 s (2 succeeded)", "20.0 % asked for, 25.0 % measured", "more than 1 s late: 1,", "by 2.5 s")
    assert [part for part in texts if part not in text] == []
    lengths = {len(line) for line in text.splitlines() if line.startswith(("| wave", "| prime"))}
    assert len(lengths) == 1, "columns stand below each other"
