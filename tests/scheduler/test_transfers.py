"""Transfers of input files: claims and barriers that wait for them, and failed transfers."""

from typing import Any

import pytest

from koalapy.model.cluster import Link
from koalapy.model.dependency import parse_result_input
from koalapy.model.job import ComponentState, JobState
from koalapy.model.job_spec import ClaimingMode, Priority
from koalapy.model.reports import ComponentStatus, StageFault, StageStatus
from koalapy.model.request import Bundle, ComponentRequest, FixedRequest, FlexibleRequest, InputFile, NonFixedRequest
from koalapy.scheduler.attempts.contact import RETURN_TIME
from koalapy.scheduler.claims.staging import MAX_REMEMBERED_STRAYS
from koalapy.scheduler.effects import UnstageComponent
from koalapy.scheduler.event_handler import MAX_MISSING_FILES
from koalapy.scheduler.events import LinkMeasured, ReplicasChanged, Reported
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.world import START_DELAY, World

GRID = {"north": 4, "south": 4, "files": 0}
LINKS = {(source, target): Link(0.001, 100.0) for source in GRID for target in GRID if source < target}
"""100 bytes per second: a file of 1600 bytes takes 16 s."""
FILE = InputFile("data", 1600, ("files",))


def create_world(rules: Rules | None = None, **options: Any) -> World:
    return World(GRID, rules or Rules(claiming=ClaimingMode.INCREMENTAL), links=LINKS, **options)


def create_manual_world() -> World:
    """Create a manual world with all clusters connected."""
    world = create_world(manual=True)
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


def test_barrier_waits_for_actual_transfer() -> None:
    world = create_world()
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


def test_claim_follows_early_transfer_at_once() -> None:
    world = create_world()
    world.transfer_slowdown = 0.25
    job = world.submit(fixed(north=2, south=2))
    world.advance(4 + START_DELAY)
    assert world.job(job).started_at == 4 + START_DELAY
    assert world.job(job).claiming_tries == 1


def test_start_estimate_follows_slow_transfer() -> None:
    world = create_manual_world()
    job = world.submit(fixed(north=2))
    world.run_commands("north")
    world.now = 10.0
    world.sites["north"].update_stage("1.1.0", 10)
    world.deliver("north")
    assert start_estimate(world, job) == 100, "a tenth took 10 s"
    world.now = 12.0
    world.step()
    assert world.state(job) is JobState.PLACED
    assert world.commands(job) == [], "the claim is postponed since the transfer is slow"
    attempt = world.job(job).attempt
    assert attempt is not None
    assert attempt.claim_at is not None
    assert 12 < attempt.claim_at < 100
    world.now = 14.0
    world.sites["north"].update_stage("1.1.0", 70)
    world.deliver("north")
    assert start_estimate(world, job) == 20, "the transfer is faster"
    world.now = 15.0
    world.sites["north"].update_stage("1.1.0", 100)
    world.deliver("north")
    assert start_estimate(world, job) == 16, "not before the first estimate"


@pytest.mark.parametrize("fault", ["site", "source", "file"])
def test_transfer_failure_restarts_job(fault: StageFault) -> None:
    world = create_world()
    job = world.submit(fixed(north=2, south=2))
    world.advance(5)
    world.sites["north"].update_stage("1.1.0", 3, "no space left on device", fault, "data")
    world.settle()
    assert world.queries.grid["north"].health.errors == (fault == "site"), (
        "only a fault of the site counts as its error"
    )
    assert world.queries.grid["south"].health.errors == 0
    assert "1.1.0" not in world.sites["north"].stages
    assert "1.1.1" not in world.sites["south"].stages
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    assert (world.job(job).generation, world.job(job).restarts) == (2, 1)
    assert any("no space left on device" in reason for reason in world.reasons(job, "requeued"))
    check_nothing_remains(world)


def test_transfer_of_damaged_replica_uses_another() -> None:
    world = create_world()
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


@pytest.mark.parametrize("is_missing", [True, False])
def test_waiting_reason_names_input_out_of_reach(*, is_missing: bool) -> None:
    world = create_world()
    world.step([ReplicasChanged("data", ())]) if is_missing else world.disconnect("files")
    job = world.submit(nonfixed(2), policy="worst-fit")
    reason = "no cluster has a good replica of data" if is_missing else "files, which has data, is out of reach"
    assert world.queries.waiting_reason(world.job(job)) == reason
    world.step([ReplicasChanged("data", ("files",))]) if is_missing else world.connect("files")
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED


def test_start_estimate_of_unmeasured_link_uses_assumed_bandwidth() -> None:
    world = World(GRID, Rules(assumed_bandwidth=200.0))
    assert start_estimate(world, world.submit(fixed(north=2))) == 8


def test_transfer_of_cancelled_job_is_removed() -> None:
    world = create_world()
    job = world.submit(fixed(north=2, south=2))
    world.advance(14)
    assert world.state(job) is JobState.CLAIMING
    world.cancel(job)
    world.settle()
    assert world.state(job) is JobState.CANCELLED
    assert not any(site.stages for site in world.sites.values())
    check_nothing_remains(world)


def test_transfer_of_preempted_job_is_removed() -> None:
    world = create_world()
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


def test_transfer_moves_with_re_placed_component() -> None:
    world = create_world()
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


def test_start_estimate_of_re_placed_component_uses_new_transfer() -> None:
    world = create_manual_world()
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


def test_transfer_is_reused_by_superseding_component() -> None:
    world = World(
        {"north": 4, "files": 0},
        Rules(claiming=ClaimingMode.INCREMENTAL, claim_grace=1),
        links={("files", "north"): Link(None, 16.0)},
        manual=True,
    )
    for name in world.sites:
        world.deliver(name)
    job = world.submit(fixed(north=4))
    user = world.sites["north"].add_local_user(1)  # not yet reported
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


def test_transfer_continues_during_daemon_restart() -> None:
    world = create_world()
    job = world.submit(fixed(north=2))
    world.advance(5)
    world.restart()
    for name in GRID:
        world.connect(name)
    world.advance(12)
    assert world.job(job).started_at == 16
    assert world.staging_commands(job) == [("Stage", "north", "1.1.0")], "the transfer was not ordered again"


@pytest.mark.parametrize("away_s", [1, 8])
@pytest.mark.parametrize("slowdown", [1.0, 2.0])
def test_claim_after_daemon_restart_waits_for_cluster(slowdown: float, away_s: float) -> None:
    """A daemon restarted at the start time must not discard the transfers while clusters are disconnected."""
    world = create_world(Rules(claiming=ClaimingMode.INCREMENTAL, claim_factor=0.95))
    world.transfer_slowdown = slowdown
    job = world.submit(fixed(north=2))
    world.advance(15.1)
    world.restart()
    world.advance(away_s)
    for name in GRID:
        world.connect(name)
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.job(job).generation == 1
    check_nothing_remains(world)


def test_claim_after_daemon_restart_does_not_count_without_cluster_report() -> None:
    world = create_world()
    job = world.submit(fixed(north=2), max_claiming_tries=1)
    world.advance(5)
    world.restart()
    world.sites["north"].connect()
    world.deliver("north", 1)
    assert world.queries.grid["north"].is_open
    world.now += RETURN_TIME
    world.step()
    assert (world.state(job), world.job(job).claiming_tries) == (JobState.QUEUED, 0)


def test_transfer_lost_by_agent_is_ordered_again() -> None:
    world = create_world()
    job = world.submit(fixed(north=2))
    world.advance(5)
    world.disconnect("north")
    del world.sites["north"].stages["1.1.0"]
    world.connect("north")
    assert world.staging_commands(job) == [("Stage", "north", "1.1.0")] * 2
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED


@pytest.mark.parametrize("is_failed", [False, True])
def test_inventory_with_finished_and_lost_stage_is_processed(*, is_failed: bool) -> None:
    world = create_world()
    job = world.submit(FixedRequest((ComponentRequest(1, "north", inputs=(FILE,)),) * 2))
    world.advance(5)
    world.disconnect("north")
    site = world.sites["north"]
    site.update_stage("1.1.0", 10, error="no space left") if is_failed else world.finish_staging(site, "1.1.0")
    del site.stages["1.1.1"]
    world.connect("north")
    if is_failed:
        assert world.reasons(job, "requeued") == ["infrastructure-failure: north: no space left (restart 1 of 10)"]
    else:
        assert world.staging_commands(job) == [("Stage", "north", token) for token in ("1.1.0", "1.1.1", "1.1.1")]
    world.advance(60)
    assert world.state(job) is JobState.SUCCEEDED
    check_nothing_remains(world)


def test_transfer_of_bundle_does_not_delay_claim() -> None:
    """A bundle has no estimate: nodes are claimed at once, and the barrier waits for it."""
    world = create_manual_world()
    job = world.submit(FlexibleRequest(6), bundle=Bundle("0" * 64, 10_000, 3))
    assert world.state(job) is JobState.CLAIMING
    assert world.queries.is_sent_to("north", "0" * 64)
    assert not world.queries.is_sent_to("elsewhere", "0" * 64), "bundles are sent to clusters of the job only"
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


def test_job_with_absent_results_of_another_job_fails_without_a_retry() -> None:
    world = create_manual_world()
    job = world.submit(fixed(north=2), result_inputs=(parse_result_input("7:out"),))
    world.run_commands("north")
    (token,) = world.sites["north"].stages
    world.sites["north"].update_stage(token, 0, "job 7 collected no out", "job")
    world.deliver("north")
    assert (world.state(job), world.job(job).reason) == (JobState.FAILED, "job 7 collected no out")
    assert world.queries.grid["north"].health.errors == 0


def test_barrier_timeout_ignores_slow_transfer() -> None:
    world = create_world(Rules(barrier_timeout=5))
    world.transfer_slowdown = 10.0
    job = world.submit(fixed(north=2))
    world.advance(159)
    assert world.state(job) is JobState.CLAIMING
    assert world.job(job).restarts == 0
    world.advance(2)
    assert world.job(job).started_at == 160


@pytest.mark.parametrize(("assumed_bandwidth", "limit"), [(1e8, 900.0), (100.0, 1600.0)])
@pytest.mark.evidence("G11")
def test_endless_transfer_frees_nodes_of_other_clusters(assumed_bandwidth: float, limit: float) -> None:
    """A site that reports a little progress again and again holds the nodes of another no longer."""
    world = create_world(Rules(barrier_timeout=60, assumed_bandwidth=assumed_bandwidth, max_restarts=0))
    world.transfer_slowdown = 1e6
    job = world.submit(fixed(north=2, south=2))
    while not world.state(job).is_final and world.now < 10_000:
        for stage in world.staging_commands(job):
            progress = StageStatus(stage[2], "running", size=FILE.size, staged=int(world.now / 100))
            world.step([Reported(stage[1], progress)])
        world.advance(30)
    claimed_at = max(c.claimed_at or 0.0 for c in world.job(job).attempt.gang)  # type: ignore[union-attr]
    assert claimed_at + limit < world.now <= claimed_at + limit + 125
    (error,) = world.reasons(job, "error")
    assert error == "its input files had not arrived long after all nodes of the job had reported"


def test_stray_stages_are_stopped_and_bounded() -> None:
    world = create_manual_world()

    def report_stage(stage: int) -> int:
        old_count = len(world.sent)
        world.step([Reported("north", StageStatus(f"{stage}.1.0", "running", 1, 0))])
        return sum(isinstance(command, UnstageComponent) for command in world.sent[old_count:])

    end = 107 + MAX_REMEMBERED_STRAYS
    assert [report_stage(stage) for stage in range(100, end)] == [1] * (end - 100)
    assert [report_stage(stage) for stage in (107, 108, end - 1)] == [0, 0, 0]
    assert [report_stage(stage) for stage in (100, end - 1, 108)] == [1, 0, 0], (
        "a forgotten stage receives another command"
    )


@pytest.mark.evidence("G9")
@pytest.mark.parametrize(
    "fields", [{"program_exit": 0}, {"program_exit": 3}, {"error": "lost", "infrastructure": True}]
)
def test_report_before_submission_is_ignored(fields: dict[str, Any]) -> None:
    world = create_manual_world()
    job = world.submit(fixed(north=2))
    token = world.job(job).token(0)
    for state in (ComponentState.RUNNING, ComponentState.DELIVERING, ComponentState.ENDED):
        world.step([Reported("north", ComponentStatus(token, state, **fields))])
    assert world.state(job) is JobState.PLACED
    assert [c.state for c in world.job(job).attempt.gang] == [ComponentState.PLACED]  # type: ignore[union-attr]


def test_missing_files_are_forgotten_unless_requested() -> None:
    world = create_world()
    world.step([ReplicasChanged("wanted", ()), ReplicasChanged("kept", ("files",))])
    job = world.submit(fixed(InputFile("wanted", 1600, ("files",)), north=2))
    for number in range(2 * MAX_MISSING_FILES):
        world.step([ReplicasChanged(f"f{number}", ())])
    replicas = world.queries.grid.view().replicas
    assert len(replicas) <= 2 + MAX_MISSING_FILES + 1
    assert (replicas["wanted"], replicas["kept"]) == ((), ("files",))
    assert world.state(job) is JobState.QUEUED
    assert "no cluster has a good replica of wanted" in world.queries.waiting_reason(world.job(job))
    world.cancel(job)
    for number in range(2 * MAX_MISSING_FILES):
        world.step([ReplicasChanged(f"f{number}", ())])
    assert "wanted" not in world.queries.grid.view().replicas
