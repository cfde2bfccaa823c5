"""Specifications of jobs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.job import Job
from koalapy.model.job_spec import PATTERNS, JobSpec, Priority, escape_percent, fill_pattern, find_unknown_pattern
from koalapy.model.profile import ClusterProfile
from koalapy.model.request import FlexibleRequest

SPEC = JobSpec(FlexibleRequest(4), ("run", "1"), name="study", environment=(("A", "1"),), walltime=60.0)


@pytest.mark.parametrize(
    "changes", [{}, {"owner": "alice"}, {"request": FlexibleRequest(2), "priority": Priority.HIGH, "walltime": None}]
)
def test_with_fields_returns_changed_copy(changes: dict[str, object]) -> None:
    assert SPEC.with_fields(**changes) == replace(SPEC, **changes)  # type: ignore[arg-type]


def test_with_fields_of_unknown_field_raises() -> None:
    with pytest.raises(KeyError):
        SPEC.with_fields(colour="red")


SITE = ClusterProfile(scratch="/s/50%", home="/h", paths={"/data": "/lustre/%j"})


def map_name(name: str, job_name: str = "ocean") -> str:
    job = Job(7, JobSpec(FlexibleRequest(1), ("true",), name=job_name), 0.0)
    return SITE.map_output_file(name, "south", job.output_values("south"))


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("out-%j-%a-%c-%x", "out-7-7-south-ocean"),
        ("out-%r-100%%", "out-%r-100%%"),
        ("%%j", "%%j"),
        ("{scratch}/%j", "/s/50%%/7"),
        ("/data/%j", "/lustre/%%j/7"),
        ("{home}/o", "/h/o"),
    ],
)
def test_map_output_file_fills_all_patterns_but_rank(name: str, here: str) -> None:
    assert map_name(name) == here


@given(st.text(max_size=30))
def test_job_name_in_output_file_stays_one_part_of_the_path(job_name: str) -> None:
    mapped = map_name("logs/%x.out", job_name)
    assert mapped.startswith("logs/")
    assert mapped.count("/") == 1
    assert not find_unknown_pattern(mapped)
    assert "\0" not in mapped


def test_patterns_of_task_are_its_array_and_index() -> None:
    job = Job(9, JobSpec(FlexibleRequest(1), ("true",)), 0.0, array_job=7, array_index=3)
    assert SITE.map_output_file("%A_%a-%j", "south", job.output_values("south")) == "7_3-9"


def test_name_of_unnamed_job_is_its_number() -> None:
    assert map_name("%x", "") == "job-7"


@given(st.text(alphabet="%jAacrx4 /é"))
def test_unknown_pattern_is_found_unless_all_letters_have_a_meaning(name: str) -> None:
    followers = [text[:1] for text in name.replace("%%", "").split("%")[1:]]
    assert bool(find_unknown_pattern(name)) == (not PATTERNS.keys() >= set(followers))
    assert not find_unknown_pattern(escape_percent(name))


def test_fill_pattern_fills_each_text_once() -> None:
    assert fill_pattern("%x", {"x": "%j"}) == "_j"
