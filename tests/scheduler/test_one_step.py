"""Contradicting events in one step: a later event ends what an earlier one started."""

import pytest

from koalapy.model.job import ComponentState, JobId, JobState, Token
from koalapy.model.reports import ComponentStatus, Inventory, Refusal, ReportedState, StageStatus
from koalapy.model.request import ComponentRequest, FixedRequest, InputFile
from koalapy.scheduler.events import ClusterDisconnected, ClusterLost, InventoryReceived, Reported
from tests.scheduler.world import World

FILE = InputFile("data", 1600, ("files",))
HOSTS = ("n1", "n2")


def create_world_with_job(*, has_file: bool) -> tuple[World, JobId, Token]:
    """Return a connected world, a job of two nodes on north, and its component token."""
    world = World({"north": 4, "files": 0}, manual=True)
    for name in world.sites:
        world.deliver(name)
    inputs = (FILE,) if has_file else ()
    job = world.submit(FixedRequest((ComponentRequest(2, "north", inputs=inputs),)))
    return world, job, world.job(job).token(0)


def finished_stage(token: Token) -> Reported:
    return Reported("north", StageStatus(token, "done", 1600, 1600))


def component_report(token: Token, state: ReportedState, hosts: tuple[str, ...] = ()) -> Reported:
    return Reported("north", ComponentStatus(token, state, hosts=hosts))


def test_inventory_in_step_of_submit_keeps_component() -> None:
    world, job, token = create_world_with_job(has_file=True)
    stages = (StageStatus(token, "done", 1600, 1600),)
    world.step(
        [
            finished_stage(token),
            ClusterDisconnected("north", "its agent has connected anew"),
            InventoryReceived("north", Inventory((), stages=stages)),
        ]
    )
    assert world.state(job) is JobState.CLAIMING
    assert world.commands(job) == [("Submit", token)]
    assert world.job(job).restarts == 0
    assert world.reasons(job, "error") == []


def test_inventory_after_delivered_submit_loses_component() -> None:
    world, job, token = create_world_with_job(has_file=True)
    world.step([finished_stage(token)])
    world.step([InventoryReceived("north", Inventory(()))])
    assert world.reasons(job, "error") == ["the cluster knows nothing of it"]


def test_attempt_claimed_and_ended_in_one_step_opens_no_barrier() -> None:
    world, job, token = create_world_with_job(has_file=False)
    world.step([component_report(token, ComponentState.CLAIMED, HOSTS), component_report(token, ComponentState.ENDED)])
    assert world.job(job).generation == 2
    assert world.commands(job) == [("Submit", token), ("Forget", token), ("Submit", "1.2.0")]


@pytest.mark.parametrize("refused", ["", "unknown"])
@pytest.mark.parametrize("state", [ComponentState.WAITING, ComponentState.CLAIMED, ComponentState.ENDED])
def test_status_in_step_of_submit_is_ignored(state: ReportedState, refused: Refusal) -> None:
    world, job, token = create_world_with_job(has_file=True)
    early_status = ComponentStatus(token, state, HOSTS, refused=refused, error="no", over=True)
    world.step(
        [finished_stage(token), Reported("north", early_status), InventoryReceived("north", Inventory((early_status,)))]
    )
    assert world.job(job).generation == 1
    assert [c.state for c in world.job(job).attempt.gang] == [ComponentState.SUBMITTED]  # type: ignore[union-attr]
    assert world.commands(job) == [("Submit", token)]


def test_cluster_lost_in_step_of_submit_receives_no_submit() -> None:
    world, job, token = create_world_with_job(has_file=True)
    world.step([finished_stage(token), ClusterDisconnected("north", "gone"), ClusterLost("north", "ops", "burnt")])
    assert world.state(job) is JobState.QUEUED
    assert world.commands(job) == [("Forget", token)]
