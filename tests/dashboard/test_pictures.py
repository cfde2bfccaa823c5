"""Pictures are well-formed SVG without styles, whatever stands in them, and what they show stands in order."""

from dataclasses import replace
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from koalapy.dashboard.pages.job import decode_output
from koalapy.dashboard.pictures import MEANINGS, build_lanes, job_lanes
from koalapy.model.job import Attempt, Component, ComponentState, Job, JobSpec, JobState, TimelineEntry
from koalapy.model.request import FlexibleRequest

moments = st.one_of(st.none(), st.floats(0, 1000))


@st.composite
def components(draw: st.DrawFn, index: int) -> Component:
    return Component(
        index,
        draw(st.sampled_from(["north", "<b>", '"&'])),
        draw(st.integers(1, 99)),
        draw(st.sampled_from(ComponentState)),
        error=draw(st.sampled_from(["", "<script>alert(1)</script>"])),
        submitted_at=draw(moments),
        claimed_at=draw(moments),
        ended_at=draw(moments),
        staging_since=draw(moments),
        staged_at=draw(moments),
        superseded=draw(st.booleans()),
    )


@st.composite
def attempts(draw: st.DrawFn, generation: int = 1) -> Attempt:
    parts = tuple(draw(components(index)) for index in range(draw(st.integers(1, 3))))
    barrier, launched, ended = draw(moments), draw(moments), draw(moments)
    return Attempt(generation, parts, draw(st.floats(0, 1000)), None, None, barrier, launched, ended)


lines = st.lists(st.tuples(st.floats(0, 1000), st.sampled_from(JobState)), max_size=5).map(sorted)


@given(st.lists(attempts(), max_size=3), lines, moments, st.floats(0, 2000))
def test_a_jobs_way_is_in_order_and_well_formed(
    tried: list[Attempt], told: list[tuple[float, JobState]], ended: float | None, now: float
) -> None:
    job = Job(1, JobSpec(FlexibleRequest(2)), 0.0, ended_at=ended)
    timeline = [TimelineEntry(1, at, "x", state, "", 1) for at, state in told]
    lanes = build_lanes(job, tried, timeline, now)
    assert len(lanes) == 1 + sum(len(attempt.components) for attempt in tried)
    for lane in lanes:
        for phase in lane.phases:
            assert phase.what in MEANINGS
            assert phase.start <= phase.end
        assert all(one.end <= other.start for one, other in zip(lane.phases, lane.phases[1:], strict=False))
    picture = str(job_lanes(lanes))
    if not picture:
        return
    root = ElementTree.fromstring(picture)
    assert "style" not in picture
    bars = [each for each in root if each.tag == "rect"]
    assert len(bars) == sum(len(lane.phases) for lane in lanes)
    assert all(float(bar.get("width", "-1")) > 0 for bar in bars)


def test_a_job_goes_from_the_queue_over_the_barrier_to_its_end() -> None:
    part = Component(0, "north", 2, submitted_at=3.0, claimed_at=5.0, staging_since=1.0, staged_at=2.0, ended_at=11.0)
    attempt = Attempt(1, (part,), 1.0, barrier_at=6.0, launched_at=7.0, ended_at=10.0)
    job = Job(1, JobSpec(FlexibleRequest(2)), 0.0, JobState.SUCCEEDED, ended_at=11.0, generation=1, attempt=attempt)
    told = [TimelineEntry(1, 0.0, "submitted", JobState.QUEUED, "", 0)]
    told += [TimelineEntry(1, 1.0, "placed", JobState.PLACED, "", 1)]
    queue, north = build_lanes(job, [attempt], told, 99.0)
    assert [(phase.what, phase.start, phase.end) for phase in queue.phases] == [("queued", 0.0, 1.0)]
    way = [(phase.what, phase.end) for phase in north.phases]
    assert way == [
        ("files", 2.0),
        ("placed", 3.0),
        ("claiming", 5.0),
        ("claimed", 6.0),
        ("starting", 7.0),
        ("running", 10.0),
        ("stopping", 11.0),
    ]
    held = replace(told[1], state=JobState.HELD, event="held")
    still, *_ = build_lanes(replace(job, ended_at=None), [], [told[0], held], 9.0)
    assert [(phase.what, phase.end) for phase in still.phases] == [("queued", 1.0), ("held", 9.0)]


@given(st.binary(max_size=300), st.booleans())
def test_output_is_letters_and_lines_whatever_it_is(data: bytes, begun: bool) -> None:
    text = decode_output(data, is_cut=begun)
    assert all(letter in "\n\t" or not (letter < " " or "\x7f" <= letter <= "\x9f") for letter in text)
    assert not set(text) & set("\u202e\u2066\u200f")
    text.encode()


def test_output_without_colours_tricks_and_half_lines() -> None:
    assert decode_output(b"a\x1b[1;31mb\x1b[0m\r\nc\x1b]0;title\x07\rd") == "ab\nc␛]0;title␇\nd"
    assert decode_output("\u202eabc".encode()) == "\ufffdabc"
    assert decode_output(b"\xff\xfe") == "\ufffd\ufffd"
    assert decode_output(b"half of it\nwhole", is_cut=True) == "whole"
    assert decode_output("é".encode()[1:] + b"x", is_cut=True) == "x"
    assert decode_output(b"<script>") == "<script>"
