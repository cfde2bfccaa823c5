"""Components that have given back their nodes and still send results and output."""

import pytest

from koalapy.model.job import ComponentState, JobState
from koalapy.model.reports import ComponentStatus, Inventory
from koalapy.scheduler.effects import ForgetComponent, StopComponent
from koalapy.scheduler.events import InventoryReceived, Reported
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed
from tests.scheduler.world import World


def running(world: World) -> tuple[int, str]:
    job = world.submit(fixed(north=4), run_time=1e6)
    world.advance(1)
    assert world.state(job) is JobState.RUNNING
    return job, world.tokens(job)[0]


def delivers(token: str, **more: object) -> Reported:
    return Reported("north", ComponentStatus(token, ComponentState.DELIVERING, **more))  # type: ignore[arg-type]


def test_a_job_is_final_when_its_output_is_there_and_its_nodes_are_free_before() -> None:
    world = World({"north": 4})
    job, token = running(world)
    effects = world.scheduler.step([delivers(token, program_exit=3)], world.now)
    assert not [c for c in effects.commands if isinstance(c, StopComponent | ForgetComponent)]
    assert not world.queries.grid["north"].live
    assert (effects.jobs[job].state, effects.jobs[job].ending) == (JobState.RUNNING, JobState.FAILED)
    again = world.scheduler.step([delivers(token, program_exit=3)], world.now + 5)
    assert not again.commands
    effects = world.scheduler.step(
        [Reported("north", ComponentStatus(token, ComponentState.ENDED, program_exit=3))], world.now + 9
    )
    assert ForgetComponent("north", token) in effects.commands
    over = effects.jobs[job]
    assert (over.state, over.exit_code) == (JobState.FAILED, 3)
    assert over.attempt is not None
    assert over.attempt.components[0].ended_at == world.now, "the nodes were free then"
    assert not [entry for entry in effects.timeline if entry.event == "output-missing"]


def test_what_is_missing_is_in_the_timeline() -> None:
    world = World({"north": 4})
    job, token = running(world)
    missing = "the last 5 bytes: the daemon took nothing for 300 s"
    ended = Reported("north", ComponentStatus(token, ComponentState.ENDED, program_exit=3, missing=missing))
    effects = world.scheduler.step([ended], world.now)
    said = [(e.job, e.component, e.reason) for e in effects.timeline if e.event == "output-missing"]
    assert said == [(job, 0, f"of its output there is missing {missing}")]


def test_a_job_that_is_tried_again_does_not_wait_for_its_old_output() -> None:
    world = World({"north": 4})
    job, token = running(world)
    lost = delivers(token, error="the runner ended without a word", infrastructure=True)
    effects = world.scheduler.step([lost], world.now)
    assert effects.jobs[job].state is JobState.QUEUED
    assert not world.queries.grid["north"].delivering
    after = world.scheduler.step([delivers(token)], world.now)
    assert not after.commands, "it is neither stopped nor forgotten before it has told all"
    after = world.scheduler.step([Reported("north", ComponentStatus(token, ComponentState.ENDED))], world.now)
    assert after.commands == [ForgetComponent("north", token)]


def test_a_cluster_that_goes_away_is_not_waited_for_and_that_is_told() -> None:
    world = World({"north": 4}, Rules(unreachable_after=5))
    job, token = running(world)
    world.apply_effects(world.scheduler.step([delivers(token, program_exit=0)], world.now))
    world.disconnect("north")
    world.advance(4)
    assert world.state(job) is JobState.RUNNING
    world.advance(2)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.reasons(job, "output-missing") == [
        "of its output there is missing what had not come yet: north is out of reach"
    ]


def test_results_that_are_not_waited_for_are_told_too() -> None:
    world = World({"north": 4}, Rules(unreachable_after=5))
    job = world.submit(fixed(north=4), run_time=1e6, collect=("*",))
    world.advance(1)
    (token,) = world.tokens(job)
    world.apply_effects(world.scheduler.step([delivers(token, program_exit=0)], world.now))
    world.disconnect("north")
    world.advance(6)
    assert world.state(job) is JobState.SUCCEEDED
    assert world.reasons(job, "output-missing") == [
        "of its output and results there is missing what had not come yet: north is out of reach"
    ]


@pytest.mark.parametrize("restarted", [False, True])
def test_an_agent_that_knows_nothing_of_it_any_more_ends_it(restarted: bool) -> None:
    world = World({"north": 4})
    job, token = running(world)
    world.apply_effects(world.scheduler.step([delivers(token, program_exit=0)], world.now))
    if restarted:
        world.restart()
        assert not world.queries.grid["north"].live
        attempt = world.job(job).attempt
        assert attempt is not None
        assert attempt.components[0].state is ComponentState.DELIVERING
    effects = world.apply_effects(world.scheduler.step([InventoryReceived("north", Inventory(()))], world.now))
    assert effects.jobs[job].state is JobState.SUCCEEDED
    assert world.reasons(job, "output-missing") == [
        "of its output there is missing what had not come yet: the cluster knows nothing of it"
    ]
