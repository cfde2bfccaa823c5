"""Dependencies, begin and deadline of jobs: when they start, and how they end if they cannot."""

from itertools import product

import pytest

from koalapy.model.array import TaskIndices
from koalapy.model.dependency import EndCondition, parse_clause
from koalapy.model.errors import UsageError
from koalapy.model.job import ArrayTasks, Job, JobState
from koalapy.model.job_spec import JobSpec, Priority
from koalapy.model.request import StopWarning, WarningSignal
from koalapy.scheduler.events import JobCancelled, JobSubmitted
from koalapy.scheduler.explain.explain import explain, explain_submission
from koalapy.scheduler.rules import Rules
from tests.scheduler.invariants import check_nothing_remains
from tests.scheduler.requests import fixed
from tests.scheduler.world import World

NODE = fixed(north=1)
DAY = 1_763_750_000.0
ENDS = {0: JobState.SUCCEEDED, 3: JobState.FAILED, None: JobState.CANCELLED}
"""How a first job ends, by its exit code; None: it is cancelled."""


def submit_after(world: World, *clauses: str, **spec: object) -> int:
    return world.submit(NODE, after=tuple(map(parse_clause, clauses)), **spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(("code", "condition"), list(product(ENDS, EndCondition)))
def test_dependency_decides_by_end_of_first_job(code: int | None, condition: EndCondition) -> None:
    world = World({"north": 4})
    first = world.submit(NODE, run_time=10, code=code or 0)
    second = submit_after(world, f"{first}:{condition}", run_time=5)
    world.advance(5)
    assert (world.state(second), world.queries.position(second)) == (JobState.QUEUED, None)
    if code is None:
        world.cancel(first)
    world.advance(30)
    assert world.state(first) is ENDS[code]
    holds = condition is EndCondition.ANY or (code == 0) == (condition is EndCondition.OK)
    assert world.state(second) is (JobState.SUCCEEDED if holds else JobState.FAILED)
    assert world.job(second).reason.startswith("" if holds else f"dependency: job {first} ")
    check_nothing_remains(world)


def test_chain_of_failed_dependencies_ends_in_one_step() -> None:
    world = World({"north": 1})
    first = world.submit(NODE, run_time=1000)
    chain = [first]
    for _ in range(5):
        chain.append(submit_after(world, f"{chain[-1]}"))
    last = submit_after(world, f"{chain[-1]}:failed", run_time=3)
    world.step([JobCancelled(first)])
    world.settle()
    assert [world.state(job) for job in chain[1:]] == [JobState.FAILED] * 5
    assert world.state(last).is_active
    assert world.job(chain[2]).reason == f"dependency: job {chain[1]} failed, and it had to succeed"


def test_alternatives_need_one_and_entries_all() -> None:
    world = World({"north": 4})
    fails, succeeds, long = (world.submit(NODE, run_time=t, code=c) for t, c in ((1, 3), (5, 0), (20, 0)))
    one_of = submit_after(world, f"{fails}?{succeeds}", run_time=100)
    both = submit_after(world, f"{fails}:any", f"{long}", run_time=100)
    neither = submit_after(world, f"{fails}?{succeeds}:failed")
    world.advance(3)
    assert world.queries.waiting_reason(world.job(one_of)) == f"waits for job {succeeds} to succeed"
    world.restart()
    world.connect("north")
    world.advance(5)
    assert world.state(one_of) is JobState.RUNNING
    assert world.job(neither).reason == f"dependency: job {succeeds} succeeded, and it had to fail"
    assert world.state(both) is JobState.QUEUED
    world.advance(30)
    assert world.state(both) is JobState.RUNNING


@pytest.mark.parametrize("restarts", [False, True])
def test_begin_defers_job_and_it_is_tried_at_once_then(restarts: bool) -> None:
    world = World({"north": 4}, Rules(scan_interval=1000), now=DAY)
    job = world.submit(NODE, begin=DAY + 50)
    assert world.queries.waiting_reason(world.job(job)) == "waits until 18:34:10 UTC"
    if restarts:
        world.restart()
        world.connect("north")
    world.advance(49)
    assert world.state(job) is JobState.QUEUED
    world.advance(2)
    assert world.state(job) is JobState.RUNNING
    assert (world.job(job).placed_at, world.job(job).eligible_at) == (DAY + 50, DAY + 50)


def test_hold_of_deferred_job_outlasts_its_dependency() -> None:
    world = World({"north": 4})
    first = world.submit(NODE, run_time=10)
    held, released = submit_after(world, f"{first}"), submit_after(world, f"{first}")
    world.hold(held)
    world.hold(released)
    world.release(released)
    assert world.job(released).is_deferred
    world.advance(12)
    assert (world.state(held), world.state(released)) == (JobState.HELD, JobState.RUNNING)
    world.release(held)
    world.advance(1)
    assert world.state(held) is JobState.RUNNING


def test_held_job_fails_with_its_dependency() -> None:
    world = World({"north": 4})
    first = world.submit(NODE, run_time=10, code=1)
    held = submit_after(world, f"{first}")
    world.hold(held)
    world.advance(12)
    assert world.state(held) is JobState.FAILED


def test_priority_of_deferred_job_can_be_changed_and_it_can_be_cancelled() -> None:
    world = World({"north": 4})
    first = world.submit(NODE, run_time=10)
    second, third = submit_after(world, f"{first}"), submit_after(world, f"{first}")
    world.step([world.change_event(second, priority=Priority.HIGH), JobCancelled(third)])
    assert world.state(third) is JobState.CANCELLED
    assert world.queries.dependents_of(first) == [second]
    world.advance(15)
    assert (world.state(second), world.job(second).spec.priority) == (JobState.RUNNING, Priority.HIGH)


def test_deferred_time_does_not_count_for_the_starvation_guarantee() -> None:
    world = World({"north": 1}, Rules(low_patience=30))
    deferred = world.submit(NODE, begin=world.now + 40, run_time=100)
    running = world.submit(NODE, run_time=1000)
    world.advance(41)
    assert world.state(running) is JobState.RUNNING
    assert not world.queries.has_waited_long(world.job(deferred))
    world.advance(40)
    world.step()
    assert world.queries.has_waited_long(world.job(deferred))


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.HELD])
def test_waiting_job_fails_when_it_can_no_longer_meet_its_deadline(state: JobState) -> None:
    world = World({"north": 1}, now=DAY)
    world.submit(NODE, run_time=1000)
    job = world.submit(NODE, walltime=60.0, deadline=DAY + 100)
    if state is JobState.HELD:
        world.hold(job)
    world.advance(39)
    assert world.state(job) is state
    world.advance(1)
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason == "deadline 18:35:00 UTC can no longer be met: its walltime is 1:00"


def test_waiting_job_fails_when_its_program_would_be_warned_of_the_deadline_at_once() -> None:
    world = World({"north": 1}, rules=Rules(warning_max=20.0), now=DAY)
    world.submit(NODE, run_time=1000)
    job = world.submit(NODE, deadline=DAY + 100, warning=StopWarning(WarningSignal.TERM, 50.0))
    world.advance(79)
    assert world.state(job) is JobState.QUEUED
    world.advance(1)
    assert (world.state(job), world.job(job).reason) == (
        JobState.FAILED,
        "deadline 18:35:00 UTC can no longer be met: its program would be warned 0:20 before",
    )


def test_running_job_is_warned_and_stopped_at_its_deadline() -> None:
    world = World({"north": 1}, now=DAY)
    warning = StopWarning(WarningSignal.TERM, 10.0)
    job = world.submit(NODE, run_time=1000, deadline=DAY + 100, warning=warning)
    world.advance(89)
    assert world.state(job) is JobState.RUNNING
    world.advance(3)
    assert world.job(job).ending is JobState.FAILED
    world.advance(20)
    assert (world.state(job), world.job(job).reason) == (JobState.FAILED, "deadline 18:35:00 UTC reached")
    assert "warned" in world.timeline_events(job)


def test_requeued_job_fails_if_it_can_no_longer_meet_its_deadline() -> None:
    world = World({"north": 1}, now=DAY)
    job = world.submit(NODE, run_time=50, walltime=60.0, deadline=DAY + 100)
    world.advance(45)
    world.site_of(world.tokens(job)[0]).fail_component(world.tokens(job)[0], "node lost")
    world.settle()
    assert world.state(job) is JobState.FAILED
    assert world.job(job).reason.endswith("deadline 18:35:00 UTC can no longer be met: its walltime is 1:00")


def test_submission_after_itself_or_an_ended_job_is_rejected() -> None:
    world = World({"north": 1})
    for ident in (1, 77):
        clause = parse_clause(str(ident))
        spec = JobSpec(NODE, ("program",), after=(clause,))
        with pytest.raises(UsageError, match=f"after names job {ident}, which is not unfinished"):
            world.scheduler.apply(JobSubmitted(Job(1, spec, world.now, awaits=(clause,))), world.now)
    assert not world.scheduler.step([], world.now).jobs


def submit_array(world: World, text: str, *clauses: str, **spec: object) -> int:
    return submit_after(world, *clauses, array=TaskIndices.parse(text), **spec)


def test_deferred_array_starts_its_tasks_after_its_dependency() -> None:
    world = World({"north": 2})
    first = world.submit(NODE, run_time=10)
    array = submit_array(world, "1-3", f"{first}", run_time=10.0)
    last = submit_after(world, f"{array}", run_time=5)
    world.advance(9)
    assert world.job(array).tasks == ArrayTasks(3, ((0, 2),), 0.0)
    world.advance(3)
    assert (world.job(array).tasks or ArrayTasks(0, (), 0)).live == 2
    world.advance(60)
    assert [world.state(job) for job in (array, last)] == [JobState.SUCCEEDED] * 2
    assert (world.job(last).placed_at or 0) >= (world.job(array).ended_at or 0)
    check_nothing_remains(world)


def test_deferred_array_fails_with_its_dependency_and_can_be_cancelled() -> None:
    world = World({"north": 2})
    first = world.submit(NODE, run_time=10, code=1)
    failing, cancelled, held = (submit_array(world, "1-3", f"{first}") for _ in range(3))
    world.hold(held)
    world.cancel(cancelled)
    assert (world.state(cancelled), world.queries.queued) == (JobState.CANCELLED, 1)
    world.advance(12)
    assert [world.state(job) for job in (failing, held)] == [JobState.FAILED] * 2
    assert (world.job(failing).tasks or ArrayTasks(0, (), 0)).failed == 3
    assert world.job(held).reason == f"dependency: job {first} failed, and it had to succeed"
    assert world.queries.queued == 0
    check_nothing_remains(world)


def test_waiting_tasks_fail_when_they_can_no_longer_meet_the_deadline() -> None:
    world = World({"north": 1}, now=DAY)
    array = submit_array(world, "1-5", walltime=30.0, deadline=DAY + 60, run_time=20.0)
    world.advance(29)
    assert world.state(array) is JobState.QUEUED
    world.advance(30)
    tasks = world.job(array).tasks
    assert tasks is not None
    assert (tasks.succeeded, tasks.failed, tasks.live) == (2, 3, 0)
    assert world.job(array).reason == "deadline 18:34:20 UTC can no longer be met: its walltime is 0:30"


def test_explanation_of_deferred_job_names_conditions_and_room() -> None:
    world = World({"north": 2}, now=DAY)
    first = world.submit(NODE, run_time=10)
    job = submit_after(world, f"{first}:any", begin=DAY + 60)
    explanation = explain(world.queries, world.job(job), world.timeline, world.now)
    assert explanation.headline == f"waits for job {first} to end and until 18:34:20 UTC"
    assert explanation.notes == ("there is room for it now on north (1 node)",)
    spec = world.job(job).spec
    assert explain_submission(world.queries, spec, DAY, spec.after).headline == explanation.headline
    assert explain_submission(world.queries, spec, DAY + 61).headline == "would be placed at once on north (1 node)"
