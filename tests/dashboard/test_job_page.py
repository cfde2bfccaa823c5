"""The search in the output of a job, its files, and the links that submit it again."""

import pytest

from koalapy.daemon.jobs.output import OutputTail
from koalapy.dashboard.pages.job import MAX_MATCHES, component_output, files_of
from koalapy.model.dependency import ResultInput
from koalapy.model.job import Job
from koalapy.model.job_spec import JobSpec
from koalapy.model.request import Bundle, FlexibleRequest, InputFile
from tests.daemon_in_process import ServedDaemon
from tests.dashboard.people import Person, create_token


@pytest.mark.parametrize(
    ("data", "find", "lines"),
    [
        (b"one\nTWO\nthree two\n", "two", ["     2  TWO", "     3  three two"]),
        (b"a.c\nabc", "a.c", ["     1  a.c"]),
        (b"", "x", []),
    ],
)
def test_component_output_with_search_ignores_case_and_numbers_lines(data: bytes, find: str, lines: list[str]) -> None:
    output = component_output(OutputTail(0, "north", data, 0), find)
    assert (output["text"], output["matches"]) == ("\n".join(lines), len(lines))


def test_component_output_with_search_shows_last_matches() -> None:
    data = b"\n".join(b"step %d" % n for n in range(2 * MAX_MATCHES))
    output = component_output(OutputTail(0, "north", data, 0), "STEP")
    assert (output["matches"], output["text"].count("\n") + 1) == (2 * MAX_MATCHES, MAX_MATCHES)
    assert output["text"].endswith(f"step {2 * MAX_MATCHES - 1}")
    assert component_output(OutputTail(0, "north", data, 0), "none")["matches"] == 0


def test_files_of_job_lists_inputs_bundle_and_results() -> None:
    spec = JobSpec(
        FlexibleRequest(2),
        ("true",),
        inputs=(InputFile("sky/map", 7, ("north",)),),
        result_inputs=(ResultInput(3, "out.csv"),),
        bundle=Bundle("ab", 9, 1),
        collect=("*.csv",),
    )
    files = files_of(Job(1, spec, 0.0))
    assert files == [
        ("input", "sky/map", 7, "north"),
        ("result of a job", "out.csv", None, "job 3"),
        ("uploaded bundle", "ab", 9, "daemon"),
        ("collected result", "*.csv", None, ""),
    ]


def test_job_page_links_to_the_same_submission(daemon: ServedDaemon) -> None:
    body = {"request": {"type": "flexible", "total_size": 2}, "command": ["echo", "<b>&"], "name": "<script>x</script>"}
    job = daemon.http.post("/api/v1/jobs", json=body).raise_for_status().json()["id"]
    person = Person(daemon, create_token(daemon, "olga", "operator"))
    page = person.get_page(f"/jobs/{job}?find=<script>")
    assert f'href="/jobs/new?from={job}"' in page
    assert "<script>x" not in page
    assert "<b>&" not in page
    assert "&lt;b&gt;" in person.get_page(f"/jobs/new?from={job}")
    person.get_page(f"/jobs/{job}?find={'x' * 201}", 422)
    other = Person(daemon, create_token(daemon, "eve"))
    assert "/jobs/new?from" not in other.get_page(f"/jobs/{job}")
    person.close()
    other.close()
