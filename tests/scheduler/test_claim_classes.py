"""Claims of components that compete for nodes: the placement decides which nodes each of them gets."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.array import TaskIndices
from koalapy.model.job import JobState, RefusalCause
from koalapy.model.job_spec import ClaimingMode, JobSpec
from koalapy.model.reports import NodeClassReport
from koalapy.model.request import ComponentRequest, NonFixedRequest
from koalapy.scheduler.claims.claim_try import ClaimTry
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.test_node_requirements import NodesWorld
from tests.scheduler.world import World

FEATURES = ("big", "batch")


def make_world(*counts: tuple[int, tuple[str, ...]], rules: Rules | None = None) -> NodesWorld:
    """Return a grid of one cluster with classes of so many nodes with these features."""
    classes = tuple(
        NodeClassReport(f"k{index}", total, total, features=features) for index, (total, features) in enumerate(counts)
    )
    world = NodesWorld(rules, {"north": sum(total for total, _ in counts)}, {"north": classes})
    world.advance(1)
    return world


def competing(*components: tuple[int, tuple[str, ...]]) -> NonFixedRequest:
    """Return a request for components of these sizes that require these features."""
    return NonFixedRequest(tuple(ComponentRequest(size, features=features) for size, features in components))


@pytest.mark.parametrize("claiming", list(ClaimingMode))
@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
def test_claim_of_overlapping_requirements_starts_at_once(queue: Any, claiming: ClaimingMode) -> None:
    rules = Rules(queue=queue, claiming=claiming)
    world = make_world((1, ("big", "batch")), (3, ("big",)), (1, ()), rules=rules)
    job = world.submit(competing((1, ()), (1, ("batch",)), (3, ("big",))), run_time=60)
    world.advance(5)
    attempt = world.job(job).attempt
    assert attempt is not None
    assert (world.state(job), world.timeline_events(job).count("placed")) == (JobState.RUNNING, 1)
    assert [component.node_class for component in attempt.components] == ["k2", "k0", "k1"]
    assert world.nodes_of(job) == {"north.k0": 1, "north.k1": 3, "north.k2": 1}


@given(
    counts=st.lists(st.tuples(st.integers(1, 3), st.sets(st.sampled_from(FEATURES))), min_size=1, max_size=3),
    components=st.lists(st.tuples(st.integers(1, 3), st.sets(st.sampled_from(FEATURES))), min_size=2, max_size=4),
    claiming=st.sampled_from(ClaimingMode),
)
def test_claim_follows_placement_for_all_requirements(counts: Any, components: Any, claiming: ClaimingMode) -> None:
    """A job on an idle grid is placed once and starts, if it can be placed at all."""
    world = make_world(*((total, tuple(features)) for total, features in counts), rules=Rules(claiming=claiming))
    spec = JobSpec(competing(*((size, tuple(features)) for size, features in components)), ("program",))
    if world.queries.questions.refusal_on_empty_grid(spec):
        return
    (job,) = world.submit_together([spec])
    world.advance(5)
    world.check_nodes()
    assert (world.state(job), world.timeline_events(job).count("placed")) == (JobState.RUNNING, 1)


def test_claim_of_equal_requirements_names_no_class() -> None:
    world = make_world((2, ("big",)), (2, ("big",)), (1, ()))
    job = world.submit(competing((1, ("big",)), (3, ("big",))))
    world.advance(1)
    attempt = world.job(job).attempt
    assert attempt is not None
    assert [component.node_class for component in attempt.components] == ["", ""]


# Claims that fail in the cycle of their placement, as if both disagreed


@pytest.fixture
def disagreeing(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(ClaimTry, "_take_idle", lambda self, component: component.cluster != "north")
    monkeypatch.setattr("tests.scheduler.invariants._check_claims_lead_to_starts", lambda effects, ends_in_vain: None)
    return monkeypatch


def test_claim_failing_at_once_pauses_for_growing_times(disagreeing: pytest.MonkeyPatch) -> None:
    world = World({"north": 4})
    job = world.submit(fixed(north=2), run_time=10)
    placed = [entry.at for entry in world.timeline if entry.event == "placed"]
    assert (placed, world.state(job), world.job(job).retry_at) == ([0.0], JobState.QUEUED, 30.0)
    reason = "north lacked 2 nodes when they were claimed, and is tried again at 00:00:30"
    assert world.queries.waiting_reason(world.job(job)) == f"is tried again at 00:00:30: {reason}"
    assert reason in explain(world.queries, world.job(job), world.timeline, world.now).headline
    world.advance(7200)
    placed = [entry.at for entry in world.timeline if entry.event == "placed"]
    assert placed == [0.0, 30.0, 90.0, 210.0, 450.0, 930.0, 1890.0, 3810.0]
    assert (world.job(job).restarts, world.state(job)) == (0, JobState.QUEUED)
    disagreeing.undo()
    world.advance(3700)
    assert world.state(job) is JobState.SUCCEEDED


def test_claim_failing_at_once_leads_to_other_cluster(disagreeing: pytest.MonkeyPatch) -> None:
    world = World({"north": 8, "south": 4})
    job = world.submit(nonfixed(3), run_time=1000)
    world.advance(1)
    attempt = world.job(job).attempt
    assert attempt is not None
    assert [component.cluster for component in attempt.components] == ["south"]
    assert world.state(job) is JobState.RUNNING


def test_claim_of_array_failing_at_once_starts_few_tasks(disagreeing: pytest.MonkeyPatch) -> None:
    world = World({"north": 4}, strict=False)
    array = world.submit(fixed(north=1), array=TaskIndices.parse("0-99"))
    world.advance(600)
    assert sum(entry.event == "placed" for entry in world.timeline) <= 20
    disagreeing.undo()
    world.advance(7200)
    assert world.state(array) is JobState.SUCCEEDED


def test_claim_failures_alone_never_fail_a_job(disagreeing: pytest.MonkeyPatch) -> None:
    """Only rejections by resource managers count as such, here one after many failed claims."""
    world = World({"north": 4})
    job = world.submit(flexible(2), run_time=10)
    world.advance(4000)
    assert world.job(job).refusals[0].times > 4
    disagreeing.undo()
    world.sites["north"].rejection_fault = lambda size: "unknown"
    while not (rejections := [r for r in world.job(job).refusals if r.cause is RefusalCause.REJECTED]):
        world.advance(10)
    assert (world.state(job), rejections[0].times) == (JobState.QUEUED, 1)
