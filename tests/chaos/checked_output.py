"""Check that the output and results of a job are those that its ranks wrote."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tests.chaos.evidence import ReportedJob
from tests.chaos.marks import Mark
from tests.chaos.rank import format_line
from tests.chaos.workload import PlannedJob

Ranks = Mapping[int, Mark]


def check_output(
    planned: PlannedJob, job: ReportedJob, begin_marks: Ranks, end_marks: Ranks, limit: int, *, was_power_lost: bool
) -> Iterator[str]:
    """Yield the errors in a job's output.

    The marks are those of the last attempt; ``limit`` is the number of bytes that are kept of each component. The
    output of an ended rank is complete, unless its timeline reports missing output of the rank's cluster, and the job
    has not succeeded or ``was_power_lost``. Then the output may be cut off at its end, and nowhere else.
    """
    is_whole = job.state == "succeeded" and not was_power_lost
    if not is_whole:
        end_marks = {rank: mark for rank, mark in end_marks.items() if mark.cluster not in job.missing}
    if len(job.joined_output) != sum(map(len, job.output.values())):
        sizes = {component: len(data) for component, data in job.output.items()}
        yield f"{len(job.joined_output)} bytes in all, {sizes} by component"
    if len(begin_marks) * planned.task["lines"] * planned.task["width"] > limit:
        yield from _check_cut_output(planned, job, begin_marks, end_marks)
        return
    written: dict[int, list[bytes]] = defaultdict(list)
    for component, data in sorted(job.output.items()):
        for text in data.splitlines(keepends=True):
            rank = _parse_rank(text, job)
            if rank is not None and rank in begin_marks:
                written[rank].append(text)
            elif is_whole:
                yield f"component {component} has a line of nobody's: {text[:80]!r}"
                return
            elif rank is not None:
                yield f"component {component} has a line of rank {rank}, which never began: {text[:80]!r}"
                return
    for rank in sorted(begin_marks):
        must_be_complete = rank in end_marks and (job.state == "succeeded" or not planned.is_mpi)
        if error := _find_line_error(planned, job, rank, written[rank], must_be_complete):
            yield f"rank {rank}: {error}"


def _parse_rank(text: bytes, job: ReportedJob) -> int | None:
    """Return the rank that wrote a line, or None if it is not a line of this attempt."""
    fields = text.split(b" ", 3)
    if len(fields) < 4 or fields[:2] != [str(job.id).encode(), str(job.generation).encode()]:
        return None
    return int(fields[2]) if fields[2].isdigit() else None


def _find_line_error(
    planned: PlannedJob, job: ReportedJob, rank: int, lines: Sequence[bytes], must_be_complete: bool
) -> str:
    """Return the error in the lines of one rank, or an empty string.

    Lines may be missing at the end, and the last one be cut, unless the output ``must_be_complete``.
    """
    line_count, width = planned.task["lines"], planned.task["width"]
    for number, text in enumerate(lines, 1):
        expected_line = format_line(str(job.id), job.generation, rank, number, line_count, width)
        if text == expected_line:
            continue
        cut = not must_be_complete and number == len(lines) and expected_line.startswith(text)
        if not cut:
            return f"line {number} is {text[:60]!r}"
    if must_be_complete and len(lines) != line_count:
        return f"{len(lines)} of {line_count} lines"
    return "" if len(lines) <= line_count else f"{len(lines)} lines instead of {line_count}"


def _check_cut_output(planned: PlannedJob, job: ReportedJob, begin_marks: Ranks, end_marks: Ranks) -> Iterator[str]:
    """Yield the errors in output over the limit: it has the first and last lines, each once and in order."""
    line_count, width = planned.task["lines"], planned.task["width"]
    for component, data in sorted(job.output.items()):
        last_numbers: dict[int, int] = {}
        for text in data.splitlines(keepends=True):
            rank = _parse_rank(text, job)
            if rank is None or rank not in begin_marks or len(text) != width:
                continue  # a cut line, or one of koalapy
            number = int(text.split(b" ", 4)[3].partition(b"/")[0])
            if text != format_line(
                str(job.id), job.generation, rank, number, line_count, width
            ) or number <= last_numbers.get(rank, 0):
                yield f"component {component}: {text[:60]!r} after line {last_numbers.get(rank, 0)} of that rank"
                return
            last_numbers[rank] = number
        # The last lines of killed ranks are unknown, and may be the end of the output.
        if last_numbers and begin_marks.keys() == end_marks.keys() and line_count not in last_numbers.values():
            yield f"component {component}: the last lines of all ranks are missing: {last_numbers} of {line_count}"


def check_results(planned: PlannedJob, job: ReportedJob, begin_marks: Ranks) -> Iterator[str]:
    """Yield the errors in the collected results of a job that succeeded."""
    if not planned.input or job.state != "succeeded":
        return
    expected = {f"out/{rank}.txt": f"{job.id} {job.generation} {rank}".encode() for rank in begin_marks}
    if job.results != expected:
        missing, unexpected = sorted(expected.keys() - job.results.keys()), sorted(job.results.keys() - expected.keys())
        wrong = sorted(name for name in expected.keys() & job.results.keys() if expected[name] != job.results[name])
        yield f"of the results {missing} are missing, {wrong} are wrong, {unexpected} are nobody's"
