"""Timers of deadlines: firing in order and in time, postponing and cancelling."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from koalapy.scheduler.state import Deadline, Timers
from tests.scheduler.requests import flexible
from tests.scheduler.world import World


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0, 20)))
def test_timers_fire_once_in_order_when_due(deadlines: list[float], pauses: list[float]) -> None:
    timers = Timers()
    for job, deadline in enumerate(deadlines):
        timers.add(deadline, Deadline.BARRIER, job=job)
    now, fired = 0.0, []
    for pause in [*pauses, 200.0]:
        now += pause
        due = [(timer.at, timer.job) for timer in timers.pop_due(now)]
        assert all(deadline <= now for deadline, _ in due)
        fired += due
        waiting = sorted(deadline for job, deadline in enumerate(deadlines) if job not in {j for _, j in fired})
        assert timers.next_at() == (waiting[0] if waiting else None)
        assert not waiting or waiting[0] > now
    assert fired == sorted((deadline, job) for job, deadline in enumerate(deadlines))


def test_timers_postponed_deadline_fires_again() -> None:
    timers = Timers()
    timers.add(1.0, Deadline.CLAIM_GRACE, job=3, generation=2, component=1)
    (timer,) = timers.pop_due(1.0)
    timers.postpone(timer, 5.0)
    assert list(timers.pop_due(4.9)) == []
    (postponed,) = timers.pop_due(5.0)
    assert (postponed.kind, postponed.job, postponed.generation, postponed.component) == (Deadline.CLAIM_GRACE, 3, 2, 1)
    assert timers.next_at() is None


def test_timers_deadline_added_while_firing_is_kept() -> None:
    timers = Timers()
    timers.add(1.0, Deadline.UNREACHABLE, cluster="north")
    kinds = []
    for timer in timers.pop_due(2.0):
        kinds.append(timer.kind)
        if timer.kind is Deadline.UNREACHABLE:
            timers.add(2.0, Deadline.LOST, cluster="north")
            timers.add(3.0, Deadline.STOP, job=1)
    assert kinds == [Deadline.UNREACHABLE, Deadline.LOST]
    assert timers.next_at() == 3.0


drawn_attempts = st.tuples(st.integers(1, 5), st.integers(1, 2))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), drawn_attempts, st.floats(0, 100)),
            st.tuples(st.just("add another"), drawn_attempts, st.floats(0, 100)),
            st.tuples(st.just("forget"), drawn_attempts, st.just(0.0)),
            st.tuples(st.just("forget those"), drawn_attempts, st.just(0.0)),
            st.tuples(st.just("pass"), drawn_attempts, st.floats(0, 30)),
        )
    )
)
def test_timers_cancelled_deadlines_never_fire_and_are_removed(steps: list[Any]) -> None:
    timers, now = Timers(), 0.0
    waiting: list[tuple[float, tuple[int, int], Deadline]] = []
    ended: set[tuple[int, int]] = set()
    kinds = {"add": Deadline.WALLTIME, "add another": Deadline.LAUNCH}
    for action, attempt, number in steps:
        if action in kinds and attempt not in ended:
            timers.add(now + number, kinds[action], job=attempt[0], generation=attempt[1])
            waiting.append((now + number, attempt, kinds[action]))
        elif action == "forget":
            timers.cancel(*attempt)
            ended.add(attempt)
            waiting = [entry for entry in waiting if entry[1] != attempt]
        elif action == "forget those":
            timers.cancel(*attempt, Deadline.LAUNCH, Deadline.BARRIER)
            waiting = [entry for entry in waiting if entry[1:] != (attempt, Deadline.LAUNCH)]
        elif action == "pass":
            now += number
            due = sorted(entry[0] for entry in waiting if entry[0] <= now)
            assert [timer.at for timer in timers.pop_due(now)] == due
            waiting = [entry for entry in waiting if entry[0] > now]
        assert timers.next_at() == min((entry[0] for entry in waiting), default=None)
        assert len(timers) <= 2 * len(waiting) + 1


def test_timers_postponed_deadline_of_ended_attempt_is_dropped() -> None:
    timers = Timers()
    for deadline in (1.0, 9.0, 9.5):
        timers.add(deadline, Deadline.BARRIER, job=3, generation=2)
    timers.add(8.0, Deadline.LOST, cluster="north")
    timers.add(8.5, Deadline.LOST, cluster="south")
    (timer,) = timers.pop_due(1.0)
    timers.cancel(3, 2)
    timers.postpone(timer, 5.0)
    assert [due_timer.cluster for due_timer in timers.pop_due(20.0) if due_timer.kind is Deadline.LOST] == [
        "north",
        "south",
    ]
    assert timers.next_at() is None
    assert len(timers) == 0


def test_timers_running_job_causes_no_wakeup_before_walltime() -> None:
    """Deadlines of the start are cancelled."""
    world = World({"north": 8})
    job = world.submit(flexible(4), run_time=100, walltime=300)
    world.advance(5)
    attempt = world.job(job).attempt
    assert attempt is not None
    assert attempt.launched_at is not None
    assert world.scheduler.next_wakeup() == attempt.launched_at + 300
