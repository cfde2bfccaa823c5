"""No state of finished jobs is kept, whatever their end."""

from koalapy.model.job import JobState
from koalapy.model.job_spec import Priority
from koalapy.model.request import StopWarning, WarningSignal
from koalapy.scheduler.rules import Rules
from tests.scheduler.leftovers import FIRST_JOB, container_sizes, find_job_references
from tests.scheduler.requests import flexible
from tests.scheduler.test_failures import break_component
from tests.scheduler.world import World


def test_leftovers_of_job_cancelled_before_scan_are_removed() -> None:
    world = World({"north": 2}, Rules(event_driven=False), first_job=FIRST_JOB)
    job = world.submit(flexible(3))
    world.step([world.change_event(job, priority=Priority.HIGH)])
    assert find_job_references(world.scheduler)
    world.cancel(job)
    assert not find_job_references(world.scheduler)


def test_leftovers_search_finds_references_and_sizes() -> None:
    world = World({"north": 2}, first_job=FIRST_JOB)
    jobs = [world.submit(flexible(1)) for _ in range(3)]
    assert set().union(*find_job_references(world.scheduler).values()) == set(jobs)
    assert any(path.endswith("jobs") and size == 3 for path, size in container_sizes(world.scheduler).items())


def test_leftovers_of_unreported_warning_are_removed() -> None:
    """The walltime passes, or the job is cancelled, while its cluster is disconnected."""
    warning = StopWarning(WarningSignal.TERM, 5.0)
    for cancelled in (True, False):
        world = World({"north": 2}, Rules(unreachable_after=1.0), first_job=FIRST_JOB, lease=1.0)
        job = world.submit(flexible(1), walltime=30.0, run_time=1000.0, warning=warning)
        world.advance(5)
        assert world.state(job) is JobState.RUNNING
        world.disconnect("north")
        world.advance(2)
        if cancelled:
            world.cancel(job, warn=True)
        world.advance(100)
        world.connect("north")
        world.advance(100)
        assert world.state(job).is_final
        assert not {
            path for path in find_job_references(world.scheduler) if "_timers" not in path and "_strays" not in path
        }


def test_restart_pause_of_cancelled_job_causes_no_wakeup() -> None:
    world = World({"north": 2}, Rules(restart_pause=5000.0, restart_pause_max=5000.0, error_threshold=100))
    job = world.submit(flexible(1), run_time=1000)
    while world.job(job).retry_at is None:
        world.advance(1)
        break_component(world, world.tokens(job)[0])
        world.settle()
    assert world.scheduler.next_wakeup() == world.job(job).retry_at
    world.cancel(job)
    world.settle()
    assert world.scheduler.next_wakeup() is None
