"""Deadlines come when they are due, in order, and no earlier."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from koalapy.scheduler.state import Deadline, Timers
from tests.scheduler.requests import flexible
from tests.scheduler.world import World


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0, 20)))
def test_each_comes_once_in_order_when_it_is_due(deadlines: list[float], pauses: list[float]) -> None:
    timers = Timers()
    for job, at in enumerate(deadlines):
        timers.add(at, Deadline.BARRIER, job=job)
    now, fired = 0.0, []
    for pause in [*pauses, 200.0]:
        now += pause
        due = [(timer.at, timer.job) for timer in timers.pop_due(now)]
        assert all(at <= now for at, _ in due)
        fired += due
        waiting = sorted(at for job, at in enumerate(deadlines) if job not in {j for _, j in fired})
        assert timers.next_at() == (waiting[0] if waiting else None)
        assert not waiting or waiting[0] > now
    assert fired == sorted((at, job) for job, at in enumerate(deadlines))


def test_one_that_is_postponed_comes_again_as_it_was() -> None:
    timers = Timers()
    timers.add(1.0, Deadline.CLAIM_GRACE, job=3, generation=2, component=1)
    (timer,) = timers.pop_due(1.0)
    timers.postpone(timer, 5.0)
    assert list(timers.pop_due(4.9)) == []
    (again,) = timers.pop_due(5.0)
    assert (again.kind, again.job, again.generation, again.component) == (Deadline.CLAIM_GRACE, 3, 2, 1)
    assert timers.next_at() is None


def test_one_that_is_added_while_others_come_is_not_lost() -> None:
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


attempts = st.tuples(st.integers(1, 5), st.integers(1, 2))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), attempts, st.floats(0, 100)),
            st.tuples(st.just("add another"), attempts, st.floats(0, 100)),
            st.tuples(st.just("forget"), attempts, st.just(0.0)),
            st.tuples(st.just("forget those"), attempts, st.just(0.0)),
            st.tuples(st.just("pass"), attempts, st.floats(0, 30)),
        )
    )
)
def test_those_that_mean_nothing_any_more_never_come_and_take_no_more_room_than_the_others(steps: list[Any]) -> None:
    timers, now = Timers(), 0.0
    waiting: list[tuple[float, tuple[int, int], Deadline]] = []
    over: set[tuple[int, int]] = set()
    kinds = {"add": Deadline.WALLTIME, "add another": Deadline.LAUNCH}
    for what, attempt, number in steps:
        if what in kinds and attempt not in over:
            timers.add(now + number, kinds[what], job=attempt[0], generation=attempt[1])
            waiting.append((now + number, attempt, kinds[what]))
        elif what == "forget":
            timers.cancel(*attempt)
            over.add(attempt)
            waiting = [each for each in waiting if each[1] != attempt]
        elif what == "forget those":
            timers.cancel(*attempt, Deadline.LAUNCH, Deadline.BARRIER)
            waiting = [each for each in waiting if each[1:] != (attempt, Deadline.LAUNCH)]
        elif what == "pass":
            now += number
            due = sorted(each[0] for each in waiting if each[0] <= now)
            assert [timer.at for timer in timers.pop_due(now)] == due
            waiting = [each for each in waiting if each[0] > now]
        assert timers.next_at() == min((each[0] for each in waiting), default=None)
        assert len(timers) <= 2 * len(waiting) + 1


def test_a_deadline_that_waited_for_news_does_not_come_back_after_its_attempt() -> None:
    timers = Timers()
    for at in (1.0, 9.0, 9.5):
        timers.add(at, Deadline.BARRIER, job=3, generation=2)
    timers.add(8.0, Deadline.LOST, cluster="north")
    timers.add(8.5, Deadline.LOST, cluster="south")
    (timer,) = timers.pop_due(1.0)
    timers.cancel(3, 2)
    timers.postpone(timer, 5.0)
    assert [each.cluster for each in timers.pop_due(20.0) if each.kind is Deadline.LOST] == ["north", "south"]
    assert timers.next_at() is None
    assert len(timers) == 0


def test_while_a_job_runs_nobody_is_woken_before_its_walltime_is_over() -> None:
    """What was to be done before it started means nothing any more."""
    world = World({"north": 8})
    job = world.submit(flexible(4), run_time=100, walltime=300)
    world.advance(5)
    attempt = world.job(job).attempt
    assert attempt is not None
    assert attempt.launched_at is not None
    assert world.scheduler.next_wakeup() == attempt.launched_at + 300
