"""Steps with a time budget: unfinished scans continue in the next step in the same order."""

from functools import partial
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobState
from koalapy.model.job_spec import JobSpec, Launcher, Priority
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed, flexible, nonfixed
from tests.scheduler.world import World

SIZES = {"north": 6, "south": 4}
drawn_requests = st.one_of(
    st.builds(flexible, st.integers(1, 10)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda s: nonfixed(*s)),
)
drawn_specs = st.builds(
    lambda request, priority: JobSpec(request, ("program",), priority=priority, launcher=Launcher.PROCESSES),
    drawn_requests,
    st.sampled_from(Priority),
)


def create_world(budget: float | None, **rules: object) -> World:
    """Create a world with a clock that advances by one with every read."""
    clock = partial(next, count(1.0)) if budget else None
    return World(SIZES, Rules(step_budget=budget or 1.0, preemption="never", **rules), clock=clock)  # type: ignore[arg-type]


@given(
    job_specs=st.lists(drawn_specs, max_size=15),
    budget=st.sampled_from([0.001, 2.0, 3.0, 7.0]),
    queue=st.sampled_from(["scan", "head", "fcfs"]),
    order=st.sampled_from(["fcfs", "narrowest-first"]),
    plan_after=st.sampled_from([0.0, 3600.0]),
)
def test_budget_does_not_change_placement_order(
    job_specs: list[JobSpec], budget: float, queue: str, order: str, plan_after: float
) -> None:
    placements = []
    for seconds in (None, budget):
        grid = create_world(seconds, queue=queue, queue_order=order, plan_after=plan_after)
        users = [grid.sites[name].add_local_user(size) for name, size in SIZES.items()]
        grid.settle()
        grid.submit_together(job_specs)
        grid.finish()
        for site, user in zip(grid.sites.values(), users, strict=True):
            site.remove_local_user(user)
            site.send_report()
        grid.deliver_from_all_sites()
        grid.finish()
        placements.append([(entry.job, entry.reason) for entry in grid.timeline if entry.event == "placed"])
    assert placements[0] == placements[1]


def test_budget_keeps_woken_job_when_others_are_woken() -> None:
    sizes = {"east": 1, "north": 1, "south": 1, "west": 1}
    clock = partial(next, count(1.0))
    grid = World(sizes, Rules(step_budget=0.001, preemption="never"), clock=clock, manual=True)
    for name, site in grid.sites.items():
        grid.deliver(name)
        site.add_local_user(1)
        site.send_report()
        grid.deliver(name)
    first, second, third = grid.submit_together(
        [JobSpec(fixed(**{name: 1}), ("program",)) for name in ("east", "north", "south")]
    )
    grid.finish()
    for name in ("east", "north"):
        grid.sites[name].remove_local_user("user-1")
        grid.sites[name].send_report()
    grid.deliver_from_all_sites()
    assert [grid.state(job) for job in (first, second)] == [JobState.CLAIMING, JobState.QUEUED]
    grid.sites["south"].remove_local_user("user-1")
    grid.sites["south"].send_report()
    grid.deliver("south")
    grid.finish()
    assert [grid.state(job) for job in (second, third)] == [JobState.CLAIMING] * 2
