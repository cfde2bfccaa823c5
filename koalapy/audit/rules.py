"""The rules of the audit, each a function that yields the contradictions that it finds in the evidence of a job.

A rule that lacks evidence yields a gap, so that a report never shows as proved what no source could tell.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from koalapy.audit.evidence import Evidence, JobEvidence, NodeUse
from koalapy.audit.facts import FAR_FUTURE, FINAL_STATES, Fact, JobRecord, Output, Run, RunKind, Source, format_moment

LINGER_S = 60.0
"""Seconds in which jobs of a resource manager are removed after an end or as duplicates, and ends are reported."""
REMOVED = "the database has no record of the job any more"
MAX_FINDINGS = 1000
"""Findings that a report lists; more are counted."""
MAX_EXAMPLES = 3
"""Jobs that a report names of those without evidence."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A violated rule, and which source said what and when."""

    rule: str
    job: int
    attempt: int | None
    text: str
    evidence: tuple[str, ...] = ()

    def __str__(self) -> str:
        attempt = "" if self.attempt is None else f".{self.attempt}"
        return f"{self.rule}: job {self.job}{attempt}: {self.text}{''.join(f' [{entry}]' for entry in self.evidence)}"


@dataclass(frozen=True, slots=True)
class Gap:
    """A rule that could not be judged for a job, and the evidence that is missing."""

    rule: str
    job: int
    missing: str


@dataclass(slots=True)
class Missing:
    """The jobs for which a rule was not proved since some evidence is missing."""

    count: int = 0
    last_job: int | None = None
    examples: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """The findings of an audit, and the facts that it could not prove."""

    sources: list[Source] = field(default_factory=list)
    jobs: int = 0
    """Jobs with any fact."""
    findings: list[Finding] = field(default_factory=list)
    finding_count: int = 0
    missing: dict[tuple[str, str], Missing] = field(default_factory=dict)
    """By rule and missing evidence."""

    def add(self, results: Iterable[Finding | Gap]) -> None:
        for result in results:
            if isinstance(result, Gap):
                missing = self.missing.setdefault((result.rule, result.missing), Missing())
                if result.job == missing.last_job:  # another component
                    continue
                missing.count, missing.last_job = missing.count + 1, result.job
                if len(missing.examples) < MAX_EXAMPLES:
                    missing.examples.append(result.job)
                continue
            self.finding_count += 1
            if len(self.findings) < MAX_FINDINGS:
                self.findings.append(result)


Results = Iterator[Finding | Gap]
JobRule = Callable[[JobEvidence, Evidence], Results]
GridRule = Callable[[Evidence], Results]
JOB_RULES: dict[str, JobRule] = {}
GRID_RULES: dict[str, GridRule] = {}


def _job_rule(name: str) -> Callable[[JobRule], JobRule]:
    """Register a rule about the facts of one job."""
    return lambda function: JOB_RULES.setdefault(name, function)


def _grid_rule(name: str) -> Callable[[GridRule], GridRule]:
    """Register a rule that compares facts of several jobs."""
    return lambda function: GRID_RULES.setdefault(name, function)


def find_violations(facts: Iterable[Fact]) -> list[Finding]:
    """Return the violations of all rules in facts, which may come in any order."""
    return audit_facts(facts).findings


def audit_facts(facts: Iterable[Fact]) -> Report:
    """Judge facts, which may come in any order, by all rules."""
    with Evidence(facts) as evidence:
        report = Report(evidence.sources)
        for job in evidence.jobs():
            report.jobs += 1
            for rule in JOB_RULES.values():
                report.add(rule(job, evidence))
        for grid_rule in GRID_RULES.values():
            report.add(grid_rule(evidence))
    return report


@_grid_rule("submission-once")
def check_submissions(evidence: Evidence) -> Results:
    """A keyed submission happens once: one key names one job, which exists."""
    for submissions in evidence.submissions():
        jobs = sorted({submission.job for submission in submissions})
        statements = tuple(dict.fromkeys(map(str, submissions)))
        if len(jobs) > 1:
            yield Finding("submission-once", jobs[1], None, f"one submission is the jobs {jobs}", statements)
        for job in jobs:
            if evidence.find_record(job) is None:
                missing = Finding("submission-once", job, None, "it was acknowledged, and is missing", statements)
                yield _unless_removed(missing, evidence)


def _unless_removed(missing: Finding, evidence: Evidence) -> Finding | Gap:
    """Return a finding about a job without a record, or a gap if the daemon may have removed the job."""
    return Gap(missing.rule, missing.job, REMOVED) if evidence.may_be_removed(missing.job) else missing


@_job_rule("attempt-once")
def check_starts(job: JobEvidence, _: Evidence) -> Results:
    """An attempt happens at most once: no part of it starts twice, or has two jobs of a resource manager at a time."""
    firsts: dict[tuple[object, ...], Run] = {}
    for run in sorted(job.runs, key=lambda run: run.begin or 0.0):
        key = (run.source.name, run.kind, run.attempt, run.part, run.cluster)
        first = firsts.setdefault(key, run)
        if first is run or run.kind is RunKind.CLAIM or _are_one_start(first, run):
            continue
        overlap_s = min(first.last_moment or 0.0, run.last_moment or 0.0) - (run.begin or FAR_FUTURE)
        if run.kind is RunKind.PROGRAM:
            yield Finding("attempt-once", job.job, run.attempt, f"{run.part} started twice", (str(first), str(run)))
        elif overlap_s > LINGER_S + run.source.tolerance_to(run.source):
            text = f"component {run.part} had two jobs of {run.cluster} at a time"
            yield Finding("attempt-once", job.job, run.attempt, text, (str(first), str(run)))
        else:
            firsts[key] = run


def _are_one_start(first: Run, run: Run) -> bool:
    """Return whether two runs of a part are reports of one start, which the next daemon run may hear of again."""
    if first.run_id and run.run_id:
        return first.run_id == run.run_id
    return first.begin == run.begin or first.source != run.source


@_job_rule("attempts-apart")
def check_attempts(job: JobEvidence, _: Evidence) -> Results:
    """Attempts of a job never overlap: each program has ended before a program of a later attempt begins."""
    programs = job.runs_of(RunKind.PROGRAM)
    given_up = {(run.attempt, run.part) for run in job.runs_of(RunKind.CLAIM) if run.unknown_since is not None}
    # Runners may deliver results after the lease of a component has ended its program.
    held_runs = [run for run in job.runs_of(RunKind.HELD) if (run.attempt, run.part) not in given_up]
    reported: set[tuple[int, int]] = set()
    for later in programs or held_runs:
        for earlier in (*programs, *held_runs):
            pair = (earlier.attempt, later.attempt)
            end = earlier.last_moment
            if pair[0] >= pair[1] or pair in reported or end is None or later.begin is None:
                continue
            if end > later.begin + earlier.source.tolerance_to(later.source):
                reported.add(pair)
                text = f"attempt {pair[0]} had not ended when attempt {pair[1]} began"
                yield Finding("attempts-apart", job.job, later.attempt, text, (str(earlier), str(later)))


@_job_rule("result-produced")
def check_result(job: JobEvidence, _: Evidence) -> Results:
    """A reported result was produced: its exit code and success are backed by a source at the program."""
    record = job.record
    if record is None or not record.is_final or record.attempt == 0 or record.array is not None:
        return
    programs = [run for run in job.runs_of(RunKind.PROGRAM, record.attempt) if run.exit_code is not None]
    programs.sort(key=lambda run: " " in run.part)  # components first
    claims = _last_claims(job, record)[: 1 if record.has_one_code else None]  # those with an exit code
    statements = (str(record), *map(str, programs))
    if record.state == "succeeded" and record.exit_code != 0:
        yield Finding("result-produced", job.job, record.attempt, "it succeeded without exit code 0", statements[:1])
    elif record.exit_code is None:
        if record.state == "failed" and not record.reason.startswith("infrastructure") and _is_complete(job, record):
            text = "it failed without an exit code, and every program ended with 0"
            yield Finding("result-produced", job.job, record.attempt, text, statements)
    elif record.state == "succeeded" and (failing := [run for run in programs if run.exit_code != 0]):
        text = f"it succeeded, and a program ended with {failing[0].exit_code}"
        yield Finding("result-produced", job.job, record.attempt, text, (statements[0], *map(str, failing)))
    elif record.exit_code in {run.exit_code for run in programs}:
        return
    elif not any(len({run.part for run in runs}) >= _count_parts(runs, claims) for runs in _group_by_source(programs)):
        yield Gap("result-produced", job.job, "no source at the program knows the exit code")  # a killed part has none
    else:
        text = f"no program ended with its exit code {record.exit_code}"
        yield Finding("result-produced", job.job, record.attempt, text, statements)


def _is_complete(job: JobEvidence, record: JobRecord) -> bool:
    """Return whether one source saw all parts of the last attempt end with 0, in time, and the daemon gave up none."""
    has_run_out = record.reason.startswith(("deadline", "walltime"))
    limit = (record.ended_at or FAR_FUTURE) - LINGER_S if has_run_out else FAR_FUTURE
    claims = _last_claims(job, record)
    return all(claim.unknown_since is None for claim in claims) and any(
        {run.exit_code for run in runs} in ({0}, {0, None} if record.has_one_code else {0})
        and len(_finished_parts(runs)) == _count_parts(runs, claims) > 0
        and max(run.end or 0.0 for run in runs) <= limit
        for runs in _group_by_source(job.runs_of(RunKind.PROGRAM, record.attempt))
    )


def _last_claims(job: JobEvidence, record: JobRecord) -> list[Run]:
    """Return the claims of the last attempt, without components that others have replaced."""
    return [claim for claim in job.runs_of(RunKind.CLAIM, record.attempt) if not claim.superseded]


def _count_parts(runs: list[Run], claims: list[Run]) -> int:
    """Return how many parts a source must have seen: the ranks that its marks name, or the claimed components."""
    return runs[0].size if " " in runs[0].part else len(claims)


def _group_by_source(runs: Iterable[Run]) -> list[list[Run]]:
    """Group runs by the names of their sources: a record names a program when it ends, or in a later daemon run."""
    groups: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.source.name].append(run)
    return list(groups.values())


@_job_rule("gang-whole")
def check_gang(job: JobEvidence, _: Evidence) -> Results:
    """No gang ran in part and counts as succeeded: each component had its nodes, and each source saw each part run."""
    record = job.record
    if record is None or record.state != "succeeded" or record.attempt == 0 or record.array is not None:
        return
    claims = _last_claims(job, record)
    for claim in claims:
        if claim.begin is None or (claim.nodes and len(claim.nodes) != claim.size):
            text = f"component {claim.part} never had its {claim.size} nodes"
            yield Finding("gang-whole", job.job, record.attempt, text, (str(record), str(claim)))
    groups = _group_by_source(job.runs_of(RunKind.PROGRAM, record.attempt))
    groups = [runs for runs in groups if any(all(map(run.source.covers, claims)) for run in runs)]
    if not groups:
        yield Gap("gang-whole", job.job, "no source saw its programs from begin to end")
    elif all(len(_finished_parts(runs)) < _count_parts(runs, claims) for runs in groups):
        runs = max(groups, key=len)
        text = f"only {sorted(_finished_parts(runs))} of {_count_parts(runs, claims)} parts ran"
        yield Finding("gang-whole", job.job, record.attempt, text, (str(record), *map(str, runs)))


def _finished_parts(runs: list[Run]) -> set[str]:
    """Return the parts that ran to their end. The exit code of a component may be that of the whole program only."""
    return {run.part for run in runs if " " not in run.part or run.exit_code == 0}


@_grid_rule("node-once")
def check_nodes(evidence: Evidence) -> Results:
    """No node is held twice by jobs of the grid at a time, unless both accept a part of a node."""
    for source, uses in evidence.node_uses():
        latest: dict[str, NodeUse] = {}
        for use in uses:
            earlier = latest.get(use.kind)
            if earlier is None or (use.last_moment or 0.0) >= (earlier.last_moment or 0.0):
                latest[use.kind] = use
            if earlier is None or (earlier.job, earlier.attempt, earlier.part) == (use.job, use.attempt, use.part):
                continue
            if (earlier.last_moment or 0.0) > use.begin + source.tolerance_to(source):
                yield from _judge_node_conflict(evidence.find_run(earlier.fact), evidence.find_run(use.fact), evidence)


def _judge_node_conflict(earlier: Run, run: Run, evidence: Evidence) -> Results:
    """Yield a finding for two runs on a node at the same time, unless both jobs share nodes or the end is unknown."""
    shares = {_shares_nodes(job, evidence) for job in (earlier.job, run.job)}
    if earlier.kind is RunKind.CLAIM and _accounts_of(earlier, evidence) & _accounts_of(run, evidence):
        return  # their times are judged: the daemon may have heard of an end late, or its clock was set back
    if False in shares and earlier.unknown_since is not None and (run.begin or 0.0) >= earlier.unknown_since:
        yield Gap("node-once", run.job, "the end of an earlier claim on the same node was not reported")
    elif False in shares:
        text = f"{min({*earlier.nodes} & {*run.nodes})} of {run.cluster} was held by job {earlier.job} as well"
        yield Finding("node-once", run.job, run.attempt, text, (str(earlier), str(run)))
    elif None in shares:
        yield Gap("node-once", run.job, "the database has no record any more of a job on the same node")


def _accounts_of(claim: Run, evidence: Evidence) -> set[Source]:
    """Return the sources that recorded which nodes a resource manager gave to a claim."""
    part = (RunKind.HELD, claim.attempt, claim.part, claim.cluster)
    runs = evidence.find_runs(claim.job)
    return {r.source for r in runs if (r.kind, r.attempt, r.part, r.cluster) == part and r.nodes}


def _shares_nodes(job: int, evidence: Evidence) -> bool | None:
    """Return whether a job accepts part of a node; None if the daemon may have removed it."""
    if (record := evidence.find_record(job)) is not None:
        return record.shares
    return None if evidence.may_be_removed(job) else False


@_job_rule("claim-ended")
def check_claims(job: JobEvidence, _: Evidence) -> Results:
    """Every claim ended when its job ended, and claims of earlier attempts before that."""
    record = job.record
    if record is None:
        return
    for claim in job.runs_of(RunKind.CLAIM):
        is_over = record.is_final or claim.attempt < record.attempt
        if is_over and not claim.has_ended and claim.unknown_since is None:
            text = f"component {claim.part} still has its nodes"
            yield Finding("claim-ended", job.job, claim.attempt, text, (str(record), str(claim)))


@_job_rule("nothing-left")
def check_remains(job: JobEvidence, _: Evidence) -> Results:
    """Nothing is left in a resource manager after a job has ended."""
    record = job.record
    if record is None or not record.is_final or record.array is not None:
        return
    held_runs = job.runs_of(RunKind.HELD)
    claims = {(claim.attempt, claim.part): claim for claim in job.runs_of(RunKind.CLAIM)}
    accounted = {(run.attempt, run.part) for run in held_runs}
    if any(claim.begin is not None and key not in accounted for key, claim in claims.items()):
        yield Gap("nothing-left", job.job, "no accounting of a resource manager that gave it nodes")
    for run in held_runs:
        claim = claims.get((run.attempt, run.part))
        end, moment = record.ended_at, run.last_moment
        if (claim is not None and claim.unknown_since is not None) or end is None or moment is None:
            continue
        released_at = max(end, claim.end or end) if claim is not None else end
        if moment > released_at + LINGER_S + run.source.tolerance_to(record.source):
            verb = "was left" if run.has_ended else "is left"
            text = f"a job of component {run.part} {verb} on {run.cluster} after its end"
            yield Finding("nothing-left", job.job, run.attempt, text, (str(record), str(run)))


@_job_rule("run-recorded")
def check_recorded(job: JobEvidence, evidence: Evidence) -> Results:
    """Nothing runs that the database does not hold: each start belongs to a component of a recorded attempt."""
    runs = [run for run in job.runs if run.kind is not RunKind.CLAIM]
    if job.job <= 0 or not runs:
        return
    if job.record is None:
        text = "it ran, and the database has no such job"
        yield _unless_removed(Finding("run-recorded", job.job, runs[0].attempt, text, (str(runs[0]),)), evidence)
        return
    claims = {(claim.attempt, claim.part): claim for claim in job.runs_of(RunKind.CLAIM)}
    nodes: dict[tuple[int, str], set[str]] = defaultdict(set)
    for run in runs:
        if " " in run.part:
            nodes[run.attempt, run.cluster].update(run.nodes)
            continue
        claim = claims.get((run.attempt, run.part))
        if claim is None or claim.cluster != run.cluster or (run.nonce and claim.nonce not in ("", run.nonce)):
            text = f"component {run.part} on {run.cluster} is not recorded"
            yield Finding("run-recorded", job.job, run.attempt, text, (str(run), *([str(claim)] if claim else [])))
    for (attempt, cluster), names in nodes.items():
        recorded = sum(c.size for c in claims.values() if (c.attempt, c.cluster) == (attempt, cluster))
        if len(names) > recorded:
            text = f"it ran on {len(names)} nodes of {cluster}, and {recorded} are recorded"
            yield Finding("run-recorded", job.job, attempt, text, tuple(sorted(names)))


@_job_rule("rows-whole")
def check_rows(job: JobEvidence, _: Evidence) -> Results:
    """The database lacks no row that others need."""
    for row in job.missing:
        yield Finding("rows-whole", job.job, row.attempt, f"the database lacks a row: {row.missing}")


@_job_rule("array-once")
def check_array(job: JobEvidence, evidence: Evidence) -> Results:
    """Each index of an array runs exactly once: no index is a task twice, and none is lost at the array's end."""
    record = job.record
    if record is None or (counts := record.array) is None:
        return
    by_state: dict[str, int] = defaultdict(int)
    previous: tuple[int, int] | None = None
    for index, task, state in evidence.tasks_of(job.job):
        by_state[state] += 1
        if previous is not None and previous[0] == index:
            yield Finding("array-once", job.job, None, f"index {index} is the jobs {previous[1]} and {task}")
        if not counts.has_index(index):
            yield Finding("array-once", job.job, None, f"job {task} has the index {index}, which the array lacks")
        previous = (index, task)
    if not record.is_final:
        return
    ended = counts.succeeded + counts.failed + counts.cancelled
    if ended != counts.size or (record.state == "succeeded" and counts.succeeded != counts.size):
        text = f"it {record.state} with {counts.succeeded} succeeded of {counts.size} tasks, {ended} ended"
        yield Finding("array-once", job.job, None, text, (str(record),))
    for state, count in (("succeeded", counts.succeeded), ("failed", counts.failed)):
        if by_state[state] == count:
            continue
        if by_state[state] < count and evidence.may_be_removed(job.job + 1):
            yield Gap("array-once", job.job, "the daemon may have removed tasks")
            continue
        text = f"it counts {count} tasks that {state}, and {by_state[state]} are recorded"
        yield Finding("array-once", job.job, None, text, (str(record),))


@_job_rule("dependency-first")
def check_dependencies(job: JobEvidence, evidence: Evidence) -> Results:
    """A dependent job never begins before the jobs that it depends on have ended in the required way."""
    record = job.record
    if record is None or not record.after:
        return
    for clause in record.after:
        ends = [(alternative, how, evidence.find_record(alternative)) for alternative, how in clause]
        if any(end is None for _, _, end in ends):
            yield Gap("dependency-first", job.job, "the database has no record of a job that it depends on")
            continue
        satisfied = [end for _, how, end in ends if end is not None and _holds(how, end.state)]
        too_early = [run for run in job.runs if not any(_ended_before(end, run, record) for end in satisfied)]
        if first := min(too_early, key=lambda run: run.begin or 0.0, default=None):
            texts = [f"job {ident} {end.state}, end {format_moment(end.ended_at)}" for ident, _, end in ends if end]
            text = f"it began before {' or '.join(f'{ident}:{how}' for ident, how, _ in ends)} held"
            yield Finding("dependency-first", job.job, first.attempt, text, (str(first), *texts))


def _ended_before(end: JobRecord, run: Run, dependent: JobRecord) -> bool:
    """Return whether a job had ended when a run of a dependent job began, if that is known.

    For a claim the order of the database decides, which is right also if the daemon's clock was set back.
    """
    if run.kind is RunKind.CLAIM and end.ended_line is not None and dependent.placed_line is not None:
        return end.ended_line < dependent.placed_line
    return run.begin is None or (end.ended_at or FAR_FUTURE) <= run.begin + end.source.tolerance_to(run.source)


def _holds(how: str, state: str) -> bool:
    """Return whether a job that is in a state fulfils a condition."""
    return state in {"ok": ("succeeded",), "failed": ("failed", "cancelled")}.get(how, FINAL_STATES)


@_job_rule("lease-obeyed")
def check_leases(job: JobEvidence, _: Evidence) -> Results:
    """No component's program runs after its lease or walltime has certainly ended, once its cluster was lost."""
    for claim in job.runs_of(RunKind.CLAIM):
        if claim.lease_over_at is None:
            continue
        programs = [
            run
            for run in job.runs_of(RunKind.PROGRAM, claim.attempt)
            if run.part == claim.part or (" " in run.part and run.cluster == claim.cluster)
        ]
        moments = [(moment, run) for run in programs if (moment := run.last_moment) is not None]
        if not moments:
            yield Gap("lease-obeyed", job.job, "no source knows when the program of a lost component ended")
        for moment, run in moments:
            if moment > claim.lease_over_at + run.source.tolerance_to(claim.source):
                text = f"component {claim.part} ran after its lease was over at {format_moment(claim.lease_over_at)}"
                yield Finding("lease-obeyed", job.job, claim.attempt, text, (str(claim), str(run)))


@_job_rule("output-whole")
def check_output(job: JobEvidence, _: Evidence) -> Results:
    """Output is complete, or its gap is announced."""
    record = job.record
    if record is None or not record.is_final:
        return
    by_part: dict[tuple[int, str], list[Output]] = defaultdict(list)
    for output in job.outputs:
        by_part[output.attempt, output.part].append(output)
    for (attempt, part), outputs in by_part.items():
        written = max((output.written for output in outputs if output.written is not None), default=None)
        stored = max((output.stored for output in outputs if output.stored is not None), default=None)
        if any(output.gap_announced for output in outputs):
            continue
        if written is None:
            yield Gap("output-whole", job.job, "no source at the program knows how much it wrote")
        elif written > (stored or 0):
            text = f"component {part} wrote {written} bytes, {stored or 0} are stored, and no gap is announced"
            yield Finding("output-whole", job.job, attempt, text, tuple(map(str, outputs)))
