"""Preemption: high-priority jobs take nodes from few low-priority jobs, completely and at once (semantics 5)."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import ComponentState, JobState
from koalapy.model.job_spec import ClaimingMode, Priority
from koalapy.model.request import ComponentRequest, FixedRequest, StopWarning, WarningSignal
from koalapy.scheduler.claims.preemption import Preemption
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

HIGH = Priority.HIGH


def preempted_jobs(world: World) -> list[int]:
    """Return the preempted jobs, in order."""
    return [entry.job for entry in world.timeline if entry.event == "preempted"]


def start_jobs(world: World, *requests: Any, **spec: Any) -> list[int]:
    """Start long jobs, each a second after the previous one."""
    jobs = []
    for request in requests:
        jobs.append(world.submit(request, run_time=spec.get("run_time", 500.0)))
        world.advance(1)
    assert all(world.state(job) is JobState.RUNNING for job in jobs)
    return jobs


def test_preemption_takes_youngest_and_no_more_than_needed() -> None:
    """Victims are chosen in descending order of their job start times."""
    world = World({"north": 8})
    start_jobs(world, *[fixed(north=2)] * 4)
    high = world.submit(fixed(north=3), priority=HIGH)
    world.advance(1)
    assert world.state(high) is JobState.RUNNING
    assert preempted_jobs(world) == [4, 3]
    assert [world.state(job) for job in (1, 2)] == [JobState.RUNNING] * 2
    assert [world.state(job) for job in (3, 4)] == [JobState.QUEUED] * 2
    assert world.reasons(4, "requeued") == ["preempted: north is needed for job 5 of high priority"]
    assert world.job(4).restarts == 0, "a preemption is not a failure"
    world.advance(3000)
    assert [world.state(job) for job in range(1, 6)] == [JobState.SUCCEEDED] * 5
    check_nothing_remains(world)


def test_preemption_frees_all_clusters_of_victim() -> None:
    world = World({"north": 4, "south": 4})
    (low,) = start_jobs(world, fixed(north=2, south=3))
    high = world.submit(fixed(north=4), priority=HIGH)
    world.advance(1)
    assert (world.state(high), world.state(low)) == (JobState.RUNNING, JobState.QUEUED)
    assert world.queries.grid["south"].nodes.available == 4
    assert [kind for kind, _ in world.commands(low)][-4:] == ["Stop", "Stop", "Forget", "Forget"]


def test_preemption_is_avoided_by_placing_elsewhere() -> None:
    world = World({"north": 4, "south": 4})
    start_jobs(world, fixed(north=4))
    high = world.submit(nonfixed(4), priority=HIGH)
    world.advance(1)
    assert world.state(high) is JobState.RUNNING
    assert preempted_jobs(world) == []


@pytest.mark.parametrize("occupant", [HIGH, None])
def test_preemption_spares_high_jobs_and_local_users(occupant: Priority | None) -> None:
    world = World({"north": 4})
    if occupant:
        world.submit(fixed(north=4), priority=occupant, run_time=50)
    else:
        world.sites["north"].add_local_user(4)
        world.settle()
    high = world.submit(fixed(north=2), priority=HIGH)
    world.advance(5)
    assert world.state(high) is JobState.QUEUED
    assert preempted_jobs(world) == []


def test_preemption_needs_all_components_to_fit() -> None:
    """One component could preempt, the other could never start."""
    world = World({"north": 4, "south": 4})
    start_jobs(world, fixed(north=4))
    world.sites["south"].add_local_user(1)
    world.settle()
    high = world.submit(fixed(north=4, south=4), priority=HIGH)
    world.advance(5)
    assert (world.state(high), preempted_jobs(world)) == (JobState.QUEUED, [])


def test_preemption_disabled_high_job_waits() -> None:
    world = World({"north": 4}, Rules(preemption="never"))
    (low,) = start_jobs(world, fixed(north=4), run_time=20)
    high = world.submit(fixed(north=4), priority=HIGH, run_time=100)
    world.advance(5)
    assert (world.state(low), world.state(high)) == (JobState.RUNNING, JobState.QUEUED)
    world.advance(30)
    assert world.state(high) is JobState.RUNNING


def test_preemption_by_second_high_job_counts_first() -> None:
    """Together they take no more than both need."""
    world = World({"north": 8})
    start_jobs(world, *[fixed(north=2)] * 4)
    first = world.submit(fixed(north=3), priority=HIGH)
    second = world.submit(fixed(north=1), priority=HIGH)
    world.advance(1)
    assert [world.state(job) for job in (first, second)] == [JobState.RUNNING] * 2
    assert preempted_jobs(world) == [4, 3]
    third = world.submit(fixed(north=5), priority=HIGH)
    world.advance(1)
    assert world.state(third) is JobState.QUEUED, "only four nodes can be preempted"
    assert preempted_jobs(world) == [4, 3]


def test_preemption_by_two_high_jobs_before_any_report() -> None:
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
    assert preempted_jobs(world) == [running_job]
    assert [world.state(job) for job in high] == [JobState.CLAIMING] * 2
    world.start_automation()
    world.advance(2)
    assert [world.state(job) for job in high] == [JobState.RUNNING] * 2


def test_preemption_delays_claim_grace_until_nodes_are_free() -> None:
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
    assert world.state(high) is JobState.CLAIMING, "it waits for job 1 to end"
    assert world.job(high).attempt.components[0].state is ComponentState.WAITING  # type: ignore[union-attr]
    site.inbox.append(stop)
    world.start_automation()
    world.advance(2)
    assert world.state(high) is JobState.RUNNING
    assert world.state(low) is JobState.QUEUED


def test_preemption_continues_past_component_that_cannot_start() -> None:
    """At the claim one of two components on a cluster can start, by preemption."""
    from tests.scheduler.test_incremental import GRID, LINKS, with_input

    rules = Rules(claiming=ClaimingMode.INCREMENTAL, preemption="claiming", claim_epsilon=0.1)
    world = World(GRID | {"north": 8}, rules, links=LINKS)
    request = FixedRequest((ComponentRequest(4, "north"), ComponentRequest(4, "north")))
    high = world.submit(with_input(request), priority=HIGH)
    assert world.state(high) is JobState.PLACED
    low = world.submit(fixed(north=4), run_time=100)
    world.sites["north"].add_local_user(3)
    world.advance(13)
    assert preempted_jobs(world) == [low]
    assert world.state(high) is JobState.CLAIMING


def test_preemption_by_cancelled_job_restarts_victim() -> None:
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


def test_preemption_of_just_ended_program_runs_it_again() -> None:
    """Whether the program ended by itself or by the signal is unknown, so it runs again."""
    world = World({"north": 4}, manual=True)
    world.deliver("north")
    low = world.submit(fixed(north=4), run_time=5)
    world.start_automation()
    world.advance(1)
    world.sites["north"].exit_program("1.1.0", 0)  # before the daemon's command arrives
    world.sites["north"].end_component("1.1.0")
    submitted = world.submit(fixed(north=4), priority=HIGH, run_time=5)
    assert preempted_jobs(world) == [low]
    world.advance(60)
    assert [world.state(job) for job in (low, submitted)] == [JobState.SUCCEEDED] * 2
    assert world.job(low).generation == 2
    check_nothing_remains(world)


def test_preemption_at_claim_replaces_taken_nodes() -> None:
    """``preemption = claiming``, as in M05: at the claim a low job has the idle nodes of the placement."""
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
    assert preempted_jobs(world) == [low]


@pytest.mark.parametrize(("preemption", "priority"), [("never", HIGH), ("claiming", Priority.LOW)])
def test_preemption_at_claim_is_only_for_high_jobs_and_as_rules_say(preemption: Any, priority: Priority) -> None:
    from tests.scheduler.test_incremental import GRID, LINKS, with_input

    world = World(GRID, Rules(claiming=ClaimingMode.INCREMENTAL, preemption=preemption), links=LINKS)
    waiting = world.submit(with_input(fixed(north=4)), priority=priority)
    low = world.submit(fixed(north=4), run_time=100)
    world.advance(20)
    assert (world.state(low), preempted_jobs(world)) == (JobState.RUNNING, [])
    assert world.state(waiting) is JobState.QUEUED


def test_preemption_at_claim_prefers_re_placement() -> None:
    from tests.scheduler.test_incremental import GRID, LINKS, with_input

    rules = Rules(claiming=ClaimingMode.INCREMENTAL, preemption="claiming")
    world = World(GRID, rules, links=LINKS | {("files", "south"): LINKS["files", "north"].__class__(None, 1e6)})
    high = world.submit(with_input(nonfixed(4)), priority=HIGH, policy="worst-fit")
    assert world.job(high).attempt.gang[0].cluster == "north"  # type: ignore[union-attr]
    world.submit(fixed(north=4), run_time=100)
    world.advance(17)
    assert world.state(high) is JobState.RUNNING
    assert preempted_jobs(world) == []
    assert world.job(high).attempt.gang[0].cluster == "south"  # type: ignore[union-attr]


@given(sizes=st.lists(st.integers(1, 4), max_size=6), idle=st.integers(0, 3), required=st.integers(1, 12))
def test_preemption_victims_suffice_and_are_youngest(sizes: list[int], idle: int, required: int) -> None:
    total = sum(sizes) + idle
    world = World({"north": total}, Rules(preemption_order="jst"))
    for size in sizes:
        world.submit(flexible(size), run_time=500)
        world.advance(1)
    chooser = Preemption(world.scheduler._state)
    plan = chooser.plan_preemption({"north": required}, world.now)
    freed = {victim.job.id: sizes[victim.job.id - 1] for victim in plan.victims}
    if required > total:
        assert not freed
        return
    assert idle + sum(freed.values()) >= required
    assert all(idle + sum(freed.values()) - size < required for size in freed.values()), "a victim is not needed"
    freed_nodes = 0
    for job_id in range(len(sizes), 0, -1):
        if idle + freed_nodes >= required:
            assert job_id not in freed, "an older job is preempted than needed"
        freed_nodes += sizes[job_id - 1]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_preemption_spares_job_with_ended_program(is_restarted: bool) -> None:
    """Its components end by themselves and then release their nodes."""
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
    if is_restarted:
        world.restart()
        world.connect("north")
        world.deliver("north")
    world.submit(fixed(north=4), priority=HIGH)
    assert preempted_jobs(world) == []
    world.start_automation()
    world.advance(5)
    assert world.state(low) is JobState.SUCCEEDED


# With which the least is lost


def test_preemption_takes_old_small_before_young_large_job() -> None:
    world = World({"north": 9})
    small_job = world.submit(fixed(north=1), run_time=500)
    world.advance(20)
    large_job = world.submit(fixed(north=8), run_time=500)
    world.advance(4)
    high = world.submit(fixed(north=1), priority=HIGH)
    world.advance(1)
    assert preempted_jobs(world) == [small_job], "24 node-seconds, and not 32"
    assert world.reasons(small_job, "preempted") == [
        f"preempted: north is needed for job {high} of high priority, and the least work is lost so: 24 node-seconds"
    ]
    assert world.state(large_job) is JobState.RUNNING


def test_preemption_by_jst_takes_youngest_job() -> None:
    world = World({"north": 9}, Rules(preemption_order="jst"))
    start_jobs(world, fixed(north=1))
    world.advance(20)
    large_job = world.submit(fixed(north=8), run_time=500)
    world.advance(4)
    high = world.submit(fixed(north=1), priority=HIGH)
    assert preempted_jobs(world) == [large_job]
    assert world.reasons(large_job, "preempted") == [f"preempted: north is needed for job {high} of high priority"]


def test_preemption_cost_includes_other_clusters() -> None:
    world = World({"north": 4, "south": 8})
    wide_job, narrow_job = start_jobs(world, fixed(north=2, south=8), fixed(north=2))
    world.advance(1)
    world.submit(fixed(north=2), priority=HIGH)
    assert preempted_jobs(world) == [narrow_job]
    assert world.state(wide_job) is JobState.RUNNING


def test_preemption_takes_one_job_on_both_clusters() -> None:
    world = World({"north": 6, "south": 6})
    north_job, south_job, wide_job = start_jobs(world, fixed(north=3), fixed(south=3), fixed(north=3, south=3))
    high = world.submit(fixed(north=2, south=2), priority=HIGH)
    world.advance(1)
    assert preempted_jobs(world) == [wide_job]
    assert "north, south are needed" in world.reasons(wide_job, "preempted")[0]
    assert world.state(high) is JobState.RUNNING
    assert [world.state(job) for job in (north_job, south_job)] == [JobState.RUNNING] * 2


def test_preemption_of_unstarted_job_costs_nothing() -> None:
    world = World({"north": 4}, manual=True)
    world.deliver("north")
    waiting = world.submit(fixed(north=4))
    world.submit(fixed(north=4), priority=HIGH)
    assert preempted_jobs(world) == [waiting]
    assert world.reasons(waiting, "preempted")[0].endswith("and no work is lost so")


# Jobs about to end


def create_nearly_ended_job(run_time: float) -> tuple[World, int]:
    """Run a job on all nodes, 2 s before its walltime of 100 s."""
    world = World({"north": 4})
    low = world.submit(fixed(north=4), run_time=run_time, walltime=100)
    world.advance(98.125)
    return world, low


def test_preemption_waits_for_job_about_to_end() -> None:
    world, low = create_nearly_ended_job(run_time=99.5)
    high = world.submit(fixed(north=4), priority=HIGH)
    assert world.state(high) is JobState.CLAIMING
    assert world.reasons(high, "awaits") == [f"job {low}, about to end: no job is preempted for those nodes"]
    world.advance(4)
    assert (world.state(low), world.state(high)) == (JobState.SUCCEEDED, JobState.RUNNING)
    assert preempted_jobs(world) == []
    check_nothing_remains(world)


def test_preemption_does_not_wait_for_predicted_run_time() -> None:
    world = World({"north": 4})
    for _ in range(5):
        world.submit(fixed(north=4), run_time=100)
        world.advance(110)
    low = world.submit(fixed(north=4), run_time=100)
    world.advance(98)
    high = world.submit(fixed(north=4), priority=HIGH)
    assert (preempted_jobs(world), world.reasons(high, "awaits")) == ([low], [])


def test_preemption_does_not_wait_beyond_claim_grace() -> None:
    world = World({"north": 4}, Rules(claim_grace=1))
    low = world.submit(fixed(north=4), run_time=99.5, walltime=100)
    world.advance(98.125)
    world.submit(fixed(north=4), priority=HIGH)
    assert preempted_jobs(world) == [low]


def test_preemption_does_not_wait_for_nodes_awaited_by_another() -> None:
    world, low = create_nearly_ended_job(run_time=99.5)
    high = [world.submit(fixed(north=2), priority=HIGH) for _ in range(2)]
    third = world.submit(fixed(north=2), priority=HIGH)
    assert [world.state(job) for job in (*high, third)] == [JobState.CLAIMING] * 2 + [JobState.QUEUED]
    world.advance(4)
    assert [world.state(job) for job in (low, *high)] == [JobState.SUCCEEDED, *[JobState.RUNNING] * 2]


def test_preemption_waits_for_walltime_of_job() -> None:
    world, low = create_nearly_ended_job(run_time=500)
    high = world.submit(fixed(north=4), priority=HIGH)
    world.advance(4)
    assert (world.state(low), world.state(high), preempted_jobs(world)) == (JobState.FAILED, JobState.RUNNING, [])


def test_preemption_waits_longer_if_victim_has_warning() -> None:
    world = World({"north": 8})
    warned_job = world.submit(fixed(north=4), run_time=500, walltime=100, warning=StopWarning(WarningSignal.TERM, 60))
    plain_job = world.submit(fixed(north=4), run_time=500, walltime=100)
    world.advance(80)
    high = world.submit(fixed(north=4), priority=HIGH)
    assert world.reasons(high, "awaits")[0].startswith(f"job {warned_job}, about to end")
    assert preempted_jobs(world) == []
    world.submit(fixed(north=2), priority=HIGH)
    assert preempted_jobs(world) == [plain_job]


def create_job_with_late_end(world: World) -> int:
    """Run a job that keeps its nodes after its program has ended."""
    low = world.submit(fixed(north=4), run_time=500)
    world.advance(10)
    world.queries.grid["north"].nodes.exited.add(world.tokens(low)[0])
    return low


def test_preemption_follows_if_awaited_job_does_not_end() -> None:
    world = World({"north": 4}, Rules(claim_grace=5))
    low = create_job_with_late_end(world)
    high = world.submit(fixed(north=4), priority=HIGH)
    world.advance(4)
    assert (world.state(low), world.state(high), preempted_jobs(world)) == (JobState.RUNNING, JobState.CLAIMING, [])
    world.advance(3)
    assert (world.state(low), world.state(high)) == (JobState.QUEUED, JobState.RUNNING)
    assert world.reasons(low, "preempted")[0].endswith("and it has not ended by itself as was expected")
    assert world.job(high).claiming_tries == 1


def test_preemption_is_not_done_after_waiting_job_is_cancelled() -> None:
    world = World({"north": 4}, Rules(claim_grace=5))
    low = create_job_with_late_end(world)
    first = world.submit(fixed(north=4), priority=HIGH)
    world.cancel(first)
    world.advance(20)
    assert (world.state(low), preempted_jobs(world)) == (JobState.RUNNING, [])
    second = world.submit(fixed(north=3), priority=HIGH)
    world.advance(10)
    assert (world.state(low), world.state(second)) == (JobState.QUEUED, JobState.RUNNING)


def test_preemption_follows_daemon_restart_while_waiting() -> None:
    world = World({"north": 4}, Rules(claim_grace=5))
    low = create_job_with_late_end(world)
    high = world.submit(fixed(north=4), priority=HIGH)
    world.restart()
    world.connect("north")
    world.advance(30)
    assert (world.state(high), preempted_jobs(world)) == (JobState.SUCCEEDED, [low])
