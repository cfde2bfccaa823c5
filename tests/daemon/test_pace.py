"""Rate limits of users, and of requests with unknown tokens."""

import pytest

from koalapy.daemon.auth.pace import BURST_SECONDS, FAILURES_AT_ONCE, Pace
from koalapy.model.limits import Limits, LimitSettings, UserLimits
from koalapy.model.throttle import Throttle


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make_pace(clock: Clock, settings: LimitSettings, groups: tuple[str, ...] = ()) -> Pace:
    return Pace(Limits(settings, lambda _: groups), clock)


def count_allowed(pace: Pace, user: str, max_requests: int = 100) -> int:
    return next((count for count in range(max_requests) if pace.find_excess(user)), max_requests)


def test_pace_allows_burst_and_then_rate(clock: Clock) -> None:
    paced = make_pace(clock, LimitSettings(UserLimits(requests_per_second=2.0)))
    assert count_allowed(paced, "alice") == 2 * BURST_SECONDS
    excess = paced.find_excess("alice")
    assert excess is not None
    assert (excess[0].name, excess[0].limit, excess[1]) == ("requests_per_second", 2.0, 0.5)
    clock.now += 3
    assert count_allowed(paced, "alice") == 6
    assert count_allowed(paced, "bob") == 2 * BURST_SECONDS, "what others do is theirs"


def test_pace_of_group_limits_members_together(clock: Clock) -> None:
    limits = LimitSettings(
        users={"alice": UserLimits(requests_per_second=1.0)}, groups={"physics": UserLimits(requests_per_second=2.0)}
    )
    paced = make_pace(clock, limits, ("physics", "nobody-limits-these"))
    assert count_allowed(paced, "alice") == 5
    assert count_allowed(paced, "bob") == 5, "what alice has left of the group's"
    assert count_allowed(paced, "carl") == 0


def test_pace_rejected_request_is_not_counted(clock: Clock) -> None:
    limits = LimitSettings(UserLimits(requests_per_second=1.0), groups={"all": UserLimits(requests_per_second=10.0)})
    paced = make_pace(clock, limits, ("all",))
    for _ in range(1000):
        paced.find_excess("alice")
    assert count_allowed(paced, "bob") == 5


def test_pace_with_slow_limit_allows_one_at_a_time(clock: Clock) -> None:
    paced = make_pace(clock, LimitSettings(UserLimits(requests_per_second=0.01)))
    assert count_allowed(paced, "alice") == 1
    clock.now += 100
    assert count_allowed(paced, "alice") == 1


def test_pace_without_limits_counts_nothing(clock: Clock) -> None:
    paced = Pace(None, clock)
    assert count_allowed(paced, "alice") == 100


def test_pace_blocks_address_after_unknown_tokens(clock: Clock) -> None:
    paced = make_pace(clock, LimitSettings())
    for _ in range(int(FAILURES_AT_ONCE)):
        assert not paced.block_time("192.0.2.7")
        paced.count_failure("192.0.2.7")
    assert paced.block_time("192.0.2.7") == 2.0
    assert not paced.block_time("192.0.2.8")
    clock.now += 2
    assert not paced.block_time("192.0.2.7")


def test_pace_counts_ipv6_network_as_one_address(clock: Clock) -> None:
    paced = make_pace(clock, LimitSettings())
    for number in range(int(FAILURES_AT_ONCE)):
        paced.count_failure(f"2001:db8::{number:x}")
    assert paced.block_time("2001:db8::ffff:1")
    assert not paced.block_time("2001:db8:0:1::1")
    assert not paced.block_time("unknown")


def test_pace_memory_is_bounded() -> None:
    throttle = Throttle(1.0, 1.0, max_keys=3)
    for number in range(1000):
        throttle.count(number, 0.0)
        throttle.count("busy", 0.0)
    assert len(throttle._full_at) == 3
    assert throttle.wait_time("busy", 0.0)
