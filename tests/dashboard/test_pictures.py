"""Pictures are well-formed, ordered SVG without styles."""

from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from koalapy.dashboard.pages.job import decode_output
from koalapy.dashboard.timeline import MEANINGS, Phase, TimelineLane, build_lanes, job_timeline
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobState, TimelineEntry
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import FlexibleRequest
from tests.dashboard.pages import draw_timeline

timestamps = st.one_of(st.none(), st.floats(0, 1000))


@st.composite
def draw_component(draw: st.DrawFn, index: int) -> Component:
    return Component(
        index,
        draw(st.sampled_from(["north", "<b>", '"&'])),
        draw(st.integers(1, 99)),
        draw(st.sampled_from(ComponentState)),
        error=draw(st.sampled_from(["", "<script>alert(1)</script>"])),
        submitted_at=draw(timestamps),
        claimed_at=draw(timestamps),
        ended_at=draw(timestamps),
        staging_since=draw(timestamps),
        staged_at=draw(timestamps),
        superseded=draw(st.booleans()),
    )


@st.composite
def draw_attempt(draw: st.DrawFn, generation: int = 1) -> Attempt:
    parts = tuple(draw(draw_component(index)) for index in range(draw(st.integers(1, 3))))
    barrier, launched, ended = draw(timestamps), draw(timestamps), draw(timestamps)
    return Attempt(generation, parts, draw(st.floats(0, 1000)), None, None, barrier, launched, ended)


state_changes = st.lists(st.tuples(st.floats(0, 1000), st.sampled_from(JobState)), max_size=5).map(sorted)


def phases_of(lane: TimelineLane) -> list[Phase]:
    return [phase for bar in lane.bars for phase in bar.phases]


@given(st.lists(draw_attempt(), max_size=3), state_changes, timestamps, st.floats(0, 2000))
def test_job_timeline_is_ordered_and_well_formed(
    job_attempts: list[Attempt], states: list[tuple[float, JobState]], ended: float | None, now: float
) -> None:
    job = Job(1, JobSpec(FlexibleRequest(2)), 0.0, ended_at=ended)
    timeline = [TimelineEntry(1, timestamp, "x", state, "", 1) for timestamp, state in states]
    lanes = build_lanes(job, job_attempts, timeline, now)
    assert len(lanes) == 1 + sum(len(attempt.components) for attempt in job_attempts)
    all_phases = [phases_of(lane) for lane in lanes]
    for phases in all_phases:
        for phase in phases:
            assert phase.what in MEANINGS
            assert phase.start <= phase.end
        assert all(one.end <= following.start for one, following in pairwise(phases))
    picture = draw_timeline(job_timeline(lanes, now))
    if not picture:
        return
    root = ElementTree.fromstring(picture)
    assert "style" not in picture
    bars = [element for element in root.iter("rect") if element.get("class") != "lane-back"]
    assert len(bars) == sum(map(len, all_phases))
    assert all(float(bar.get("width", "-1").rstrip("%")) > 0 for bar in bars)


def test_build_lanes_shows_phases_of_job() -> None:
    part = Component(0, "north", 2, submitted_at=3.0, claimed_at=5.0, staging_since=1.0, staged_at=2.0, ended_at=11.0)
    attempt = Attempt(1, (part,), 1.0, barrier_at=6.0, launched_at=7.0, ended_at=10.0)
    job = Job(1, JobSpec(FlexibleRequest(2)), 0.0, JobState.SUCCEEDED, ended_at=11.0, generation=1, attempt=attempt)
    timeline = [TimelineEntry(1, 0.0, "submitted", JobState.QUEUED, "", 0)]
    timeline += [TimelineEntry(1, 1.0, "placed", JobState.PLACED, "", 1)]
    queue, north = build_lanes(job, [attempt], timeline, 99.0)
    assert [(phase.what, phase.start, phase.end) for phase in phases_of(queue)] == [("queued", 0.0, 1.0)]
    phases = [(phase.what, phase.end) for phase in phases_of(north)]
    assert phases == [
        ("files", 2.0),
        ("placed", 3.0),
        ("claiming", 5.0),
        ("claimed", 6.0),
        ("starting", 7.0),
        ("running", 10.0),
        ("stopping", 11.0),
    ]
    held_entry = replace(timeline[1], state=JobState.HELD, event="held")
    queue_lane, *_ = build_lanes(replace(job, ended_at=None), [], [timeline[0], held_entry], 9.0)
    assert [(phase.what, phase.end) for phase in phases_of(queue_lane)] == [("queued", 1.0), ("held", 9.0)]


@given(st.binary(max_size=300), st.booleans())
def test_decode_output_contains_no_control_characters(data: bytes, begun: bool) -> None:
    text = decode_output(data, is_cut=begun)
    assert all(letter in "\n\t" or not (letter < " " or "\x7f" <= letter <= "\x9f") for letter in text)
    assert not set(text) & set("\u202e\u2066\u200f")
    text.encode()


def test_decode_output_removes_escapes_and_partial_lines() -> None:
    assert decode_output(b"a\x1b[1;31mb\x1b[0m\r\nc\x1b]0;title\x07\rd") == "ab\nc␛]0;title␇\nd"
    assert decode_output("\u202eabc".encode()) == "\ufffdabc"
    assert decode_output(b"\xff\xfe") == "\ufffd\ufffd"
    assert decode_output(b"half of it\nwhole", is_cut=True) == "whole"
    assert decode_output("é".encode()[1:] + b"x", is_cut=True) == "x"
    assert decode_output(b"<script>") == "<script>"
