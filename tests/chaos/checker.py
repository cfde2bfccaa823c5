"""Whether everything was right, judged by what the ranks marked themselves. Pure: evidence in, violations out."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tests.chaos.checked_output import check_output, check_results
from tests.chaos.evidence import FINAL, Evidence, Look, Submission, Told, Violation
from tests.chaos.marks import Mark
from tests.chaos.workload import NETWORKS

INFRASTRUCTURE = "infrastructure-failure"
WALLTIME = "walltime"
GAVE_UP = "gave up after"


class Ranks:
    """The marks of one job, by attempt and rank."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self.marks = marks
        self.begun: dict[int, dict[int, Mark]] = defaultdict(dict)
        self.ended: dict[int, dict[int, Mark]] = defaultdict(dict)
        for mark in marks:
            if mark.what in ("begin", "end"):
                (self.begun if mark.what == "begin" else self.ended)[mark.generation][mark.index] = mark

    def complete(self, generation: int) -> bool:
        """Whether every rank of an attempt has begun and come to its own end, with 0."""
        begun, ended = self.begun.get(generation, {}), self.ended.get(generation, {})
        size = next((mark.size for mark in begun.values()), 0)
        return 0 < size == len(begun) == len(ended) and all(mark.code == 0 for mark in ended.values())

    def codes(self, generation: int) -> set[int | None]:
        """With what ranks of an attempt ended, 0 left out."""
        return {mark.code for mark in self.ended.get(generation, {}).values()} - {0}


def check(evidence: Evidence) -> list[Violation]:
    """Everything that was not as it has to be, in order."""
    by_job: dict[str, list[Mark]] = defaultdict(list)
    for mark in evidence.marks:
        by_job[mark.job].append(mark)
    found = [
        *check_submissions(evidence.submissions, evidence.jobs),
        *check_marks(evidence.marks, {str(job.id): job for job in evidence.jobs}),
        *check_looks(evidence.looks),
        *check_rest(evidence.last_looks),
        *(Violation("left", "", what) for what in evidence.left),
        *(Violation("trouble", "", what) for what in evidence.troubles),
    ]
    planned = {submission.planned.name: submission for submission in evidence.submissions}
    for job in evidence.jobs:
        if job.name in planned:
            found += check_job(planned[job.name], job, Ranks(by_job[str(job.id)]), evidence.output_limit)
    return sorted(found)


def check_submissions(submissions: Sequence[Submission], jobs: Sequence[Told]) -> Iterator[Violation]:
    """No job is lost once it was acknowledged, and none is made of nothing or twice."""
    if not jobs:  # the daemon told nothing, which is trouble enough
        return
    known = {job.id: job for job in jobs}
    names: dict[str, list[int]] = defaultdict(list)
    for job in jobs:
        names[job.name].append(job.id)
    for submission in submissions:
        name, ids = submission.planned.name, set(submission.ids)
        for ident in ids:
            if ident not in known or known[ident].name != name:
                yield Violation("lost", str(ident), f"{name} was acknowledged, and is not there")
        if len(ids) > 1 or len(names[name]) > 1:
            yield Violation("twice", "", f"{name} is {sorted({*ids, *names[name]})}")
        if not ids and not names[name]:
            yield Violation("lost", "", f"{name} was never acknowledged, however often it was submitted")
    for unknown in names.keys() - {submission.planned.name for submission in submissions}:
        yield Violation("twice", "", f"nobody submitted {unknown} ({names[unknown]})")


def check_marks(marks: Sequence[Mark], jobs: Mapping[str, Told]) -> Iterator[Violation]:
    """No node and no rank twice, no two live attempts; nothing runs of which no record says so."""
    begun: dict[tuple[str, int, int], Mark] = {}
    by_node: dict[str, list[Mark]] = defaultdict(list)
    sizes: dict[tuple[str, int, str], int] = defaultdict(int)
    for mark in marks:
        if mark.what == "loud":
            continue
        by_node[mark.node].append(mark)
        if mark.what == "end":
            continue
        for trouble in mark.trouble:
            yield Violation("overlap", mark.job, f"{mark}: {trouble}")
        if earlier := begun.get(mark.rank):
            yield Violation("rank twice", mark.job, f"{mark}, which was {earlier} before")
        begun[mark.rank] = mark
        sizes[mark.job, mark.generation, mark.cluster] += 1
        if not mark.host.startswith(f"{NETWORKS[mark.cluster]}."):
            yield Violation("network", mark.job, f"{mark} has the address {mark.host}")
    for node, on_it in by_node.items():
        yield from _shared(node, on_it)
    for (name, generation, cluster), ranks in sizes.items():
        job = jobs.get(name)
        if name.startswith("local-"):
            continue
        recorded = job.attempts.get(generation, {}).get(cluster, 0) if job else 0
        if ranks > recorded:
            text = f"attempt {generation} ran on {ranks} nodes of {cluster}; its record says {recorded}"
            yield Violation("unrecorded", name, text)


def _shared(node: str, marks: Sequence[Mark]) -> Iterator[Violation]:
    """Two ranks on a node at once, seen by their times alone: one begins before the one before it has ended."""
    living: dict[tuple[str, int, int], Mark] = {}
    for mark in sorted(marks, key=lambda mark: mark.at):
        if mark.what == "begin":
            living[mark.rank] = mark
            continue
        own = living.pop(mark.rank, None)
        for other in living.values():
            if own is not None and other.at > own.at:
                yield Violation("overlap", mark.job, f"{other} before {mark}")


def check_looks(looks: Sequence[Look]) -> Iterator[Violation]:
    """The nodes of a cluster that is in reach add up at every moment."""
    for look in looks:
        if look.state == "unreachable":
            continue
        counts = (look.idle, look.used, look.background, look.down)
        if sum(counts) != look.total or min(counts) < 0:
            said = f"idle {look.idle} + used {look.used} + background {look.background} + down {look.down}"
            text = f"{said} are not {look.total} nodes of {look.cluster} ({look.state}, at {look.at:.2f})"
            yield Violation("counts", "", text)


def check_rest(looks: Sequence[Look]) -> Iterator[Violation]:
    """Once everything is over every node is idle."""
    for look in looks:
        if (look.idle, look.used, look.background) != (look.total, 0, 0):
            said = f"idle {look.idle}, used {look.used}, background {look.background}, down {look.down}"
            yield Violation("rest", "", f"{look.cluster} with {look.total} nodes ended with {said} ({look.state})")


def check_job(submission: Submission, job: Told, ranks: Ranks, limit: int) -> Iterator[Violation]:
    """The verdict was earned, by this very attempt, and the output is what the ranks wrote."""
    own = str(job.id)
    if job.state not in FINAL:
        yield Violation("unfinished", own, f"{job.name} is {job.state} ({job.reason}) in attempt {job.generation}")
        return
    if newer := [mark for mark in ranks.marks if mark.generation > job.generation]:
        yield Violation("unrecorded", own, f"{newer[0]}, but it ended with attempt {job.generation}")
    wrong = _wrong_verdict(submission, job, ranks)
    if wrong:
        yield Violation("verdict", own, f"{job.name} {job.state} ({job.reason or job.exit_code}): {wrong}")
    for text in _not_stopped(submission, ranks):
        yield Violation("not stopped", own, text)
    # Of what never came to run, or a wrong verdict, the output proves nothing.
    if not wrong:
        begun, ended = ranks.begun.get(job.generation, {}), ranks.ended.get(job.generation, {})
        for text in check_output(submission.planned, job, begun, ended, limit):
            yield Violation("output", own, f"{job.name} {job.state}: {text}")
        for text in check_results(submission.planned, job, begun):
            yield Violation("results", own, f"{job.name} {job.state}: {text}")


def _wrong_verdict(submission: Submission, job: Told, ranks: Ranks) -> str:
    """Why the state is not what the ranks say; empty when it is."""
    planned, last = submission.planned, job.generation
    complete, codes = ranks.complete(last), ranks.codes(last)
    match job.state:
        case "succeeded":
            if not complete:
                begun, ended = sorted(ranks.begun.get(last, {})), sorted(ranks.ended.get(last, {}))
                return f"in attempt {last} the ranks {begun} began, {ended} ended, with {codes or 0}"
            return "" if job.exit_code == 0 else f"with exit code {job.exit_code}"
        case "cancelled":
            return "" if submission.cancel_tried else "nobody cancelled it"
    if job.reason.startswith(INFRASTRUCTURE):
        if GAVE_UP not in job.reason or job.restarts < job.max_restarts:
            return f"after {job.restarts} of {job.max_restarts} restarts"
        return ""
    if complete:
        return f"every rank of attempt {last} ended with 0"
    if WALLTIME in job.reason:
        return "" if _short(planned.walltime) else "it had time enough"
    if job.exit_code in codes and job.exit_code == planned.task["code"]:
        return ""
    return f"its ranks ended with {codes or 'nothing'}"


def _short(walltime: float | None) -> bool:
    return walltime is not None and walltime < 60


def _not_stopped(submission: Submission, ranks: Ranks) -> Iterator[str]:
    """An attempt that began after its job was cancelled."""
    order = submission.cancelled
    if order is None:
        return
    for attempt in ranks.begun.values():
        for mark in attempt.values():
            if mark.generation > order.generation and mark.at > order.at:
                yield f"{mark}, {mark.at - order.at:.1f} s after it was cancelled in attempt {order.generation}"
