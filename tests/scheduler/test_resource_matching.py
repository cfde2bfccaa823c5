"""Jobs that are matched with nodes and uplinks, by the scheduler: what they ask for, whom they wait for, and why."""

from dataclasses import replace

from koalapy.model.cluster import Link
from koalapy.model.job import JobState
from koalapy.model.reports import ClusterReport
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible
from tests.scheduler.test_explain import explain_job
from tests.scheduler.test_node_classes import ClassedWorld, HalfFastSite
from tests.scheduler.world import World

GB = 10**9
FREE = (("mode", "non-saturated"),)


class HalfBig(HalfFastSite):
    """Half of its nodes are of twice the power, and have eight times the memory."""

    def current_report(self) -> ClusterReport:
        report = super().current_report()
        slow, fast = report.node_classes
        return replace(report, node_classes=(replace(slow, memory=8 * GB), replace(fast, memory=64 * GB, power=2.0)))


class UnlikeWorld(ClassedWorld):
    site_class = HalfBig


def classes(world: World, job: int) -> list[tuple[str, str, int]]:
    attempt = world.job(job).attempt
    assert attempt is not None
    return [(c.cluster, c.node_class, c.size) for c in attempt.components]


def test_it_gets_the_fast_nodes_and_nodes_with_enough_memory() -> None:
    world = UnlikeWorld({"north": 8, "south": 8})
    world.advance(1)
    first = world.submit(flexible(3), policy="resource-matching", run_time=50.0)
    second = world.submit(flexible(4), policy="resource-matching", memory=32 * GB, run_time=50.0)
    third = world.submit(flexible(3), policy="resource-matching", memory=GB, run_time=50.0)
    world.advance(1)
    assert classes(world, first) == [("north", "fast", 3)]
    assert classes(world, second) == [("south", "fast", 4)]
    assert classes(world, third) == [("north", "slow", 3)]
    assert {world.state(job) for job in (first, second, third)} == {JobState.RUNNING}


def test_who_needs_more_than_is_idle_waits_and_keeps_nobody_else_from_being_placed() -> None:
    world = UnlikeWorld({"north": 8})
    world.advance(1)
    large = world.submit(flexible(2), policy="resource-matching", memory=128 * GB)
    holder = world.submit(flexible(4), policy="resource-matching", memory=32 * GB, run_time=20.0)
    same = world.submit(flexible(2), policy="resource-matching", memory=32 * GB, run_time=20.0)
    small = world.submit(flexible(2), policy="resource-matching", memory=8 * GB, run_time=20.0)
    world.advance(1)
    states = [world.state(job) for job in (large, holder, same, small)]
    assert states == [JobState.QUEUED, JobState.RUNNING, JobState.QUEUED, JobState.RUNNING]
    assert explain_job(world, large).headline == "needs 2 nodes with 128 GB of memory; idle with that are north 0 of 2"
    world.advance(25)
    assert (world.state(large), world.state(same)) == (JobState.QUEUED, JobState.RUNNING)


def test_who_keeps_links_free_waits_until_they_are() -> None:
    world = World({"north": 8, "south": 8}, Rules(), links={("north", "south"): Link(bandwidth=100e6)})
    world.advance(1)
    sender = world.submit(fixed(north=4, south=4), per_node_bandwidth=25e6, run_time=50.0)
    world.advance(1)
    careful = world.submit(
        flexible(8), policy="resource-matching", policy_options=FREE, per_node_bandwidth=25e6, run_time=50.0
    )
    careless = world.submit(flexible(2), policy="resource-matching", policy_options=FREE, run_time=50.0)
    world.advance(10)
    states = [world.state(job) for job in (sender, careful, careless)]
    assert states == [JobState.RUNNING, JobState.QUEUED, JobState.RUNNING]
    assert explain_job(world, careful).headline.startswith("needs 8 nodes")
    world.cancel(careless)
    world.advance(5)
    assert "every split saturates an uplink: north's uplink admits" in explain_job(world, careful).headline
    world.advance(60)
    assert world.state(careful) is JobState.RUNNING


def test_a_placement_says_what_it_costs() -> None:
    world = World({"north": 4, "south": 4})
    world.advance(1)
    job = world.submit(flexible(6), policy="resource-matching")
    (reason,) = world.reasons(job, "placed")
    assert reason.endswith(
        "north 4, south 2: 1 × the run time on idle nodes of power 1; "
        "computation 1 × (north), communication 1 × (no uplink is saturated)"
    )
