"""Jobs accepted at submission can be placed on the empty grid, whatever their policy."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import Link
from koalapy.model.errors import UsageError
from koalapy.model.job import JobState
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest, Request
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.events import LinkMeasured
from koalapy.scheduler.grid import Links
from koalapy.scheduler.rules import Rules
from koalapy.validation.submission import check_submission
from tests.scheduler.requests import nonfixed
from tests.scheduler.world import World

NAMES = ("east", "north", "south", "west")
PAIRS = [(source, target) for source in NAMES for target in NAMES if source <= target]
OPTIONS: dict[str, list[tuple[tuple[str, str], ...]]] = {
    "communication-aware": [(), (("group_latency", "5ms"),), (("metric", "bandwidth"),)],
    "resource-matching": [(), (("mode", "non-saturated"),), (("mode", "first-non-saturated"),)],
}

drawn_links = st.builds(
    Link,
    latency=st.sampled_from([1e-3, 1e-1]),
    bandwidth=st.sampled_from([1e6, 1e7]),
    unreachable=st.sampled_from([False, False, True]),
)
drawn_files = st.builds(
    InputFile,
    name=st.sampled_from(["mesh", "fields"]),
    size=st.just(10**7),
    sites=st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True).map(tuple),
)
inputs = st.lists(drawn_files, max_size=1).map(tuple)
drawn_sizes = st.integers(1, 7)


@st.composite
def drawn_specs(draw: st.DrawFn) -> JobSpec:
    policies = builtin_policies()
    kind = draw(st.sampled_from(["fixed", "nonfixed", "flexible"]))
    request: Request
    if kind == "flexible":
        split = draw(st.lists(st.lists(drawn_sizes, min_size=1, max_size=3).map(tuple), max_size=2))
        total = sum(split[0]) if split else draw(st.integers(1, 20))
        valid_splits = tuple(option for option in split if sum(option) == total)
        request = FlexibleRequest(
            total, draw(st.integers(1, min(3, total))), draw(st.sampled_from([None, 1, 2])), valid_splits
        )
    elif kind == "nonfixed":
        component = st.builds(ComponentRequest, drawn_sizes, inputs=inputs)
        request = NonFixedRequest(tuple(draw(st.lists(component, min_size=1, max_size=4))))
    else:
        component = st.builds(ComponentRequest, drawn_sizes, cluster=st.sampled_from(NAMES), inputs=inputs)
        request = FixedRequest(tuple(draw(st.lists(component, min_size=1, max_size=3))))
    serving = [name for name in policies.names() if request.type in policies.get(name).serves]
    policy = draw(st.sampled_from(serving))
    return JobSpec(
        request,
        ("program",),
        policy=policy,
        policy_options=draw(st.sampled_from(OPTIONS.get(policy, [()]))),
        coallocation=draw(st.sampled_from([None, None, 1, 2, 3])),
        speed_ratio_min=draw(st.sampled_from([None, None, 0.5, 1.0])),
        inputs=draw(inputs) if kind == "flexible" else (),
        per_node_bandwidth=draw(st.sampled_from([None, 1e6])) if policy == "resource-matching" else None,
        launcher=Launcher.PROCESSES,
    )


@given(
    totals=st.fixed_dictionaries({name: st.integers(1, 10) for name in NAMES}),
    measured_links=st.fixed_dictionaries(dict.fromkeys(PAIRS, drawn_links)),
    speeds=st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0]) for name in NAMES}),
    spec=drawn_specs(),
    queue=st.sampled_from(["scan", "head", "fcfs"]),
)
def test_submission_accepted_job_is_placed_on_empty_grid(
    totals: dict[str, int], measured_links: Links, speeds: dict[str, float], spec: JobSpec, queue: str
) -> None:
    world = World(totals, Rules(queue=queue), links=measured_links, speeds=speeds)
    try:
        check_submission(spec, world.queries.limits())
    except UsageError:
        return
    (job,) = world.submit_together([spec])
    assert world.state(job) is not JobState.QUEUED, world.queries.waiting_reason(world.job(job))


@given(
    totals=st.fixed_dictionaries({name: st.integers(1, 10) for name in NAMES}),
    component_sizes=st.lists(drawn_sizes, min_size=1, max_size=4),
    policy=st.sampled_from(["", "close-to-files", "auto"]),
    max_clusters=st.sampled_from([None, 1, 2, 3]),
)
def test_submission_policy_accepts_what_worst_fit_places(
    totals: dict[str, int], component_sizes: list[int], policy: str, max_clusters: int | None
) -> None:
    """Input files change the choice of clusters, not whether a job fits."""
    file = InputFile("mesh", 10**7, ("east",))
    world = World(totals, links={("east", name): Link(1e-3, 1e6) for name in NAMES})
    try:
        check_submission(
            JobSpec(nonfixed(*component_sizes), ("program",), coallocation=max_clusters), world.queries.limits()
        )
    except UsageError:
        return
    request = NonFixedRequest(tuple(ComponentRequest(size, inputs=(file,)) for size in component_sizes))
    check_submission(JobSpec(request, ("program",), policy=policy, coallocation=max_clusters), world.queries.limits())


@pytest.mark.parametrize("policy", ["close-to-files", "auto"])
@pytest.mark.parametrize("with_inputs", [False, True])
def test_submission_impossible_job_is_rejected_with_reason(policy: str, with_inputs: bool) -> None:
    file = InputFile("mesh", 10**6, ("north", "south"))
    world = World({"north": 9, "south": 4}, links={("north", "south"): Link(1e-3, 1e7)})
    request = NonFixedRequest(
        tuple(ComponentRequest(size, inputs=(file,) if with_inputs and size == 2 else ()) for size in (3, 2, 6, 2))
    )
    with pytest.raises(UsageError) as error:
        check_submission(JobSpec(request, ("program",), policy=policy), world.queries.limits())
    expected = (
        f"policy is {policy}, which does not place this job even on the empty grid: no cluster has 2 idle nodes left"
    )
    assert error.value.message.startswith(expected)
    assert error.value.field == "policy"


def test_submission_busy_or_disconnected_cluster_counts_as_empty() -> None:
    world = World({"north": 9, "south": 4})
    world.submit(nonfixed(9), run_time=100)
    world.disconnect("south")
    check_submission(JobSpec(nonfixed(9, 4), ("program",), policy="close-to-files"), world.queries.limits())


@pytest.mark.parametrize(("policy", "sizes"), [("close-to-files", (5, 5, 4, 3)), ("auto", (5, 5, 4, 3))])
def test_close_to_files_with_cluster_limit_chooses_clusters_with_capacity(policy: str, sizes: tuple[int, ...]) -> None:
    """The only two clusters that can serve the job are not neighbours in the order by transfer time."""
    pairs = {("c0", "c1"): 1e7, ("c0", "c2"): 5e6, ("c0", "c3"): 1e7, ("c1", "c2"): 1e6, ("c1", "c3"): 1e6}
    links = {pair: Link(1e-3, bandwidth) for pair, bandwidth in (pairs | {("c2", "c3"): 5e6}).items()}
    world = World({"c0": 7, "c1": 3, "c2": 9, "c3": 10}, links=links)
    file = InputFile("mesh", 10**7, ("c0", "c2"))
    request = NonFixedRequest(tuple(ComponentRequest(size, inputs=(file,)) for size in sizes))
    job = world.submit(request, policy=policy, coallocation=2)
    attempt = world.job(job).attempt
    assert attempt is not None
    assert {component.cluster for component in attempt.components} == {"c2", "c3"}


@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
@pytest.mark.parametrize("priority", Priority)
@pytest.mark.parametrize("is_busy", [False, True])
def test_queue_job_that_no_longer_fits_blocks_no_other(queue: Any, priority: Priority, is_busy: bool) -> None:
    """The job was accepted while the nodes of a cluster were unknown, or links differed."""
    world = World({"north": 7, "south": 6}, Rules(queue=queue))
    busy = [world.submit(nonfixed(7), run_time=60), world.submit(nonfixed(6), run_time=60)] if is_busy else []
    oversized = world.submit(nonfixed(4, 5, 3), policy="close-to-files", priority=priority)
    later_jobs = [world.submit(nonfixed(1), run_time=5, priority=priority) for _ in range(3)]
    world.advance(100)
    assert {world.state(job) for job in [*busy, *later_jobs]} == {JobState.SUCCEEDED}
    assert world.state(oversized) is JobState.QUEUED
    assert "no cluster has 3 idle nodes left" in world.queries.waiting_reason(world.job(oversized))


@pytest.mark.parametrize("queue", ["head", "fcfs"])
def test_queue_job_that_fits_again_keeps_its_position(queue: Any) -> None:
    world = World({"north": 7, "south": 6}, Rules(queue=queue))
    oversized = world.submit(nonfixed(4, 5, 3), policy="close-to-files", run_time=50)
    world.submit(nonfixed(1), run_time=5)
    world.sites["south"].total = 8
    world.sites["south"].send_report(world.sites["south"].current_report())
    world.settle()
    world.advance(10)
    assert world.state(oversized) is JobState.RUNNING


def test_submission_unknown_links_are_assumed_good() -> None:
    """Until its links are measured, the job blocks no other."""
    world = World({"north": 4, "south": 4}, Rules(queue="fcfs"))
    file = InputFile("mesh", 10**7, ("north",))
    request = NonFixedRequest((ComponentRequest(4, inputs=(file,)), ComponentRequest(4, inputs=(file,))))
    spec = JobSpec(request, ("program",), policy="close-to-files", launcher=Launcher.PROCESSES)
    check_submission(spec, world.queries.limits())
    (job,) = world.submit_together([spec])
    later_job = world.submit(nonfixed(1), run_time=5)
    world.advance(10)
    assert (world.state(job), world.state(later_job)) == (JobState.QUEUED, JobState.SUCCEEDED)
    world.step([LinkMeasured("north", "south", Link(1e-3, 1e7))])
    assert world.state(job) is not JobState.QUEUED
