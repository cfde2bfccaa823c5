"""Of jobs that are over nothing is kept, however they came to their end."""

from koalapy.model.job import Priority
from koalapy.scheduling.events import JobPriorityChanged
from koalapy.scheduling.rules import Rules
from tests.scheduling.remains import FIRST_JOB, jobs_named, sizes
from tests.scheduling.requests import flexible
from tests.scheduling.world import World


def test_nothing_is_kept_of_a_job_that_came_back_to_its_place_and_left_before_any_scan() -> None:
    world = World({"north": 2}, Rules(event_driven=False), first_job=FIRST_JOB)
    job = world.submit(flexible(3))
    world.step([JobPriorityChanged(job, Priority.HIGH)])
    assert jobs_named(world.scheduler)
    world.cancel(job)
    assert not jobs_named(world.scheduler)


def test_what_is_looked_for_is_found() -> None:
    world = World({"north": 2}, first_job=FIRST_JOB)
    jobs = [world.submit(flexible(1)) for _ in range(3)]
    assert set().union(*jobs_named(world.scheduler).values()) == set(jobs)
    assert any(path.endswith("jobs") and size == 3 for path, size in sizes(world.scheduler).items())
