"""What claims have shown of a cluster: chances that follow what happened, fade, and stay chances."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.scheduler.claims.evidence import (
    ASSUMED_LOSSES,
    ASSUMED_OVERTAKEN,
    ASSUMED_RETURNS,
    ASSUMED_START,
    HALF_LIFE,
    ClaimEvidence,
)

SECONDS = st.floats(0, 1e6)
SIZES = st.integers(0, 300)
STARTS = st.tuples(st.just("started"), SIZES, SECONDS)
OVERTAKEN = st.tuples(st.just("overtaken"), SIZES)
WATCHED = st.tuples(st.just("watched"), SIZES, SECONDS, st.booleans(), st.booleans())
STORIES = st.lists(st.tuples(SECONDS, st.one_of(STARTS, OVERTAKEN, WATCHED)), max_size=40)


def evidence_of(*story: tuple[float, tuple[Any, ...]]) -> ClaimEvidence:
    """What a story of moments and events leaves."""
    evidence = ClaimEvidence()
    for now, (event, size, *more) in story:
        match event:
            case "started":
                evidence.started(size, *more, now)
            case "overtaken":
                evidence.overtaken(size, now)
            case _:
                seconds, had_room, has_room = more
                evidence.watched(size, seconds, had_room=had_room, has_room=has_room, now=now)
    return evidence


def answers(evidence: ClaimEvidence, size: int, now: float, seconds: float = 10.0) -> list[float]:
    return [
        evidence.chance_overtaken(size, now),
        evidence.chance_lost(size, seconds, now),
        evidence.chance_returned(size, seconds, now),
        evidence.runner_wait(size, now),
    ]


def test_a_cluster_that_nobody_claimed_on_is_as_assumed_of_all() -> None:
    evidence = ClaimEvidence()
    assert evidence.claims(4, 0.0) == 0
    assert evidence.chance_overtaken(4, 0.0) == pytest.approx(ASSUMED_OVERTAKEN)
    assert evidence.runner_wait(4, 0.0) == pytest.approx(ASSUMED_START)
    assert evidence.chance_lost(4, 0.01, 0.0) == pytest.approx(0.01 * ASSUMED_LOSSES, rel=1e-3)
    assert evidence.until_returned(4, 0.0) == pytest.approx(1 / ASSUMED_RETURNS)


def test_three_runners_of_ten_overtaken_make_a_chance_of_three_in_ten() -> None:
    story = [("overtaken", 4)] * 30 + [("started", 4, 2.0)] * 70
    evidence = evidence_of(*((0.0, each) for each in story))
    assert evidence.chance_overtaken(4, 0.0) == pytest.approx(0.3, abs=0.01)
    assert evidence.runner_wait(4, 0.0) == pytest.approx(2.0, abs=0.05)
    assert evidence.claims(4, 0.0) == pytest.approx(100)


def test_nodes_that_are_gone_after_ten_seconds_each_time_are_likely_gone_in_ten_seconds() -> None:
    evidence = evidence_of(*[(0.0, ("watched", 4, 10.0, True, False))] * 50)
    assert evidence.chance_lost(4, 10.0, 0.0) == pytest.approx(0.63, abs=0.02), "at a rate of one in ten seconds"
    assert evidence.chance_lost(4, 0.0, 0.0) == 0
    assert evidence.chance_lost(4, inf, 0.0) == 1


def test_what_one_size_has_shown_is_believed_of_another_until_that_has_shown_better() -> None:
    evidence = evidence_of(*[(0.0, ("overtaken", 16))] * 50)
    unknown = evidence.chance_overtaken(1, 0.0)
    assert unknown > 0.9
    for _ in range(20):
        evidence.started(1, 0.1, 0.0)
    assert evidence.chance_overtaken(1, 0.0) < 0.1
    assert evidence.chance_overtaken(17, 0.0) > 0.9, "sixteen and seventeen are of one class"


def test_what_was_shown_weighs_half_after_its_half_life_and_fades_to_what_is_assumed() -> None:
    evidence = evidence_of(*[(0.0, ("overtaken", 4))] * 8, *[(0.0, ("watched", 4, 1.0, False, True))] * 8)
    assert evidence.claims(4, HALF_LIFE) == pytest.approx(4)
    untouched = ClaimEvidence()
    for late in (100 * HALF_LIFE, 1e12):
        assert answers(evidence, 4, late) == pytest.approx(answers(untouched, 4, late), rel=1e-3)


@given(story=STORIES, size=SIZES, now=SECONDS, seconds=SECONDS)
def test_chances_stay_chances_and_times_finite_whatever_happens_and_in_whatever_order(
    story: list[tuple[float, tuple[Any, ...]]], size: int, now: float, seconds: float
) -> None:
    evidence = evidence_of(*story)
    *chances, wait = answers(evidence, size, now, seconds)
    assert all(0 <= chance <= 1 for chance in chances)
    assert 0 <= wait < inf
    assert 0 < evidence.until_returned(size, now) < inf
    assert evidence.claims(size, now) >= 0


@given(story=STORIES, size=SIZES, now=SECONDS)
def test_each_event_moves_its_chance_the_way_it_points(
    story: list[tuple[float, tuple[Any, ...]]], size: int, now: float
) -> None:
    def after(*event: Any) -> list[float]:
        return answers(evidence_of(*story, (now, event)), size, now)

    before = answers(evidence_of(*story), size, now)
    assert after("overtaken", size)[0] >= before[0] - 1e-9
    assert after("started", size, 1.0)[0] <= before[0] + 1e-9
    assert after("watched", size, 0.0, True, False)[1] >= before[1] - 1e-9
    assert after("watched", size, 10.0, True, True)[1] <= before[1] + 1e-9
    assert after("watched", size, 0.0, False, True)[2] >= before[2] - 1e-9
    assert after("watched", size, 10.0, False, False)[2] <= before[2] + 1e-9


@given(story=STORIES, size=SIZES, now=SECONDS, shorter=SECONDS, more=SECONDS)
def test_the_longer_nodes_are_left_the_likelier_they_are_lost(
    story: list[tuple[float, tuple[Any, ...]]], size: int, now: float, shorter: float, more: float
) -> None:
    evidence = evidence_of(*story)
    assert evidence.chance_lost(size, shorter, now) <= evidence.chance_lost(size, shorter + more, now)
    assert evidence.chance_returned(size, shorter, now) <= evidence.chance_returned(size, shorter + more, now)


@given(events=st.lists(st.one_of(STARTS, OVERTAKEN, WATCHED), max_size=20), now=SECONDS, data=st.data())
def test_what_happens_in_one_moment_has_no_order(
    events: list[tuple[Any, ...]], now: float, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(events))
    one, other = (evidence_of(*((now, event) for event in each)) for each in (events, shuffled))
    assert answers(one, 4, now) == pytest.approx(answers(other, 4, now), rel=1e-6)
