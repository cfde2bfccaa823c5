"""Workloads follow their recipe, are equal for equal seeds, and fit their grid."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koalapy.api.job_views import JobSubmission
from koalapy.model.errors import UsageError
from koalapy.validation.limits import ClusterLimits, Limits
from koalapy.validation.submission import check_submission
from koalapy.workload.generate import from_trace, generate_workload
from koalapy.workload.plan import Workload, components_of, nodes_of, parse_workload, workload_lines
from koalapy.workload.recipe import DEFAULT, POLICIES, PRESETS, GridSize, Recipe, form_for
from koalapy.workload.swf import Trace, TraceJob

GRID = GridSize({"north": 16, "south": 16, "east": 8})
recipes = st.builds(
    Recipe,
    sizes=st.lists(st.integers(1, 8), min_size=1, max_size=4).map(tuple),
    components=st.lists(st.integers(1, 8), min_size=1, max_size=4).map(tuple),
    least=st.integers(1, 4),
    request=st.sampled_from(["nonfixed", "flexible"]),
    policy=st.sampled_from(["", "worst-fit", "cluster-minimization"]),
    priorities=st.sampled_from([(("high", 1.0), ("low", 2.0)), (("low", 1.0),)]),
    applications=st.sampled_from([(("sleep", 1.0),), (("prime", 2.0), ("wave", 1.0))]),
    inputs=st.sampled_from([(), ("a", "b")]),
    jobs=st.integers(1, 30),
    rate=st.none() | st.floats(0.01, 100),
    scale=st.none() | st.floats(0.1, 2),
    fields=st.sampled_from([(), (("claiming", "incremental"), ("processes_per_node", 2))]),
).map(lambda r: replace(r, request=form_for(r.policy, r.request)))


@settings(max_examples=60, deadline=None)
@given(recipes, st.integers(0, 2**32))
def test_generated_jobs_pass_validation_for_the_grid(recipe: Recipe, seed: int) -> None:
    generated = generate_workload(recipe, GRID, seed)
    assert len(generated.jobs) == recipe.jobs
    limits = Limits([ClusterLimits(name, nodes) for name, nodes in GRID.clusters.items()], POLICIES)
    for arrival in generated.jobs:
        check_submission(JobSubmission.model_validate(arrival.job).to_model(), limits)
        assert 1 <= nodes_of(arrival.job) <= GRID.total
    assert [a.arrives_at for a in generated.jobs] == sorted(a.arrives_at for a in generated.jobs)


@settings(max_examples=30, deadline=None)
@given(recipes, st.integers(0, 2**32))
def test_generated_file_is_reproducible_and_parses_back(recipe: Recipe, seed: int) -> None:
    first, second = (list(workload_lines(generate_workload(recipe, GRID, seed))) for _ in range(2))
    assert first == second
    again = parse_workload(first, "file")
    assert list(workload_lines(again)) == first


def test_generated_jobs_do_not_depend_on_policy() -> None:
    recipe = replace(DEFAULT, sizes=(2, 4, 8), applications=(("prime", 1.0), ("wave", 1.0)), jobs=200)

    def job_facts(generated: Workload) -> list[tuple[Any, ...]]:
        return [
            (a.arrives_at, a.application, nodes_of(a.job), a.job["command"], a.job["priority"]) for a in generated.jobs
        ]

    split = generate_workload(replace(recipe, policy="worst-fit", components=(2,)), GRID, 7)
    flexible = generate_workload(replace(recipe, policy="cluster-minimization", request="flexible"), GRID, 7)
    assert job_facts(split) == job_facts(flexible)
    assert {components_of(a.job) for a in split.jobs} == {2}
    assert job_facts(generate_workload(recipe, GRID, 8)) != job_facts(split)


def test_generated_arrivals_and_sizes_have_requested_means() -> None:
    recipe = replace(DEFAULT, sizes=(1, 2, 4), run_times=(10.0, 30.0), utilisation=0.4, jobs=5000)
    generated = generate_workload(recipe, GRID, 3)
    sizes = [nodes_of(a.job) for a in generated.jobs]
    times = [float(a.job["command"][1]) for a in generated.jobs]
    assert fmean(sizes) == pytest.approx(7 / 3, rel=0.05)
    assert fmean(times) == pytest.approx(20, rel=0.05)
    assert min(times) >= 10
    assert max(times) <= 30
    work = sum(n * t for n, t in zip(sizes, times, strict=True))
    assert work / (GRID.total * generated.lasts) == pytest.approx(0.4, rel=0.06)
    gaps = [b.arrives_at - a.arrives_at for a, b in zip(generated.jobs, generated.jobs[1:], strict=False)]
    # Mean and standard deviation of an exponential distribution are equal.
    assert fmean(g**2 for g in gaps) == pytest.approx(2 * fmean(gaps) ** 2, rel=0.1)


def test_preset_mohamed_2005_splits_as_in_the_paper() -> None:
    jobs = generate_workload(replace(PRESETS["m05"], scale=1.0), GridSize({"a": 100, "b": 100, "c": 110}), 1).jobs
    assert len(jobs) == 500
    split = {(nodes_of(a.job), components_of(a.job)) for a in jobs}
    assert split == {(36, 3), (36, 4), (72, 3), (72, 4), (72, 6), (72, 8)}
    assert all(min(c["size"] for c in a.job["request"]["components"]) > 8 for a in jobs)
    assert {a.job["priority"] for a in jobs} == {"high", "low"}
    assert {(a.job["policy"], a.job["claiming"]) for a in jobs} == {("close-to-files", "incremental")}
    assert all(30 <= float(a.job["command"][1]) <= 192 for a in jobs)


def test_presets_sonmez_2010_fit_the_grid() -> None:
    das3 = GridSize({"amsterdam": 85, "uva": 41, "multimedian": 46, "leiden": 32})
    first = replace(PRESETS["s10-vi"], estimates=(("prime", 200.0),))
    assert {nodes_of(a.job) for a in generate_workload(first, das3, 1).jobs} == {8, 16, 32}
    second = replace(PRESETS["s10-vii"], estimates=(("wave", 200.0),))
    generated = generate_workload(second, das3, 1)
    assert {nodes_of(a.job) for a in generated.jobs} == {64}
    assert {a.application for a in generated.jobs} == {"wave"}
    # 40 % of 204 nodes, with jobs of 64 nodes and 200 s: one job in 157 s
    assert generated.header["rate"] == pytest.approx(0.4 * 204 / (64 * 200), rel=1e-3)
    small = generate_workload(replace(first, jobs=50, duration=None), GridSize({"a": 4, "b": 8}), 1)
    assert {nodes_of(a.job) for a in small.jobs} == {1, 2, 4}


def test_generated_job_reads_one_input_file() -> None:
    generated = generate_workload(replace(DEFAULT, inputs=("a", "b"), jobs=50), GRID, 1)
    assert {a.job["inputs"][0]["file"] for a in generated.jobs} == {"a", "b"}
    assert all(len(a.job["inputs"]) == 1 for a in generated.jobs)


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"sizes": (0,)}, "--sizes"),
        ({"sizes": ()}, "--sizes"),
        ({"components": (0,)}, "--components"),
        ({"rate": 0.0}, "--rate"),
        ({"rate": float("nan")}, "--rate"),
        ({"utilisation": -1.0}, "--utilisation"),
        ({"scale": 0.0}, "--scale"),
        ({"compress": float("inf")}, "--compress"),
        ({"jobs": 0}, "--jobs"),
        ({"run_times": (5.0, 1.0)}, "--run-times"),
        ({"applications": (("x", 1.0),)}, "--applications"),
        ({"applications": (("sleep", 0.0),)}, "--applications"),
        ({"priorities": (("medium", 1.0),)}, "--priorities"),
        ({"estimates": (("x", 1.0),)}, "--estimate"),
        ({"sizes": (40,), "request": "nonfixed"}, "--sizes"),
        ({"duration": 1e-9, "jobs": None}, "--duration"),
    ],
)
def test_recipe_with_invalid_value_names_its_option(changes: dict[str, Any], option: str) -> None:
    with pytest.raises(UsageError) as refused:
        generate_workload(replace(DEFAULT, **changes), GRID, 1)
    assert refused.value.field.startswith(option)
    assert refused.value.hint


def test_recipe_with_utilisation_needs_a_grid() -> None:
    with pytest.raises(UsageError, match="the sizes of the clusters"):
        generate_workload(DEFAULT, GridSize(), 1)
    assert len(generate_workload(replace(DEFAULT, rate=1.0, jobs=3), GridSize(), 1).jobs) == 3


def test_from_trace_uses_its_arrivals_sizes_and_run_times() -> None:
    trace = Trace(
        [
            TraceJob(1, 100.0, 60.0, 64, 1),
            TraceJob(2, 160.0, 30.0, 1, 5),
            TraceJob(3, 220.0, 0.0, 8, 1),
            TraceJob(4, 400.0, 120.0, 128, 1),
        ],
        {"MaxProcs": "128"},
    )
    recipe = replace(DEFAULT, request="flexible", compress=10.0, jobs=None)
    generated = from_trace(recipe, trace, GRID, 1, name="a.swf")
    assert [(a.arrives_at, nodes_of(a.job), a.job["command"]) for a in generated.jobs] == [
        (0.0, 20, ["sleep", "6.000"]),
        (6.0, 1, ["sleep", "3.000"]),
        (30.0, 40, ["sleep", "12.000"]),
    ]
    assert generated.header["trace"] == {
        "file": "a.swf",
        "jobs": 4,
        "used": 3,
        "processors": 128,
        "left_out": {"of run time 0": 1},
    }
    with_zero = from_trace(recipe, trace, GRID, 1, keep_zero=True)
    assert [a.job["command"] for a in with_zero.jobs] == [["sleep", f"{s}.000"] for s in (6, 3, 0, 12)]
    assert with_zero.header["trace"]["left_out"] == {}
    completed = from_trace(recipe, trace, GRID, 1, status=1)
    assert len(completed.jobs) == 2
    assert len(from_trace(replace(recipe, duration=10.0), trace, GRID, 1).jobs) == 2
    assert len(from_trace(replace(recipe, jobs=1), trace, GRID, 1).jobs) == 1
    with pytest.raises(UsageError, match="no job that ran"):
        from_trace(recipe, trace, GRID, 1, status=3)


def test_from_trace_with_too_many_jobs_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace([TraceJob(number, number, 60.0, 1, 1) for number in range(3)], {"MaxProcs": str(GRID.total)})
    recipe = replace(DEFAULT, jobs=None)
    monkeypatch.setattr("koalapy.workload.generate.MAX_JOBS", 3)
    assert len(from_trace(recipe, trace, GRID, 1).jobs) == 3
    monkeypatch.setattr("koalapy.workload.generate.MAX_JOBS", 2)
    with pytest.raises(UsageError, match="more than 2 jobs"):
        from_trace(recipe, trace, GRID, 1)
    assert len(from_trace(replace(recipe, jobs=2), trace, GRID, 1).jobs) == 2


@pytest.mark.parametrize(
    ("policy", "requested", "form"),
    [
        ("worst-fit", "flexible", "nonfixed"),
        ("close-to-files", "flexible", "nonfixed"),
        ("cluster-minimization", "nonfixed", "flexible"),
        ("best-fit", "flexible", "flexible"),
        ("best-fit", "nonfixed", "nonfixed"),
        ("auto", "flexible", "flexible"),
        ("fixed", "nonfixed", "nonfixed"),
        ("of-another-package", "flexible", "flexible"),
        ("", "nonfixed", "nonfixed"),
    ],
)
def test_form_for_policy_is_one_that_it_serves(policy: str, requested: str, form: str) -> None:
    assert form_for(policy, requested) == form
