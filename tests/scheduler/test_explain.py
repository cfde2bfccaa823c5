"""Why a job waits, kind by kind: the binding reason, and that the smallest change does start it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from koalapy.model.cluster import Drain, Link
from koalapy.model.explanation import Explanation
from koalapy.model.job import Job, JobId, JobSpec, JobState, Launcher, Priority
from koalapy.model.limits import Limits, LimitSettings, UserLimits
from koalapy.model.placement import Placement, Refusal
from koalapy.model.profile import ClusterProfile, Mpi
from koalapy.model.reports import ClusterReport
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest, Request
from koalapy.scheduler.events import ClusterDrained, JobSubmitted, ReplicasChanged, Reported
from koalapy.scheduler.explain.dry_run import DryRun
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.explain.smallest_change import MAX_QUESTIONS
from koalapy.scheduler.rules import QueueMode, QueueOrder, Rules
from tests.scheduler.world import Program, World

TWO = {"north": 4, "south": 4}
THREE = {"east": 4, "north": 4, "south": 4}
AT = 14 * 3600.0 + 120.0
"""14:02 on the first day of the epoch."""


def fixed(**sizes: int) -> FixedRequest:
    return FixedRequest(tuple(ComponentRequest(size, name) for name, size in sizes.items()))


def nonfixed(*sizes: int) -> NonFixedRequest:
    return NonFixedRequest(tuple(ComponentRequest(size) for size in sizes))


def busy(sizes: Mapping[str, int], rules: Rules | None = None, *, world: Any = None, **local: int) -> World:
    """A grid at 14:02 on which local users have some nodes."""
    found = World(sizes, rules, now=AT, **(world or {}))
    for name, nodes in local.items():
        found.sites[name].add_local_user(nodes)
    found.settle()
    return found


def why(world: World, job: JobId) -> Explanation:
    return explain(world.queries, world.job(job), [e for e in world.timeline if e.job == job], world.now)


def submit(world: World, spec: JobSpec) -> JobId:
    ident = len(world.jobs) + 1
    world.programs[ident] = Program((1000.0,))
    world.step([JobSubmitted(Job(ident, spec, world.now))])
    return ident


def text_of(found: Explanation, cluster: str) -> str:
    return next(c.reason for c in found.clusters if c.cluster == cluster)


@dataclass(frozen=True)
class Case:
    """One kind of waiting job; ``change``: the field and value of its smallest change, if it has one."""

    build: Callable[[], tuple[World, JobId]]
    says: str
    clusters: Mapping[str, str] = field(default_factory=dict)
    change: tuple[str, object] | None = None
    suffices: str | None = None
    notes: str | None = None


CASES: dict[str, Case] = {}


def case(says: str, change: tuple[str, object] | None = None, **more: Any) -> Callable[[Any], Any]:
    def register(build: Callable[[], tuple[World, JobId]]) -> Callable[[], tuple[World, JobId]]:
        CASES[build.__name__] = Case(build, says, change=change, **more)
        return build

    return register


# Nodes that are not idle


@case(
    "needs 6 nodes; 5 are idle",
    ("request.total_size", 5),
    clusters={"south": "local users have 3"},
    suffices="1 more idle node in south",
)
def local_users_have_the_nodes() -> tuple[World, JobId]:
    world = busy(TWO, south=3)
    return world, world.submit(FlexibleRequest(6))


@case("needs 6 nodes; 5 are idle", ("request.total_size", 5), clusters={"north": "our jobs have 3"})
def our_own_jobs_have_the_nodes() -> tuple[World, JobId]:
    world = busy(TWO, Rules(preemption="never"))
    world.submit(fixed(north=3), run_time=1000.0)
    world.advance(1.0)
    return world, world.submit(FlexibleRequest(6))


@case("needs 6 nodes; 5 are idle", ("request.total_size", 5), clusters={"north": "local users have 1, 2 are down"})
def nodes_are_down() -> tuple[World, JobId]:
    world = busy(TWO)
    world.step([Reported("north", ClusterReport(4, 1, 1, 2))])
    return world, world.submit(FlexibleRequest(6))


@case("needs 4 nodes; 1 is idle", ("priority", "high"), clusters={"north": "our jobs have 4"})
def jobs_of_low_priority_have_the_nodes() -> tuple[World, JobId]:
    world = busy(TWO)
    world.submit(FlexibleRequest(7), run_time=1000.0)
    world.advance(1.0)
    return world, world.submit(FlexibleRequest(4))


# Bounds of the request


@case("no cluster has 4 idle nodes", ("request.type", "flexible"), clusters={"north": "component 0 needs 4"})
def a_component_is_too_large_now() -> tuple[World, JobId]:
    world = busy(TWO, north=1, south=1)
    return world, world.submit(nonfixed(4))


@case("needs 4 nodes on one cluster", ("request.max_components", 2))
def too_few_components_allowed() -> tuple[World, JobId]:
    world = busy(TWO, north=1, south=1)
    return world, world.submit(FlexibleRequest(4, max_components=1))


@case("on clusters with at least 2", ("request.min_component_size", 1))
def components_must_be_too_large() -> tuple[World, JobId]:
    world = busy(THREE, east=1, north=3, south=3)
    return world, world.submit(FlexibleRequest(4, min_component_size=2))


@case("no split option fits", ("request.split_options", []))
def no_split_option_fits() -> tuple[World, JobId]:
    world = busy(TWO, north=1, south=1)
    return world, world.submit(FlexibleRequest(4, split_options=((4,),)))


@case("not be combined|1 cluster|alone|one cluster", ("coallocation", 2))
def never_to_co_allocate() -> tuple[World, JobId]:
    world = busy(TWO, north=1, south=1)
    return world, world.submit(FlexibleRequest(4), coallocation=1)


@case("speed", ("speed_ratio_min", 0.5))
def clusters_differ_too_much_in_speed() -> tuple[World, JobId]:
    world = busy(THREE, world={"speeds": {"east": 1.0, "north": 2.0, "south": 8.0}})
    return world, world.submit(FlexibleRequest(6), speed_ratio_min=0.9)


@case("unreachable", ("policy", "cluster-minimization"))
def clusters_do_not_reach_each_other() -> tuple[World, JobId]:
    links = {("north", "south"): Link(unreachable=True)}
    world = busy({"north": 8, "south": 8}, north=4, south=4, world={"links": links})
    return world, world.submit(FlexibleRequest(6), policy="communication-aware")


# Clusters that may not be used


@case(
    "needs 2 nodes on south; 0 are idle",
    ("request.components[0].cluster", "north"),
    clusters={"south": "local users have 4"},
    suffices="2 more idle nodes in south",
)
def the_named_cluster_is_busy() -> tuple[World, JobId]:
    world = busy(TWO, south=4)
    return world, world.submit(fixed(south=2))


@case(
    "south",
    ("request.components[0].cluster", "north"),
    clusters={"south": "drained since 14:02 by ops: disk"},
    suffices="south resumed (koala clusters resume south)",
)
def the_named_cluster_is_drained() -> tuple[World, JobId]:
    world = busy(TWO)
    world.step([ClusterDrained("south", "ops", "disk")])
    return world, world.submit(fixed(south=2))


@case(
    "south",
    ("request.components[0].cluster", "north"),
    clusters={"south": "unreachable since 14:02: its agent is not connected"},
    suffices="south in reach again",
)
def the_named_cluster_is_out_of_reach() -> tuple[World, JobId]:
    world = busy(TWO)
    world.disconnect("south")
    return world, world.submit(fixed(south=2))


def broken(rules: Rules) -> tuple[World, JobId]:
    """A job whose start on south failed, and whom nobody but south may serve."""
    world = busy(TWO, rules)
    job = world.submit(fixed(south=2))
    world.settle()
    token = world.tokens(job)[0]
    world.sites["south"].fail_component(token, "no such partition")
    world.sites["south"].end_component(token)
    world.settle()
    return world, job


@case(
    "south",
    ("request.components[0].cluster", "north"),
    clusters={"south": "1 error, the last: no such partition"},
    suffices="south mended (koala clusters clear south)",
    notes="queued again at 14:02:00: infrastructure-failure",
)
def the_named_cluster_fails() -> tuple[World, JobId]:
    return broken(Rules(error_threshold=1, probation=False))


@case("south", ("request.components[0].cluster", "north"), clusters={"south": "to be tried again at 14:03"})
def the_named_cluster_is_to_be_tried_again() -> tuple[World, JobId]:
    return broken(Rules(error_threshold=1, probation_pause=60.0))


@case("cluster south has no scratch folder", ("request.total_size", 1))
def the_idle_cluster_lacks_a_folder() -> tuple[World, JobId]:
    profiles = {"north": ClusterProfile(scratch="/scratch"), "south": ClusterProfile()}
    world = busy(TWO, north=3, world={"profiles": profiles})
    return world, world.submit(FlexibleRequest(2), command=("program", "{scratch}/in"))


@case("south 4: a job runs under one series", ("request.total_size", 4))
def clusters_have_different_series() -> tuple[World, JobId]:
    profiles = {"north": ClusterProfile(mpi=Mpi(5)), "south": ClusterProfile(mpi=Mpi(4))}
    world = busy({"north": 8, "south": 8}, north=4, south=4, world={"profiles": profiles})
    return world, world.submit(FlexibleRequest(6), launcher=Launcher.OPENMPI)


# The queue


@case("waits behind job 1", ("", None), suffices="job 1 placed before it")
def behind_the_head_of_the_queue() -> tuple[World, JobId]:
    world = busy(TWO, Rules(queue="head"), south=4)
    world.submit(FlexibleRequest(6))
    user = world.sites["north"].add_local_user(3)
    world.settle()
    job = world.submit(FlexibleRequest(3))
    world.sites["north"].remove_local_user(user)
    world.settle()
    return world, job


@case("waits behind job 1", ("priority", "high"), suffices="job 1 placed before it")
def first_come_first_served() -> tuple[World, JobId]:
    world = busy(TWO, Rules(queue="fcfs"), south=4)
    world.submit(FlexibleRequest(6))
    return world, world.submit(FlexibleRequest(3))


@case(
    "nodes are kept for job 2",
    ("priority", "high"),
    clusters={"north": "3 kept for job 2"},
    suffices="job 2, for which nodes are kept, out of its way (koala hold 2)",
)
def nodes_are_kept_for_an_older_job() -> tuple[World, JobId]:
    sizes = {"north": 4, "south": 5}
    world = busy(sizes, Rules(aging_tries=1, high_scans_per_low=1, scan_interval=10.0))
    world.submit(fixed(south=4), run_time=1000.0)
    world.advance(1.0)
    wide = world.submit(FlexibleRequest(8))
    world.advance(25.0)
    assert world.queries.reservation == wide
    return world, world.submit(FlexibleRequest(3))


@case("fits, and waits for the next scan", ("", None), notes="event_driven is off")
def scans_come_by_the_clock_only() -> tuple[World, JobId]:
    world = busy(TWO, Rules(event_driven=False), south=4)
    user = world.sites["north"].add_local_user(2)
    world.settle()
    job = world.submit(FlexibleRequest(4))
    world.sites["north"].remove_local_user(user)
    world.settle()
    return world, job


@case("needs 4 nodes; 2 are idle", ("request.total_size", 2), notes="queued again at 14:02:10: claim-failed")
def local_users_were_faster() -> tuple[World, JobId]:
    world = busy(TWO, south=4)
    job = world.submit(FlexibleRequest(4))
    world.sites["north"].add_local_user(2)
    world.advance(10.0)
    return world, job


@case("needs 4 nodes; 0 are idle", notes="queued again at 14:02:01: preempted")
def preempted_by_a_job_of_high_priority() -> tuple[World, JobId]:
    world = busy({"north": 4}, Rules(preemption="placement"))
    job = world.submit(FlexibleRequest(4), run_time=1000.0)
    world.advance(1.0)
    world.submit(FlexibleRequest(4), run_time=1000.0, priority=Priority.HIGH)
    world.advance(1.0)
    return world, job


@pytest.mark.parametrize("name", CASES)
def test_the_binding_reason(name: str) -> None:
    expected = CASES[name]
    world, job = expected.build()
    found = why(world, job)
    assert (found.job, found.state) == (job, JobState.QUEUED)
    assert any(says in found.headline for says in expected.says.split("|")), found.headline
    assert found.headline == world.queries.waiting_reason(world.job(job))
    for cluster, says in expected.clusters.items():
        assert says in text_of(found, cluster)
    assert expected.suffices is None or expected.suffices in found.suffices
    assert expected.notes is None or any(expected.notes in note for note in found.notes), found.notes
    change = found.smallest_change
    assert (change and (change.field, change.value)) == expected.change, change
    assert (found.position or 0) == found.ahead + 1


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.change == ("priority", "high")])
def test_explain_to_caller_without_high_priority_offers_another_change(name: str) -> None:
    world, job = CASES[name].build()
    told = explain(world.queries, world.job(job), (), world.now, high_priority_allowed=False)
    spec = world.job(job).spec
    told_before = explain_submission(world.queries, spec, world.now, high_priority_allowed=False)
    for change in (told.smallest_change, told_before.smallest_change):
        assert change is None or change.spec.priority is Priority.LOW


@pytest.mark.parametrize("name", [name for name, expected in CASES.items() if expected.change])
def test_the_smallest_change_starts_the_job(name: str) -> None:
    world, job = CASES[name].build()
    change = why(world, job).smallest_change
    assert change is not None
    world.step()
    assert world.state(job) is JobState.QUEUED
    world.cancel(job)
    changed = submit(world, change.spec)
    assert world.state(changed).is_active, world.job(changed)
    attempt = world.job(changed).attempt
    assert attempt is not None
    assert sorted((c.cluster, c.size) for c in attempt.gang) == sorted(
        (c.cluster, c.size) for c in change.placement.components
    )
    world.advance(5.0)
    assert world.state(changed) is JobState.RUNNING


def test_what_suffices_is_enough() -> None:
    world, job = CASES["the_named_cluster_is_busy"].build()
    assert why(world, job).suffices == ("2 more idle nodes in south",)
    world.sites["south"].remove_local_user("user-1")
    assert world.sites["south"].add_local_user(2)
    world.settle()
    assert world.state(job).is_active


def test_as_many_nodes_as_there_is_room_for() -> None:
    world = busy(dict.fromkeys("abcdef", 4), **dict.fromkeys("abcdef", 3))
    found = why(world, world.submit(FlexibleRequest(8, min_component_size=2)))
    assert found.smallest_change is not None
    assert found.smallest_change.text == "ask for 6 nodes without any bounds"


@given(
    local=st.tuples(st.integers(0, 3), st.integers(0, 5)),
    drained=st.booleans(),
    everywhere=st.booleans(),
    request=st.one_of(
        st.builds(FlexibleRequest, st.integers(3, 8)),
        st.builds(nonfixed, st.integers(3, 6)),
        st.builds(lambda north, south: fixed(north=north, south=south), st.integers(1, 4), st.integers(1, 5)),
    ),
)
def test_what_suffices_beside_a_reservation_is_enough_and_no_less_is(
    local: tuple[int, int], drained: bool, everywhere: bool, request: Request
) -> None:
    """As many more idle nodes as are told, or the return of a cluster, or the reservation gone: each by itself."""
    world = World({"north": 4, "south": 6}, Rules(aging_tries=1, high_scans_per_low=1, scan_interval=10.0), now=AT)
    for name, count in zip(world.sites, local, strict=True):
        for _ in range(count):
            world.sites[name].add_local_user(1)
    world.settle()
    hog = world.submit(nonfixed(1), run_time=1e6)
    attempt = world.job(hog).attempt
    assert attempt is not None
    there = attempt.gang[0].cluster
    one = fixed(**{there: world.sites[there].total - local[there == "south"]})
    reserved = world.submit(FlexibleRequest(10 - sum(local)) if everywhere else one, run_time=1e6)
    world.advance(25.0)
    assert world.queries.reservation == reserved
    if drained:
        world.step([ClusterDrained("south")])
    job = world.submit(request, run_time=1e6)
    if world.state(job) is not JobState.QUEUED:
        return
    found, queries = why(world, job), world.queries

    def fits() -> bool:
        return isinstance(queries.evaluate(world.job(job).spec, queries.view(Priority.LOW)), Placement)

    def with_more_idle(name: str, count: int) -> bool:
        """As an agent would report it."""
        status, before = queries.grid[name], world.sites[name].current_report()
        status.report(
            ClusterReport(before.total, before.idle + count, before.background - count, 0, before.holding), 0.0
        )
        answer = fits()
        status.report(ClusterReport(before.total, before.idle, before.background, 0, before.holding), 0.0)
        return answer

    for cluster in found.clusters:
        if cluster.missing:
            assert with_more_idle(cluster.cluster, cluster.missing)
            assert not with_more_idle(cluster.cluster, cluster.missing - 1)
            assert f"{cluster.missing} more idle node" in str(found.suffices)
    if any("resumed" in text for text in found.suffices):
        queries.grid["south"].drained = None
        queries.grid.touch("south")
        assert fits()
        queries.grid["south"].drained = Drain(AT)
        queries.grid.touch("south")
    if any("out of its way" in text for text in found.suffices):
        world.hold(reserved)
        assert world.state(hog) is JobState.RUNNING
        assert fits() or world.state(job).is_active


def test_nodes_kept_for_a_job_are_its_own() -> None:
    world, _ = CASES["nodes_are_kept_for_an_older_job"].build()
    wide = world.queries.reservation
    assert wide is not None
    found = why(world, wide)
    assert "5 are idle" in found.headline
    assert [(c.cluster, c.idle) for c in found.clusters] == [("north", 4), ("south", 1)]
    assert found.smallest_change is not None


# Jobs that are not queued


def test_a_held_job() -> None:
    world = busy(TWO, north=4, south=4)
    job = world.submit(FlexibleRequest(2))
    world.hold(job)
    found = why(world, job)
    assert (found.state, found.headline, found.smallest_change) == (JobState.HELD, "held", None)
    assert found.suffices == ("its release (koala release 1)",)
    assert found.notes[0].startswith("released now it would wait: ")
    assert "0 are idle" in found.notes[0]


def test_a_placed_job_waits_for_its_claiming_time() -> None:
    links = {("north", "south"): Link(1e-3, 1e6)}
    world = busy(TWO, south=4, world={"links": links})
    file = InputFile("in", 100_000_000, ("south",))
    job = world.submit(NonFixedRequest((ComponentRequest(2, inputs=(file,)),)), policy="close-to-files")
    found = why(world, job)
    assert found.state is JobState.PLACED
    assert found.headline == (
        "placed on north (2 nodes); the files of component 0 are on their way, "
        "expected at 14:03:40; asks for its nodes at 14:03:15"
    )
    assert found.placement is not None
    assert [(c.size, c.cluster) for c in found.placement.components] == [(2, "north")]
    assert found.reasons[-2].reason == found.placement.reason
    assert found.reasons[-1].reason == "in (100 MB) from south to north, about 100 s"
    assert "its files come from south" in found.clusters[0].reason
    world.step([ReplicasChanged("in", ())])
    world.cancel(job)
    again = world.submit(NonFixedRequest((ComponentRequest(2, inputs=(file,)),)))
    assert "no cluster has a good replica of in" in why(world, again).headline


def test_a_claim_waits_behind_local_users() -> None:
    world = busy(TWO)
    job = world.submit(FlexibleRequest(8))
    world.sites["north"].add_local_user(4)
    world.advance(1.0)
    found = why(world, job)
    assert found.state is JobState.CLAIMING
    assert found.headline == (
        "waits in the resource manager of north behind local users with component 0, for 10 s at most"
    )
    assert text_of(found, "north") == "component 0: queued in the resource manager since 14:02:00"
    there = "every node has reported, waits at the barrier for the others"
    assert text_of(found, "south").startswith(f"component 1: {there} since 14:02:")


def test_the_barrier_waits_for_a_component() -> None:
    world = busy(TWO, world={"manual": True})
    for name in TWO:
        world.deliver(name)
    job = world.submit(FlexibleRequest(8))
    world.run_commands("north")
    world.run_commands("south")
    world.sites["north"].report_claimed(world.tokens(job)[0])
    world.deliver("north")
    assert why(world, job).headline == "waits for the nodes of component 1 on south to report"


def test_a_running_job_is_explained_by_its_placement() -> None:
    world = busy(TWO)
    job = world.submit(FlexibleRequest(6), run_time=100.0)
    world.advance(2.0)
    found = why(world, job)
    assert (found.state, found.headline) == (JobState.RUNNING, "runs since 14:02 on north (4 nodes), south (2 nodes)")
    assert found.placement is not None
    assert "north had the most idle nodes" in found.placement.reason
    assert [(c.cluster, c.gives) for c in found.clusters] == [("north", 4), ("south", 2)]


def test_a_job_whose_cluster_is_out_of_reach() -> None:
    world = busy(TWO)
    job = world.submit(FlexibleRequest(6), run_time=100.0)
    world.advance(2.0)
    world.disconnect("south")
    world.advance(10.0)
    found = why(world, job)
    assert found.state is JobState.UNKNOWN
    assert found.headline == "south is out of reach since 14:02: what runs there is not known"


def test_a_finished_job_is_explained_by_its_end() -> None:
    world = busy(TWO)
    job = world.submit(FlexibleRequest(6), run_time=1.0, code=3)
    world.advance(60.0)
    found = why(world, job)
    assert found.state is JobState.FAILED
    assert found.headline.startswith("failed at 14:02: ")
    assert found.clusters == ()
    assert found.position is None
    assert found.reasons[0].event == "placed"


# Submissions that nobody made


def test_a_submission_that_would_be_placed() -> None:
    world = busy(TWO)
    found = explain_submission(world.queries, JobSpec(FlexibleRequest(3), ("program",)), world.now)
    assert (found.job, found.state, found.position) == (None, JobState.PLACED, None)
    assert found.headline == "would be placed at once on north (3 nodes)"
    assert [(c.cluster, c.gives, c.reason) for c in found.clusters] == [
        ("north", 3, "3 nodes would be taken here"),
        ("south", 0, "not needed"),
    ]
    assert world.jobs == {}


def test_a_submission_that_would_preempt_others() -> None:
    world, _ = CASES["jobs_of_low_priority_have_the_nodes"].build()
    spec = JobSpec(FlexibleRequest(4), ("program",), priority=Priority.HIGH)
    found = explain_submission(world.queries, spec, world.now)
    assert found.headline == "would be placed at once on north (4 nodes), where it would preempt others"
    assert [(c.gives, c.idle) for c in found.clusters] == [(4, 0), (0, 1)]


def test_a_submission_that_would_wait() -> None:
    world = busy(TWO, south=3)
    world.submit(FlexibleRequest(6))
    found = explain_submission(world.queries, JobSpec(FlexibleRequest(6), ("program",)), world.now)
    assert (found.state, found.position, found.ahead) == (JobState.QUEUED, 2, 1)
    assert "5 are idle" in found.headline
    assert found.smallest_change is not None
    assert found.smallest_change.text == "ask for 5 nodes"


def test_a_submission_behind_others() -> None:
    world, _ = CASES["first_come_first_served"].build()
    found = explain_submission(world.queries, JobSpec(FlexibleRequest(1), ("program",)), world.now)
    assert found.headline == "would wait behind job 1"


@pytest.mark.parametrize(
    ("request_", "more"),
    [
        (FixedRequest(tuple(ComponentRequest(60, f"c{n:02}", command=("x",)) for n in range(50))), {}),
        (FixedRequest(tuple(ComponentRequest(60, f"c{n:02}") for n in range(50))), {"priority": Priority.HIGH}),
        (NonFixedRequest(tuple(ComponentRequest(60 + n, command=("x",)) for n in range(40))), {}),
        (FlexibleRequest(4000, 50, 49), {"coallocation": 49, "speed_ratio_min": 0.99, "policy": "larger-first"}),
    ],
)
def test_the_search_is_bounded(request_: Request, more: dict[str, Any]) -> None:
    names = [f"c{n:02}" for n in range(50)]
    world = busy(
        dict.fromkeys(names, 100),
        world={"speeds": {name: 1.0 + n for n, name in enumerate(names)}},
        **dict.fromkeys(names, 99),
    )
    asked = []
    ask = world.queries.evaluate

    def counted(*arguments: Any) -> Any:
        asked.append(arguments)
        return ask(*arguments)

    world.queries.evaluate = counted  # type: ignore[method-assign]
    found = explain_submission(world.queries, JobSpec(request_, ("program",), **more), world.now)
    assert found.state is JobState.QUEUED
    assert len(asked) <= MAX_QUESTIONS + 20
    assert found.smallest_change is not None


# Any grid, any request

sizes = st.integers(1, 6)
names = st.sampled_from(["a", "b", "c"])
flexible = st.builds(
    lambda total, least, most: FlexibleRequest(total, min(least, total), most),
    st.integers(1, 14),
    st.integers(1, 4),
    st.none() | st.integers(1, 3),
)
requests: st.SearchStrategy[Request] = st.one_of(
    flexible,
    st.lists(sizes, min_size=1, max_size=3).map(lambda found: nonfixed(*found)),
    st.lists(st.tuples(sizes, names), min_size=1, max_size=3).map(
        lambda found: FixedRequest(tuple(ComponentRequest(size, name) for size, name in found))
    ),
)
grids = st.fixed_dictionaries(
    {name: st.tuples(sizes, st.integers(0, 6), st.sampled_from(["", "", "drained", "away"])) for name in "abc"}
)


jobs_of_others = st.lists(st.tuples(sizes, st.sampled_from(Priority)), max_size=3)
policies = st.sampled_from(["", "", "best-fit", "faster-first", "adaptive", "communication-aware", "close-to-files"])


TIGHT = {"a": (1, 0, ""), "b": (2, 0, ""), "c": (3, 0, "")}


@example(TIGHT, FlexibleRequest(4), [(5, Priority.LOW)], Priority.HIGH, "", None, None, "scan")
@given(
    grids,
    requests,
    jobs_of_others,
    st.sampled_from(Priority),
    policies,
    st.none() | st.integers(1, 3),
    st.none() | st.floats(0.1, 1.0),
    st.sampled_from(["scan", "head", "fcfs"]),
)
def test_any_job_is_explained(
    grid: dict[str, tuple[int, int, str]],
    request: Request,
    others: list[tuple[int, Priority]],
    priority: Priority,
    policy: str,
    combined: int | None,
    ratio: float | None,
    queue: Any,
) -> None:
    world = World(
        {name: total for name, (total, _, _) in grid.items()},
        Rules(queue=queue),
        now=AT,
        speeds={"a": 1.0, "b": 2.0, "c": 3.0},
        links={("a", "b"): Link(1e-3, 1e6)},
    )
    for name, (total, taken, state) in grid.items():
        world.sites[name].add_local_user(min(total, taken))
        world.settle()
        if state == "drained":
            world.step([ClusterDrained(name)])
        elif state == "away":
            world.disconnect(name)
    for size, rank in others:
        world.submit(FlexibleRequest(size), run_time=1000.0, priority=rank)
        world.settle()
    spec = JobSpec(
        request,
        ("program",),
        priority=priority,
        launcher=Launcher.PROCESSES,
        coallocation=combined,
        speed_ratio_min=ratio,
        policy=policy,
    )
    before = explain_submission(world.queries, spec, world.now)
    job = submit(world, spec)
    assert world.state(job).is_active == (before.state is JobState.PLACED), before.headline
    found = why(world, job)
    assert found.headline
    if world.state(job).is_active:
        assert found.placement is not None
        assert before.placement is not None
        # A component for which others would be preempted is re-placed where there is room, once the job is claimed for.
        moved = {entry.component for entry in world.timeline if entry.job == job and entry.event == "re-placed"}
        where = [
            [(c.size, "elsewhere" if index in moved else c.cluster) for index, c in enumerate(placement.components)]
            for placement in (found.placement, before.placement)
        ]
        assert where[0] == where[1]
    elif found.smallest_change is not None:
        world.cancel(job)
        assert world.state(submit(world, found.smallest_change.spec)).is_active
    else:
        one = replace(spec, request=FlexibleRequest(1), coallocation=None, speed_ratio_min=None, policy="")
        instead = DryRun(world.queries, world.job(job)).instead()
        assert instead is None or instead.placed_at_once(one) is None


@example(
    {"a": (4, 2, ""), "b": (2, 2, ""), "c": (1, 1, "")}, fixed(a=3), [(2, Priority.LOW)], Priority.HIGH, "", False, None
)
@given(
    grids,
    requests,
    jobs_of_others,
    st.sampled_from(Priority),
    policies,
    st.booleans(),
    st.sampled_from([None, "promised", "aged", "leaves"]),
)
def test_what_suffices_is_the_least_whoever_makes_room(
    grid: dict[str, tuple[int, int, str]],
    request: Request,
    others: list[tuple[int, Priority]],
    priority: Priority,
    policy: str,
    reclaims: bool,
    also: str | None,
) -> None:
    """Nodes of local users and of others who make no room: so many of them on one cluster, and no fewer, would do."""
    rules = Rules(
        sharing="feasible" if reclaims else "ordinary",
        low_patience=5.0 if also == "promised" else None,
        aging_tries=1 if also == "aged" else 1000,
        high_scans_per_low=1,
        scan_interval=10.0,
    )
    world = World({name: total for name, (total, *_) in grid.items()}, rules, now=AT)
    for number, (size, rank) in enumerate(others):
        world.submit(FlexibleRequest(size), run_time=1e6, priority=rank, home_site="abc"[number] if reclaims else "")
        world.settle()
    for name, (_, taken, state) in grid.items():
        world.sites[name].add_local_user(min(world.sites[name].idle, taken))
        world.settle()
        if state == "drained":
            world.step([ClusterDrained(name)])
    world.advance(25)
    if also == "leaves" and others:
        world.cancel(1)
    spec = JobSpec(request, ("program",), priority=priority, policy=policy, home_site="a" if reclaims else "")
    job = submit(world, spec)
    if world.state(job) is not JobState.QUEUED:
        return
    queries = world.queries

    def is_placed_with(name: str, count: int) -> bool:
        status, site = queries.grid[name], world.sites[name].current_report()
        status.report(ClusterReport(site.total, site.idle + count, site.background - count, 0, site.holding), 0.0)
        answer = DryRun(queries, world.job(job)).answer(spec)
        status.report(ClusterReport(site.total, site.idle, site.background, 0, site.holding), 0.0)
        return isinstance(answer, Placement)

    found = why(world, job)
    assert isinstance(DryRun(queries, world.job(job)).answer(spec), Refusal)
    for name, (*_, state) in grid.items():
        if state == "drained":
            queries.grid[name].drained = None
            queries.grid.touch(name)
            answer = DryRun(queries, world.job(job)).answer(spec)
            assert isinstance(answer, Placement) == any(f"resume {name}" in text for text in found.suffices)
            queries.grid[name].drained = Drain(AT)
            queries.grid.touch(name)
    for cluster in found.clusters:
        status = queries.grid[cluster.cluster]
        counts = range(1, status.background + 1 if status.is_open else 1)
        least = next((count for count in counts if is_placed_with(cluster.cluster, count)), None)
        if least is not None or (cluster.missing or 0) <= status.background:
            assert cluster.missing == least
        told = [
            text
            for text in found.suffices
            if f"more idle node{'s'[: cluster.missing != 1]} in {cluster.cluster}" in text
        ]
        assert [text.split()[0] for text in told] == ([] if cluster.missing is None else [str(cluster.missing)])


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["anna", "bert", "carl"])), max_size=6),
    asked=st.tuples(st.integers(1, 4), st.sampled_from(["anna", "bert", "carl"])),
    order=st.sampled_from(["fcfs", "narrowest-first"]),
    mode=st.sampled_from(["scan", "head", "fcfs"]),
    clusters=st.lists(st.sampled_from(["north", "south"]), min_size=7, max_size=7),
)
def test_a_dry_run_foretells_whether_and_where_a_submission_waits(
    sizes: list[tuple[int, str]], asked: tuple[int, str], order: QueueOrder, mode: QueueMode, clusters: list[str]
) -> None:
    """With owners who have what they may have, who stand in nobody's way."""
    limits = Limits(LimitSettings(UserLimits(nodes=4)), lambda _: ())
    world = World({"north": 4, "south": 4}, Rules(queue=mode, queue_order=order), limits=limits)
    for (size, owner), cluster in zip(sizes, clusters, strict=False):
        world.submit(fixed(**{cluster: size}), owner=owner, run_time=1000)
        world.settle()
    request = fixed(**{clusters[-1]: asked[0]})
    told = explain_submission(world.queries, JobSpec(request, ("program",), owner=asked[1]), world.now)
    behind = re.search(r"behind job (\d+)", told.headline)
    assert behind is None or world.state(int(behind[1])) is JobState.QUEUED
    job = world.submit(request, owner=asked[1], run_time=1000)
    assert (told.state is JobState.PLACED) == (world.state(job) is not JobState.QUEUED)
    assert told.position == world.queries.position(job)


def test_for_whom_nodes_are_kept_is_told_of_those_that_are_kept_for_one_before_it() -> None:
    """The one before waits for its file, and has been promised the nodes that are idle."""
    rules = Rules(low_patience=40.0, scan_interval=10)
    world = World({"north": 10, "south": 1}, rules, links={("south", "north"): Link(0.001, 10.0)})
    world.submit(fixed(north=8), run_time=1000, priority=Priority.HIGH)
    world.submit(fixed(north=2), run_time=80, priority=Priority.HIGH)
    inputs = (InputFile("file", 1000, ("south",)),)
    first = world.submit(FixedRequest((ComponentRequest(2, "north", inputs=inputs),)))
    second = world.submit(fixed(north=4))
    world.advance(120)
    assert (world.state(first), world.queries.reservation) == (JobState.PLACED, second)
    told = explain(world.queries, world.job(second), [], world.now)
    assert told.suffices == ("4 more idle nodes in north",)
    assert f"2 kept for job {first}" in told.clusters[0].reason
    for token in world.tokens(1):
        world.sites["north"].exit_program(token, 0)
        world.sites["north"].end_component(token)
    world.sites["north"].add_local_user(6)
    world.settle()
    told = explain(world.queries, world.job(second), [], world.now)
    assert told.headline == f"nodes are kept for job {first}, which has waited longer"
    assert "2 more idle nodes in north" in told.suffices
