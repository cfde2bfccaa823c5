"""The arithmetic of reports, on cases worked out by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.workload import measures, tables
from koalapy.workload.measures import Samples, measured_row, planned_row, quantile_of, report_of
from koalapy.workload.plan import Arrival

Json = dict[str, Any]


def job(
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
    **more: Any,
) -> Json:
    """A row of a job as the daemon would tell of it."""
    request = {"type": "nonfixed", "components": [{"size": size} for size in sizes]}
    arrival = Arrival(float(number), application, {"request": request, "priority": priority})
    told: Json = {
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
        **more,
    }
    components = [{"staged_at": None}, {"staged_at": "2026-11-21T12:00:02.500Z"}, {}]
    attempts = [{"placed_at": "2026-11-21T12:00:01.000Z", "components": components}]
    return measured_row(planned_row(number, arrival), number + 0.25, told, attempts)


def cluster(name: str, total: int, used: int, background: int) -> Json:
    return {
        "name": name,
        "total": total,
        "used": used,
        "background": background,
        "idle": total - used - background,
        "down": 0,
    }


def test_a_job_is_told_by_its_spans() -> None:
    told = job(3)
    assert (told["wait_time"], told["execution_time"], told["response_time"]) == (2.0, 8.0, 10.0)
    assert (told["nodes"], told["components"], told["submitted"], told["late"]) == (4, 2, 3.25, 0.25)
    assert (told["clusters"], told["coallocated"], told["transfer_time"]) == ({"north": 2, "south": 2}, True, 1.5)


def test_two_components_on_one_cluster_are_not_coallocated() -> None:
    told = job(1, places={"north": 4})
    assert (told["coallocated"], told["clusters"]) == (False, {"north": 4})


def test_a_job_that_never_started_is_nowhere() -> None:
    told = job(1, wait=None, state="cancelled")
    assert (told["clusters"], told["coallocated"], told["execution_time"]) == ({}, None, None)


def test_means_are_over_the_jobs_that_ran() -> None:
    told = measures.compute_means(
        [
            job(1, wait=1.0, response=4.0),
            job(2, wait=3.0, response=12.0, places={"north": 4}, restarts=2),
            job(3, state="failed", exit_code=1, wait=2.0, response=5.0, restarts=1),
            job(4, state="cancelled", wait=None, response=99.0),
            planned_row(5, Arrival(0.0, "wave", {"request": {"type": "flexible", "total_size": 3}})),
        ]
    )
    assert told["states"] == {"cancelled": 1, "failed": 1, "not submitted": 1, "succeeded": 2}
    assert (told["jobs"], told["ran"]) == (5, 3)
    assert (told["wait_time"], told["execution_time"], told["response_time"]) == (2.0, 5.0, 7.0)
    assert told["coallocated"] == pytest.approx(2 / 3, abs=1e-6)
    assert told["clusters_combined"] == pytest.approx(5 / 3, abs=1e-6)
    # Three failures in six runs.
    assert told["failures"] == 0.5
    assert told["response_quantiles"] == {"0.5": 5.0, "0.95": 12.0}


def test_a_job_that_failed_before_it_started_has_not_run() -> None:
    """As one that was not placed in as many tries as it was given; its response time is none of a program's."""
    told = measures.compute_means([job(1), job(2, state="failed", wait=None, response=100.0, restarts=1)])
    assert (told["ran"], told["response_time"], told["wait_time"], told["execution_time"]) == (1, 10.0, 2.0, 8.0)
    assert told["states"] == {"failed": 1, "succeeded": 1}
    assert told["failures"] == pytest.approx(1 / 3, abs=1e-6)


def test_a_job_that_was_aborted_has_not_run_to_an_end_of_its_own() -> None:
    """Its last attempt is a failure, too, but none of its restarts."""
    reason = "infrastructure-failure: north: the runner was lost (gave up after 2 restarts)"
    aborted = job(2, state="failed", response=500.0, restarts=2, reason=reason)
    late = job(3, state="failed", response=100.0, reason="walltime of 98 s exceeded")
    told = measures.compute_means([job(1), aborted, late])
    assert (told["ran"], told["response_time"], told["states"]) == (1, 10.0, {"failed": 2, "succeeded": 1})
    # Of five attempts three failed.
    assert told["failures"] == 0.6


def test_means_of_nothing_are_unknown() -> None:
    told = measures.compute_means([])
    assert (told["jobs"], told["response_time"], told["coallocated"], told["failures"]) == (0, None, None, None)


def test_sizes_are_grouped_as_in_the_paper() -> None:
    groups = measures.by_size([job(1), job(2, priority="high"), job(3, sizes=(1, 1)), job(4)])
    assert [(g["nodes"], g["components"], g["priority"], g["ran"]) for g in groups] == [
        (2, 2, "low", 1),
        (4, 2, "high", 1),
        (4, 2, "low", 2),
    ]


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_the_smallest_that_so_many_do_not_exceed(values: list[float], part: float) -> None:
    ordered = sorted(values)
    found = quantile_of(ordered, part)
    assert found in values
    assert found is not None
    assert sum(v <= found for v in values) >= part * len(values) - 1e-6
    assert sum(v < found for v in values) < part * len(values) + 1e-6


def test_utilisation_weighs_each_look_by_how_long_it_held() -> None:
    samples = Samples()
    samples.add_sample(0.0, [cluster("north", 4, 0, 0), cluster("south", 2, 2, 0)])
    samples.add_sample(1.0, [cluster("north", 4, 4, 0), cluster("south", 2, 0, 2)])
    samples.add_sample(4.0, [cluster("north", 4, 1, 1), cluster("south", 2, 0, 0)])
    told = samples.utilisation()
    assert told["clusters"]["north"] == {"nodes": 4, "ours": 12 / 16, "background": 0.0}
    assert told["clusters"]["south"] == {"nodes": 2, "ours": 0.25, "background": 0.75}
    assert told["all"] == {"nodes": 6, "ours": round(14 / 24, 6), "background": 0.25}
    assert Samples(samples.to_json()).utilisation() == told
    assert samples.cut_at(1.0).at == [0.0, 1.0]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.floats(0.001, 100)), min_size=1, max_size=20))
def test_utilisation_is_the_same_whether_counted_on_the_way_or_at_the_end(looks: list[tuple[int, int, float]]) -> None:
    samples, at = Samples(), 0.0
    for used, background, span in looks:
        samples.add_sample(at, [cluster("north", 8, used, background)])
        at += span
    again = Samples(samples.to_json()).utilisation()
    assert samples.cut_at(at).utilisation() == again
    for who in ("ours", "background"):
        assert samples.utilisation()["all"][who] == pytest.approx(again["all"][who], abs=1e-5)


def test_a_promised_node_is_not_counted_twice() -> None:
    samples = Samples()
    for at in (0.0, 1.0):
        samples.add_sample(at, [cluster("north", 4, 6, 1)])
    assert samples.utilisation()["all"] == {"nodes": 4, "ours": 0.75, "background": 0.25}


def test_a_cluster_that_joins_later_had_no_nodes_before() -> None:
    samples = Samples()
    samples.add_sample(0.0, [cluster("north", 2, 1, 0)])
    samples.add_sample(1.0, [cluster("north", 2, 1, 0), cluster("south", 2, 2, 0)])
    samples.add_sample(2.0, [])
    told = samples.utilisation()
    assert told["clusters"]["south"]["ours"] == 1.0
    assert told["all"]["ours"] == pytest.approx(4 / 6, abs=1e-6)


def a_report(policy: str, response: float, label: str = "") -> Json:
    samples = Samples()
    for at in (0.0, 10.0, 20.0, 30.0):
        samples.add_sample(at, [cluster("north", 4, 2, 1)])
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
    jobs = [job(1, response=response, policy=policy), job(2, response=response, policy=policy, application="prime")]
    return report_of(jobs, samples, {"seed": 1, "arrivals": "poisson"}, run)


def test_what_was_seen_after_the_last_job_does_not_count() -> None:
    told = a_report("worst-fit", 10.0)
    # The last job ended at 2.25 + 10 s.
    assert told["samples"]["at"] == [0.0, 10.0]
    assert told["utilisation"]["all"] == {"nodes": 4, "ours": 0.5, "background": 0.25}


def test_runs_are_compared_with_the_first() -> None:
    told = measures.compare_reports([("a", a_report("worst-fit", 10.0)), ("b", a_report("cluster-minimization", 15.0))])
    rows = {(row["run"], row["application"]): row["change"] for row in told["rows"]}
    assert rows == {
        ("worst-fit", "prime"): None,
        ("worst-fit", "wave"): None,
        ("worst-fit", "all"): None,
        ("cluster-minimization", "prime"): 0.5,
        ("cluster-minimization", "wave"): 0.5,
        ("cluster-minimization", "all"): 0.5,
    }
    text = tables.format_comparison(told)
    assert "+50.0 %" in text
    assert "| cluster-minimization |" in text


def test_runs_of_one_policy_are_told_apart_by_their_names() -> None:
    told = measures.compare_reports([("a", a_report("worst-fit", 10.0)), ("b", a_report("worst-fit", 15.0))])
    assert [run["label"] for run in told["runs"]] == ["a", "b"]


def test_the_page_tells_what_was_measured() -> None:
    text = tables.format_report(a_report("worst-fit", 10.0), "worst-fit")
    said = ("2 jobs in 30 s (2 succeeded)", "20.0 % asked for, 25.0 % measured", "more than 1 s late: 1,", "by 2.5 s")
    assert [part for part in said if part not in text] == []
    lengths = {len(line) for line in text.splitlines() if line.startswith(("| wave", "| prime"))}
    assert len(lengths) == 1, "columns stand below each other"
