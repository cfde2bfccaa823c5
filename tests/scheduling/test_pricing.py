"""Holding nodes against letting them go, by examples that can be reckoned in one's head, and by laws."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.scheduling.claiming.pricing import Outlook, Price

FILES_ON_THE_WAY = Outlook(held=8, seconds=20, wanted=1, width=10, start=1, lost=0.1, again=60)
"""Eight of its ten nodes are there, its next claiming try is in 20 seconds, others wait for nodes. Nodes that are left
alone for 20 seconds are gone one time in ten; then it starts a minute later."""

SECONDS = st.floats(0, 1e6)
CHANCES = st.floats(0, 1)
OUTLOOKS = st.builds(Outlook, st.integers(0, 500), SECONDS, CHANCES, st.integers(1, 1000), CHANCES, CHANCES, SECONDS)


def test_while_others_wait_nodes_are_not_held_that_are_seldom_lost() -> None:
    """8 nodes x 20 s = 160 node-seconds, for a risk of 10 nodes x 60 s x 10 % = 60."""
    assert FILES_ON_THE_WAY.holding.node_seconds == 160
    assert FILES_ON_THE_WAY.letting_go.node_seconds == pytest.approx(60)
    assert not FILES_ON_THE_WAY.holds


def test_where_local_users_are_quick_they_are_held() -> None:
    """Lost one time in two: 10 nodes x 60 s x 50 % = 300 node-seconds."""
    outlook = replace(FILES_ON_THE_WAY, lost=0.5)
    assert outlook.letting_go.node_seconds == pytest.approx(300)
    assert outlook.holds


def test_what_nobody_else_wants_is_held_for_the_least_risk() -> None:
    assert replace(FILES_ON_THE_WAY, wanted=0.0, lost=0.001).holds


def test_a_job_that_cannot_start_anyway_holds_nothing() -> None:
    """The rest of its nodes come in one case of a hundred: 10 x 60 s x 1 % = 6 node-seconds, even if all were lost."""
    assert not replace(FILES_ON_THE_WAY, start=0.01, lost=1.0).holds


def test_at_its_start_time_a_job_waits_for_nodes_that_are_soon_there_rather_than_queue_again() -> None:
    """Missing nodes in 5 s: 8 x 5 = 40 node-seconds against 10 x (60 - 5) = 550. In 50 s: 400 against 100."""
    assert Outlook(held=8, seconds=5, wanted=1, width=10, start=1, lost=1, again=60 - 5).holds
    assert not Outlook(held=8, seconds=50, wanted=1, width=10, start=1, lost=1, again=60 - 50).holds


def test_a_job_that_would_start_no_later_lets_go() -> None:
    assert not Outlook(held=0, seconds=10, wanted=1, width=10, start=1, lost=1, again=0).holds
    late = Outlook(held=1, seconds=10, wanted=0, width=10, start=1, lost=1, again=-5)
    assert late.letting_go == Price(10, 0.0, 1.0)
    assert not late.holds


def test_it_is_told_in_plain_words() -> None:
    assert str(FILES_ON_THE_WAY) == (
        "to hold 8 nodes for 20.0 s costs 160 node-seconds (others want them: 100%), "
        "to let go 60.0 node-seconds (10 nodes start 60.0 s later: 10%)"
    )


@given(outlook=OUTLOOKS)
def test_prices_are_never_negative_and_what_costs_nothing_to_lose_is_never_held(outlook: Outlook) -> None:
    assert outlook.holding.node_seconds >= 0
    assert outlook.letting_go.node_seconds >= 0
    for worthless in (replace(outlook, lost=0.0), replace(outlook, start=0.0), replace(outlook, again=0.0)):
        assert not worthless.holds


@given(outlook=OUTLOOKS, more=SECONDS, chance=CHANCES)
def test_who_holds_would_also_hold_for_a_shorter_time_fewer_nodes_and_at_a_greater_risk(
    outlook: Outlook, more: float, chance: float
) -> None:
    if outlook.holds:
        assert replace(outlook, seconds=min(outlook.seconds, more)).holds
        assert replace(outlook, held=outlook.held // 2).holds
        assert replace(outlook, wanted=min(outlook.wanted, chance)).holds
        assert replace(outlook, lost=max(outlook.lost, chance)).holds
        assert replace(outlook, again=outlook.again + more).holds
