"""What a resource manager says of a runner that it has not started: told to users, and boots are waited for."""

import re

import pytest

from koalapy.model.job import ComponentState, JobState
from koalapy.model.reports import ClusterReport, ComponentStatus, Inventory
from koalapy.scheduler.events import ClusterConfirmed, InventoryReceived, Reported
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from koalapy.scheduler.state import LrmWaits
from tests.scheduler.requests import fixed
from tests.scheduler.world import World

TOKEN = "1.1.0"
PRIORITY = "Slurm says Priority (jobs of higher priority come first)"


def told(state: str = "waiting", pending: str = "", starting: float = 0.0) -> Reported:
    hosts = () if state in ("submitted", "waiting") else ("n1", "n2")
    return Reported(
        "north", ComponentStatus(TOKEN, ComponentState(state), hosts, "5", pending=pending, starting=starting)
    )


def submitted(**rules: float) -> World:
    """A world in which a component of two nodes waits."""
    world = World({"north": 4}, Rules(claim_grace=10, barrier_timeout=60, **rules), manual=True)  # type: ignore[arg-type]
    world.step([InventoryReceived("north", Inventory(())), Reported("north", ClusterReport(4, 4, 0, 0, frozenset()))])
    world.submit(fixed(north=2))
    world.step([told()])
    return world


def at(world: World, moment: float, *events: Reported) -> None:
    world.now = moment
    world.step(list(events))
    world.step([ClusterConfirmed("north", moment)])


def test_why_a_runner_was_not_started_is_told_in_its_resource_managers_words() -> None:
    world = submitted()
    at(world, 5, told(pending=PRIORITY))
    at(world, 10)
    assert world.reasons(1, "ending") == [f"claim-failed: north did not start it: {PRIORITY}"]
    assert world.queries.grid["north"].health.errors == 0


def test_without_a_word_local_users_were_faster() -> None:
    world = submitted()
    at(world, 5, told(pending=PRIORITY))
    at(world, 6, told())
    at(world, 10)
    assert world.reasons(1, "ending") == ["claim-failed: local users of north were faster"]


@pytest.mark.parametrize("holding", [False, True])
def test_nodes_that_boot_are_no_overtaking_and_no_error(holding: bool) -> None:
    """However the barrier's own patience ends before: 300 s is what the resource manager gives them."""
    world = submitted()
    at(world, 1, told(pending="Slurm makes its nodes ready", starting=300.0))
    if holding:
        world.step([Reported("north", ClusterReport(4, 2, 0, 0, frozenset({TOKEN})))])
    for moment in (10, 60, 120, 299):
        at(world, moment)
        assert world.state(1) is JobState.CLAIMING
        assert world.job(1).generation == 1
        assert "claim-failed" not in world.timeline_events(1)
    assert world.queries.grid["north"].health.errors == 0


def test_nodes_that_never_come_up_are_given_up() -> None:
    world = submitted()
    at(world, 1, told(starting=100.0))
    world.step([Reported("north", ClusterReport(4, 2, 0, 0, frozenset({TOKEN})))])
    for moment in range(10, 161, 10):
        at(world, moment, told(starting=100.0))
        assert world.state(1) is JobState.CLAIMING, moment
    at(world, 161)
    assert world.reasons(1, "error") == ["its nodes had not all reported after 60 s"]


def test_nodes_that_are_started_again_and_again_are_given_up() -> None:
    """A resource manager that takes others for those that did not come up goes on with that for ever."""
    world = submitted()
    for moment in range(1, 400, 20):
        at(world, moment, told(pending="Resources"))
        at(world, moment + 1, told(starting=100.0))
        at(world, moment + 19, told(starting=100.0))
        if world.job(1).ending is not None:
            break
    assert world.reasons(1, "ending") == ["claim-failed: local users of north were faster"]
    assert 102 <= world.now <= 122


@pytest.mark.parametrize("rules", [{"claim_grace": 0.001}, {"barrier_timeout": 0.001, "claim_grace": 60.0}])
def test_what_is_awaited_is_not_asked_about_all_the_time(rules: dict[str, float]) -> None:
    """However short the patience with others is: each question has the resource manager looked at."""
    world = World({"north": 4}, Rules(**rules), manual=True)  # type: ignore[arg-type]
    world.step([InventoryReceived("north", Inventory(())), Reported("north", ClusterReport(4, 4, 0, 0, frozenset()))])
    world.submit(fixed(north=2))
    world.step([told(starting=300.0)])
    asked = 0
    while asked < 100 and (wakeup := world.scheduler.next_wakeup()) is not None and wakeup <= 20.0:
        world.now = max(world.now, wakeup)
        asked += bool(world.step().confirm)
        world.step([ClusterConfirmed("north", world.now)])
    assert asked <= 21
    assert world.state(1) is JobState.CLAIMING


def test_a_boot_that_is_not_seen_for_a_moment_is_waited_for_as_before() -> None:
    world = submitted()
    at(world, 1, told(starting=100.0))
    at(world, 5, told())
    at(world, 6, told(starting=100.0))
    for moment in (10, 60, 100):
        at(world, moment)
        assert world.state(1) is JobState.CLAIMING
        assert world.job(1).ending is None


def test_runners_on_nodes_that_came_up_have_as_long_as_others() -> None:
    world = submitted()
    at(world, 1, told(starting=300.0))
    world.step([Reported("north", ClusterReport(4, 2, 0, 0, frozenset({TOKEN})))])
    at(world, 60)
    at(world, 70, told())
    at(world, 120)
    assert world.state(1) is JobState.CLAIMING
    at(world, 130)
    assert world.reasons(1, "error") == ["its nodes had not all reported after 60 s"]


@pytest.mark.parametrize("last", ["claimed", "running", "delivering", "ended"])
def test_nothing_is_kept_of_what_waits_no_more(last: str) -> None:
    waits = LrmWaits()
    waits.update(told(pending=PRIORITY, starting=5.0).report, 1.0)
    assert (waits.reason(TOKEN), waits.up_by(TOKEN)) == (PRIORITY, 6.0)
    waits.update(told(last).report, 2.0)
    assert waits._waits == {}


def test_a_component_of_no_job_leaves_nothing_behind() -> None:
    world = submitted()
    waits = world.queries.lrm_waits
    at(world, 1, told(pending=PRIORITY))
    assert waits.reason(TOKEN)
    world.cancel(1)
    at(world, 2, told(pending=PRIORITY), told("ended"))
    at(world, 3, told(pending=PRIORITY))
    assert waits._waits == {}


def test_a_job_that_is_asked_why_says_what_its_runners_wait_for() -> None:
    world = submitted()
    at(world, 5, told(pending=PRIORITY))
    assert f"; north: {PRIORITY}" in explain(world.queries, world.job(1), world.timeline, world.now).headline
    at(world, 6, told(pending="Slurm makes its nodes ready", starting=300.0))
    said = explain(world.queries, world.job(1), world.timeline, world.now).headline
    assert re.fullmatch(
        r"the nodes of component 0 on north are being started, which takes until \S+ at most; "
        r"north: Slurm makes its nodes ready",
        said,
    )
