"""Evidence of claims on a cluster: failed fraction, mean wait, decay and explanation."""

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


def collect_evidence(*events: tuple[float, tuple[Any, ...]]) -> ClaimEvidence:
    """Return the evidence after events at given times."""
    evidence = ClaimEvidence()
    for now, (event, *arguments) in events:
        getattr(evidence, event)(*arguments, now)
    return evidence


def evidence_values(evidence: ClaimEvidence, now: float) -> tuple[float, float, float]:
    return evidence.claims(now), evidence.failed_fraction(now), evidence.mean_wait(now)


def test_evidence_without_claims_is_assumed() -> None:
    assert evidence_values(ClaimEvidence(), 0.0) == (0, 0, ASSUMED_START)


def test_evidence_of_three_failed_in_ten_is_thirty_percent() -> None:
    evidence = collect_evidence(*[(0.0, ("record_failed",))] * 3, *[(0.0, ("record_started", 2.0))] * 7)
    assert evidence_values(evidence, 0.0) == pytest.approx((10, 0.3, 2.0))


def test_evidence_decays_by_half_life() -> None:
    evidence = collect_evidence(*[(0.0, ("record_failed",))] * 8, (HALF_LIFE, ("record_started", 3.0)))
    assert evidence_values(evidence, HALF_LIFE) == pytest.approx((5, 0.8, 3.0))
    assert evidence.claims(1e12) == pytest.approx(0)


@given(events=st.lists(EVENTS, max_size=20), now=SECONDS, delay=SECONDS, data=st.data())
def test_evidence_is_independent_of_order(
    events: list[tuple[Any, ...]], now: float, delay: float, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(events))
    evidence, shuffled_evidence = (
        collect_evidence(*((now, event) for event in sequence)) for sequence in (events, shuffled)
    )
    assert evidence_values(evidence, now + delay) == pytest.approx(
        evidence_values(shuffled_evidence, now + delay), rel=1e-6
    )
    assert 0 <= evidence.failed_fraction(now + delay) <= 1
    assert evidence.claims(now + delay) <= len(events)


def test_explanation_of_claim_shows_failed_fraction() -> None:
    world = World({"hole": 16, "other": 8}, Rules(claim_grace=2))
    world.sites["hole"].is_black_hole = True
    for _ in range(3):
        world.submit(fixed(hole=2, other=2), max_claiming_tries=1)
        world.advance(100)
    job = world.submit(fixed(hole=2, other=2))
    while world.state(job) is not JobState.CLAIMING:
        world.advance(1)
    explanation = explain(world.queries, world.job(job), world.timeline, world.now)
    reasons = {cluster.cluster: cluster.reason for cluster in explanation.clusters}
    assert reasons["hole"].endswith("; of claims there 100% came to nothing lately"), reasons["hole"]
    assert "came to nothing" not in reasons["other"]
