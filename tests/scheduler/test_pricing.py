"""Holding nodes against letting them go, by examples that can be reckoned in one's head, and by laws."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.scheduler.claims.pricing import Outlook, later_after_another_try, later_from_the_queue, waited_for

FILES_ON_THE_WAY = Outlook(
    held=8,
    seconds=20,
    wanted=1,
    width=10,
    later=later_after_another_try(start=1, lost=0.1, again=60, breaks=0, seconds=20),
)
"""Eight of its ten nodes are there, its next claiming try is in 20 seconds, and others wait for such nodes. Nodes that
are left alone for 20 seconds are gone one time in ten; then it starts a minute later: by 6 seconds on average."""

SECONDS = st.floats(0, 1e6)
CHANCES = st.floats(0, 1)
COUNTS = st.integers(1, 1000)
OUTLOOKS = st.builds(Outlook, st.integers(0, 500), SECONDS, st.floats(0, 100), COUNTS, SECONDS)


def test_while_others_wait_nodes_are_not_held_that_are_seldom_lost() -> None:
    """8 nodes x 20 s = 160 node-seconds, for a risk of 10 nodes x 60 s x 10 % = 60."""
    assert FILES_ON_THE_WAY.holding == 160
    assert FILES_ON_THE_WAY.letting_go == pytest.approx(60)
    assert not FILES_ON_THE_WAY.holds


def test_where_local_users_are_quick_they_are_held() -> None:
    """Lost one time in two: 10 nodes x 60 s x 50 % = 300 node-seconds."""
    later = later_after_another_try(start=1, lost=0.5, again=60, breaks=0, seconds=20)
    assert later == 30
    assert replace(FILES_ON_THE_WAY, later=later).holds


def test_what_nobody_else_wants_is_held_for_the_least_risk() -> None:
    assert replace(FILES_ON_THE_WAY, wanted=0.0, later=0.001).holds


def test_a_runner_that_breaks_had_better_do_so_soon() -> None:
    """One of two breaks, which shows 20 s later if it is started 20 s later; and then nothing is held any more."""
    later = later_after_another_try(start=0.5, lost=0.0, again=60, breaks=0.5, seconds=20)
    assert later == 10
    assert replace(FILES_ON_THE_WAY, seconds=10, later=later).holds, "80 node-seconds against 100"


def test_at_its_start_time_a_job_waits_for_nodes_that_are_soon_there_rather_than_queue_again() -> None:
    """Missing nodes that come in 5 s spare it 60 - 5; in 50 s, 60 - 50: 8 x 5 = 40 against 550, 8 x 50 against 100."""
    soon, late = (later_from_the_queue(start=1, again=60, seconds=seconds) for seconds in (5, 50))
    assert (soon, late) == (55, 10)
    assert replace(FILES_ON_THE_WAY, seconds=5, later=soon).holds
    assert not replace(FILES_ON_THE_WAY, seconds=50, later=late).holds


def test_what_is_waited_for_in_vain_is_lost_twice() -> None:
    """It comes one time in ten: 6 s are spared on average, and 10 s waited."""
    assert later_from_the_queue(start=0.1, again=60, seconds=10) == 0


def test_a_job_that_would_start_no_later_lets_go() -> None:
    assert not Outlook(held=0, seconds=10, wanted=1, width=10, later=0).holds
    assert not Outlook(held=1, seconds=10, wanted=0, width=10, later=0).holds


def test_a_node_is_wanted_as_much_as_others_wait_for_it() -> None:
    assert waited_for(8, 0, 32) == 0, "nobody waits"
    assert waited_for(8, 2, 32) == 0.25, "for two of the eight"
    assert waited_for(8, 20, 32) == 1, "for all of them"
    assert waited_for(8, 96, 32) == 3, "three grids full of jobs wait for each other, and all for these"
    assert waited_for(0, 5, 0) == 5, "a grid that has lost its nodes"


def test_it_is_told_in_plain_words() -> None:
    assert str(FILES_ON_THE_WAY) == (
        "to hold 8 nodes for 20.0 s costs 160 node-seconds (others want them: 100%), "
        "to let go 60.0 node-seconds (10 nodes start 6.00 s later on average)"
    )


@given(start=CHANCES, lost=CHANCES, again=SECONDS, breaks=CHANCES, seconds=SECONDS)
def test_nobody_starts_earlier_by_letting_go(
    start: float, lost: float, again: float, breaks: float, seconds: float
) -> None:
    assert 0 <= later_after_another_try(start, lost, again, breaks, seconds) <= again + seconds
    assert 0 <= later_from_the_queue(start, again, seconds) <= again
    assert later_after_another_try(start, 0.0, again, 0.0, seconds) == 0, "nothing is lost"
    assert later_from_the_queue(0.0, again, seconds) == 0, "it does not start"


@given(held=COUNTS, asked_for=st.floats(0, 1e6), more=st.floats(0, 1e6), total=COUNTS)
def test_the_more_wait_the_more_is_wanted_and_what_some_wait_for_is_of_use_at_most_once_where_there_is_room(
    held: int, asked_for: float, more: float, total: int
) -> None:
    assert 0 <= waited_for(held, asked_for, total) <= waited_for(held, asked_for + more, total)
    assert held * waited_for(held, asked_for, total) <= asked_for + 1e-6 * held
    if asked_for <= total:
        assert waited_for(held, asked_for, total) <= 1


@given(outlook=OUTLOOKS, more=SECONDS)
def test_who_holds_would_also_hold_for_a_shorter_time_and_fewer_nodes_and_to_spare_more(
    outlook: Outlook, more: float
) -> None:
    assert outlook.holding >= 0
    assert outlook.letting_go >= 0
    if outlook.holds:
        assert replace(outlook, seconds=min(outlook.seconds, more)).holds
        assert replace(outlook, held=outlook.held // 2).holds
        assert replace(outlook, wanted=outlook.wanted / 2).holds
        assert replace(outlook, later=outlook.later + more).holds
