"""Events of one step that contradict each other: what the first starts, a later one ends."""

import pytest

from koalapy.model.job import ComponentState, JobId, JobState, Token
from koalapy.model.reports import ComponentStatus, Inventory, Refusal, ReportedState, StageStatus
from koalapy.model.request import ComponentRequest, FixedRequest, InputFile
from koalapy.scheduler.events import ClusterDisconnected, ClusterLost, InventoryReceived, Reported
from tests.scheduler.world import World

FILE = InputFile("data", 1600, ("files",))
HOSTS = ("n1", "n2")


def world_with_job(*, has_file: bool) -> tuple[World, JobId, Token]:
    """Return a world whose clusters are connected, and a job of two nodes on north, with the token of its component."""
    world = World({"north": 4, "files": 0}, manual=True)
    for name in world.sites:
        world.deliver(name)
    inputs = (FILE,) if has_file else ()
    job = world.submit(FixedRequest((ComponentRequest(2, "north", inputs=inputs),)))
    return world, job, world.job(job).token(0)


def staged(token: Token) -> Reported:
    return Reported("north", StageStatus(token, "done", 1600, 1600))


def reported(token: Token, state: ReportedState, hosts: tuple[str, ...] = ()) -> Reported:
    return Reported("north", ComponentStatus(token, state, hosts=hosts))


def test_inventory_in_the_step_of_a_submit_does_not_lose_the_component() -> None:
    world, job, token = world_with_job(has_file=True)
    stages = (StageStatus(token, "done", 1600, 1600),)
    world.step(
        [
            staged(token),
            ClusterDisconnected("north", "its agent has connected anew"),
            InventoryReceived("north", Inventory((), stages=stages)),
        ]
    )
    assert world.state(job) is JobState.CLAIMING
    assert world.commands(job) == [("Submit", token)]
    assert world.job(job).restarts == 0
    assert world.reasons(job, "error") == []


def test_inventory_after_the_step_of_a_submit_that_was_delivered_loses_the_component() -> None:
    world, job, token = world_with_job(has_file=True)
    world.step([staged(token)])
    world.step([InventoryReceived("north", Inventory(()))])
    assert world.reasons(job, "error") == ["the cluster knows nothing of it"]


def test_attempt_that_is_claimed_and_ends_in_one_step_opens_no_barrier_with_the_next_attempts_plan() -> None:
    world, job, token = world_with_job(has_file=False)
    world.step([reported(token, ComponentState.CLAIMED, HOSTS), reported(token, ComponentState.ENDED)])
    assert world.job(job).generation == 2
    assert world.commands(job) == [("Submit", token), ("Forget", token), ("Submit", "1.2.0")]


@pytest.mark.parametrize("refused", ["", "unknown"])
@pytest.mark.parametrize("state", [ComponentState.WAITING, ComponentState.CLAIMED, ComponentState.ENDED])
def test_status_in_the_step_of_a_submit_is_ignored(state: ReportedState, refused: Refusal) -> None:
    world, job, token = world_with_job(has_file=True)
    early = ComponentStatus(token, state, HOSTS, refused=refused, error="no", over=True)
    world.step([staged(token), Reported("north", early), InventoryReceived("north", Inventory((early,)))])
    assert world.job(job).generation == 1
    assert [c.state for c in world.job(job).attempt.gang] == [ComponentState.SUBMITTED]  # type: ignore[union-attr]
    assert world.commands(job) == [("Submit", token)]


def test_cluster_declared_lost_in_the_step_of_a_submit_is_not_given_it() -> None:
    world, job, token = world_with_job(has_file=True)
    world.step([staged(token), ClusterDisconnected("north", "gone"), ClusterLost("north", "ops", "burnt")])
    assert world.state(job) is JobState.QUEUED
    assert world.commands(job) == [("Forget", token)]
