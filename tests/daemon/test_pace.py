"""How fast requests may come: what a user may, and who shows tokens that nobody has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.daemon.auth.pace import BURST_SECONDS, FAILURE_INTERVAL, FAILURES_AT_ONCE, AgentAttempts, Pace
from koalapy.model.limits import Limits, LimitSettings, UserLimits
from koalapy.model.throttle import Throttle


class Clock:
    at = 0.0

    def __call__(self) -> float:
        return self.at


@pytest.fixture
def clock() -> Clock:
    return Clock()


def pace(clock: Clock, settings: LimitSettings, groups: tuple[str, ...] = ()) -> Pace:
    return Pace(Limits(settings, lambda _: groups), clock)


def allowed(pace: Pace, user: str, most: int = 100) -> int:
    return next((count for count in range(most) if pace.find_excess(user)), most)


def test_so_many_may_come_at_once_and_then_as_fast_as_the_limit_says(clock: Clock) -> None:
    paced = pace(clock, LimitSettings(UserLimits(requests_per_second=2.0)))
    assert allowed(paced, "alice") == 2 * BURST_SECONDS
    found = paced.find_excess("alice")
    assert found is not None
    assert (found[0].name, found[0].limit, found[1]) == ("requests_per_second", 2.0, 0.5)
    clock.at += 3
    assert allowed(paced, "alice") == 6
    assert allowed(paced, "bob") == 2 * BURST_SECONDS, "what others do is theirs"


def test_a_group_shares_its_limit_and_its_members_have_their_own_beside(clock: Clock) -> None:
    limits = LimitSettings(
        users={"alice": UserLimits(requests_per_second=1.0)}, groups={"physics": UserLimits(requests_per_second=2.0)}
    )
    paced = pace(clock, limits, ("physics", "nobody-limits-these"))
    assert allowed(paced, "alice") == 5
    assert allowed(paced, "bob") == 5, "what alice has left of the group's"
    assert allowed(paced, "carl") == 0


def test_one_that_is_refused_uses_up_nothing(clock: Clock) -> None:
    limits = LimitSettings(UserLimits(requests_per_second=1.0), groups={"all": UserLimits(requests_per_second=10.0)})
    paced = pace(clock, limits, ("all",))
    for _ in range(1000):
        paced.find_excess("alice")
    assert allowed(paced, "bob") == 5


def test_a_slow_limit_lets_one_through_at_a_time(clock: Clock) -> None:
    paced = pace(clock, LimitSettings(UserLimits(requests_per_second=0.01)))
    assert allowed(paced, "alice") == 1
    clock.at += 100
    assert allowed(paced, "alice") == 1


def test_without_limits_nothing_is_counted(clock: Clock) -> None:
    paced = Pace(None, clock)
    assert allowed(paced, "alice") == 100
    assert not paced._requests


def test_who_guesses_is_not_listened_to_after_a_while(clock: Clock) -> None:
    paced = pace(clock, LimitSettings())
    for _ in range(int(FAILURES_AT_ONCE)):
        assert not paced.block_time("192.0.2.7")
        paced.count_failure("192.0.2.7")
    assert paced.block_time("192.0.2.7") == 2.0
    assert not paced.block_time("192.0.2.8")
    clock.at += 2
    assert not paced.block_time("192.0.2.7")


def test_a_network_of_addresses_is_one_who_guesses(clock: Clock) -> None:
    paced = pace(clock, LimitSettings())
    for number in range(int(FAILURES_AT_ONCE)):
        paced.count_failure(f"2001:db8::{number:x}")
    assert paced.block_time("2001:db8::ffff:1")
    assert not paced.block_time("2001:db8:0:1::1")
    assert not paced.block_time("unknown")


def test_memory_is_bounded_however_many_come() -> None:
    throttle = Throttle(1.0, 1.0, max_keys=3)
    for number in range(1000):
        throttle.count(number, 0.0)
        throttle.count("busy", 0.0)
    assert len(throttle._full_at) == 3
    assert throttle.wait_time("busy", 0.0)


@given(rate=st.floats(0.01, 100), burst=st.floats(1, 100), pauses=st.lists(st.floats(0, 20), max_size=60))
def test_never_more_than_the_burst_and_what_has_come_since(rate: float, burst: float, pauses: list[float]) -> None:
    throttle, now, taken = Throttle(burst, 1 / rate), 0.0, 0
    for pause in pauses:
        now += pause
        while not throttle.wait_time("x", now):
            throttle.count("x", now)
            taken += 1
        assert taken <= burst + now * rate + 1e-6
        assert throttle.wait_time("x", now) <= 1 / rate + 1e-9


def test_agent_attempts_from_one_address_are_bounded_for_all_clusters(clock: Clock) -> None:
    attempts = AgentAttempts(clock)
    for number in range(int(FAILURES_AT_ONCE)):
        assert not attempts.block_time(f"cluster-{number}", "192.0.2.7")
        attempts.count_failure(f"cluster-{number}", "192.0.2.7")
    assert attempts.block_time("north", "192.0.2.7") == FAILURE_INTERVAL
    assert not attempts.block_time("north", "192.0.2.8")
    clock.at += FAILURE_INTERVAL
    assert not attempts.block_time("north", "192.0.2.7")


def test_agent_attempts_at_one_cluster_are_bounded_for_all_addresses_but_its_agents(clock: Clock) -> None:
    attempts = AgentAttempts(clock)
    attempts.record_success("north", "192.0.2.7")
    for number in range(int(FAILURES_AT_ONCE)):
        attempts.count_failure("north", f"198.51.100.{number}")
    assert attempts.block_time("north", "203.0.113.1") == FAILURE_INTERVAL
    assert not attempts.block_time("north", "192.0.2.7")
    assert not attempts.block_time("south", "203.0.113.1")
