"""What claims have shown of a cluster: it follows what happened, fades, and is told to users."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import JobState
from koalapy.scheduler.cluster_conditions import ASSUMED_START, HALF_LIFE, ClaimEvidence
from koalapy.scheduler.explain.explain import explain
from koalapy.scheduler.rules import Rules
from tests.scheduler.requests import fixed
from tests.scheduler.world import World

SECONDS = st.floats(0, 1e6)
EVENTS = st.one_of(st.tuples(st.just("record_started"), SECONDS), st.tuples(st.just("record_failed")))


def evidence_of(*story: tuple[float, tuple[Any, ...]]) -> ClaimEvidence:
    """Return the evidence that a story of times and events leaves."""
    evidence = ClaimEvidence()
    for now, (event, *arguments) in story:
        getattr(evidence, event)(*arguments, now)
    return evidence


def answers(evidence: ClaimEvidence, now: float) -> tuple[float, float, float]:
    return evidence.claims(now), evidence.failed_fraction(now), evidence.mean_wait(now)


def test_evidence_without_claims_is_as_assumed() -> None:
    assert answers(ClaimEvidence(), 0.0) == (0, 0, ASSUMED_START)


def test_evidence_of_three_runners_of_ten_in_vain_gives_three_in_ten() -> None:
    evidence = evidence_of(*[(0.0, ("record_failed",))] * 3, *[(0.0, ("record_started", 2.0))] * 7)
    assert answers(evidence, 0.0) == pytest.approx((10, 0.3, 2.0))


def test_evidence_weighs_half_after_its_half_life_and_fades_to_nothing() -> None:
    evidence = evidence_of(*[(0.0, ("record_failed",))] * 8, (HALF_LIFE, ("record_started", 3.0)))
    assert answers(evidence, HALF_LIFE) == pytest.approx((5, 0.8, 3.0))
    assert evidence.claims(1e12) == pytest.approx(0)


@given(events=st.lists(EVENTS, max_size=20), now=SECONDS, later=SECONDS, data=st.data())
def test_evidence_of_one_moment_is_a_share_whatever_the_order(
    events: list[tuple[Any, ...]], now: float, later: float, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(events))
    one, other = (evidence_of(*((now, event) for event in each)) for each in (events, shuffled))
    assert answers(one, now + later) == pytest.approx(answers(other, now + later), rel=1e-6)
    assert 0 <= one.failed_fraction(now + later) <= 1
    assert one.claims(now + later) <= len(events)


def test_explanation_of_a_claim_tells_how_claims_fared_there() -> None:
    world = World({"hole": 16, "other": 8}, Rules(claim_grace=2))
    world.sites["hole"].is_black_hole = True
    for _ in range(3):
        world.submit(fixed(hole=2, other=2), max_claiming_tries=1)
        world.advance(100)
    job = world.submit(fixed(hole=2, other=2))
    while world.state(job) is not JobState.CLAIMING:
        world.advance(1)
    found = explain(world.queries, world.job(job), world.timeline, world.now)
    said = {cluster.cluster: cluster.reason for cluster in found.clusters}
    assert said["hole"].endswith("; of claims there 100% came to nothing lately"), said["hole"]
    assert "came to nothing" not in said["other"]
