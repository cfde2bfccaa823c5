"""What claims have shown of a cluster: chances that follow what happened, fade, and stay chances."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.scheduler.claims.evidence import ASSUMED_IN_VAIN, ASSUMED_START, HALF_LIFE, ClaimEvidence

SECONDS = st.floats(0, 1e6)
SIZES = st.integers(0, 300)
STARTS = st.tuples(st.just("started"), SIZES, SECONDS)
OVERTAKEN = st.tuples(st.just("overtaken"), SIZES)
FAILED = st.tuples(st.just("failed"), SIZES)
EVENTS = st.one_of(STARTS, OVERTAKEN, FAILED)
STORIES = st.lists(st.tuples(SECONDS, EVENTS), max_size=40)


def evidence_of(*story: tuple[float, tuple[Any, ...]]) -> ClaimEvidence:
    """Return the evidence that a story of times and events leaves."""
    evidence = ClaimEvidence()
    for now, (event, *arguments) in story:
        getattr(evidence, event)(*arguments, now)
    return evidence


def answers(evidence: ClaimEvidence, size: int, now: float) -> list[float]:
    return [evidence.chance_in_vain(size, now), evidence.mean_wait(now)]


def test_evidence_without_claims_is_as_assumed() -> None:
    evidence = ClaimEvidence()
    assert evidence.claims(4, 0.0) == 0
    assert answers(evidence, 4, 0.0) == pytest.approx([ASSUMED_IN_VAIN, ASSUMED_START])


@pytest.mark.parametrize("event", ["overtaken", "failed"])
def test_evidence_of_three_runners_of_ten_in_vain_gives_three_in_ten(event: str) -> None:
    story = [(event, 4)] * 30 + [("started", 4, 2.0)] * 70
    evidence = evidence_of(*((0.0, each) for each in story))
    assert evidence.chance_in_vain(4, 0.0) == pytest.approx(0.3, abs=0.01)
    assert evidence.mean_wait(0.0) == pytest.approx(2.0)
    assert evidence.claims(4, 0.0) == pytest.approx(100)


def test_evidence_of_one_size_holds_for_another_until_that_has_its_own() -> None:
    evidence = evidence_of(*[(0.0, ("overtaken", 16))] * 50)
    assert evidence.chance_in_vain(1, 0.0) > 0.9
    for _ in range(20):
        evidence.started(1, 0.1, 0.0)
    assert evidence.chance_in_vain(1, 0.0) < 0.1
    assert evidence.chance_in_vain(17, 0.0) > 0.9, "sixteen and seventeen are of one class"


def test_evidence_weighs_half_after_its_half_life_and_fades_to_what_is_assumed() -> None:
    evidence = evidence_of(*[(0.0, ("overtaken", 4))] * 8)
    assert evidence.claims(4, HALF_LIFE) == pytest.approx(4)
    for late in (100 * HALF_LIFE, 1e12):
        assert answers(evidence, 4, late) == pytest.approx([ASSUMED_IN_VAIN, ASSUMED_START], rel=1e-3)


@given(story=STORIES, size=SIZES, now=SECONDS)
def test_evidence_of_any_story_gives_chances_that_each_event_moves_its_way(
    story: list[tuple[float, tuple[Any, ...]]], size: int, now: float
) -> None:
    def after(*event: Any) -> float:
        return evidence_of(*story, (now, event)).chance_in_vain(size, now)

    evidence = evidence_of(*story)
    chance = evidence.chance_in_vain(size, now)
    assert 0 <= chance <= 1
    assert evidence.mean_wait(now) >= 0
    assert evidence.claims(size, now) >= 0
    assert min(after("overtaken", size), after("failed", size)) >= chance - 1e-9
    assert after("started", size, 1.0) <= chance + 1e-9


@given(events=st.lists(EVENTS, max_size=20), now=SECONDS, data=st.data())
def test_evidence_of_one_moment_is_independent_of_the_order(
    events: list[tuple[Any, ...]], now: float, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(events))
    one, other = (evidence_of(*((now, event) for event in each)) for each in (events, shuffled))
    assert answers(one, 4, now) == pytest.approx(answers(other, 4, now), rel=1e-6)
