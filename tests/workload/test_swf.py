"""Traces as written by editors, scripts and spreadsheets."""

from pathlib import Path

import pytest

from koalapy.workload.swf import parse_trace, read_trace

JOB = "1 0 5 100 4 -1 -1 4 200 -1 1 1 1 1 1 1 -1 -1\n"


def test_read_file_with_byte_order_mark_has_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.swf"
    path.write_bytes(b"\xef\xbb\xbf; MaxProcs: 8\r\n" + JOB.encode())
    trace = read_trace(path)
    assert (len(trace.jobs), trace.processors) == (1, 8)


@pytest.mark.parametrize(
    "first", ["# made by a script\n", "#\n", "\ufeff# made by a script\n", "\ufeff\n", "\ufeff;\n"]
)
def test_parse_skips_comments_of_scripts(first: str) -> None:
    assert len(parse_trace([first, JOB, "  # more\n"], "a.swf").jobs) == 1


@pytest.mark.parametrize("mark", [";", "#"])
@pytest.mark.parametrize(("text", "processors"), [("1,024", 1024), ("1,048,576 of them", 1_048_576), ("10,24", 4)])
def test_parse_reads_processors_with_thousands_separator(mark: str, text: str, processors: int) -> None:
    assert parse_trace([f"{mark} MaxProcs: {text}\n", JOB], "a.swf").processors == processors


def test_parse_reads_fields_with_thousands_separator() -> None:
    (job,) = parse_trace(["1 1,000,000 5 86,400 1,024 -1 -1 1,024 90,000.5 -1 1 1 1 1 1 1 -1 -1\n"], "a.swf").jobs
    assert (job.submitted, job.ran, job.processors, job.requested_time) == (1_000_000, 86_400, 1024, 90_000.5)
