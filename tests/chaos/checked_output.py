"""Whether what users get to see of a job is what its ranks wrote: all of it, in order, each line once."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tests.chaos.evidence import Told
from tests.chaos.marks import Mark
from tests.chaos.rank import line
from tests.chaos.workload import Planned

OURS = b"koala: "
"""How lines begin that koalapy adds."""

Ranks = Mapping[int, Mark]


def check_output(planned: Planned, job: Told, begun: Ranks, ended: Ranks, limit: int) -> Iterator[str]:
    """Yield what is wrong with a job's output.

    ``begun`` and ``ended`` are the marks of the last attempt, ``limit`` the bytes that are kept of each component. The
    output of a rank that has ended is whole, unless the job has not succeeded and its timeline says that output of the
    rank's cluster is missing; then it may be cut off at its end, and nowhere else.
    """
    if job.state != "succeeded":
        ended = {rank: mark for rank, mark in ended.items() if mark.cluster not in job.missing}
    if len(job.whole_output) != sum(map(len, job.output.values())):
        sizes = {component: len(data) for component, data in job.output.items()}
        yield f"{len(job.whole_output)} bytes in all, {sizes} by component"
    if len(begun) * planned.task["lines"] * planned.task["width"] > limit:
        yield from _check_cut_output(planned, job, begun, ended)
        return
    written: dict[int, list[bytes]] = defaultdict(list)
    for component, data in sorted(job.output.items()):
        for text in data.splitlines(keepends=True):
            rank = _rank_of(text, job)
            if rank is not None and rank in begun:
                written[rank].append(text)
            elif job.state == "succeeded":
                yield f"component {component} has a line of nobody's: {text[:80]!r}"
                return
            elif rank is not None:
                yield f"component {component} has a line of rank {rank}, which never began: {text[:80]!r}"
                return
    for rank in sorted(begun):
        whole = rank in ended and (job.state == "succeeded" or not planned.is_mpi)
        if wrong := _wrong(planned, job, rank, written[rank], whole):
            yield f"rank {rank}: {wrong}"


def _rank_of(text: bytes, job: Told) -> int | None:
    """Whose line it is, if it looks like one of this attempt at all."""
    words = text.split(b" ", 3)
    if len(words) < 4 or words[:2] != [str(job.id).encode(), str(job.generation).encode()]:
        return None
    return int(words[2]) if words[2].isdigit() else None


def _wrong(planned: Planned, job: Told, rank: int, found: Sequence[bytes], whole: bool) -> str:
    """What is wrong with one rank's lines. All have to be there when it came to its end; else it was cut off
    somewhere, at last in the middle of a line."""
    of, width = planned.task["lines"], planned.task["width"]
    for number, text in enumerate(found, 1):
        meant = line(str(job.id), job.generation, rank, number, of, width)
        if text == meant:
            continue
        cut = not whole and number == len(found) and meant.startswith(text)
        if not cut:
            return f"line {number} is {text[:60]!r}"
    if whole and len(found) != of:
        return f"{len(found)} of {of} lines"
    return "" if len(found) <= of else f"{len(found)} lines instead of {of}"


def _check_cut_output(planned: Planned, job: Told, begun: Ranks, ended: Ranks) -> Iterator[str]:
    """More was written than is kept: the beginning and the end of it are there, and no line twice or in disorder."""
    of, width = planned.task["lines"], planned.task["width"]
    for component, data in sorted(job.output.items()):
        last: dict[int, int] = {}
        for text in data.splitlines(keepends=True):
            rank = _rank_of(text, job)
            if rank is None or rank not in begun or len(text) != width:
                continue  # cut through, or koalapy's own
            number = int(text.split(b" ", 4)[3].partition(b"/")[0])
            if text != line(str(job.id), job.generation, rank, number, of, width) or number <= last.get(rank, 0):
                yield f"component {component}: {text[:60]!r} after line {last.get(rank, 0)} of that rank"
                return
            last[rank] = number
        # Where ranks were killed nobody knows what they wrote last, and the end may be theirs.
        if last and begun.keys() == ended.keys() and of not in last.values():
            yield f"component {component}: of the ends of its ranks none is there; they got to {last} of {of}"


def check_results(planned: Planned, job: Told, begun: Ranks) -> Iterator[str]:
    """What was collected of a job that succeeded is what each rank left."""
    if not planned.input or job.state != "succeeded":
        return
    meant = {f"out/{rank}.txt": f"{job.id} {job.generation} {rank}".encode() for rank in begun}
    if job.results != meant:
        lacking, odd = sorted(meant.keys() - job.results.keys()), sorted(job.results.keys() - meant.keys())
        wrong = sorted(name for name in meant.keys() & job.results.keys() if meant[name] != job.results[name])
        yield f"of the results {lacking} are missing, {wrong} are wrong, {odd} are nobody's"
