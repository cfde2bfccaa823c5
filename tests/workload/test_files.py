"""Valid and invalid files of workloads and traces."""

import gzip
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koalapy.model.errors import UsageError
from koalapy.workload import plan, swf

numbers = st.integers(-1, 10**6)
rows = st.lists(st.lists(numbers, min_size=swf.FIELDS, max_size=swf.FIELDS), min_size=1, max_size=20)
HEAD = '{"koala_workload": 1, "seed": 1}'
JOB = '{"at": %s, "job": {"request": {"type": "flexible", "total_size": 2}, "command": ["true"]}}'
LINE = "1 0 -1 60 4 -1 -1 4 -1 -1 1 1 1 -1 1 -1 -1 -1\n"


@given(rows, st.sampled_from([" ", "\t", "  "]))
def test_trace_that_is_written_is_read_back(table: list[list[int]], gap: str) -> None:
    text = ["; Version: 2.2\n", ";MaxProcs: 128\n", "\n", *(gap.join(map(str, row)) + "\n" for row in table)]
    trace = swf.parse_trace(text, "x")
    assert trace.header == {"Version": "2.2", "MaxProcs": "128"}
    assert trace.processors == 128
    expected = sorted((row[1], row[0], row[3], row[7] if row[7] > 0 else row[4], row[10]) for row in table)
    parsed = sorted((j.submitted, j.number, j.ran, j.processors, j.status) for j in trace.jobs)
    assert parsed == expected
    assert [j.submitted for j in trace.jobs] == sorted(j.submitted for j in trace.jobs)
    for keep_zero in (False, True):
        sorted_jobs = swf.select_jobs(trace.jobs, keep_zero=keep_zero)
        assert len(sorted_jobs.usable) + sum(sorted_jobs.left_out.values()) == len(trace.jobs)
        for job in sorted_jobs.usable:
            assert job.processors > 0
            assert job.ran > 0 or (keep_zero and job.ran == 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1 2 3\n", "line 3 has 3 fields, not 18"),
        (LINE.replace("60", "abc"), "line 3: field 4, the run time, is 'abc'"),
        (LINE.replace("1 0", "1 nan"), "line 3: field 2, the submit time, is 'nan'"),
        (LINE.replace("\n", " 7\n"), "line 3 has 19 fields, not 18"),
    ],
)
def test_trace_with_malformed_line_names_it(line: str, message: str) -> None:
    with pytest.raises(UsageError, match="trace " + message):
        swf.parse_trace(["; Version: 2\n", LINE, line], "trace")


def test_select_jobs_excludes_parts_between_checkpoints() -> None:
    """Logs of the archive describe the complete job in a separate line, with status 0, 1 or 5."""
    text = [LINE.replace("4 -1 -1 1 1 1", f"4 -1 -1 {status} 1 1") for status in (1, 2, 3, 4, 5, 0, -1)]
    trace = swf.parse_trace(text, "x")
    assert [job.status for job in swf.select_jobs(trace.jobs).usable] == [1, 5, 0, -1]
    assert [job.status for job in swf.select_jobs(trace.jobs, 3).usable] == [3]


def test_select_jobs_counts_exclusions_by_reason() -> None:
    ran = [LINE.replace("60", seconds) for seconds in ("0", "0", "60", "-1")]
    trace = swf.parse_trace([*ran, LINE.replace("4 -1 -1 1", "4 -1 -1 3"), LINE.replace(" 4 ", " -1 ")], "x")
    sorted_jobs = swf.select_jobs(trace.jobs)
    assert sorted_jobs.left_out == {
        "of run time 0": 2,
        "of no known time": 1,
        "parts of jobs": 1,
        "of no known size": 1,
    }
    assert [job.ran for job in sorted_jobs.usable] == [60]
    assert [job.ran for job in swf.select_jobs(trace.jobs, keep_zero=True).usable] == [0, 0, 60]


@given(st.text())
def test_parse_trace_of_any_text_raises_only_usage_error(text: str) -> None:
    for read in (swf.parse_trace, plan.parse_workload):
        try:
            read(text.splitlines(keepends=True), "x")
        except UsageError as error:
            assert error.hint  # noqa: PT017


def test_trace_header_with_too_many_digits_is_ignored() -> None:
    trace = swf.parse_trace([f"; MaxProcs: {'9' * 5000}\n", LINE], "x")
    assert trace.processors == trace.jobs[0].processors


def test_read_trace_decompresses_files(tmp_path: Path) -> None:
    text = ("; MaxProcs: 8\n" + LINE).encode()
    for name, packed in (("a.swf", text), ("a.swf.gz", gzip.compress(text)), ("a.swf.xz", lzma.compress(text))):
        (tmp_path / name).write_bytes(packed)
        assert swf.read_trace(tmp_path / name).jobs == [swf.TraceJob(1, 0.0, 60.0, 4, 1, -1.0, 1, 1)]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.swf", None),
        ("a.swf.gz", b"no gzip"),
        ("a.swf.gz", gzip.compress(LINE.encode() * 500)[:-12]),
        ("a.swf.xz", b"no xz"),
        ("a.swf", b"; only a header\n"),
        ("a.swf", b"\xff\xfe\x00"),
    ],
)
def test_read_trace_of_unreadable_file_names_the_problem(tmp_path: Path, name: str, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as refused:
        swf.read_trace(tmp_path / name)
    assert name in refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty"),
        ([HEAD], "contains no jobs"),
        (["{"], "line 1 is not JSON"),
        (['{"a": 1}'], "line 1 is not a header"),
        (['{"koala_workload": 2}'], "line 1: its version is 2"),
        ([HEAD, "[]"], "line 2: it is"),
        ([HEAD, JOB % "-1"], "line 2: at is -1"),
        ([HEAD, JOB % "true"], "line 2: at is true"),
        ([HEAD, JOB % "NaN"], "line 2: at is NaN"),
        ([HEAD, JOB % ("1" + "0" * 400)], "line 2: at is 1000"),
        ([HEAD, '{"at": 1, "job": {"request": {"type": "flexible", "total_size": 1e999}}}'], "line 2: job.request is"),
        ([HEAD, JOB % "0", '{"at": 1}'], "line 3: job is null"),
        ([HEAD, '{"at": 1, "job": {"request": {}}}'], "line 2: job.request is"),
        ([HEAD, '{"at": 1, "application": 3, "job": {}}'], "line 2: application is 3"),
    ],
)
def test_parse_workload_with_invalid_line_names_it(lines: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan.parse_workload(lines, "w.jsonl")


def test_parse_workload_sorts_jobs_by_arrival() -> None:
    workload = plan.parse_workload([HEAD, JOB % "5", "", JOB % "1"], "w")
    assert [arrival.arrives_at for arrival in workload.jobs] == [1.0, 5.0]
    assert workload.jobs[0].application == "job"
