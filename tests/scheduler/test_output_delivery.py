"""Components that have released their nodes and still deliver results and output."""

from collections.abc import Mapping
from typing import Any

import pytest

from koalapy.model.job import ComponentState, JobState
from koalapy.model.job_spec import Launcher
from koalapy.model.reports import ComponentStatus, Inventory
from koalapy.scheduler.effects import ForgetComponent, StopComponent
from koalapy.scheduler.events import InventoryReceived, Reported
from koalapy.scheduler.ledger import live
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed
from tests.scheduler.world import World


def submit_running_job(world: World, **options: Any) -> tuple[int, str]:
    job = world.submit(fixed(north=4), run_time=1e6, **options)
    world.advance(1)
    assert world.state(job) is JobState.RUNNING
    return job, world.tokens(job)[0]


def delivering_report(token: str, **fields: object) -> Reported:
    return Reported("north", ComponentStatus(token, ComponentState.DELIVERING, **fields))  # type: ignore[arg-type]


def test_delivery_frees_nodes_before_job_is_final() -> None:
    world = World({"north": 4})
    job, token = submit_running_job(world)
    effects = world.scheduler.step([delivering_report(token, program_exit=3)], world.now)
    assert not [c for c in effects.commands if isinstance(c, StopComponent | ForgetComponent)]
    assert not world.queries.grid["north"].nodes.live
    assert (effects.jobs[job].state, effects.jobs[job].ending) == (JobState.RUNNING, JobState.FAILED)
    repeated = world.scheduler.step([delivering_report(token, program_exit=3)], world.now + 5)
    assert not repeated.commands
    effects = world.scheduler.step(
        [Reported("north", ComponentStatus(token, ComponentState.ENDED, program_exit=3))], world.now + 9
    )
    assert ForgetComponent("north", token) in effects.commands
    finished = effects.jobs[job]
    assert (finished.state, finished.exit_code) == (JobState.FAILED, 3)
    assert finished.attempt is not None
    assert finished.attempt.components[0].ended_at == world.now, "nodes are released when delivery starts"
    assert not [entry for entry in effects.timeline if entry.event == "output-missing"]


def test_delivery_missing_output_is_in_timeline() -> None:
    world = World({"north": 4})
    job, token = submit_running_job(world)
    missing = "the last 5 bytes: the daemon took nothing for 300 s"
    ended = Reported("north", ComponentStatus(token, ComponentState.ENDED, program_exit=3, missing=missing))
    effects = world.scheduler.step([ended], world.now)
    entries = [(e.job, e.component, e.reason) for e in effects.timeline if e.event == "output-missing"]
    assert entries == [(job, 0, f"of its output there is missing {missing}")]


@pytest.mark.parametrize("more", [False, True])
def test_delivery_without_the_end_of_the_output_says_so_once(more: bool) -> None:
    world = World({"north": 4})
    job, token = submit_running_job(world)
    missing = "possibly the end of what node 0 wrote: its runner was killed"
    report = delivering_report(token, program_exit=3, missing=missing)
    for _ in range(3):
        world.apply_effects(world.scheduler.step([report], world.now))
    lost = missing + "; 5 bytes: they are not in /spool any more" * more
    ended = Reported("north", ComponentStatus(token, ComponentState.ENDED, program_exit=3, missing=lost))
    world.apply_effects(world.scheduler.step([ended], world.now))
    assert world.reasons(job, "output-missing") == [
        f"of its output there is missing {text}" for text in dict.fromkeys((missing, lost))
    ]


def test_delivery_of_restarted_job_without_the_end_of_the_output_says_so() -> None:
    """Reports about an earlier attempt count for nothing, so that the last one would say it too late."""
    world = World({"north": 4})
    job, token = submit_running_job(world)
    failure = delivering_report(token, error="the node was lost", infrastructure=True, missing="5 bytes")
    effects = world.scheduler.step([failure], world.now)
    assert effects.jobs[job].state is JobState.QUEUED
    entries = [(e.generation, e.reason) for e in effects.timeline if e.event == "output-missing"]
    assert entries == [(1, "of its output there is missing 5 bytes")]


def test_delivery_does_not_delay_restarted_job() -> None:
    world = World({"north": 4})
    job, token = submit_running_job(world)
    failure = delivering_report(token, error="the runner ended without a word", infrastructure=True)
    effects = world.scheduler.step([failure], world.now)
    assert effects.jobs[job].state is JobState.QUEUED
    assert not world.queries.grid["north"].nodes.delivering
    later_effects = world.scheduler.step([delivering_report(token)], world.now)
    assert not later_effects.commands, "it is neither stopped nor forgotten before its delivery ends"
    later_effects = world.scheduler.step([Reported("north", ComponentStatus(token, ComponentState.ENDED))], world.now)
    assert later_effects.commands == [ForgetComponent("north", token)]


def test_delivery_of_unreachable_cluster_ends_with_timeline_entry() -> None:
    world = World({"north": 4}, Rules(unreachable_after=5))
    job, token = submit_running_job(world)
    world.apply_effects(world.scheduler.step([delivering_report(token, program_exit=0)], world.now))
    world.disconnect("north")
    world.advance(4)
    assert world.state(job) is JobState.RUNNING
    world.advance(2)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.reasons(job, "output-missing") == [
        "of its output there is missing what had not come yet: north is out of reach"
    ]


def test_delivery_of_unreachable_results_is_in_timeline() -> None:
    world = World({"north": 4}, Rules(unreachable_after=5))
    job = world.submit(fixed(north=4), run_time=1e6, collect=("*",))
    world.advance(1)
    (token,) = world.tokens(job)
    world.apply_effects(world.scheduler.step([delivering_report(token, program_exit=0)], world.now))
    world.disconnect("north")
    world.advance(6)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.reasons(job, "output-missing") == [
        "of its output and results there is missing what had not come yet: north is out of reach"
    ]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_delivery_unknown_to_agent_ends(is_restarted: bool) -> None:
    world = World({"north": 4})
    job, token = submit_running_job(world)
    world.apply_effects(world.scheduler.step([delivering_report(token, program_exit=0)], world.now))
    if is_restarted:
        world.restart()
        assert not world.queries.grid["north"].nodes.live
        attempt = world.job(job).attempt
        assert attempt is not None
        assert attempt.components[0].state is ComponentState.DELIVERING
    effects = world.apply_effects(world.scheduler.step([InventoryReceived("north", Inventory(()))], world.now))
    assert effects.jobs[job].state is JobState.SUCCEEDED
    assert world.reasons(job, "output-missing") == [
        "of its output there is missing what had not come yet: the cluster knows nothing of it"
    ]


RESTARTED = "the cluster's machine was restarted before it had sent the result files, which may be lost"
LOST: Mapping[str, Any] = {"error": RESTARTED, "infrastructure": True, "results_lost": True}


@pytest.mark.parametrize("max_restarts", [None, 0])
@pytest.mark.parametrize("launcher", list(Launcher))
@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("is_known", [True, False])
def test_lost_results_undo_success(is_known: bool, loser: int, launcher: Launcher, max_restarts: int | None) -> None:
    world = World({"north": 4, "south": 4})
    request = fixed(north=2, south=2)
    job = world.submit(request, run_time=1e6, collect=("*",), launcher=launcher, max_restarts=max_restarts)
    world.advance(1)
    tokens, clusters = world.tokens(job), [component.cluster for component in live(world.job(job)).gang]

    def report(index: int, state: ComponentState, **fields: Any) -> Reported:
        return Reported(clusters[index], ComponentStatus(tokens[index], state, **fields))

    def code_of(index: int) -> int | None:
        return None if index and launcher is Launcher.OPENMPI else 0

    if is_known:
        world.step([report(index, ComponentState.DELIVERING, program_exit=code_of(index)) for index in (0, 1)])
        assert (world.state(job), world.job(job).ending) == (JobState.RUNNING, JobState.SUCCEEDED)
    sender = 1 - loser
    world.step([report(loser, ComponentState.DELIVERING, **LOST)])
    world.step([report(loser, ComponentState.ENDED, **LOST)])
    world.step([report(sender, ComponentState.DELIVERING, program_exit=code_of(sender))])
    world.step([report(sender, ComponentState.ENDED, program_exit=code_of(sender))])
    reason = f"transfer-failure: {clusters[loser]}: {RESTARTED}"
    if max_restarts is None:
        assert world.reasons(job, "requeued") == [f"{reason} (restart 1 of 10)"]
        assert (world.job(job).restarts, world.job(job).exit_code) == (1, None)
    else:
        assert (world.state(job), world.job(job).exit_code) == (JobState.FAILED, None)
        assert world.job(job).reason == f"{reason} (gave up after 0 restarts)"
    assert not world.job(job).refusals, "a loss of power is not an error of the cluster"


@pytest.mark.parametrize("is_known", [True, False])
def test_daemon_without_the_field_results_lost_keeps_known_success_and_restarts_others(is_known: bool) -> None:
    """An earlier version of the daemon ignores the field, as all that it does not know."""
    world = World({"north": 4})
    job, token = submit_running_job(world, collect=("*",))
    if is_known:
        world.step([delivering_report(token, program_exit=0)])
    lost = {**LOST, "results_lost": False}
    world.step([delivering_report(token, **lost)])
    world.step([Reported("north", ComponentStatus(token, ComponentState.ENDED, **lost))])
    assert world.job(job).restarts == (0 if is_known else 1)
    assert (world.state(job) is JobState.SUCCEEDED) is is_known
    world.advance(1)
    assert not world.queries.grid["north"].nodes.delivering


def test_lost_results_of_failed_job_do_not_restart_it() -> None:
    world = World({"north": 4})
    job, token = submit_running_job(world, collect=("*",))
    world.step([delivering_report(token, program_exit=3)])
    world.step([delivering_report(token, **LOST)])
    world.step([Reported("north", ComponentStatus(token, ComponentState.ENDED, **LOST))])
    assert (world.state(job), world.job(job).exit_code) == (JobState.FAILED, 3)


def test_job_without_files_to_collect_loses_none() -> None:
    world = World({"north": 4})
    job, token = submit_running_job(world)
    world.step([delivering_report(token, program_exit=0)])
    world.step([delivering_report(token, **LOST)])
    world.step([Reported("north", ComponentStatus(token, ComponentState.ENDED, **LOST))])
    assert (world.state(job), world.job(job).exit_code, world.job(job).restarts) == (JobState.SUCCEEDED, 0, 0)


def test_lost_results_do_not_restart_job_whose_head_failed_later() -> None:
    world = World({"north": 4, "south": 4})
    job = world.submit(fixed(north=2, south=2), run_time=1e6, collect=("*",), launcher=Launcher.OPENMPI)
    world.advance(1)
    tokens, (head, other) = world.tokens(job), (component.cluster for component in live(world.job(job)).gang)
    world.step([Reported(other, ComponentStatus(tokens[1], ComponentState.DELIVERING, **LOST))])
    world.step([Reported(other, ComponentStatus(tokens[1], ComponentState.ENDED, **LOST))])
    assert (world.state(job), world.job(job).ending) == (JobState.RUNNING, None)
    world.step([Reported(head, ComponentStatus(tokens[0], ComponentState.ENDED, program_exit=3))])
    assert (world.state(job), world.job(job).exit_code) == (JobState.FAILED, 3)


def test_program_that_was_not_started_loses_no_files() -> None:
    world = World({"north": 4, "south": 4})
    world.sites["south"].add_local_user(4)  # not yet reported
    job = world.submit(fixed(north=2, south=2), run_time=1e6, collect=("*",))
    world.advance(1)
    assert world.state(job) is JobState.CLAIMING
    world.step([Reported("north", ComponentStatus(world.tokens(job)[0], ComponentState.CLAIMED, **LOST))])
    assert world.job(job).reason == f"infrastructure-failure: north: {RESTARTED} (restart 1 of 10)"
