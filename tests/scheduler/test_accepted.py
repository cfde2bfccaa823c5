"""What is accepted at submission is placed on the whole empty grid, whatever its policy."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.cluster import Link
from koalapy.model.errors import UsageError
from koalapy.model.job import JobSpec, JobState, Launcher, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest, Request
from koalapy.policies.registry import builtin_policies
from koalapy.scheduler.events import LinkMeasured
from koalapy.scheduler.grid import Links
from koalapy.scheduler.rules import Rules
from koalapy.validation.submission import check
from tests.scheduler.requests import nonfixed
from tests.scheduler.world import World

NAMES = ("east", "north", "south", "west")
PAIRS = [(one, other) for one in NAMES for other in NAMES if one <= other]
OPTIONS: dict[str, list[tuple[tuple[str, str], ...]]] = {
    "communication-aware": [(), (("group_latency", "5ms"),), (("metric", "bandwidth"),)],
    "resource-matching": [(), (("mode", "non-saturated"),), (("mode", "first-non-saturated"),)],
}

links = st.builds(
    Link,
    latency=st.sampled_from([1e-3, 1e-1]),
    bandwidth=st.sampled_from([1e6, 1e7]),
    unreachable=st.sampled_from([False, False, True]),
)
files = st.builds(
    InputFile,
    name=st.sampled_from(["mesh", "fields"]),
    size=st.just(10**7),
    sites=st.lists(st.sampled_from(NAMES), min_size=1, max_size=2, unique=True).map(tuple),
)
inputs = st.lists(files, max_size=1).map(tuple)
sizes = st.integers(1, 7)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    policies = builtin_policies()
    kind = draw(st.sampled_from(["fixed", "nonfixed", "flexible"]))
    request: Request
    if kind == "flexible":
        split = draw(st.lists(st.lists(sizes, min_size=1, max_size=3).map(tuple), max_size=2))
        total = sum(split[0]) if split else draw(st.integers(1, 20))
        same = tuple(option for option in split if sum(option) == total)
        request = FlexibleRequest(total, draw(st.integers(1, min(3, total))), draw(st.sampled_from([None, 1, 2])), same)
    elif kind == "nonfixed":
        each = st.builds(ComponentRequest, sizes, inputs=inputs)
        request = NonFixedRequest(tuple(draw(st.lists(each, min_size=1, max_size=4))))
    else:
        each = st.builds(ComponentRequest, sizes, cluster=st.sampled_from(NAMES), inputs=inputs)
        request = FixedRequest(tuple(draw(st.lists(each, min_size=1, max_size=3))))
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
    known=st.fixed_dictionaries(dict.fromkeys(PAIRS, links)),
    speeds=st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0]) for name in NAMES}),
    spec=specs(),
    queue=st.sampled_from(["scan", "head", "fcfs"]),
)
def test_what_is_accepted_is_placed_on_the_empty_grid(
    totals: dict[str, int], known: Links, speeds: dict[str, float], spec: JobSpec, queue: str
) -> None:
    world = World(totals, Rules(queue=queue), links=known, speeds=speeds)
    try:
        check(spec, world.queries.limits())
    except UsageError:
        return
    (job,) = world.submit_together([spec])
    assert world.state(job) is not JobState.QUEUED, world.queries.waiting_reason(world.job(job))


@given(
    totals=st.fixed_dictionaries({name: st.integers(1, 10) for name in NAMES}),
    wanted=st.lists(sizes, min_size=1, max_size=4),
    policy=st.sampled_from(["", "close-to-files", "auto"]),
    at_most=st.sampled_from([None, 1, 2, 3]),
)
def test_what_worst_fit_places_no_policy_refuses(
    totals: dict[str, int], wanted: list[int], policy: str, at_most: int | None
) -> None:
    """Inputs change where components go, not whether they fit."""
    file = InputFile("mesh", 10**7, ("east",))
    world = World(totals, links={("east", name): Link(1e-3, 1e6) for name in NAMES})
    try:
        check(JobSpec(nonfixed(*wanted), ("program",), coallocation=at_most), world.queries.limits())
    except UsageError:
        return
    request = NonFixedRequest(tuple(ComponentRequest(size, inputs=(file,)) for size in wanted))
    check(JobSpec(request, ("program",), policy=policy, coallocation=at_most), world.queries.limits())


@pytest.mark.parametrize("policy", ["close-to-files", "auto"])
@pytest.mark.parametrize("with_inputs", [False, True])
def test_a_job_that_can_never_fit_is_refused_with_the_reason(policy: str, with_inputs: bool) -> None:
    file = InputFile("mesh", 10**6, ("north", "south"))
    world = World({"north": 9, "south": 4}, links={("north", "south"): Link(1e-3, 1e7)})
    request = NonFixedRequest(
        tuple(ComponentRequest(size, inputs=(file,) if with_inputs and size == 2 else ()) for size in (3, 2, 6, 2))
    )
    with pytest.raises(UsageError) as refused:
        check(JobSpec(request, ("program",), policy=policy), world.queries.limits())
    said = f"policy is {policy}, which does not place this job even on the empty grid: no cluster has 2 idle nodes left"
    assert refused.value.message.startswith(said)
    assert refused.value.field == "policy"


def test_a_busy_drained_or_absent_cluster_counts_as_empty() -> None:
    world = World({"north": 9, "south": 4})
    world.submit(nonfixed(9), run_time=100)
    world.disconnect("south")
    check(JobSpec(nonfixed(9, 4), ("program",), policy="close-to-files"), world.queries.limits())


@pytest.mark.parametrize(("policy", "sizes"), [("close-to-files", (5, 5, 4, 3)), ("auto", (5, 5, 4, 3))])
def test_inputs_and_a_limit_of_clusters_take_those_with_room(policy: str, sizes: tuple[int, ...]) -> None:
    """The two clusters that serve are not next to each other in the order of the inputs' transfers."""
    pairs = {("c0", "c1"): 1e7, ("c0", "c2"): 5e6, ("c0", "c3"): 1e7, ("c1", "c2"): 1e6, ("c1", "c3"): 1e6}
    measured = {pair: Link(1e-3, bandwidth) for pair, bandwidth in (pairs | {("c2", "c3"): 5e6}).items()}
    world = World({"c0": 7, "c1": 3, "c2": 9, "c3": 10}, links=measured)
    file = InputFile("mesh", 10**7, ("c0", "c2"))
    request = NonFixedRequest(tuple(ComponentRequest(size, inputs=(file,)) for size in sizes))
    job = world.submit(request, policy=policy, coallocation=2)
    attempt = world.job(job).attempt
    assert attempt is not None
    assert {component.cluster for component in attempt.components} == {"c2", "c3"}


@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
@pytest.mark.parametrize("priority", Priority)
@pytest.mark.parametrize("is_busy", [False, True])
def test_job_that_does_not_fit_any_more_keeps_nobody_waiting(queue: Any, priority: Priority, is_busy: bool) -> None:
    """It was accepted while the nodes of a cluster were not known, or links were others."""
    world = World({"north": 7, "south": 6}, Rules(queue=queue))
    busy = [world.submit(nonfixed(7), run_time=60), world.submit(nonfixed(6), run_time=60)] if is_busy else []
    never = world.submit(nonfixed(4, 5, 3), policy="close-to-files", priority=priority)
    behind = [world.submit(nonfixed(1), run_time=5, priority=priority) for _ in range(3)]
    world.advance(100)
    assert {world.state(job) for job in [*busy, *behind]} == {JobState.SUCCEEDED}
    assert world.state(never) is JobState.QUEUED
    assert "no cluster has 3 idle nodes left" in world.queries.waiting_reason(world.job(never))


@pytest.mark.parametrize("queue", ["head", "fcfs"])
def test_job_that_fits_again_keeps_its_place(queue: Any) -> None:
    world = World({"north": 7, "south": 6}, Rules(queue=queue))
    never = world.submit(nonfixed(4, 5, 3), policy="close-to-files", run_time=50)
    world.submit(nonfixed(1), run_time=5)
    world.sites["south"].total = 8
    world.sites["south"].send_report(world.sites["south"].current_report())
    world.settle()
    world.advance(10)
    assert world.state(never) is JobState.RUNNING


def test_links_that_are_not_known_yet_are_assumed_to_be_good() -> None:
    """Transfers and measurements teach them; until then the job keeps nobody waiting."""
    world = World({"north": 4, "south": 4}, Rules(queue="fcfs"))
    file = InputFile("mesh", 10**7, ("north",))
    request = NonFixedRequest((ComponentRequest(4, inputs=(file,)), ComponentRequest(4, inputs=(file,))))
    spec = JobSpec(request, ("program",), policy="close-to-files", launcher=Launcher.PROCESSES)
    check(spec, world.queries.limits())
    (job,) = world.submit_together([spec])
    behind = world.submit(nonfixed(1), run_time=5)
    world.advance(10)
    assert (world.state(job), world.state(behind)) == (JobState.QUEUED, JobState.SUCCEEDED)
    world.step([LinkMeasured("north", "south", Link(1e-3, 1e7))])
    assert world.state(job) is not JobState.QUEUED
