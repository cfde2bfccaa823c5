"""Sharing between sites (semantics 8): own queues, permitted clusters, and reclaimed nodes."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.errors import UsageError
from koalapy.model.job import JobState
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.model.users import Sharing
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.rules import Rules
from koalapy.validation.submission import check_submission
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

FEASIBLE: dict[str, Any] = {"sharing": "feasible"}
LONG = 5000.0


def reclaimed_jobs(world: World) -> list[int]:
    """Return the reclaimed jobs, in order."""
    return [entry.job for entry in world.timeline if entry.event == "reclaimed"]


def start_jobs(world: World, *jobs: tuple[int, str, str]) -> list[int]:
    """Start long jobs of (nodes, cluster, home site), each a second after the previous one."""
    job_ids = []
    for size, cluster, home in jobs:
        job_ids.append(world.submit(fixed(**{cluster: size}), run_time=LONG, home_site=home))
        world.advance(1)
    assert all(world.state(job) is JobState.RUNNING for job in job_ids)
    return job_ids


# What a site takes back


def test_reclaim_frees_nodes_for_own_user() -> None:
    world = World({"north": 8, "south": 4}, Rules(**FEASIBLE))
    (guest,) = start_jobs(world, (6, "north", "south"))
    own_job = world.submit(flexible(8), home_site="north")
    world.advance(1)
    assert (world.state(own_job), world.state(guest)) == (JobState.RUNNING, JobState.QUEUED)
    assert world.reasons(guest, "requeued") == [
        f"reclaimed: north takes back its nodes for job {own_job} of its own users"
    ]
    assert world.reasons(own_job, "reclaims") == [f"your site north reclaimed 6 nodes, of job {guest}"]
    assert world.job(guest).restarts == 0, "a reclaim is not a failure"
    world.advance(LONG + 100)
    assert [world.state(job) for job in (own_job, guest)] == [JobState.SUCCEEDED] * 2
    check_nothing_remains(world)


def test_reclaimed_job_restarts_and_keeps_its_position() -> None:
    world = World({"north": 4, "south": 4}, Rules(**FEASIBLE))
    guest = world.submit(nonfixed(4), run_time=100.0, home_site="south")  # worst-fit: north, by its name
    world.advance(60)
    submitted, seq = world.job(guest).submitted_at, world.job(guest).queue_seq
    world.submit(fixed(south=4), run_time=500.0, home_site="south")
    world.submit(nonfixed(4), run_time=500.0, home_site="north")
    world.advance(60)
    assert world.state(guest) is JobState.QUEUED
    world.advance(530)
    assert world.state(guest) is JobState.RUNNING, "it restarted from the beginning"
    world.advance(30)
    assert world.state(guest) is JobState.SUCCEEDED
    assert (world.job(guest).submitted_at, world.job(guest).queue_seq) == (submitted, seq)


@pytest.mark.parametrize(
    ("order", "expected"), [("jst", [4, 3]), ("least-harm", [4, 3])], ids=["as in the paper", "least harm"]
)
def test_reclaim_takes_youngest_and_no_more_than_needed(order: str, expected: list[int]) -> None:
    world = World({"north": 8, "south": 4}, Rules(**FEASIBLE, preemption_order=order))
    start_jobs(world, *[(2, "north", "south")] * 4)
    world.submit(fixed(north=3), home_site="north")
    world.advance(1)
    assert reclaimed_jobs(world) == expected


def test_guest_submitted_with_own_job_waits() -> None:
    world = World({"north": 4, "south": 4}, Rules(sharing="feasible"))
    specs = [JobSpec(fixed(south=3), ("program",), home_site=site) for site in ("north", "south")]
    guest, owner = world.submit_together(specs)
    world.settle()
    assert (world.state(guest), world.state(owner)) == (JobState.QUEUED, JobState.CLAIMING)
    assert reclaimed_jobs(world) == []
    world.advance(60)
    assert [world.state(job) for job in (guest, owner)] == [JobState.SUCCEEDED] * 2
    check_nothing_remains(world)


def test_reclaim_is_avoided_by_placing_elsewhere() -> None:
    world = World({"north": 4, "south": 4}, Rules(**FEASIBLE))
    start_jobs(world, (4, "north", "south"))
    own_job = world.submit(nonfixed(4), home_site="north")
    world.advance(1)
    assert world.state(own_job) is JobState.RUNNING
    assert not reclaimed_jobs(world)
    assert world.job(own_job).attempt is not None
    assert [c.cluster for c in world.job(own_job).attempt.components] == ["south"]  # type: ignore[union-attr]


def test_reclaim_is_not_done_if_insufficient() -> None:
    """Jobs of the site itself are not reclaimed."""
    world = World({"north": 8, "south": 4}, Rules(**FEASIBLE))
    start_jobs(world, (4, "north", "north"), (4, "north", "south"), (4, "south", "south"))
    own_job = world.submit(nonfixed(5), home_site="north")
    world.advance(100)
    assert world.state(own_job) is JobState.QUEUED
    assert not reclaimed_jobs(world)
    smaller_job = world.submit(nonfixed(4), home_site="north")
    world.advance(1)
    assert world.state(smaller_job) is JobState.RUNNING
    assert reclaimed_jobs(world) == [2]


def test_job_without_home_is_guest_everywhere() -> None:
    world = World({"north": 4}, Rules(**FEASIBLE))
    start_jobs(world, (4, "north", ""))
    own_job = world.submit(nonfixed(4), home_site="north")
    world.advance(1)
    assert world.state(own_job) is JobState.RUNNING
    assert reclaimed_jobs(world) == [1]
    homeless_job = world.submit(nonfixed(4))
    world.advance(1)
    assert world.state(homeless_job) is JobState.QUEUED, "no nodes are reclaimed for it"


def test_reclaim_of_coallocated_job_frees_all_clusters() -> None:
    world = World({"north": 4, "south": 4}, Rules(**FEASIBLE))
    guest = world.submit(fixed(north=2, south=3), run_time=LONG, home_site="south")
    world.advance(1)
    own_job = world.submit(nonfixed(4), home_site="north")
    world.advance(1)
    assert (world.state(own_job), world.state(guest)) == (JobState.RUNNING, JobState.QUEUED)
    assert world.queries.grid["south"].nodes.available == 4


def test_reclaim_spares_high_jobs() -> None:
    world = World({"north": 4, "south": 4}, Rules(**FEASIBLE))
    high_job = world.submit(fixed(north=2), run_time=LONG, home_site="south", priority=Priority.HIGH)
    world.submit(fixed(south=4), run_time=LONG, home_site="south")
    own_job = world.submit(nonfixed(3), home_site="north")
    world.advance(30)
    assert (world.state(high_job), world.state(own_job)) == (JobState.RUNNING, JobState.QUEUED)
    assert not reclaimed_jobs(world)


def test_reclaim_does_not_count_leaving_nodes_twice() -> None:
    world = World({"north": 4, "south": 4}, Rules(**FEASIBLE), manual=True)
    guests = [world.submit(fixed(north=2), home_site="south") for _ in range(2)]
    for name in world.sites:
        world.run_commands(name)
    for token in world.sites["north"].startable():
        world.sites["north"].report_claimed(token)
    world.sites["north"].send_report()
    world.deliver("north")
    first = world.submit(fixed(north=2), home_site="north")
    second = world.submit(fixed(north=2), home_site="north")
    third = world.submit(fixed(north=1), home_site="north")
    assert sorted(reclaimed_jobs(world)) == guests, "one guest for each of the first two jobs"
    assert [world.state(job) for job in (first, second, third)] == [JobState.CLAIMING] * 2 + [JobState.QUEUED]


@pytest.mark.parametrize("sharing", ["ordinary", "independent"])
def test_reclaim_is_disabled_without_feasible_sharing(sharing: str) -> None:
    world = World({"north": 4}, Rules(sharing=sharing))
    start_jobs(world, (4, "north", ""))
    own_job = world.submit(nonfixed(4), home_site="north")
    world.advance(1)
    assert world.state(own_job) is JobState.QUEUED
    assert world.queries.grid["north"].nodes.reclaimable == 0


def test_reclaim_works_after_daemon_restart() -> None:
    world = World({"north": 4, "south": 4}, Rules(**FEASIBLE))
    start_jobs(world, (4, "north", "south"))
    world.restart()
    for name in world.sites:
        world.connect(name)
    own_job = world.submit(fixed(north=4), home_site="north")
    world.advance(1)
    assert world.state(own_job) is JobState.RUNNING
    assert reclaimed_jobs(world) == [1]


# Positions of reclaimed jobs


@pytest.mark.parametrize(
    ("position", "order", "expected"),
    [
        ("place", "fcfs", [1, 2]),
        ("place", "narrowest-first", [2, 1]),
        ("front", "fcfs", [1, 2]),
        ("front", "narrowest-first", [1, 2]),
    ],
)
def test_reclaimed_job_position_follows_setting(position: str, order: str, expected: list[int]) -> None:
    world = World({"north": 4, "south": 4}, Rules(**FEASIBLE, reclaimed_position=position, queue_order=order))
    guest, *_ = start_jobs(world, (4, "north", "south"), (4, "south", "south"))
    narrow_job = world.submit(nonfixed(2), run_time=LONG, home_site="south")
    own_job = world.submit(nonfixed(4), run_time=LONG, home_site="north")
    world.advance(1)
    assert (reclaimed_jobs(world), world.state(own_job)) == ([guest], JobState.RUNNING)
    assert [world.queries.position(job) for job in (guest, narrow_job)] == expected
    world.restart()
    assert [world.queries.position(job) for job in (guest, narrow_job)] == expected


def test_reclaimed_last_job_is_first_in_queue() -> None:
    world = World({"north": 4, "south": 4}, Rules(**FEASIBLE, reclaimed_position="front"))
    start_jobs(world, (4, "south", "south"), (2, "north", "south"), (2, "north", "south"))
    for _ in range(2):
        world.submit(nonfixed(2), run_time=LONG, home_site="north")
        world.advance(1)
    assert reclaimed_jobs(world) == [3, 2]
    assert [world.queries.position(job) for job in (2, 3)] == [1, 2]


# Queues


def test_queue_of_site_does_not_block_other_sites() -> None:
    for sharing, expected in (("ordinary", JobState.QUEUED), ("feasible", JobState.RUNNING)):
        world = World({"north": 4, "south": 4}, Rules(sharing=sharing, queue="fcfs"))
        start_jobs(world, (2, "north", "north"), (2, "south", "south"))
        wide_job = world.submit(fixed(north=4), home_site="north")
        narrow_job = world.submit(nonfixed(2), home_site="south")
        world.advance(1)
        assert world.state(wide_job) is JobState.QUEUED
        assert world.state(narrow_job) is expected


def test_queues_of_sites_are_ordered_by_name() -> None:
    world = World({"north": 4, "south": 4, "west": 2}, Rules(**FEASIBLE))
    wide_job = world.submit(fixed(north=4, south=4, west=2), run_time=50.0, priority=Priority.HIGH)
    world.advance(1)
    homes = ("", "west", "south", "north")
    jobs = {home: world.submit(flexible(10), run_time=LONG, home_site=home) for home in homes}
    assert {home: world.queries.position(job) for home, job in jobs.items()} == dict.fromkeys(homes, 1)
    world.advance(60)
    assert world.state(wide_job) is JobState.SUCCEEDED
    assert world.state(jobs["north"]) is JobState.RUNNING
    assert world.queries.waiting_reason(world.job(jobs["south"]))


# Where jobs run


def test_sharing_independent_runs_jobs_at_home_only() -> None:
    world = World({"north": 4, "south": 4}, Rules(sharing="independent"))
    jobs = [world.submit(nonfixed(3), home_site="north") for _ in range(2)]
    homeless_job = world.submit(nonfixed(4))
    world.advance(1)
    assert [world.state(job) for job in (*jobs, homeless_job)] == [JobState.RUNNING, JobState.QUEUED, JobState.RUNNING]
    explanation = explain(world.queries, world.job(jobs[1]), [e for e in world.timeline if e.job == jobs[1]], world.now)
    assert "sharing is independent: south is not its home site" in explanation.headline
    assert [c.reason for c in explanation.clusters if c.cluster == "south"] == [
        "its home site is north, and sharing is independent (our jobs have 4)"
    ]


def test_speed_threshold_excludes_slow_clusters() -> None:
    speeds = {"north": 1.0, "south": 2.0, "west": 1.5}
    rules = Rules(speed_threshold=0.75)
    world = World({"north": 4, "south": 4, "west": 4}, rules, speeds=speeds)
    jobs = [world.submit(nonfixed(4), home_site="south") for _ in range(3)]
    world.advance(1)
    clusters = {c.cluster for job in jobs if (a := world.job(job).attempt) is not None for c in a.components}
    assert clusters == {"south", "west"}
    assert world.state(jobs[2]) is JobState.QUEUED
    assert "north is too slow beside its home site" in world.queries.waiting_reason(world.job(jobs[2]))


def test_submission_impossible_for_home_site_is_rejected() -> None:
    def rejection_message(request: Any, home: str, **rules: Any) -> str:
        world = World({"north": 4, "south": 2}, Rules(**rules), speeds={"north": 1.0, "south": 2.0})
        with pytest.raises(UsageError) as error:
            check_submission(
                JobSpec(request, ("true",), home_site=home, launcher=Launcher.PROCESSES), world.queries.limits()
            )
        return error.value.message

    independent, slow = {"sharing": "independent"}, {"speed_threshold": 1.0}
    assert "sharing is independent: north is not its home site" in rejection_message(
        flexible(3), "south", **independent
    )
    assert "north is too slow beside its home site" in rejection_message(flexible(3), "south", **slow)
    assert "its home site is south, and sharing is independent" in rejection_message(
        fixed(north=1), "south", **independent
    )
    assert "its speed is 1, and a job of south is to have at least 2" in rejection_message(
        fixed(north=1), "south", **slow
    )


@given(
    speeds=st.dictionaries(st.sampled_from("abcde"), st.sampled_from([0.5, 1.0, 2.0]), min_size=1),
    mode=st.sampled_from(["ordinary", "independent", "feasible"]),
    threshold=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    home=st.sampled_from(["", *"abcdef"]),
)
def test_sharing_home_site_is_open_to_its_jobs(
    speeds: dict[str, float], mode: Any, threshold: float, home: str
) -> None:
    sharing = Sharing(mode, threshold, speeds)
    closed = sharing.closed_to(home)
    assert home not in closed
    assert closed <= speeds.keys()
    assert closed == {name for name in speeds if home and sharing.rejection_reason(home, name)}
    assert (sharing.section_of(home) < sharing.section_of("")) == bool(sharing.site_of(home))
    assert sharing.reclaiming_site(home) in ("", home)


# What is said of it


def test_dry_run_names_reclaim() -> None:
    world = World({"north": 4, "south": 4}, Rules(**FEASIBLE))
    start_jobs(world, (4, "north", "south"), (4, "south", "south"))
    spec = JobSpec(nonfixed(3), ("true",), home_site="north", launcher=Launcher.PROCESSES)
    dry_run = explain_submission(world.queries, spec, world.now)
    assert (
        dry_run.headline == "would be placed at once on north (3 nodes), where north would take back nodes from others"
    )
    spec = JobSpec(nonfixed(3), ("true",))
    assert world.queries.offer(spec).at_home(spec) is None


@pytest.mark.parametrize("queue", ["scan", "head", "fcfs"])
@pytest.mark.parametrize("is_together", [True, False])
def test_guest_is_not_placed_where_reclaimed_in_same_step(queue: Any, is_together: bool) -> None:
    world = World({"a": 8, "b": 8}, Rules(sharing="feasible", queue=queue))
    world.submit(fixed(a=8), run_time=1e4, home_site="a")
    requests = [(flexible(4, max_components=1), "a"), (flexible(8), "b")]
    specs = [JobSpec(request, ("p",), home_site=home, launcher=Launcher.PROCESSES) for request, home in requests]
    if is_together:
        guest, owner = world.submit_together(specs)
    else:
        for site in world.sites.values():
            site.add_local_user(site.idle)
            site.send_report()
        world.settle()
        guest, owner = (world.submit_together([spec])[0] for spec in specs)
        world.sites["b"].remove_local_user(next(iter(world.sites["b"].local_users)))
        world.sites["b"].send_report()
        world.settle()
    world.advance(1)
    assert world.state(owner) is JobState.RUNNING
    assert (world.state(guest), world.timeline_events(guest)) == (JobState.QUEUED, ["submitted"])


@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 4), st.sampled_from(["a", "b", "c", ""]), st.sampled_from(Priority)), max_size=8
    ),
    queue=st.sampled_from(["scan", "head", "fcfs"]),
)
def test_jobs_submitted_together_reclaim_only_from_guests_not_started(
    jobs: list[tuple[int, str, Priority]], queue: Any
) -> None:
    world, reclaimed_jobs = submit_with_sharing(jobs, queue)
    for job in reclaimed_jobs:
        assert [kind for kind, _ in world.commands(job)] == ["Submit", "Stop"]
    world.advance(1)
    running = {job for job in world.jobs if world.state(job) is JobState.RUNNING}
    assert not running & set(reclaimed_jobs)


def test_jobs_submitted_together_with_a_newcomer_behind_the_head_do_not_reclaim() -> None:
    low, high = Priority.LOW, Priority.HIGH
    jobs = [(1, "a", low), (2, "b", high), (3, "a", high), (3, "a", high), (3, "b", low), (2, "b", low)]
    assert submit_with_sharing(jobs, "head")[1] == []


def test_guest_with_lost_nodes_is_placed_elsewhere() -> None:
    low, high = Priority.LOW, Priority.HIGH
    jobs = [(2, "b", high), (3, "a", low), (3, "a", low), (1, "a", low), (2, "a", low), (2, "a", low)]
    world, _ = submit_with_sharing(jobs, "head")
    assert [job for job in world.jobs if "claim-try" in world.timeline_events(job)] == []


def submit_with_sharing(jobs: list[tuple[int, str, Priority]], queue: Any) -> tuple[World, list[int]]:
    """Submit jobs of (size, home site, priority) together; return the world, and the jobs reclaimed in that cycle."""
    world = World({"a": 4, "b": 4, "c": 4}, Rules(sharing="feasible", queue=queue))
    specs = [
        JobSpec(
            flexible(size, max_components=1), ("p",), home_site=home, priority=priority, launcher=Launcher.PROCESSES
        )
        for size, home, priority in jobs
    ]
    submitted = world.submit_together(specs)
    return world, [job for job in submitted if "reclaimed" in world.timeline_events(job)]
