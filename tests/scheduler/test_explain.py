"""Explanations of waiting jobs: the binding reason of each kind, and a smallest change that starts the job."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from koalapy.model.cluster import Drain, Link
from koalapy.model.job import Job, JobId, JobState
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.model.limits import Limits, LimitSettings, UserLimits
from koalapy.model.placement import Explanation, Placement, Refusal
from koalapy.model.profile import ClusterProfile, Mpi, MpiSeries
from koalapy.model.reports import ClusterReport
from koalapy.model.request import ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest, Request
from koalapy.scheduler.events import ClusterDrained, JobChanged, JobSubmitted, ReplicasChanged, Reported
from koalapy.scheduler.explain.dry_run import DryRun
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.explain.smallest_change import MAX_QUESTIONS
from koalapy.scheduler.rules import QueueMode, QueueOrder, Rules
from tests.scheduler.world import Program, World

TWO_CLUSTERS = {"north": 4, "south": 4}
THREE_CLUSTERS = {"east": 4, "north": 4, "south": 4}
START_TIME = 14 * 3600.0 + 120.0
"""14:02 on the first day of the epoch."""


def fixed(**sizes: int) -> FixedRequest:
    return FixedRequest(tuple(ComponentRequest(size, name) for name, size in sizes.items()))


def nonfixed(*sizes: int) -> NonFixedRequest:
    return NonFixedRequest(tuple(ComponentRequest(size) for size in sizes))


def create_busy_grid(sizes: Mapping[str, int], rules: Rules | None = None, *, world: Any = None, **local: int) -> World:
    """Create a grid at 14:02 on which local users have some nodes."""
    grid = World(sizes, rules, now=START_TIME, **(world or {}))
    for name, nodes in local.items():
        grid.sites[name].add_local_user(nodes)
    grid.settle()
    return grid


def explain_job(world: World, job: JobId) -> Explanation:
    return explain(world.queries, world.job(job), [e for e in world.timeline if e.job == job], world.now)


def submit_spec(world: World, spec: JobSpec) -> JobId:
    job_id = len(world.jobs) + 1
    world.programs[job_id] = Program((1000.0,))
    world.step([JobSubmitted(Job(job_id, spec, world.now))])
    return job_id


def reason_on(explanation: Explanation, cluster: str) -> str:
    return next(c.reason for c in explanation.clusters if c.cluster == cluster)


@dataclass(frozen=True)
class Case:
    """A kind of waiting job with its expected reason and the field and value of its smallest change."""

    build: Callable[[], tuple[World, JobId]]
    says: str
    clusters: Mapping[str, str] = field(default_factory=dict)
    change: tuple[str, object] | None = None
    suffices: str | None = None
    notes: str | None = None


CASES: dict[str, Case] = {}


def add_case(says: str, change: tuple[str, object] | None = None, **expectations: Any) -> Callable[[Any], Any]:
    def register(build: Callable[[], tuple[World, JobId]]) -> Callable[[], tuple[World, JobId]]:
        CASES[build.__name__] = Case(build, says, change=change, **expectations)
        return build

    return register


# Nodes that are not idle


@add_case(
    "needs 6 nodes; 5 are idle",
    ("request.total_size", 5),
    clusters={"south": "local users have 3"},
    suffices="1 more idle node in south",
)
def local_users_have_the_nodes() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS, south=3)
    return world, world.submit(FlexibleRequest(6))


@add_case("needs 6 nodes; 5 are idle", ("request.total_size", 5), clusters={"north": "our jobs have 3"})
def our_own_jobs_have_the_nodes() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS, Rules(preemption="never"))
    world.submit(fixed(north=3), run_time=1000.0)
    world.advance(1.0)
    return world, world.submit(FlexibleRequest(6))


@add_case("needs 6 nodes; 5 are idle", ("request.total_size", 5), clusters={"north": "local users have 1, 2 are down"})
def nodes_are_down() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS)
    world.step([Reported("north", ClusterReport(4, 1, 1, 2))])
    return world, world.submit(FlexibleRequest(6))


@add_case("needs 4 nodes; 1 is idle", ("priority", "high"), clusters={"north": "our jobs have 4"})
def jobs_of_low_priority_have_the_nodes() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS)
    world.submit(FlexibleRequest(7), run_time=1000.0)
    world.advance(1.0)
    return world, world.submit(FlexibleRequest(4))


# Bounds of the request


@add_case("no cluster has 4 idle nodes", ("request.type", "flexible"), clusters={"north": "component 0 needs 4"})
def a_component_is_too_large_now() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS, north=1, south=1)
    return world, world.submit(nonfixed(4))


@add_case("needs 4 nodes on one cluster", ("request.max_components", 2))
def too_few_components_allowed() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS, north=1, south=1)
    return world, world.submit(FlexibleRequest(4, max_components=1))


@add_case("on clusters with at least 2", ("request.min_component_size", 1))
def components_must_be_too_large() -> tuple[World, JobId]:
    world = create_busy_grid(THREE_CLUSTERS, east=1, north=3, south=3)
    return world, world.submit(FlexibleRequest(4, min_component_size=2))


@add_case("no split option fits", ("request.split_options", []))
def no_split_option_fits() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS, north=1, south=1)
    return world, world.submit(FlexibleRequest(4, split_options=((4,),)))


@add_case("not be combined|1 cluster|alone|one cluster", ("coallocation", 2))
def coallocation_is_forbidden() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS, north=1, south=1)
    return world, world.submit(FlexibleRequest(4), coallocation=1)


@add_case("speed", ("speed_ratio_min", 0.5))
def clusters_differ_too_much_in_speed() -> tuple[World, JobId]:
    world = create_busy_grid(THREE_CLUSTERS, world={"speeds": {"east": 1.0, "north": 2.0, "south": 8.0}})
    return world, world.submit(FlexibleRequest(6), speed_ratio_min=0.9)


@add_case("unreachable", ("policy", "cluster-minimization"))
def clusters_do_not_reach_each_other() -> tuple[World, JobId]:
    links = {("north", "south"): Link(unreachable=True)}
    world = create_busy_grid({"north": 8, "south": 8}, north=4, south=4, world={"links": links})
    return world, world.submit(FlexibleRequest(6), policy="communication-aware")


# Clusters that may not be used


@add_case(
    "needs 2 nodes on south; 0 are idle",
    ("request.components[0].cluster", "north"),
    clusters={"south": "local users have 4"},
    suffices="2 more idle nodes in south",
)
def the_named_cluster_is_busy() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS, south=4)
    return world, world.submit(fixed(south=2))


@add_case(
    "south",
    ("request.components[0].cluster", "north"),
    clusters={"south": "drained since 14:02 by ops: disk"},
    suffices="south resumed (koala clusters resume south)",
)
def the_named_cluster_is_drained() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS)
    world.step([ClusterDrained("south", "ops", "disk")])
    return world, world.submit(fixed(south=2))


@add_case(
    "south",
    ("request.components[0].cluster", "north"),
    clusters={"south": "unreachable since 14:02: its agent is not connected"},
    suffices="south in reach again",
)
def the_named_cluster_is_out_of_reach() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS)
    world.disconnect("south")
    return world, world.submit(fixed(south=2))


def fail_start_on_south(rules: Rules) -> tuple[World, JobId]:
    """Submit a job that may only run on south, where its start fails."""
    world = create_busy_grid(TWO_CLUSTERS, rules)
    job = world.submit(fixed(south=2))
    world.settle()
    token = world.tokens(job)[0]
    world.sites["south"].fail_component(token, "no such partition")
    world.sites["south"].end_component(token)
    world.settle()
    return world, job


@add_case(
    "south",
    ("request.components[0].cluster", "north"),
    clusters={"south": "1 error"},
    suffices="south mended (koala clusters clear south)",
    notes="queued again at 14:02:00: infrastructure-failure",
)
def the_named_cluster_fails() -> tuple[World, JobId]:
    return fail_start_on_south(Rules(error_threshold=1, probation=False))


@add_case("south", ("request.components[0].cluster", "north"), clusters={"south": "to be tried again at 14:03"})
def the_named_cluster_is_on_probation() -> tuple[World, JobId]:
    return fail_start_on_south(Rules(error_threshold=1, probation_pause=60.0))


@add_case("cluster south has no scratch folder", ("request.total_size", 1))
def the_idle_cluster_lacks_a_folder() -> tuple[World, JobId]:
    profiles = {"north": ClusterProfile(scratch="/scratch"), "south": ClusterProfile()}
    world = create_busy_grid(TWO_CLUSTERS, north=3, world={"profiles": profiles})
    return world, world.submit(FlexibleRequest(2), command=("program", "{scratch}/in"))


@add_case("south 4: a job runs under one series", ("request.total_size", 4))
def clusters_have_different_series() -> tuple[World, JobId]:
    profiles = {"north": ClusterProfile(mpi=Mpi(MpiSeries.FIVE)), "south": ClusterProfile(mpi=Mpi(MpiSeries.FOUR))}
    world = create_busy_grid({"north": 8, "south": 8}, north=4, south=4, world={"profiles": profiles})
    return world, world.submit(FlexibleRequest(6), launcher=Launcher.OPENMPI)


# The queue


@add_case("waits behind job 1", ("", None), suffices="job 1 placed before it")
def behind_the_head_of_the_queue() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS, Rules(queue="head"), south=4)
    world.submit(FlexibleRequest(6))
    user = world.sites["north"].add_local_user(3)
    world.settle()
    job = world.submit(FlexibleRequest(3))
    world.sites["north"].remove_local_user(user)
    world.settle()
    return world, job


@add_case("waits behind job 1", ("priority", "high"), suffices="job 1 placed before it")
def behind_another_job_in_fcfs() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS, Rules(queue="fcfs"), south=4)
    world.submit(FlexibleRequest(6))
    return world, world.submit(FlexibleRequest(3))


@add_case(
    "nodes are kept for job 2",
    ("priority", "high"),
    clusters={"north": "3 kept for job 2"},
    suffices="job 2, for which nodes are kept, out of its way (koala hold 2)",
)
def nodes_are_kept_for_an_older_job() -> tuple[World, JobId]:
    sizes = {"north": 4, "south": 5}
    world = create_busy_grid(sizes, Rules(plan_after=0, high_scans_per_low=1, scan_interval=10.0))
    world.submit(fixed(south=4), run_time=1000.0)
    world.advance(1.0)
    wide = world.submit(FlexibleRequest(8))
    world.advance(25.0)
    assert world.queries.planned_job == wide
    return world, world.submit(FlexibleRequest(3))


@add_case("fits, and waits for the next scan", ("", None), notes="event_driven is off")
def event_driven_is_off() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS, Rules(event_driven=False), south=4)
    user = world.sites["north"].add_local_user(2)
    world.settle()
    job = world.submit(FlexibleRequest(4))
    world.sites["north"].remove_local_user(user)
    world.settle()
    return world, job


@add_case("needs 4 nodes; 2 are idle", ("request.total_size", 2), notes="queued again at 14:02:10: claim-failed")
def local_users_were_faster() -> tuple[World, JobId]:
    world = create_busy_grid(TWO_CLUSTERS, south=4)
    job = world.submit(FlexibleRequest(4))
    world.sites["north"].add_local_user(2)
    world.advance(10.0)
    return world, job


@add_case("needs 4 nodes; 0 are idle", notes="queued again at 14:02:01: preempted")
def preempted_by_a_job_of_high_priority() -> tuple[World, JobId]:
    world = create_busy_grid({"north": 4}, Rules(preemption="placement"))
    job = world.submit(FlexibleRequest(4), run_time=1000.0)
    world.advance(1.0)
    world.submit(FlexibleRequest(4), run_time=1000.0, priority=Priority.HIGH)
    world.advance(1.0)
    return world, job


@pytest.mark.parametrize("name", CASES)
def test_explanation_names_binding_reason(name: str) -> None:
    expected = CASES[name]
    world, job = expected.build()
    explanation = explain_job(world, job)
    assert (explanation.job, explanation.state) == (job, JobState.QUEUED)
    assert any(says in explanation.headline for says in expected.says.split("|")), explanation.headline
    assert explanation.headline == world.queries.waiting_reason(world.job(job))
    for cluster, says in expected.clusters.items():
        assert says in reason_on(explanation, cluster)
    assert expected.suffices is None or expected.suffices in explanation.suffices
    assert expected.notes is None or any(expected.notes in note for note in explanation.notes), explanation.notes
    change = explanation.smallest_change
    assert (change and (change.field, change.value)) == expected.change, change
    assert (explanation.position or 0) == explanation.ahead + 1


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.change == ("priority", "high")])
def test_explanation_without_high_priority_offers_other_change(name: str) -> None:
    world, job = CASES[name].build()
    explanation = explain(world.queries, world.job(job), (), world.now, high_priority_allowed=False)
    spec = world.job(job).spec
    dry_run = explain_submission(world.queries, spec, world.now, high_priority_allowed=False)
    for change in (explanation.smallest_change, dry_run.smallest_change):
        assert change is None or change.spec.priority is Priority.LOW


@pytest.mark.parametrize("name", [name for name, expected in CASES.items() if expected.change])
def test_smallest_change_starts_job(name: str) -> None:
    world, job = CASES[name].build()
    change = explain_job(world, job).smallest_change
    assert change is not None
    world.step()
    assert world.state(job) is JobState.QUEUED
    world.cancel(job)
    changed = submit_spec(world, change.spec)
    assert world.state(changed).is_active, world.job(changed)
    attempt = world.job(changed).attempt
    assert attempt is not None
    assert sorted((c.cluster, c.size) for c in attempt.gang) == sorted(
        (c.cluster, c.size) for c in change.placement.components
    )
    world.advance(5.0)
    assert world.state(changed) is JobState.RUNNING


def test_smallest_change_offers_all_available_nodes() -> None:
    world = create_busy_grid(dict.fromkeys("abcdef", 4), **dict.fromkeys("abcdef", 3))
    explanation = explain_job(world, world.submit(FlexibleRequest(8, min_component_size=2)))
    assert explanation.smallest_change is not None
    assert explanation.smallest_change.text == "ask for 6 nodes without any bounds"


@given(
    local_counts=st.tuples(st.integers(0, 3), st.integers(0, 5)),
    is_drained=st.booleans(),
    reserves_all=st.booleans(),
    request=st.one_of(
        st.builds(FlexibleRequest, st.integers(3, 8)),
        st.builds(nonfixed, st.integers(3, 6)),
        st.builds(lambda north, south: fixed(north=north, south=south), st.integers(1, 4), st.integers(1, 5)),
    ),
)
def test_sufficient_changes_beside_reservation_are_minimal(
    local_counts: tuple[int, int], is_drained: bool, reserves_all: bool, request: Request
) -> None:
    """Each sufficient change is tested by itself: more idle nodes, a resumed cluster, or the reservation removed."""
    world = World(
        {"north": 4, "south": 6}, Rules(plan_after=0, high_scans_per_low=1, scan_interval=10.0), now=START_TIME
    )
    for name, count in zip(world.sites, local_counts, strict=True):
        for _ in range(count):
            world.sites[name].add_local_user(1)
    world.settle()
    blocker = world.submit(nonfixed(1), run_time=1e6)
    attempt = world.job(blocker).attempt
    assert attempt is not None
    cluster_name = attempt.gang[0].cluster
    fixed_request = fixed(**{cluster_name: world.sites[cluster_name].total - local_counts[cluster_name == "south"]})
    reserved = world.submit(FlexibleRequest(10 - sum(local_counts)) if reserves_all else fixed_request, run_time=1e6)
    world.advance(25.0)
    assert world.queries.planned_job == reserved
    if is_drained:
        world.step([ClusterDrained("south")])
    job = world.submit(request, run_time=1e6)
    if world.state(job) is not JobState.QUEUED:
        return
    explanation, queries = explain_job(world, job), world.queries

    def is_placeable() -> bool:
        """Answer as the next periodic scan, which plans again."""
        if queries.planned_job == reserved:
            queries.queues.plan.invalidate()
            queries.queues.plan.update(queries.questions.ask)
        return isinstance(
            queries.questions.ask(world.job(job).spec, queries.offer(world.job(job).spec, world.job(job)).view),
            Placement,
        )

    def is_placeable_with(name: str, count: int) -> bool | None:
        """Answer for a report with more idle nodes.

        None if nodes of local users suffice for the planned job, which then starts with them. The explanation does not
        plan again for each number of nodes.
        """
        status, report = queries.grid[name], world.sites[name].current_report()
        status.report(
            ClusterReport(report.total, report.idle + count, report.background - count, 0, report.holding), 0.0
        )
        answer: bool | None = is_placeable()
        if count <= report.background and queries.planned_start(reserved) == world.now:
            answer = None
        status.report(ClusterReport(report.total, report.idle, report.background, 0, report.holding), 0.0)
        return answer

    for cluster in explanation.clusters:
        if cluster.missing:
            assert is_placeable_with(cluster.cluster, cluster.missing) is not False
            assert not is_placeable_with(cluster.cluster, cluster.missing - 1)
            assert f"{cluster.missing} more idle node" in str(explanation.suffices)
    if any("resumed" in text for text in explanation.suffices):
        queries.grid["south"].drained = None
        queries.grid.touch("south")
        assert is_placeable()
        queries.grid["south"].drained = Drain(START_TIME)
        queries.grid.touch("south")
    if any("out of its way" in text for text in explanation.suffices):
        world.hold(reserved)
        assert world.state(blocker) is JobState.RUNNING
        assert is_placeable() or world.state(job).is_active


def test_explanation_of_reserving_job_counts_reserved_nodes() -> None:
    world, _ = CASES["nodes_are_kept_for_an_older_job"].build()
    wide = world.queries.planned_job
    assert wide is not None
    explanation = explain_job(world, wide)
    assert "5 are idle" in explanation.headline
    assert [(c.cluster, c.idle) for c in explanation.clusters] == [("north", 4), ("south", 1)]
    assert explanation.smallest_change is not None


# Jobs that are not queued


def test_explanation_of_held_job_names_release() -> None:
    world = create_busy_grid(TWO_CLUSTERS, north=4, south=4)
    job = world.submit(FlexibleRequest(2))
    world.hold(job)
    explanation = explain_job(world, job)
    assert (explanation.state, explanation.headline, explanation.smallest_change) == (JobState.HELD, "held", None)
    assert explanation.suffices == ("its release (koala release 1)",)
    assert explanation.notes[0].startswith("released now it would wait: ")
    assert "0 are idle" in explanation.notes[0]


def test_explanation_of_placed_job_names_claim_time() -> None:
    links = {("north", "south"): Link(1e-3, 1e6)}
    world = create_busy_grid(TWO_CLUSTERS, south=4, world={"links": links})
    file = InputFile("in", 100_000_000, ("south",))
    job = world.submit(NonFixedRequest((ComponentRequest(2, inputs=(file,)),)), policy="close-to-files")
    explanation = explain_job(world, job)
    assert explanation.state is JobState.PLACED
    assert explanation.headline == (
        "placed on north (2 nodes); the files of component 0 are on their way, "
        "expected at 14:03:40; asks for its nodes at 14:03:15"
    )
    assert explanation.placement is not None
    assert [(c.size, c.cluster) for c in explanation.placement.components] == [(2, "north")]
    assert explanation.reasons[-2].reason == explanation.placement.reason
    assert explanation.reasons[-1].reason == "in (100 MB) from south to north, about 100 s"
    assert "its files come from south" in explanation.clusters[0].reason
    world.step([ReplicasChanged("in", ())])
    world.cancel(job)
    second_job = world.submit(NonFixedRequest((ComponentRequest(2, inputs=(file,)),)))
    assert "no cluster has a good replica of in" in explain_job(world, second_job).headline


def test_explanation_of_claim_names_local_users() -> None:
    world = create_busy_grid(TWO_CLUSTERS)
    job = world.submit(FlexibleRequest(8))
    world.sites["north"].add_local_user(4)
    world.advance(1.0)
    explanation = explain_job(world, job)
    assert explanation.state is JobState.CLAIMING
    assert explanation.headline == (
        "waits in the resource manager of north behind local users with component 0, for 10 s at most"
    )
    assert reason_on(explanation, "north") == "component 0: queued in the resource manager since 14:02:00"
    barrier_text = "every node has reported, waits at the barrier for the others"
    assert reason_on(explanation, "south").startswith(f"component 1: {barrier_text} since 14:02:")


def test_explanation_of_barrier_names_missing_component() -> None:
    world = create_busy_grid(TWO_CLUSTERS, world={"manual": True})
    for name in TWO_CLUSTERS:
        world.deliver(name)
    job = world.submit(FlexibleRequest(8))
    world.run_commands("north")
    world.run_commands("south")
    world.sites["north"].report_claimed(world.tokens(job)[0])
    world.deliver("north")
    assert explain_job(world, job).headline == "waits for the nodes of component 1 on south to report"


def test_explanation_of_running_job_is_its_placement() -> None:
    world = create_busy_grid(TWO_CLUSTERS)
    job = world.submit(FlexibleRequest(6), run_time=100.0)
    world.advance(2.0)
    explanation = explain_job(world, job)
    assert (explanation.state, explanation.headline) == (
        JobState.RUNNING,
        "runs since 14:02 on north (4 nodes), south (2 nodes)",
    )
    assert explanation.placement is not None
    assert "north had the most idle nodes" in explanation.placement.reason
    assert [(c.cluster, c.gives) for c in explanation.clusters] == [("north", 4), ("south", 2)]


def test_explanation_of_unknown_job_names_cluster() -> None:
    world = create_busy_grid(TWO_CLUSTERS)
    job = world.submit(FlexibleRequest(6), run_time=100.0)
    world.advance(2.0)
    world.disconnect("south")
    world.advance(10.0)
    explanation = explain_job(world, job)
    assert explanation.state is JobState.UNKNOWN
    assert explanation.headline == "south is out of reach since 14:02: what runs there is not known"


def test_explanation_of_finished_job_is_its_end() -> None:
    world = create_busy_grid(TWO_CLUSTERS)
    job = world.submit(FlexibleRequest(6), run_time=1.0, code=3)
    world.advance(60.0)
    explanation = explain_job(world, job)
    assert explanation.state is JobState.FAILED
    assert explanation.headline.startswith("failed at 14:02: ")
    assert explanation.clusters == ()
    assert explanation.position is None
    assert explanation.reasons[0].event == "placed"


# Dry runs


def test_dry_run_of_placeable_submission_names_clusters() -> None:
    world = create_busy_grid(TWO_CLUSTERS)
    dry_run = explain_submission(world.queries, JobSpec(FlexibleRequest(3), ("program",)), world.now)
    assert (dry_run.job, dry_run.state, dry_run.position) == (None, JobState.PLACED, None)
    assert dry_run.headline == "would be placed at once on north (3 nodes)"
    assert [(c.cluster, c.gives, c.reason) for c in dry_run.clusters] == [
        ("north", 3, "3 nodes would be taken here"),
        ("south", 0, "not needed"),
    ]
    assert world.jobs == {}


def test_dry_run_with_preemption_names_it() -> None:
    world, _ = CASES["jobs_of_low_priority_have_the_nodes"].build()
    spec = JobSpec(FlexibleRequest(4), ("program",), priority=Priority.HIGH)
    dry_run = explain_submission(world.queries, spec, world.now)
    assert dry_run.headline == "would be placed at once on north (4 nodes), where it would preempt others"
    assert [(c.gives, c.idle) for c in dry_run.clusters] == [(4, 0), (0, 1)]


def test_dry_run_of_waiting_submission_has_position() -> None:
    world = create_busy_grid(TWO_CLUSTERS, south=3)
    world.submit(FlexibleRequest(6))
    dry_run = explain_submission(world.queries, JobSpec(FlexibleRequest(6), ("program",)), world.now)
    assert (dry_run.state, dry_run.position, dry_run.ahead) == (JobState.QUEUED, 2, 1)
    assert "5 are idle" in dry_run.headline
    assert dry_run.smallest_change is not None
    assert dry_run.smallest_change.text == "ask for 5 nodes"


def test_dry_run_in_fcfs_names_job_ahead() -> None:
    world, _ = CASES["behind_another_job_in_fcfs"].build()
    dry_run = explain_submission(world.queries, JobSpec(FlexibleRequest(1), ("program",)), world.now)
    assert dry_run.headline == "would wait behind job 1"


@pytest.mark.parametrize(
    ("request_", "options"),
    [
        (FixedRequest(tuple(ComponentRequest(60, f"c{n:02}", command=("x",)) for n in range(50))), {}),
        (FixedRequest(tuple(ComponentRequest(60, f"c{n:02}") for n in range(50))), {"priority": Priority.HIGH}),
        (NonFixedRequest(tuple(ComponentRequest(60 + n, command=("x",)) for n in range(40))), {}),
        (FlexibleRequest(4000, 50, 49), {"coallocation": 49, "speed_ratio_min": 0.99, "policy": "larger-first"}),
    ],
)
def test_dry_run_questions_are_bounded(request_: Request, options: dict[str, Any]) -> None:
    names = [f"c{n:02}" for n in range(50)]
    world = create_busy_grid(
        dict.fromkeys(names, 100),
        world={"speeds": {name: 1.0 + n for n, name in enumerate(names)}},
        **dict.fromkeys(names, 99),
    )
    questions = []
    ask = world.queries.questions.ask

    def record_question(*arguments: Any) -> Any:
        questions.append(arguments)
        return ask(*arguments)

    world.queries.questions.ask = record_question  # type: ignore[method-assign]
    dry_run = explain_submission(world.queries, JobSpec(request_, ("program",), **options), world.now)
    assert dry_run.state is JobState.QUEUED
    assert len(questions) <= MAX_QUESTIONS + 20
    assert dry_run.smallest_change is not None


# Any grid, any request

drawn_sizes = st.integers(1, 6)
drawn_names = st.sampled_from(["a", "b", "c"])
flexible_requests = st.builds(
    lambda total, min_size, max_components: FlexibleRequest(total, min(min_size, total), max_components),
    st.integers(1, 14),
    st.integers(1, 4),
    st.none() | st.integers(1, 3),
)
drawn_requests: st.SearchStrategy[Request] = st.one_of(
    flexible_requests,
    st.lists(drawn_sizes, min_size=1, max_size=3).map(lambda component_sizes: nonfixed(*component_sizes)),
    st.lists(st.tuples(drawn_sizes, drawn_names), min_size=1, max_size=3).map(
        lambda components: FixedRequest(tuple(ComponentRequest(size, name) for size, name in components))
    ),
)
drawn_grids = st.fixed_dictionaries(
    {name: st.tuples(drawn_sizes, st.integers(0, 6), st.sampled_from(["", "", "drained", "away"])) for name in "abc"}
)


drawn_jobs = st.lists(st.tuples(drawn_sizes, st.sampled_from(Priority)), max_size=3)
drawn_policies = st.sampled_from(
    ["", "", "best-fit", "faster-first", "adaptive", "communication-aware", "close-to-files"]
)


TIGHT = {"a": (1, 0, ""), "b": (2, 0, ""), "c": (3, 0, "")}


@example(TIGHT, FlexibleRequest(4), [(5, Priority.LOW)], Priority.HIGH, "", None, None, "scan")
@given(
    drawn_grids,
    drawn_requests,
    drawn_jobs,
    st.sampled_from(Priority),
    drawn_policies,
    st.none() | st.integers(1, 3),
    st.none() | st.floats(0.1, 1.0),
    st.sampled_from(["scan", "head", "fcfs"]),
)
def test_explanation_of_random_job_matches_placement(
    grid: dict[str, tuple[int, int, str]],
    request: Request,
    other_jobs: list[tuple[int, Priority]],
    priority: Priority,
    policy: str,
    coallocation: int | None,
    speed_ratio: float | None,
    queue: Any,
) -> None:
    world = World(
        {name: total for name, (total, _, _) in grid.items()},
        Rules(queue=queue),
        now=START_TIME,
        speeds={"a": 1.0, "b": 2.0, "c": 3.0},
        links={("a", "b"): Link(1e-3, 1e6)},
    )
    for name, (total, local_nodes, state) in grid.items():
        world.sites[name].add_local_user(min(total, local_nodes))
        world.settle()
        if state == "drained":
            world.step([ClusterDrained(name)])
        elif state == "away":
            world.disconnect(name)
    for size, rank in other_jobs:
        world.submit(FlexibleRequest(size), run_time=1000.0, priority=rank)
        world.settle()
    spec = JobSpec(
        request,
        ("program",),
        priority=priority,
        launcher=Launcher.PROCESSES,
        coallocation=coallocation,
        speed_ratio_min=speed_ratio,
        policy=policy,
    )
    dry_run = explain_submission(world.queries, spec, world.now)
    job = submit_spec(world, spec)
    assert world.state(job).is_active == (dry_run.state is JobState.PLACED), dry_run.headline
    explanation = explain_job(world, job)
    assert explanation.headline
    if world.state(job).is_active:
        assert explanation.placement is not None
        assert dry_run.placement is not None
        # A component that would preempt others is re-placed on free nodes when the job claims.
        moved_components = {
            entry.component for entry in world.timeline if entry.job == job and entry.event == "re-placed"
        }
        placed_on = [
            [
                (c.size, "elsewhere" if index in moved_components else c.cluster)
                for index, c in enumerate(placement.components)
            ]
            for placement in (explanation.placement, dry_run.placement)
        ]
        assert placed_on[0] == placed_on[1]
    elif explanation.smallest_change is not None:
        world.step([JobChanged(job, explanation.smallest_change.spec)])
        assert world.state(job).is_active
    else:
        single_node_spec = replace(spec, request=FlexibleRequest(1), coallocation=None, speed_ratio_min=None, policy="")
        assert DryRun(world.queries, world.job(job)).placed_at_once(single_node_spec) is None


@example(
    {"a": (4, 2, ""), "b": (2, 2, ""), "c": (1, 1, "")}, fixed(a=3), [(2, Priority.LOW)], Priority.HIGH, "", False, None
)
@given(
    drawn_grids,
    drawn_requests,
    drawn_jobs,
    st.sampled_from(Priority),
    drawn_policies,
    st.booleans(),
    st.sampled_from([None, "planned", "leaves"]),
)
def test_sufficient_nodes_are_minimal_for_random_grid(
    grid: dict[str, tuple[int, int, str]],
    request: Request,
    other_jobs: list[tuple[int, Priority]],
    priority: Priority,
    policy: str,
    reclaims: bool,
    variant: str | None,
) -> None:
    """Fewer nodes on one cluster than the explanation names would not suffice."""
    rules = Rules(
        sharing="feasible" if reclaims else "ordinary",
        plan_after=None if variant is None else 0.0,
        high_scans_per_low=1,
        scan_interval=10.0,
    )
    world = World({name: total for name, (total, *_) in grid.items()}, rules, now=START_TIME)
    for number, (size, rank) in enumerate(other_jobs):
        world.submit(FlexibleRequest(size), run_time=1e6, priority=rank, home_site="abc"[number] if reclaims else "")
        world.settle()
    for name, (_, local_nodes, state) in grid.items():
        world.sites[name].add_local_user(min(world.sites[name].idle, local_nodes))
        world.settle()
        if state == "drained":
            world.step([ClusterDrained(name)])
    world.advance(25)
    if variant == "leaves" and other_jobs:
        world.cancel(1)
    spec = JobSpec(request, ("program",), priority=priority, policy=policy, home_site="a" if reclaims else "")
    job = submit_spec(world, spec)
    if world.state(job) is not JobState.QUEUED:
        return
    queries = world.queries

    def is_placed_with(name: str, count: int) -> bool:
        status, site = queries.grid[name], world.sites[name].current_report()
        status.report(ClusterReport(site.total, site.idle + count, site.background - count, 0, site.holding), 0.0)
        answer = DryRun(queries, world.job(job)).answer(spec)
        status.report(ClusterReport(site.total, site.idle, site.background, 0, site.holding), 0.0)
        return isinstance(answer, Placement)

    explanation = explain_job(world, job)
    assert isinstance(DryRun(queries, world.job(job)).answer(spec), Refusal)
    for name, (*_, state) in grid.items():
        if state == "drained":
            queries.grid[name].drained = None
            queries.grid.touch(name)
            answer = DryRun(queries, world.job(job)).answer(spec)
            assert isinstance(answer, Placement) == any(f"resume {name}" in text for text in explanation.suffices)
            queries.grid[name].drained = Drain(START_TIME)
            queries.grid.touch(name)
    for cluster in explanation.clusters:
        status = queries.grid[cluster.cluster]
        counts = range(1, status.last_report.background + 1 if status.is_open else 1)
        smallest = next((count for count in counts if is_placed_with(cluster.cluster, count)), None)
        if smallest is not None or (cluster.missing or 0) <= status.last_report.background:
            assert cluster.missing == smallest
        texts = [
            text
            for text in explanation.suffices
            if f"more idle node{'s'[: cluster.missing != 1]} in {cluster.cluster}" in text
        ]
        assert [text.split()[0] for text in texts] == ([] if cluster.missing is None else [str(cluster.missing)])


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["anna", "bert", "carl"])), max_size=6),
    spec_of_last=st.tuples(st.integers(1, 4), st.sampled_from(["anna", "bert", "carl"])),
    order=st.sampled_from(["fcfs", "narrowest-first"]),
    mode=st.sampled_from(["scan", "head", "fcfs"]),
    clusters=st.lists(st.sampled_from(["north", "south"]), min_size=7, max_size=7),
)
def test_dry_run_predicts_position_of_submission(
    sizes: list[tuple[int, str]], spec_of_last: tuple[int, str], order: QueueOrder, mode: QueueMode, clusters: list[str]
) -> None:
    """Owners at their limits do not block other jobs."""
    limits = Limits(LimitSettings(UserLimits(nodes=4)), lambda _: ())
    world = World({"north": 4, "south": 4}, Rules(queue=mode, queue_order=order), limits=limits)
    for (size, owner), cluster in zip(sizes, clusters, strict=False):
        world.submit(fixed(**{cluster: size}), owner=owner, run_time=1000)
        world.settle()
    request = fixed(**{clusters[-1]: spec_of_last[0]})
    dry_run = explain_submission(world.queries, JobSpec(request, ("program",), owner=spec_of_last[1]), world.now)
    job_ahead = re.search(r"behind job (\d+)", dry_run.headline)
    assert job_ahead is None or world.state(int(job_ahead[1])) is JobState.QUEUED
    job = world.submit(request, owner=spec_of_last[1], run_time=1000)
    assert (dry_run.state is JobState.PLACED) == (world.state(job) is not JobState.QUEUED)
    assert dry_run.position == world.queries.position(job)
