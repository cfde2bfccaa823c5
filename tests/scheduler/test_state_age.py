"""Age of the known state of a cluster's nodes. Agents report each change, so silence while connected is not an age."""

from koalapy.model.reports import ClusterReport
from koalapy.scheduler.events import Reported
from tests.scheduler.world import World


def state_age(world: World, cluster: str) -> float | None:
    known_at = world.queries.grid[cluster].known_at(world.now)
    return None if known_at is None else world.now - known_at


def test_state_age_of_connected_cluster_is_zero() -> None:
    world = World({"north": 4})
    world.advance(100_000)
    assert state_age(world, "north") == 0


def test_state_age_of_disconnected_cluster_grows_until_reconnect() -> None:
    world = World({"north": 4, "south": 4})
    world.advance(10)
    world.disconnect("south")
    world.advance(50)
    assert (state_age(world, "north"), state_age(world, "south")) == (0, 50)
    world.connect("south")
    assert state_age(world, "south") == 0


def test_state_age_grows_while_resource_manager_fails() -> None:
    world = World({"north": 4})
    report = ClusterReport(total=4, idle=4)
    world.step([Reported("north", ClusterReport(total=4, idle=4, problem="not answering since 12:00"))])
    world.advance(5)
    world.step([Reported("north", ClusterReport(total=4, idle=4, problem="not answering since 12:00: timed out"))])
    world.advance(5)
    assert state_age(world, "north") == 10
    world.step([Reported("north", report)])
    assert state_age(world, "north") == 0
