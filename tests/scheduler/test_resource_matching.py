"""The policy resource-matching in the scheduler: node classes, memory and uplinks."""

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
NON_SATURATED = (("mode", "non-saturated"),)


class TwoClassSite(HalfFastSite):
    """A site with half of its nodes of twice the power and eight times the memory."""

    def current_report(self) -> ClusterReport:
        report = super().current_report()
        slow, fast = report.node_classes
        return replace(report, node_classes=(replace(slow, memory=8 * GB), replace(fast, memory=64 * GB, power=2.0)))


class TwoClassWorld(ClassedWorld):
    site_class = TwoClassSite


def placed_classes(world: World, job: int) -> list[tuple[str, str, int]]:
    attempt = world.job(job).attempt
    assert attempt is not None
    return [(c.cluster, c.node_class, c.size) for c in attempt.components]


def test_matching_uses_fast_nodes_and_required_memory() -> None:
    world = TwoClassWorld({"north": 8, "south": 8})
    world.advance(1)
    first = world.submit(flexible(3), policy="resource-matching", run_time=50.0)
    second = world.submit(flexible(4), policy="resource-matching", memory=32 * GB, run_time=50.0)
    third = world.submit(flexible(3), policy="resource-matching", memory=GB, run_time=50.0)
    world.advance(1)
    assert placed_classes(world, first) == [("north", "fast", 3)]
    assert placed_classes(world, second) == [("south", "fast", 4)]
    assert placed_classes(world, third) == [("north", "slow", 3)]
    assert {world.state(job) for job in (first, second, third)} == {JobState.RUNNING}


def test_matching_job_without_memory_waits_and_blocks_no_other() -> None:
    world = TwoClassWorld({"north": 8})
    world.advance(1)
    large_job = world.submit(flexible(2), policy="resource-matching", memory=128 * GB)
    holder = world.submit(flexible(4), policy="resource-matching", memory=32 * GB, run_time=20.0)
    equal_job = world.submit(flexible(2), policy="resource-matching", memory=32 * GB, run_time=20.0)
    small_job = world.submit(flexible(2), policy="resource-matching", memory=8 * GB, run_time=20.0)
    world.advance(1)
    states = [world.state(job) for job in (large_job, holder, equal_job, small_job)]
    assert states == [JobState.QUEUED, JobState.RUNNING, JobState.QUEUED, JobState.RUNNING]
    assert explain_job(world, large_job).headline == "north has no node with 128 GB of memory"
    world.advance(25)
    assert (world.state(large_job), world.state(equal_job)) == (JobState.QUEUED, JobState.RUNNING)


def test_matching_non_saturated_waits_for_free_uplink() -> None:
    world = World({"north": 8, "south": 8}, Rules(), links={("north", "south"): Link(bandwidth=100e6)})
    world.advance(1)
    sender = world.submit(fixed(north=4, south=4), per_node_bandwidth=25e6, run_time=50.0)
    world.advance(1)
    bandwidth_job = world.submit(
        flexible(8), policy="resource-matching", policy_options=NON_SATURATED, per_node_bandwidth=25e6, run_time=50.0
    )
    other_job = world.submit(flexible(2), policy="resource-matching", policy_options=NON_SATURATED, run_time=50.0)
    world.advance(10)
    states = [world.state(job) for job in (sender, bandwidth_job, other_job)]
    assert states == [JobState.RUNNING, JobState.QUEUED, JobState.RUNNING]
    assert explain_job(world, bandwidth_job).headline.startswith("needs 8 nodes")
    world.cancel(other_job)
    world.advance(5)
    assert "every split saturates an uplink: north's uplink admits" in explain_job(world, bandwidth_job).headline
    world.advance(60)
    assert world.state(bandwidth_job) is JobState.RUNNING


def test_matching_placement_reason_states_cost() -> None:
    world = World({"north": 4, "south": 4})
    world.advance(1)
    job = world.submit(flexible(6), policy="resource-matching")
    (reason,) = world.reasons(job, "placed")
    assert reason.endswith(
        "north 4, south 2: 1 × the run time on idle nodes of power 1; "
        "computation 1 × (north), communication 1 × (no uplink is saturated)"
    )
