"""Jobs of high priority take nodes from low ones: as few as needed, whole, and at once (semantics 5)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import ClaimingMode, ComponentState, JobState, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, StopWarning, WarningSignal
from koalapy.scheduler.claims.preemption import Preemption
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

HIGH = Priority.HIGH


def preempted(world: World) -> list[int]:
    """The jobs that were preempted, in order."""
    return [entry.job for entry in world.timeline if entry.event == "preempted"]


def running(world: World, *requests: Any, **spec: Any) -> list[int]:
    """Jobs that run for long, each begun a second after the other."""
    jobs = []
    for request in requests:
        jobs.append(world.submit(request, run_time=spec.get("run_time", 500.0)))
        world.advance(1)
    assert all(world.state(job) is JobState.RUNNING for job in jobs)
    return jobs


def test_the_youngest_go_first_and_no_more_than_needed() -> None:
    """In descending order of their job start times."""
    world = World({"north": 8})
    running(world, *[fixed(north=2)] * 4)
    high = world.submit(fixed(north=3), priority=HIGH)
    world.advance(1)
    assert world.state(high) is JobState.RUNNING
    assert preempted(world) == [4, 3]
    assert [world.state(job) for job in (1, 2)] == [JobState.RUNNING] * 2
    assert [world.state(job) for job in (3, 4)] == [JobState.QUEUED] * 2
    assert world.reasons(4, "requeued") == ["preempted: north is needed for job 5 of high priority"]
    assert world.job(4).restarts == 0, "that is no fault of anybody"
    world.advance(3000)
    assert [world.state(job) for job in range(1, 6)] == [JobState.SUCCEEDED] * 5
    check_nothing_remains(world)


def test_idle_nodes_are_used_first() -> None:
    world = World({"north": 8})
    running(world, fixed(north=3), fixed(north=2), fixed(north=1))
    high = world.submit(fixed(north=4), priority=HIGH)
    world.advance(1)
    assert world.state(high) is JobState.RUNNING
    assert preempted(world) == [2], "job 3's node would not do, and with job 2's two it is not needed"


def test_a_preempted_job_leaves_all_of_its_clusters() -> None:
    world = World({"north": 4, "south": 4})
    (low,) = running(world, fixed(north=2, south=3))
    high = world.submit(fixed(north=4), priority=HIGH)
    world.advance(1)
    assert (world.state(high), world.state(low)) == (JobState.RUNNING, JobState.QUEUED)
    assert world.queries.grid["south"].available == 4
    assert [kind for kind, _ in world.commands(low)][-4:] == ["Stop", "Stop", "Forget", "Forget"]


def test_nothing_is_preempted_where_another_cluster_has_room() -> None:
    world = World({"north": 4, "south": 4})
    running(world, fixed(north=4))
    high = world.submit(nonfixed(4), priority=HIGH)
    world.advance(1)
    assert world.state(high) is JobState.RUNNING
    assert preempted(world) == []


@pytest.mark.parametrize("occupant", [HIGH, None])
def test_neither_high_ones_nor_local_users_are_preempted(occupant: Priority | None) -> None:
    world = World({"north": 4})
    if occupant:
        world.submit(fixed(north=4), priority=occupant, run_time=50)
    else:
        world.sites["north"].add_local_user(4)
        world.settle()
    high = world.submit(fixed(north=2), priority=HIGH)
    world.advance(5)
    assert world.state(high) is JobState.QUEUED
    assert preempted(world) == []


def test_nothing_is_preempted_in_vain() -> None:
    """Of two components one could have its nodes, the other never."""
    world = World({"north": 4, "south": 4})
    running(world, fixed(north=4))
    world.sites["south"].add_local_user(1)
    world.settle()
    high = world.submit(fixed(north=4, south=4), priority=HIGH)
    world.advance(5)
    assert (world.state(high), preempted(world)) == (JobState.QUEUED, [])


def test_low_jobs_preempt_nobody() -> None:
    world = World({"north": 4})
    running(world, fixed(north=4))
    world.submit(fixed(north=4))
    world.advance(100)
    assert preempted(world) == []


def test_without_preemption_a_high_job_waits() -> None:
    world = World({"north": 4}, Rules(preemption="never"))
    (low,) = running(world, fixed(north=4), run_time=20)
    high = world.submit(fixed(north=4), priority=HIGH, run_time=100)
    world.advance(5)
    assert (world.state(low), world.state(high)) == (JobState.RUNNING, JobState.QUEUED)
    world.advance(30)
    assert world.state(high) is JobState.RUNNING


def test_two_high_jobs_that_need_the_same_victims() -> None:
    """The second counts what the first has taken, and neither takes more than both need."""
    world = World({"north": 8})
    running(world, *[fixed(north=2)] * 4)
    first = world.submit(fixed(north=3), priority=HIGH)
    second = world.submit(fixed(north=1), priority=HIGH)
    world.advance(1)
    assert [world.state(job) for job in (first, second)] == [JobState.RUNNING] * 2
    assert preempted(world) == [4, 3]
    third = world.submit(fixed(north=5), priority=HIGH)
    world.advance(1)
    assert world.state(third) is JobState.QUEUED, "only four nodes are left to be had"
    assert preempted(world) == [4, 3]


def test_at_the_same_moment_as_well() -> None:
    """Both before any cluster could answer."""
    world = World({"north": 4}, manual=True)
    world.deliver("north")
    running_job = world.submit(fixed(north=4))
    world.run_commands("north")
    world.sites["north"].report_claimed("1.1.0")
    world.deliver("north")
    world.run_commands("north")
    world.deliver("north")
    assert world.state(running_job) is JobState.RUNNING
    high = [world.submit(fixed(north=2), priority=HIGH) for _ in range(2)]
    assert preempted(world) == [running_job]
    assert [world.state(job) for job in high] == [JobState.CLAIMING] * 2
    world.start_automation()
    world.advance(2)
    assert [world.state(job) for job in high] == [JobState.RUNNING] * 2


def test_the_grace_of_a_claim_begins_when_the_preempted_are_gone() -> None:
    world = World({"north": 4}, Rules(claim_grace=5), manual=True)
    world.deliver("north")
    low = world.submit(fixed(north=4))
    world.run_commands("north")
    world.sites["north"].report_claimed("1.1.0")
    world.deliver("north")
    world.run_commands("north")
    world.deliver("north")
    high = world.submit(fixed(north=4), priority=HIGH)
    site = world.sites["north"]
    stop = next(entry for entry in site.inbox if type(entry[1]).__name__ == "StopComponent")
    site.inbox.remove(stop)
    world.run_commands("north")
    world.deliver("north")
    for world.now in (6.0, 12.0, 18.0):
        world.step()
    assert world.state(high) is JobState.CLAIMING, "it waits for job 1, which takes its time"
    assert world.job(high).attempt.components[0].state is ComponentState.WAITING  # type: ignore[union-attr]
    site.inbox.append(stop)
    world.start_automation()
    world.advance(2)
    assert world.state(high) is JobState.RUNNING
    assert world.state(low) is JobState.QUEUED


def test_a_component_that_cannot_start_does_not_keep_another_from_preempting() -> None:
    """Two components on one cluster, where by the time of the claim there is room for one of them, by preemption."""
    from tests.scheduler.test_incremental import GRID, LINKS, with_input

    rules = Rules(claiming=ClaimingMode.INCREMENTAL, preemption="claiming", claim_epsilon=0.1)
    world = World(GRID | {"north": 8}, rules, links=LINKS)
    both = FixedRequest((ComponentRequest(4, "north"), ComponentRequest(4, "north")))
    high = world.submit(with_input(both), priority=HIGH)
    assert world.state(high) is JobState.PLACED
    low = world.submit(fixed(north=4), run_time=100)
    world.sites["north"].add_local_user(3)
    world.advance(13)
    assert preempted(world) == [low]
    assert world.state(high) is JobState.CLAIMING


def test_a_preempting_job_that_is_cancelled_in_between() -> None:
    world = World({"north": 4}, manual=True)
    world.deliver("north")
    low = world.submit(fixed(north=4), run_time=5)
    world.start_automation()
    world.advance(1)
    world.manual = True
    high = world.submit(fixed(north=4), priority=HIGH)
    world.cancel(high)
    world.start_automation()
    world.advance(30)
    assert (world.state(high), world.state(low)) == (JobState.CANCELLED, JobState.SUCCEEDED)
    assert world.job(low).generation == 2
    check_nothing_remains(world)


def test_a_preempted_job_whose_program_ends_at_that_moment_is_run_again() -> None:
    """Whether the program came to its end or obeyed a signal cannot be told: it is run again."""
    world = World({"north": 4}, manual=True)
    world.deliver("north")
    low = world.submit(fixed(north=4), run_time=5)
    world.start_automation()
    world.advance(1)
    high = world.scheduler  # the program exits on its node before the daemon's order arrives
    world.sites["north"].exit_program("1.1.0", 0)
    world.sites["north"].end_component("1.1.0")
    ident = len(world.jobs) + 1
    assert ident == 2
    assert high is world.scheduler
    submitted = world.submit(fixed(north=4), priority=HIGH, run_time=5)
    assert preempted(world) == [low]
    world.advance(60)
    assert [world.state(job) for job in (low, submitted)] == [JobState.SUCCEEDED] * 2
    assert world.job(low).generation == 2
    check_nothing_remains(world)


def test_while_claiming_a_component_whose_nodes_were_taken_preempts() -> None:
    """``preemption = claiming``, as in M05: placed on idle nodes, which a low job has by the time of the claim."""
    from tests.scheduler.test_incremental import GRID, LINKS, with_input

    rules = Rules(claiming=ClaimingMode.INCREMENTAL, preemption="claiming")
    world = World(GRID, rules, links=LINKS)
    high = world.submit(with_input(fixed(north=4)), priority=HIGH)
    assert world.state(high) is JobState.PLACED
    low = world.submit(fixed(north=4), run_time=100)
    world.advance(5)
    assert world.state(low) is JobState.RUNNING
    world.advance(12)
    assert world.state(high) is JobState.RUNNING
    assert preempted(world) == [low]


def test_a_component_is_rather_re_placed_than_anybody_preempted() -> None:
    from tests.scheduler.test_incremental import GRID, LINKS, with_input

    rules = Rules(claiming=ClaimingMode.INCREMENTAL, preemption="claiming")
    world = World(GRID, rules, links=LINKS | {("files", "south"): LINKS["files", "north"].__class__(None, 1e6)})
    high = world.submit(with_input(nonfixed(4)), priority=HIGH, policy="worst-fit")
    assert world.job(high).attempt.gang[0].cluster == "north"  # type: ignore[union-attr]
    world.submit(fixed(north=4), run_time=100)
    world.advance(17)
    assert world.state(high) is JobState.RUNNING
    assert preempted(world) == []
    assert world.job(high).attempt.gang[0].cluster == "south"  # type: ignore[union-attr]


@given(lows=st.lists(st.integers(1, 4), max_size=6), idle=st.integers(0, 3), wanted=st.integers(1, 12))
def test_victims_suffice_are_all_needed_and_are_the_youngest_that_do(lows: list[int], idle: int, wanted: int) -> None:
    total = sum(lows) + idle
    world = World({"north": total}, Rules(preemption_order="jst"))
    for size in lows:
        world.submit(flexible(size), run_time=500)
        world.advance(1)
    chooser = Preemption(world.scheduler._state)
    room = chooser.plan_preemption({"north": wanted}, world.now)
    freed = {victim.job.id: lows[victim.job.id - 1] for victim in room.victims}
    if wanted > total:
        assert not freed
        return
    assert idle + sum(freed.values()) >= wanted
    assert all(idle + sum(freed.values()) - size < wanted for size in freed.values()), "one of them is not needed"
    taken = 0
    for ident in range(len(lows), 0, -1):
        if idle + taken >= wanted:
            assert ident not in freed, "one that is older than needed"
        taken += lows[ident - 1]


def test_a_job_that_was_placed_after_a_long_wait_is_not_preempted() -> None:
    world = World({"north": 4}, Rules(low_patience=60))
    first = world.submit(fixed(north=4), run_time=60)
    second = world.submit(fixed(north=4), run_time=500)
    world.advance(61)
    assert (world.state(first), world.state(second)) == (JobState.SUCCEEDED, JobState.RUNNING)
    high = world.submit(fixed(north=4), priority=HIGH)
    world.advance(10)
    world.restart()
    world.connect("north")
    world.advance(10)
    assert (world.state(high), preempted(world)) == (JobState.QUEUED, [])
    world.advance(500)
    assert world.state(high) is JobState.SUCCEEDED


def test_a_job_whose_program_is_done_is_not_preempted() -> None:
    """Its components have a moment to end by themselves; their nodes are free after that."""
    world = World({"north": 4}, manual=True)
    world.deliver("north")
    low = world.submit(fixed(north=4))
    world.run_commands("north")
    world.sites["north"].report_claimed("1.1.0")
    for _ in range(2):
        world.deliver("north")
        world.run_commands("north")
    world.sites["north"].exit_program("1.1.0", 0)
    world.deliver("north")
    assert world.job(low).ending is JobState.SUCCEEDED
    world.submit(fixed(north=4), priority=HIGH)
    assert preempted(world) == []
    world.start_automation()
    world.advance(5)
    assert world.state(low) is JobState.SUCCEEDED


# With which the least is lost


def test_an_old_small_job_is_lost_rather_than_a_young_large_one() -> None:
    world = World({"north": 9})
    small = world.submit(fixed(north=1), run_time=500)
    world.advance(20)
    large = world.submit(fixed(north=8), run_time=500)
    world.advance(4)
    high = world.submit(fixed(north=1), priority=HIGH)
    world.advance(1)
    assert preempted(world) == [small], "24 node-seconds, and not 32"
    assert world.reasons(small, "preempted") == [
        f"preempted: north is needed for job {high} of high priority, and the least work is lost so: 24 node-seconds"
    ]
    assert world.state(large) is JobState.RUNNING


def test_with_jst_the_youngest_goes_all_the_same() -> None:
    world = World({"north": 9}, Rules(preemption_order="jst"))
    running(world, fixed(north=1))
    world.advance(20)
    large = world.submit(fixed(north=8), run_time=500)
    world.advance(4)
    high = world.submit(fixed(north=1), priority=HIGH)
    assert preempted(world) == [large]
    assert world.reasons(large, "preempted") == [f"preempted: north is needed for job {high} of high priority"]


def test_work_on_other_clusters_counts_as_well() -> None:
    world = World({"north": 4, "south": 8})
    wide, narrow = running(world, fixed(north=2, south=8), fixed(north=2))
    world.advance(1)
    world.submit(fixed(north=2), priority=HIGH)
    assert preempted(world) == [narrow]
    assert world.state(wide) is JobState.RUNNING


def test_one_job_on_both_clusters_goes_rather_than_one_on_each() -> None:
    world = World({"north": 6, "south": 6})
    one, two, both = running(world, fixed(north=3), fixed(south=3), fixed(north=3, south=3))
    high = world.submit(fixed(north=2, south=2), priority=HIGH)
    world.advance(1)
    assert preempted(world) == [both]
    assert "north, south are needed" in world.reasons(both, "preempted")[0]
    assert world.state(high) is JobState.RUNNING
    assert [world.state(job) for job in (one, two)] == [JobState.RUNNING] * 2


def test_who_has_not_begun_loses_nothing() -> None:
    world = World({"north": 4}, manual=True)
    world.deliver("north")
    waiting = world.submit(fixed(north=4))
    world.submit(fixed(north=4), priority=HIGH)
    assert preempted(world) == [waiting]
    assert world.reasons(waiting, "preempted")[0].endswith("and no work is lost so")


# Who is about to end


def nearly_over(run_time: float) -> tuple[World, int]:
    """A job that has all nodes, and reaches its walltime of 100 s in 2 s; its program lasts so long."""
    world = World({"north": 4})
    low = world.submit(fixed(north=4), run_time=run_time, walltime=100)
    world.advance(98.125)
    return world, low


def test_who_is_about_to_end_is_not_preempted() -> None:
    world, low = nearly_over(run_time=99.5)
    high = world.submit(fixed(north=4), priority=HIGH)
    assert world.state(high) is JobState.CLAIMING
    assert world.reasons(high, "awaits") == [f"job {low}, about to end: no job is preempted for those nodes"]
    world.advance(4)
    assert (world.state(low), world.state(high)) == (JobState.SUCCEEDED, JobState.RUNNING)
    assert preempted(world) == []
    check_nothing_remains(world)


def test_what_its_application_took_before_keeps_nobody_from_being_preempted() -> None:
    world = World({"north": 4})
    for _ in range(5):
        world.submit(fixed(north=4), run_time=100)
        world.advance(110)
    low = world.submit(fixed(north=4), run_time=100)
    world.advance(98)
    high = world.submit(fixed(north=4), priority=HIGH)
    assert (preempted(world), world.reasons(high, "awaits")) == ([low], [])


def test_where_claims_wait_only_shortly_nobody_is_awaited_for_long() -> None:
    world = World({"north": 4}, Rules(claim_grace=1))
    low = world.submit(fixed(north=4), run_time=99.5, walltime=100)
    world.advance(98.125)
    world.submit(fixed(north=4), priority=HIGH)
    assert preempted(world) == [low]


def test_nor_is_anybody_else_for_a_second_job_that_counts_on_the_same_nodes() -> None:
    world, low = nearly_over(run_time=99.5)
    high = [world.submit(fixed(north=2), priority=HIGH) for _ in range(2)]
    third = world.submit(fixed(north=2), priority=HIGH)
    assert [world.state(job) for job in (*high, third)] == [JobState.CLAIMING] * 2 + [JobState.QUEUED]
    world.advance(4)
    assert [world.state(job) for job in (low, *high)] == [JobState.SUCCEEDED, *[JobState.RUNNING] * 2]


def test_who_reaches_its_walltime_meanwhile_makes_room_by_that() -> None:
    world, low = nearly_over(run_time=500)
    high = world.submit(fixed(north=4), priority=HIGH)
    world.advance(4)
    assert (world.state(low), world.state(high), preempted(world)) == (JobState.FAILED, JobState.RUNNING, [])


def test_a_warning_makes_it_longer_to_stop_a_job_and_so_longer_to_wait_for_its_end() -> None:
    world = World({"north": 8})
    warned = world.submit(fixed(north=4), run_time=500, walltime=100, warning=StopWarning(WarningSignal.TERM, 60))
    plain = world.submit(fixed(north=4), run_time=500, walltime=100)
    world.advance(80)
    high = world.submit(fixed(north=4), priority=HIGH)
    assert world.reasons(high, "awaits")[0].startswith(f"job {warned}, about to end")
    assert preempted(world) == []
    world.submit(fixed(north=2), priority=HIGH)
    assert preempted(world) == [plain]


def late(world: World) -> int:
    """A job whose program has ended, as was told, while its output and so its nodes are late."""
    low = world.submit(fixed(north=4), run_time=500)
    world.advance(10)
    world.queries.grid["north"].over.add(world.tokens(low)[0])
    return low


def test_who_does_not_end_as_was_expected_is_preempted_after_all() -> None:
    world = World({"north": 4}, Rules(claim_grace=5))
    low = late(world)
    high = world.submit(fixed(north=4), priority=HIGH)
    world.advance(4)
    assert (world.state(low), world.state(high), preempted(world)) == (JobState.RUNNING, JobState.CLAIMING, [])
    world.advance(3)
    assert (world.state(low), world.state(high)) == (JobState.QUEUED, JobState.RUNNING)
    assert world.reasons(low, "preempted")[0].endswith("and it has not ended by itself as was expected")
    assert world.job(high).claiming_tries == 1


def test_nobody_counts_on_nodes_any_more_whose_job_was_cancelled() -> None:
    world = World({"north": 4}, Rules(claim_grace=5))
    low = late(world)
    first = world.submit(fixed(north=4), priority=HIGH)
    world.cancel(first)
    world.advance(20)
    assert (world.state(low), preempted(world)) == (JobState.RUNNING, [])
    second = world.submit(fixed(north=3), priority=HIGH)
    world.advance(10)
    assert (world.state(low), world.state(second)) == (JobState.QUEUED, JobState.RUNNING)


def test_with_a_restart_in_between_it_makes_room_as_any_other() -> None:
    world = World({"north": 4}, Rules(claim_grace=5))
    low = late(world)
    high = world.submit(fixed(north=4), priority=HIGH)
    world.restart()
    world.connect("north")
    world.advance(30)
    assert (world.state(high), preempted(world)) == (JobState.SUCCEEDED, [low])
