"""The state machine of jobs, attempts and tokens."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import (
    ACTIVE_STATES,
    FINAL_STATES,
    TRANSITIONS,
    Attempt,
    Component,
    Job,
    JobState,
    format_token,
    is_same_attempt,
    parse_token,
)
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import ComponentRequest, FlexibleRequest, NonFixedRequest

numbers = st.integers(0, 10**9 - 1)
nonces = st.text("0123456789abcdefghijklmnopqrstuvwxyz", max_size=32)


def _reachable_states(start: JobState) -> set[JobState]:
    states: set[JobState] = set()
    pending = [start]
    while pending:
        state = pending.pop()
        if state not in states:
            states.add(state)
            pending += TRANSITIONS[state]
    return states


def test_transitions_lead_every_unfinished_state_to_every_end() -> None:
    assert _reachable_states(JobState.QUEUED) == set(TRANSITIONS) == set(JobState)
    for state, exits in TRANSITIONS.items():
        assert state not in exits
        assert (not exits) == (state in FINAL_STATES)
        assert state in FINAL_STATES or (_reachable_states(state) >= FINAL_STATES and JobState.CANCELLED in exits)
        assert state not in ACTIVE_STATES or JobState.QUEUED in exits
    sources = {state for state, exits in TRANSITIONS.items() if JobState.SUCCEEDED in exits}
    assert sources == {JobState.CLAIMING, JobState.STARTING, JobState.RUNNING, JobState.UNKNOWN}, "it needs nodes"


def test_job_states_are_final_active_or_waiting() -> None:
    assert {state for state in JobState if state.is_final} == FINAL_STATES
    assert {state for state in JobState if state.is_active} == ACTIVE_STATES
    assert set(JobState) - FINAL_STATES - ACTIVE_STATES == {JobState.QUEUED, JobState.HELD}
    assert not FINAL_STATES & ACTIVE_STATES


@given(numbers, numbers, numbers, nonces)
def test_token_format_and_parse_are_inverse(job: int, generation: int, index: int, nonce: str) -> None:
    assert parse_token(format_token(job, generation, index, nonce)) == (job, generation, index, nonce)


@given(st.lists(st.tuples(numbers, numbers, numbers, nonces), unique=True, min_size=2))
def test_token_of_each_component_is_unique(parts: list[tuple[int, int, int, str]]) -> None:
    assert len({format_token(*part) for part in parts}) == len(parts)


@pytest.mark.parametrize(
    "token",
    [
        "",
        "1.2",
        "1.2.3.4.5",
        "a.b.c",
        "1..3",
        "1.2.3.",
        "1.2.3.A",
        "1.2.3.x-y",
        " 1.2.3",
        "1.2.3\n",
        "+1.2.3",
        "1_0.2.3",
        "-1.2.3",
        "١.٢.٣",
        f"{10**30}.1.0",
        "1.2.3." + "a" * 33,
    ],
)
def test_parse_token_rejects_invalid_tokens(token: str) -> None:
    with pytest.raises(ValueError):
        parse_token(token)
    assert not is_same_attempt(token, token)


def test_job_token_belongs_to_current_attempt() -> None:
    job = Job(7, JobSpec(FlexibleRequest(2), ("true",)), submitted_at=0.0, generation=3)
    assert job.token(1) == "7.3.1"
    components = (Component(0, "north", 1), Component(1, "south", 1))
    attempt = Attempt(3, components, 0.0, nonce="a1")
    job = replace(job, attempt=attempt, state=JobState.CLAIMING)
    assert job.token(1) == "7.3.1.a1"
    assert is_same_attempt("7.3.1.a1", "7.3.0.a1")
    for token in ("7.3.1", "7.3.1.a2", "7.2.1.a1", "8.3.1.a1"):
        assert not is_same_attempt("7.3.1.a1", token), token


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_attempt_head_is_first_largest_component(sizes: list[int]) -> None:
    components = tuple(Component(index, "north", size) for index, size in enumerate(sizes))
    assert Attempt(1, components, placed_at=0.0).head.index == sizes.index(max(sizes))


def test_spec_component_returns_requested_component() -> None:
    first, second = ComponentRequest(1), ComponentRequest(2, command=("hostname",))
    spec = JobSpec(NonFixedRequest((first, second)), ("true",))
    assert spec.component(1) is second
    assert spec.component(None) is None
    assert JobSpec(FlexibleRequest(3), ("true",)).component(0) is None
