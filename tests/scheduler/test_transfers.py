"""Files on their way to components: what waits for them, what they wait for, and what becomes of them."""

from typing import Any

import pytest

from koalapy.model.cluster import Link
from koalapy.model.job import ClaimingMode, ComponentState, JobState, Priority
from koalapy.model.reports import ComponentStatus, StageFault, StageStatus
from koalapy.model.request import Bundle, ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.scheduler.claims.staging import MAX_REMEMBERED_STRAYS
from koalapy.scheduler.effects import UnstageComponent
from koalapy.scheduler.event_handler import MAX_MISSING_FILES
from koalapy.scheduler.events import LinkMeasured, ReplicasChanged, Reported
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.world import START_DELAY, World

GRID = {"north": 4, "south": 4, "files": 0}
LINKS = {(one, other): Link(0.001, 100.0) for one in GRID for other in GRID if one < other}
"""100 bytes a second: a file of 1600 bytes takes 16 s."""
FILE = InputFile("data", 1600, ("files",))


def world_of(rules: Rules | None = None, **more: Any) -> World:
    return World(GRID, rules or Rules(claiming=ClaimingMode.INCREMENTAL), links=LINKS, **more)


def world_by_hand() -> World:
    """All clusters are there, and nothing happens by itself."""
    world = world_of(manual=True)
    for name in GRID:
        world.deliver(name)
    return world


def fixed(file: InputFile = FILE, **sizes: int) -> FixedRequest:
    return FixedRequest(tuple(ComponentRequest(size, name, inputs=(file,)) for name, size in sizes.items()))


def nonfixed(*sizes: int, file: InputFile = FILE) -> NonFixedRequest:
    return NonFixedRequest(tuple(ComponentRequest(size, inputs=(file,)) for size in sizes))


def start_estimate(world: World, job: int) -> float:
    attempt = world.job(job).attempt
    assert attempt is not None
    assert attempt.start_estimate is not None
    return attempt.start_estimate


def test_the_barrier_waits_for_the_files_and_not_for_their_estimate() -> None:
    world = world_of()
    world.transfer_slowdown = 3.0
    job = world.submit(fixed(north=2, south=2))
    assert start_estimate(world, job) == 16
    world.advance(47)
    assert world.state(job) is JobState.CLAIMING
    assert all(c.state is ComponentState.CLAIMED for c in world.job(job).attempt.gang)  # type: ignore[union-attr]
    world.advance(1.5)
    assert world.job(job).started_at == 48
    world.advance(20)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.reasons(job, "transfer") == [f"data (1.6 KB) from files to {name}, about 16 s" for name in GRID][:2]
    assert len(world.reasons(job, "staged")) == 2
    check_nothing_remains(world)


def test_files_that_are_early_are_claimed_for_at_once() -> None:
    world = world_of()
    world.transfer_slowdown = 0.25
    job = world.submit(fixed(north=2, south=2))
    world.advance(4 + START_DELAY)
    assert world.job(job).started_at == 4 + START_DELAY
    assert world.job(job).claiming_tries == 1


def test_the_start_estimate_follows_a_slow_transfer_and_nodes_do_not_wait_for_it() -> None:
    world = world_by_hand()
    job = world.submit(fixed(north=2))
    world.run_commands("north")
    world.now = 10.0
    world.sites["north"].update_stage("1.1.0", 10)
    world.deliver("north")
    assert start_estimate(world, job) == 100, "a tenth took 10 s"
    world.now = 12.0
    world.step()
    assert world.state(job) is JobState.PLACED
    assert world.commands(job) == [], "its time had come, but its files will not be there for long"
    attempt = world.job(job).attempt
    assert attempt is not None
    assert attempt.claim_at is not None
    assert 12 < attempt.claim_at < 100
    world.now = 14.0
    world.sites["north"].update_stage("1.1.0", 70)
    world.deliver("north")
    assert start_estimate(world, job) == 20, "it has become faster"
    world.now = 15.0
    world.sites["north"].update_stage("1.1.0", 100)
    world.deliver("north")
    assert start_estimate(world, job) == 16, "no sooner than it was estimated at first"


@pytest.mark.parametrize("fault", ["site", "source", "file"])
def test_a_failed_transfer_has_the_job_tried_again(fault: StageFault) -> None:
    world = world_of()
    job = world.submit(fixed(north=2, south=2))
    world.advance(5)
    world.sites["north"].update_stage("1.1.0", 3, "no space left on device", fault, "data")
    world.settle()
    assert world.queries.grid["north"].health.errors == (fault == "site"), "only its own trouble is its error"
    assert world.queries.grid["south"].health.errors == 0
    assert "1.1.0" not in world.sites["north"].stages
    assert "1.1.1" not in world.sites["south"].stages
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    assert (world.job(job).generation, world.job(job).restarts) == (2, 1)
    assert any("no space left on device" in reason for reason in world.reasons(job, "requeued"))
    check_nothing_remains(world)


def test_a_spoiled_replica_is_not_used_again() -> None:
    world = world_of()
    file = InputFile("data", 1600, ("files", "south"))
    world.step([LinkMeasured("files", "north", Link(None, 1e6))])
    job = world.submit(fixed(file, north=2))
    world.settle()
    assert world.job(job).attempt.components[0].sources == ("files",)  # type: ignore[union-attr]
    world.step([ReplicasChanged("data", ("south",))])
    world.sites["north"].update_stage("1.1.0", 0, "data has another checksum", "file", "data")
    world.settle()
    assert world.job(job).attempt.components[0].sources == ("south",)  # type: ignore[union-attr]
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED


def test_a_job_whose_input_is_nowhere_waits_until_it_is_somewhere() -> None:
    world = world_of()
    world.step([ReplicasChanged("data", ())])
    job = world.submit(nonfixed(2), policy="worst-fit")
    assert world.state(job) is JobState.QUEUED
    assert world.queries.waiting_reason(world.job(job)) == "no cluster has a good replica of data"
    world.step([ReplicasChanged("data", ("files",))])
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED


def test_a_file_site_out_of_reach_serves_nobody() -> None:
    world = world_of()
    world.disconnect("files")
    job = world.submit(nonfixed(2), policy="worst-fit")
    assert world.queries.waiting_reason(world.job(job)) == "files, which has data, is out of reach"
    world.connect("files")
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED


def test_an_unmeasured_link_is_estimated_by_what_is_assumed() -> None:
    world = World(GRID, Rules(assumed_bandwidth=200.0))
    assert start_estimate(world, world.submit(fixed(north=2))) == 8


def test_a_cancelled_job_leaves_no_files() -> None:
    world = world_of()
    job = world.submit(fixed(north=2, south=2))
    world.advance(14)
    assert world.state(job) is JobState.CLAIMING
    world.cancel(job)
    world.settle()
    assert world.state(job) is JobState.CANCELLED
    assert not any(site.stages for site in world.sites.values())
    check_nothing_remains(world)


def test_a_job_that_is_preempted_while_its_files_come_gives_everything_back() -> None:
    world = world_of()
    low = world.submit(fixed(north=4))
    world.advance(13)
    assert world.state(low) is JobState.CLAIMING
    high = world.submit(FixedRequest((ComponentRequest(4, "north"),)), priority=Priority.HIGH)
    world.advance(1)
    assert world.state(high) in (JobState.STARTING, JobState.RUNNING)
    assert world.state(low) is JobState.QUEUED
    assert not world.sites["north"].stages
    world.advance(60)
    assert world.state(low) is JobState.SUCCEEDED
    check_nothing_remains(world)


def test_a_re_placed_component_takes_its_files_along() -> None:
    world = world_of()
    world.step([LinkMeasured("files", "south", Link(None, 1e6))])
    job = world.submit(nonfixed(4), policy="worst-fit")
    assert world.staging_commands(job) == [("Stage", "north", "1.1.0")]
    world.sites["north"].add_local_user(1)
    world.advance(20)
    assert world.staging_commands(job)[1:] == [("Unstage", "north", "1.1.0"), ("Stage", "south", "1.1.0")]
    world.advance(40)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.staging_commands(job)[3:] == [("Unstage", "south", "1.1.0")]
    check_nothing_remains(world)


def test_a_re_placed_components_files_are_expected_by_the_speed_they_have_had_since() -> None:
    world = world_by_hand()
    world.step([LinkMeasured("files", "south", Link(None, 1e6))])
    job = world.submit(nonfixed(4), policy="worst-fit")
    world.sites["north"].add_local_user(1)
    world.sites["north"].send_report()
    world.deliver("north")
    world.now = 12.0
    world.step()
    assert world.staging_commands(job)[1:] == [("Unstage", "north", "1.1.0"), ("Stage", "south", "1.1.0")]
    world.run_commands("south")
    world.now = 14.0
    world.sites["south"].update_stage("1.1.0", 20)
    world.deliver("south")
    assert start_estimate(world, job) == 22, "a fifth took 2 s"
    world.now = 20.0
    world.finish_staging(world.sites["south"], "1.1.0")
    world.deliver("south")
    assert world.reasons(job, "staged") == ["100 bytes in 8 s (12.5 bytes/s)"]


def test_a_stand_in_finds_the_files_of_the_one_it_stands_in_for() -> None:
    world = World(
        {"north": 4, "files": 0},
        Rules(claiming=ClaimingMode.INCREMENTAL, claim_grace=1),
        links={("files", "north"): Link(None, 16.0)},
        manual=True,
    )
    for name in world.sites:
        world.deliver(name)
    job = world.submit(fixed(north=4))
    user = world.sites["north"].add_local_user(1)  # nobody has told yet
    world.start_automation()
    world.run_commands("north")
    world.now = 75.0
    world.step()
    world.settle()
    world.advance(5)
    world.sites["north"].remove_local_user(user)
    world.advance(200)
    attempt = world.job(job).attempt
    assert attempt is not None
    assert [c.superseded for c in attempt.components] == [True, False]
    assert world.staging_commands(job) == [("Stage", "north", "1.1.0"), ("Unstage", "north", "1.1.0")]
    assert world.state(job) is JobState.SUCCEEDED
    check_nothing_remains(world)


def test_transfers_go_on_while_the_daemon_is_dead() -> None:
    world = world_of()
    job = world.submit(fixed(north=2))
    world.advance(5)
    world.restart()
    for name in GRID:
        world.connect(name)
    world.advance(12)
    assert world.job(job).started_at == 16
    assert world.staging_commands(job) == [("Stage", "north", "1.1.0")], "it was not ordered again"


@pytest.mark.parametrize("slowness", [1.0, 2.0])
def test_a_job_is_not_claimed_for_before_its_cluster_is_heard_of_again(slowness: float) -> None:
    """A daemon that began at its start time found no room anywhere, and had the transfers begin recomputation."""
    world = world_of(Rules(claiming=ClaimingMode.INCREMENTAL, claim_factor=0.95))
    world.transfer_slowdown = slowness
    job = world.submit(fixed(north=2))
    world.advance(15.1)
    world.restart()
    world.advance(1)
    for name in GRID:
        world.connect(name)
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).generation == 1
    check_nothing_remains(world)


def test_files_that_an_agent_has_lost_are_ordered_again() -> None:
    world = world_of()
    job = world.submit(fixed(north=2))
    world.advance(5)
    world.disconnect("north")
    del world.sites["north"].stages["1.1.0"]
    world.connect("north")
    assert world.staging_commands(job) == [("Stage", "north", "1.1.0")] * 2
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED


@pytest.mark.parametrize("failed", [False, True])
def test_an_inventory_that_ends_one_stage_and_has_lost_the_other_is_taken_in_whole(*, failed: bool) -> None:
    world = world_of()
    job = world.submit(FixedRequest((ComponentRequest(1, "north", inputs=(FILE,)),) * 2))
    world.advance(5)
    world.disconnect("north")
    site = world.sites["north"]
    site.update_stage("1.1.0", 10, error="no space left") if failed else world.finish_staging(site, "1.1.0")
    del site.stages["1.1.1"]
    world.connect("north")
    if failed:
        assert world.reasons(job, "requeued") == ["infrastructure-failure: north: no space left (restart 1 of 10)"]
    else:
        assert world.staging_commands(job) == [("Stage", "north", token) for token in ("1.1.0", "1.1.1", "1.1.1")]
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    check_nothing_remains(world)


def test_the_submitters_own_files_wait_for_nobody() -> None:
    """A bundle has no estimate: nodes are claimed at once, and the barrier waits for it."""
    world = world_by_hand()
    job = world.submit(FlexibleRequest(6), bundle=Bundle("0" * 64, 10_000, 3))
    assert world.state(job) is JobState.CLAIMING
    assert world.queries.is_sent_to("north", "0" * 64)
    assert not world.queries.is_sent_to("elsewhere", "0" * 64), "no agent is given what no job of its cluster has"
    assert not world.queries.is_sent_to("north", "1" * 64)
    for name in ("north", "south"):
        world.run_commands(name)
        for token in world.sites[name].startable():
            world.sites[name].report_claimed(token)
        world.deliver(name)
    assert world.state(job) is JobState.CLAIMING
    for name in ("north", "south"):
        for token in world.sites[name].stages:
            world.finish_staging(world.sites[name], token)
        world.deliver(name)
    assert world.state(job) is JobState.STARTING


def test_nodes_that_wait_for_slow_files_are_not_taken_for_broken() -> None:
    world = world_of(Rules(barrier_timeout=5))
    world.transfer_slowdown = 10.0
    job = world.submit(fixed(north=2))
    world.advance(159)
    assert world.state(job) is JobState.CLAIMING
    assert world.job(job).restarts == 0
    world.advance(2)
    assert world.job(job).started_at == 160


def test_of_late_stages_only_the_last_are_remembered_and_all_are_told_to_end() -> None:
    world = world_by_hand()

    def told(stage: int) -> int:
        before = len(world.sent)
        world.step([Reported("north", StageStatus(f"{stage}.1.0", "running", 1, 0))])
        return sum(isinstance(command, UnstageComponent) for command in world.sent[before:])

    last = 107 + MAX_REMEMBERED_STRAYS
    assert [told(stage) for stage in range(100, last)] == [1] * (last - 100)
    assert [told(stage) for stage in (107, 108, last - 1)] == [0, 0, 0]
    assert [told(stage) for stage in (100, last - 1, 108)] == [1, 0, 0], "forgotten, which costs one order more"


@pytest.mark.evidence("G9")
@pytest.mark.parametrize("said", [{"program_exit": 0}, {"program_exit": 3}, {"error": "lost", "infrastructure": True}])
def test_what_a_cluster_says_of_a_component_that_it_was_not_given_yet_means_nothing(said: dict[str, Any]) -> None:
    world = world_by_hand()
    job = world.submit(fixed(north=2))
    token = world.job(job).token(0)
    for state in (ComponentState.RUNNING, ComponentState.DELIVERING, ComponentState.ENDED):
        world.step([Reported("north", ComponentStatus(token, state, **said))])
    assert world.state(job) is JobState.PLACED
    assert [c.state for c in world.job(job).attempt.gang] == [ComponentState.PLACED]  # type: ignore[union-attr]


def test_files_that_are_gone_are_forgotten_unless_a_job_wants_them() -> None:
    world = world_of()
    world.step([ReplicasChanged("wanted", ()), ReplicasChanged("kept", ("files",))])
    job = world.submit(fixed(InputFile("wanted", 1600, ("files",)), north=2))
    for number in range(2 * MAX_MISSING_FILES):
        world.step([ReplicasChanged(f"f{number}", ())])
    known = world.queries.view(Priority.LOW).replicas
    assert len(known) <= 2 + MAX_MISSING_FILES + 1
    assert (known["wanted"], known["kept"]) == ((), ("files",))
    assert world.state(job) is JobState.QUEUED
    assert "no cluster has a good replica of wanted" in world.queries.waiting_reason(world.job(job))
    world.cancel(job)
    for number in range(2 * MAX_MISSING_FILES):
        world.step([ReplicasChanged(f"f{number}", ())])
    assert "wanted" not in world.queries.view(Priority.LOW).replicas
