"""How old what is known of a cluster's nodes is: agents tell each change, so silence is no age while they are there."""

from koalapy.model.reports import ClusterReport
from koalapy.scheduler.events import Reported
from tests.scheduler.world import World


def age(world: World, cluster: str) -> float | None:
    known_at = world.queries.grid[cluster].known_at(world.now)
    return None if known_at is None else world.now - known_at


def test_a_cluster_that_has_nothing_to_tell_is_known_as_it_is_now() -> None:
    world = World({"north": 4})
    world.advance(100_000)
    assert age(world, "north") == 0


def test_what_is_known_of_a_cluster_that_is_away_is_as_old_as_its_last_word_until_it_tells_anew() -> None:
    world = World({"north": 4, "south": 4})
    world.advance(10)
    world.disconnect("south")
    world.advance(50)
    assert (age(world, "north"), age(world, "south")) == (0, 50)
    world.connect("south")
    assert age(world, "south") == 0


def test_what_is_known_of_a_cluster_whose_resource_manager_does_not_answer_is_of_before() -> None:
    world = World({"north": 4})
    told = ClusterReport(total=4, idle=4)
    world.step([Reported("north", ClusterReport(total=4, idle=4, problem="not answering since 12:00"))])
    world.advance(5)
    world.step([Reported("north", ClusterReport(total=4, idle=4, problem="not answering since 12:00: timed out"))])
    world.advance(5)
    assert age(world, "north") == 10
    world.step([Reported("north", told)])
    assert age(world, "north") == 0
