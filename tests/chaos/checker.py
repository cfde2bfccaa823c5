"""Find violations in the evidence of a run, by the marks that the ranks wrote."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from tests.chaos.checked_output import check_output, check_results
from tests.chaos.evidence import FINAL_STATES, ClusterReport, Evidence, ReportedJob, Submission, Violation
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
        *check_submissions(evidence.submissions, evidence.jobs),
        *check_marks(evidence.marks, {str(job.id): job for job in evidence.jobs}),
        *check_reports(evidence.reports),
        *check_final_reports(evidence.final_reports),
        *(Violation("left", "", text) for text in evidence.remains),
        *(Violation("trouble", "", text) for text in evidence.troubles),
    ]
    planned = {submission.planned.name: submission for submission in evidence.submissions}
    for job in evidence.jobs:
        if job.name in planned:
            violations += check_job(planned[job.name], job, Ranks(by_job[str(job.id)]), evidence.output_limit)
    return sorted(violations)


def check_submissions(submissions: Sequence[Submission], jobs: Sequence[ReportedJob]) -> Iterator[Violation]:
    """Yield jobs that were lost after their acknowledgement, duplicated or never submitted."""
    if not jobs:  # the daemon reported no jobs, which is a trouble already
        return
    jobs_by_id = {job.id: job for job in jobs}
    names: dict[str, list[int]] = defaultdict(list)
    for job in jobs:
        names[job.name].append(job.id)
    for submission in submissions:
        name, ids = submission.planned.name, set(submission.ids)
        for ident in ids:
            if ident not in jobs_by_id or jobs_by_id[ident].name != name:
                yield Violation("lost", str(ident), f"{name} was acknowledged, and is missing")
        if len(ids) > 1 or len(names[name]) > 1:
            yield Violation("twice", "", f"{name} is {sorted({*ids, *names[name]})}")
        if not ids and not names[name]:
            yield Violation("lost", "", f"{name} was never acknowledged, however often it was submitted")
    for unknown in names.keys() - {submission.planned.name for submission in submissions}:
        yield Violation("twice", "", f"nobody submitted {unknown} ({names[unknown]})")


def check_marks(marks: Sequence[Mark], jobs: Mapping[str, ReportedJob]) -> Iterator[Violation]:
    """Yield nodes and ranks used twice, parallel attempts, and ranks that the daemon has not recorded."""
    begun: dict[tuple[str, int, int], Mark] = {}
    by_node: dict[str, list[Mark]] = defaultdict(list)
    sizes: dict[tuple[str, int, str], int] = defaultdict(int)
    for mark in marks:
        if mark.event == "loud":
            continue
        by_node[mark.node].append(mark)
        if mark.event == "end":
            continue
        for trouble in mark.trouble:
            yield Violation("overlap", mark.job, f"{mark}: {trouble}")
        if earlier := begun.get(mark.rank):
            yield Violation("rank twice", mark.job, f"{mark}, which was {earlier} before")
        begun[mark.rank] = mark
        sizes[mark.job, mark.generation, mark.cluster] += 1
        if not mark.host.startswith(f"{NETWORKS[mark.cluster]}."):
            yield Violation("network", mark.job, f"{mark} has the address {mark.host}")
    for node, node_marks in by_node.items():
        yield from _check_node_sharing(node, node_marks)
    for (name, generation, cluster), ranks in sizes.items():
        job = jobs.get(name)
        if name.startswith("local-"):
            continue
        recorded = job.attempts.get(generation, {}).get(cluster, 0) if job else 0
        if ranks > recorded:
            text = f"attempt {generation} ran on {ranks} nodes of {cluster}; its record says {recorded}"
            yield Violation("unrecorded", name, text)


def _check_node_sharing(node: str, marks: Sequence[Mark]) -> Iterator[Violation]:
    """Yield overlapping ranks on a node, by the times of their marks."""
    running_ranks: dict[tuple[str, int, int], Mark] = {}
    for mark in sorted(marks, key=lambda mark: mark.time_s):
        if mark.event == "begin":
            running_ranks[mark.rank] = mark
            continue
        begin = running_ranks.pop(mark.rank, None)
        for running in running_ranks.values():
            if begin is not None and running.time_s > begin.time_s:
                yield Violation("overlap", mark.job, f"{running} before {mark}")


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


def check_job(submission: Submission, job: ReportedJob, ranks: Ranks, limit: int) -> Iterator[Violation]:
    """Yield errors in the final state, the output and the results of a job."""
    ident = str(job.id)
    if job.state not in FINAL_STATES:
        yield Violation("unfinished", ident, f"{job.name} is {job.state} ({job.reason}) in attempt {job.generation}")
        return
    if newer := [mark for mark in ranks.marks if mark.generation > job.generation]:
        yield Violation("unrecorded", ident, f"{newer[0]}, but it ended with attempt {job.generation}")
    error = _find_verdict_error(submission, job, ranks)
    if error:
        yield Violation("verdict", ident, f"{job.name} {job.state} ({job.reason or job.exit_code}): {error}")
    for text in _find_late_starts(submission, ranks):
        yield Violation("not stopped", ident, text)
    # Output is not checked if the final state is wrong.
    if not error:
        begun, ended = ranks.begun.get(job.generation, {}), ranks.ended.get(job.generation, {})
        for text in check_output(submission.planned, job, begun, ended, limit):
            yield Violation("output", ident, f"{job.name} {job.state}: {text}")
        for text in check_results(submission.planned, job, begun):
            yield Violation("results", ident, f"{job.name} {job.state}: {text}")


def _find_verdict_error(submission: Submission, job: ReportedJob, ranks: Ranks) -> str:
    """Return the contradiction between a job's state and the marks of its ranks, or an empty string."""
    planned, last = submission.planned, job.generation
    complete, codes = ranks.is_complete(last), ranks.codes(last)
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
