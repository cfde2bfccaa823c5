"""Sizes that clusters accept: reported limits such as Slurm's MinNodes, and rejections of one size."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import ClusterView, GridView
from koalapy.model.errors import UsageError
from koalapy.model.job import JobState
from koalapy.model.job_sizes import JobSizes, SizeRanges, accepts_size, exclude_sizes
from koalapy.model.job_spec import JobSpec
from koalapy.model.placement import Placement, Refusal
from koalapy.model.request import FlexibleRequest, Request
from koalapy.policies.registry import builtin_policies
from koalapy.policies.single import BestFit
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.queue.component_sizes import place_within_sizes
from koalapy.validation.submission import check_submission
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

AT_LEAST_TWO = (JobSizes(2),)


def create_world(**sizes: int) -> World:
    """Create a world in which west accepts jobs of two nodes or more."""
    world = World(sizes)
    world.sites["west"].job_sizes = AT_LEAST_TWO
    world.sites["west"].send_report(world.sites["west"].current_report())
    world.advance(1)
    return world


def sizes_by_cluster(world: World, job: int) -> dict[str, int]:
    attempt = world.job(job).attempt
    assert attempt is not None
    return {component.cluster: component.size for component in attempt.gang}


@pytest.mark.parametrize(
    "policy",
    ["cluster-minimization", "larger-first", "faster-first", "communication-aware", "resource-matching", "auto"],
)
def test_flexible_job_keeps_within_least_size_of_cluster(policy: str) -> None:
    world = create_world(north=3, west=3)
    job = world.submit(flexible(4), policy=policy)
    world.advance(1)
    assert sizes_by_cluster(world, job) == {"north": 2, "west": 2}


@pytest.mark.parametrize("sizes", [(JobSizes(1, 4),), (JobSizes(1, 4), JobSizes(9, 10))], ids=["one range", "gap"])
@pytest.mark.parametrize("policy", ["cluster-minimization", "communication-aware", "resource-matching", "auto"])
def test_flexible_job_keeps_within_largest_size_of_cluster(policy: str, sizes: SizeRanges) -> None:
    world = World({"north": 10, "west": 4})
    world.sites["north"].job_sizes = sizes
    world.sites["north"].send_report(world.sites["north"].current_report())
    world.advance(1)
    check_submission(JobSpec(flexible(8), command=("true",), policy=policy), world.queries.limits())
    job = world.submit(flexible(8), policy=policy)
    world.advance(1)
    assert sizes_by_cluster(world, job) == {"north": 4, "west": 4}


def test_policy_calls_grow_linearly_with_clusters_that_reject_size() -> None:
    class CountingPolicy(BestFit):
        calls = 0

        def place(self, request: Request, grid: GridView) -> Placement | Refusal:
            self.calls += 1
            assert self.calls <= 100, "it is called too often"
            return super().place(request, grid)

    clusters = tuple(ClusterView(f"c{number}", 10, 10, job_sizes=(JobSizes(1, 4),)) for number in range(30))
    answer = place_within_sizes(CountingPolicy(), FlexibleRequest(8), GridView(clusters))
    assert isinstance(answer, Refusal)
    assert "c29 gives a job at most 4 nodes" in answer.summary


@pytest.mark.parametrize(("other", "nodes"), [("north", {"north": 3, "west": 4}), ("zoo", {"west": 3, "zoo": 4})])
@pytest.mark.parametrize("policy", ["best-fit", "fastest-one", "auto", "adaptive"])
def test_single_cluster_policy_skips_cluster_that_rejects_size(policy: str, other: str, nodes: dict[str, int]) -> None:
    world = create_world(**nodes)
    job = world.submit(flexible(1), policy=policy)
    world.advance(1)
    assert sizes_by_cluster(world, job) == {other: 1}


@pytest.mark.parametrize("policy", ["worst-fit", "close-to-files", "auto"])
def test_nonfixed_components_avoid_cluster_that_rejects_their_size(policy: str) -> None:
    world = create_world(north=3, west=6)
    job = world.submit(nonfixed(5, 1), policy=policy)
    world.advance(1)
    assert sizes_by_cluster(world, job) == {"north": 1, "west": 5}


def test_submission_of_size_that_no_cluster_accepts_is_rejected() -> None:
    world = create_world(west=3)
    for request, path in ((nonfixed(1), "request.components[0].size"), (fixed(west=1), "request.components[0].size")):
        with pytest.raises(UsageError, match="west gives a job at least 2 nodes") as rejected:
            check_submission(JobSpec(request, command=("true",)), world.queries.limits())
        assert (rejected.value.field, rejected.value.value) == (path, 1)
    with pytest.raises(UsageError, match="west gives a job at least 2 nodes"):
        check_submission(JobSpec(flexible(1), command=("true",)), world.queries.limits())


@pytest.mark.parametrize("policy", ["", "best-fit", "fastest-one", "adaptive"])
def test_dry_run_names_size_limit_in_place_of_promise(policy: str) -> None:
    world = create_world(north=1, west=3)
    world.submit(fixed(north=1), run_time=500)
    world.advance(1)
    for request in (nonfixed(1), flexible(1)):
        spec = JobSpec(request, command=("true",), policy=policy)
        explanation = explain_submission(world.queries, spec, world.now)
        assert explanation.state is JobState.QUEUED
        assert any("west gives a job at least 2 nodes" in finding.reason for finding in explanation.clusters)


def test_waiting_job_starts_when_size_limit_is_lifted() -> None:
    world = create_world(north=1, west=3)
    world.submit(fixed(north=1), run_time=500)
    job = world.submit(flexible(1))
    world.advance(1)
    assert world.state(job) is JobState.QUEUED
    world.sites["west"].job_sizes = ()
    world.sites["west"].send_report(world.sites["west"].current_report())
    world.advance(1)
    assert sizes_by_cluster(world, job) == {"west": 1}


@pytest.mark.parametrize("sizes", ["few", ""])
def test_rejection_of_small_size_bars_only_smaller_ones(sizes: str) -> None:
    """Agents of earlier versions do not say that a size is rejected, so that they bar the whole cluster."""
    world = World({"north": 3, "west": 3})
    west = world.sites["west"]
    west.rejection_fault, west.rejected_sizes = lambda size: "unsuitable" if size < 2 else "", sizes
    job = world.submit(flexible(4))
    world.advance(5)
    if sizes:
        assert sizes_by_cluster(world, job) == {"north": 2, "west": 2}
        assert "west has refused 1 node or fewer, and is not asked again" in world.reasons(job, "requeued")[0]
    else:
        assert world.state(job) is JobState.FAILED


def test_rejection_of_large_size_bars_only_larger_ones() -> None:
    world = World({"north": 3, "west": 6})
    west = world.sites["west"]
    west.rejection_fault, west.rejected_sizes = lambda size: "unsuitable" if size > 3 else "", "many"
    job = world.submit(flexible(6))
    world.advance(5)
    assert sizes_by_cluster(world, job) == {"north": 3, "west": 3}


def test_job_fails_only_when_no_size_remains() -> None:
    world = World({"west": 3})
    west = world.sites["west"]
    west.rejection_fault, west.rejected_sizes = lambda size: "unsuitable", "many"
    job = world.submit(flexible(3))
    world.advance(5)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason == "every cluster that could take it has refused it: west: not 3 nodes"


def test_explanation_of_job_with_rejected_size_names_accepted_sizes() -> None:
    world = World({"north": 3, "west": 3})
    world.submit(fixed(north=3), run_time=500)
    west = world.sites["west"]
    west.rejection_fault, west.rejected_sizes = lambda size: "unsuitable", "few"
    job = world.submit(flexible(1))
    world.advance(5)
    explanation = explain(world.queries, world.job(job), (), world.now)
    reasons = {finding.cluster: finding.reason for finding in explanation.clusters}
    assert "west gives a job at least 2 nodes" in reasons["west"]


ranges = st.lists(
    st.builds(lambda least, more: JobSizes(least, least + more), st.integers(1, 6), st.integers(0, 6)), max_size=2
)
clusters = st.lists(st.tuples(st.integers(0, 8), ranges.map(tuple)), min_size=1, max_size=4)


@given(clusters, st.integers(1, 20), st.integers(1, 3), st.none() | st.integers(1, 4))
def test_flexible_request_is_split_if_any_split_keeps_within_sizes(
    idle: list[tuple[int, SizeRanges]], total: int, least: int, most: int | None
) -> None:
    view = GridView(tuple(ClusterView(f"c{i}", 8, count, job_sizes=sizes) for i, (count, sizes) in enumerate(idle)))
    request = FlexibleRequest(total_size=total, min_component_size=least, max_components=most)
    options = [[0, *(n for n in range(least, c.idle + 1) if accepts_size(c.job_sizes, n))] for c in view]
    fits = any(sum(split) == total and len([n for n in split if n]) <= (most or 4) for split in product(*options))
    for name in ("cluster-minimization", "faster-first", "communication-aware"):
        policy = builtin_policies().resolve(name, request, ())
        answer = policy.place(request, view)
        assert isinstance(answer, Placement) == fits
        assert (policy.explain(request, view) == ()) == fits
        if isinstance(answer, Placement):
            assert answer.total_size == total
            assert all(
                (cluster := view.get(c.cluster)) is not None and cluster.accepts(c.size) and c.size <= cluster.idle
                for c in answer.components
            )


@given(ranges.map(tuple), st.integers(1, 14), st.integers(0, 14))
def test_excluded_sizes_are_not_accepted(sizes: SizeRanges, least: int, more: int) -> None:
    remaining = exclude_sizes(sizes, least, least + more)
    for size in range(1, 30):
        is_left = accepts_size(sizes, size) and not least <= size <= least + more
        assert any(each.least <= size <= each.most for each in remaining) == is_left


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4))
def test_no_component_has_size_that_its_cluster_rejects(sizes: list[int], least: int) -> None:
    world = World({"north": 6, "south": 4, "west": 6})
    world.sites["west"].job_sizes = (JobSizes(least),)
    world.sites["west"].send_report(world.sites["west"].current_report())
    world.advance(1)
    world.sites["west"].rejection_fault = lambda size: "unsuitable" if size < least else ""
    requests: list[Request] = [nonfixed(*sizes), flexible(min(16, sum(sizes)))]
    jobs = [world.submit(request, run_time=1) for request in requests]
    world.advance(30)
    assert not any(world.job(job).refusals for job in jobs)
