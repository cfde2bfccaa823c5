"""Find violations in the evidence of a run: those that the auditor finds, and those of what only this harness knows."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from koalapy.audit.facts import Source
from koalapy.audit.facts import Submission as Acknowledged
from koalapy.audit.rules import find_violations
from tests.chaos.checked_output import check_output, check_results
from tests.chaos.evidence import FINAL_STATES, ClusterReport, Evidence, ReportedJob, Submission, Violation
from tests.chaos.marks import Mark, read_facts
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
            if mark.event in ("begin", "end"):
                (self.begun if mark.event == "begin" else self.ended)[mark.generation][mark.index] = mark

    def is_complete(self, generation: int) -> bool:
        """Tell whether every rank of an attempt has begun and ended with exit code 0."""
        begun, ended = self.begun.get(generation, {}), self.ended.get(generation, {})
        size = next((mark.size for mark in begun.values()), 0)
        return 0 < size == len(begun) == len(ended) and all(mark.code == 0 for mark in ended.values())

    def codes(self, generation: int) -> set[int | None]:
        """Return the exit codes other than 0 of an attempt's ranks."""
        return {mark.code for mark in self.ended.get(generation, {}).values()} - {0}


def check(evidence: Evidence) -> list[Violation]:
    """Return all violations, sorted."""
    by_job: dict[str, list[Mark]] = defaultdict(list)
    for mark in evidence.marks:
        by_job[mark.job].append(mark)
    violations = [
        *audit(evidence),
        *check_submissions(evidence.submissions, evidence.jobs),
        *check_marks(evidence.marks),
        *check_reports(evidence.reports),
        *check_final_reports(evidence.final_reports),
        *(Violation("left", "", text) for text in evidence.remains),
        *(Violation("trouble", "", text) for text in evidence.troubles),
    ]
    planned = {submission.planned.name: submission for submission in evidence.submissions}
    for job in evidence.jobs:
        if job.name in planned:
            violations += check_job(planned[job.name], job, Ranks(by_job[str(job.id)]), evidence)
    return sorted(violations)


def audit(evidence: Evidence) -> Iterator[Violation]:
    """Yield what the auditor finds in all sources, with the marks of ranks and what clients received."""
    clients, database = Source("clients"), Source("names of jobs")
    acknowledged = [
        *(Acknowledged(clients, s.planned.name, ident) for s in evidence.submissions for ident in s.ids),
        *(Acknowledged(database, job.name, job.id) for job in evidence.jobs),
    ]
    for finding in find_violations([*evidence.facts, *read_facts(evidence.marks), *acknowledged]):
        yield Violation(finding.rule, str(finding.job), str(finding))


def check_submissions(submissions: Sequence[Submission], jobs: Sequence[ReportedJob]) -> Iterator[Violation]:
    """Yield planned jobs that were never submitted, and jobs that were not planned."""
    if not jobs:  # the daemon reported no jobs, which is a trouble already
        return
    names = {job.name for job in jobs}
    for submission in submissions:
        if not submission.ids and submission.planned.name not in names:
            yield Violation("lost", "", f"{submission.planned.name} was never acknowledged, however often it was sent")
    for unknown in names - {submission.planned.name for submission in submissions}:
        yield Violation("unplanned", "", f"no client submitted {unknown}")


def check_marks(marks: Sequence[Mark]) -> Iterator[Violation]:
    """Yield ranks that found their node, rank or job locked, or with an address of another network."""
    for mark in marks:
        if mark.event != "begin":
            continue
        for trouble in mark.trouble:
            yield Violation("overlap", mark.job, f"{mark}: {trouble}")
        if not mark.host.startswith(f"{NETWORKS[mark.cluster]}."):
            yield Violation("network", mark.job, f"{mark} has the address {mark.host}")


def check_reports(looks: Sequence[ClusterReport]) -> Iterator[Violation]:
    """Yield reports of reachable clusters with node counts that do not add up."""
    for look in looks:
        if look.state == "unreachable":
            continue
        counts = (look.idle, look.used, look.background, look.down)
        if sum(counts) != look.total or min(counts) < 0:
            counts_text = f"idle {look.idle} + used {look.used} + background {look.background} + down {look.down}"
            text = f"{counts_text} are not {look.total} nodes of {look.cluster} ({look.state}, at {look.time_s:.2f})"
            yield Violation("counts", "", text)


def check_final_reports(looks: Sequence[ClusterReport]) -> Iterator[Violation]:
    """Yield clusters with busy nodes at the end."""
    for look in looks:
        if (look.idle, look.used, look.background) != (look.total, 0, 0):
            counts_text = f"idle {look.idle}, used {look.used}, background {look.background}, down {look.down}"
            yield Violation(
                "rest", "", f"{look.cluster} with {look.total} nodes ended with {counts_text} ({look.state})"
            )


def check_job(submission: Submission, job: ReportedJob, ranks: Ranks, evidence: Evidence) -> Iterator[Violation]:
    """Yield errors in the final state, the output and the results of a job."""
    ident = str(job.id)
    if job.state not in FINAL_STATES:
        yield Violation("unfinished", ident, f"{job.name} is {job.state} ({job.reason}) in attempt {job.generation}")
        return
    error = _find_verdict_error(submission, job, ranks)
    if error:
        yield Violation("verdict", ident, f"{job.name} {job.state} ({job.reason or job.exit_code}): {error}")
    for text in _find_late_starts(submission, ranks):
        yield Violation("not stopped", ident, text)
    # Output is not checked if the final state is wrong.
    if not error:
        begun, ended = ranks.begun.get(job.generation, {}), ranks.ended.get(job.generation, {})
        limit, was_power_lost = evidence.output_limit, evidence.was_power_lost
        for text in check_output(submission.planned, job, begun, ended, limit, was_power_lost=was_power_lost):
            yield Violation("output", ident, f"{job.name} {job.state}: {text}")
        for text in check_results(submission.planned, job, begun):
            yield Violation("results", ident, f"{job.name} {job.state}: {text}")


def _find_verdict_error(submission: Submission, job: ReportedJob, ranks: Ranks) -> str:
    """Return the contradiction between a job's state and the marks of its ranks, or an empty string."""
    planned, last = submission.planned, job.generation
    complete, codes = ranks.is_complete(last), ranks.codes(last)
    match job.state:
        case "succeeded":
            return "" if complete else f"not every rank of attempt {last} ended with 0"
        case "cancelled":
            return "" if submission.cancel_tried else "nobody cancelled it"
    if job.reason.startswith(INFRASTRUCTURE):
        if GAVE_UP not in job.reason or job.restarts < job.max_restarts:
            return f"after {job.restarts} of {job.max_restarts} restarts"
        return ""
    if complete:
        return f"every rank of attempt {last} ended with 0"
    if WALLTIME in job.reason:
        return "" if _is_short(planned.walltime) else "it had time enough"
    if job.exit_code in codes and job.exit_code == planned.task["code"]:
        return ""
    return f"its ranks ended with {codes or 'nothing'}"


def _is_short(walltime: float | None) -> bool:
    return walltime is not None and walltime < 60


def _find_late_starts(submission: Submission, ranks: Ranks) -> Iterator[str]:
    """Yield ranks of attempts that began after the job was cancelled."""
    order = submission.cancelled
    if order is None:
        return
    for attempt in ranks.begun.values():
        for mark in attempt.values():
            if mark.generation > order.generation and mark.time_s > order.time_s:
                yield f"{mark}, {mark.time_s - order.time_s:.1f} s after it was cancelled in attempt {order.generation}"
