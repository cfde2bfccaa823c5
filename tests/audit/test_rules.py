"""The rules accept correct histories of any kind, and find each fault that is planted in one."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from koalapy.audit.facts import ArrayCounts, Fact, JobRecord, MissingRow, Output, Run, RunKind, Source, Submission
from koalapy.audit.rules import GRID_RULES, JOB_RULES, audit_facts, find_violations
from tests.audit.history import DATABASE, History

Fault = Callable[[list[Fact], Random], bool]
FAULTS: dict[str, tuple[str, Fault]] = {}
"""By name: the rule that finds the fault, and the function that plants it and returns whether the history allows it."""


def fault(rule: str) -> Callable[[Fault], Fault]:
    def register(plant: Fault) -> Fault:
        FAULTS[plant.__name__] = (rule, plant)
        return plant

    return register


def find_runs(facts: list[Fact], kind: RunKind) -> list[Run]:
    return [fact for fact in facts if isinstance(fact, Run) and fact.kind is kind]


def find_records(facts: list[Fact], *states: str) -> list[JobRecord]:
    return [fact for fact in facts if isinstance(fact, JobRecord) and fact.state in states and fact.attempt]


def choose(random: Random, items: list[Any]) -> Iterator[Any]:
    """Yield one of the items, or none if there is none."""
    if items:
        yield random.choice(items)


def change(facts: list[Fact], fact: Fact, **changes: object) -> bool:
    facts[facts.index(fact)] = replace(fact, **changes)
    return True


def last_programs(facts: list[Fact], record: JobRecord) -> list[Run]:
    return [r for r in find_runs(facts, RunKind.PROGRAM) if (r.job, r.attempt) == (record.job, record.attempt)]


@fault("submission-once")
def submission_twice(facts: list[Fact], random: Random) -> bool:
    submissions = [fact for fact in facts if isinstance(fact, Submission)]
    if len(submissions) < 2:
        return False
    one, other = random.sample(submissions, 2)
    facts.append(replace(one, source=Source("client"), job=other.job))
    return True


@fault("submission-once")
def submission_lost(facts: list[Fact], random: Random) -> bool:
    facts.append(Submission(Source("client"), "lost", 10_000))
    return bool(find_records(facts, "succeeded", "failed"))


@fault("attempt-once")
def double_start(facts: list[Fact], random: Random) -> bool:
    for run in choose(random, find_runs(facts, RunKind.PROGRAM)):
        facts.append(replace(run, run_id="another", begin=run.begin + 20.0))
        return True
    return False


@fault("attempt-once")
def start_after_restart_of_daemon(facts: list[Fact], random: Random) -> bool:
    for run in choose(random, find_runs(facts, RunKind.PROGRAM)):
        source = replace(run.source, since=run.end + 5.0)
        facts.append(replace(run, source=source, run_id="another", begin=run.end + 10.0, end=run.end + 20.0))
        return True
    return False


@fault("attempt-once")
def two_jobs_for_a_component(facts: list[Fact], random: Random) -> bool:
    for run in choose(random, [run for run in find_runs(facts, RunKind.HELD) if run.end - run.begin > 70.0]):
        facts.append(replace(run, run_id="another", nodes=("another",)))
        return True
    return False


@fault("node-once")
def node_given_to_two_components(facts: list[Fact], random: Random) -> bool:
    for run in choose(random, find_runs(facts, RunKind.HELD)):
        facts.append(replace(run, part="7"))
        return True
    return False


@fault("attempts-apart")
def overlap_of_attempts(facts: list[Fact], random: Random) -> bool:
    later = [run for run in find_runs(facts, RunKind.PROGRAM) if run.attempt > 1]
    for run in choose(random, later):
        earlier = [r for r in find_runs(facts, RunKind.HELD) if (r.job, r.attempt) == (run.job, run.attempt - 1)]
        return change(facts, random.choice(earlier), end=run.begin + 10.0)
    return False


@fault("lease-obeyed")
def disobeyed_lease(facts: list[Fact], random: Random) -> bool:
    for run in choose(random, find_runs(facts, RunKind.PROGRAM)):
        claim = next(
            c for c in find_runs(facts, RunKind.CLAIM) if (c.job, c.attempt, c.part) == (run.job, run.attempt, run.part)
        )
        return change(facts, claim, unknown_since=run.begin, lease_over_at=run.end - 6.0)
    return False


@fault("result-produced")
def forged_exit_code(facts: list[Fact], random: Random) -> bool:
    for record in choose(random, find_records(facts, "failed")):
        return change(facts, record, exit_code=7)
    return False


@fault("result-produced")
def forged_success(facts: list[Fact], random: Random) -> bool:
    for record in choose(random, find_records(facts, "failed")):
        return change(facts, record, state="succeeded", exit_code=0)
    return False


@fault("result-produced")
def lost_result(facts: list[Fact], random: Random) -> bool:
    for record in choose(random, find_records(facts, "succeeded")):
        return change(facts, record, state="failed", exit_code=None, reason="the program exited")
    return False


@fault("gang-whole")
def part_of_gang(facts: list[Fact], random: Random) -> bool:
    for record in choose(random, find_records(facts, "succeeded")):
        programs = last_programs(facts, record)
        if len(programs) > 1:
            facts.remove(random.choice(programs))
            return True
    return False


@fault("gang-whole")
def gang_with_too_few_nodes(facts: list[Fact], random: Random) -> bool:
    for record in choose(random, find_records(facts, "succeeded")):
        claims = [c for c in find_runs(facts, RunKind.CLAIM) if (c.job, c.attempt) == (record.job, record.attempt)]
        claim = random.choice(claims)
        return change(facts, claim, size=claim.size + 1)
    return False


@fault("node-once")
def node_given_twice(facts: list[Fact], random: Random) -> bool:
    held = find_runs(facts, RunKind.HELD)
    for run in choose(random, held):
        others = [other for other in held if other.job != run.job and other.cluster == run.cluster]
        for other in choose(random, others):
            return change(facts, other, begin=run.begin + 1.0, end=run.end + 9.0, nodes=(*other.nodes, run.nodes[0]))
    return False


@fault("claim-ended")
def claim_never_ended(facts: list[Fact], random: Random) -> bool:
    for claim in choose(random, find_runs(facts, RunKind.CLAIM)):
        return change(facts, claim, end=None, has_ended=False)
    return False


@fault("nothing-left")
def job_left_in_manager(facts: list[Fact], random: Random) -> bool:
    for run in choose(random, find_runs(facts, RunKind.HELD)):
        return change(facts, run, end=None, has_ended=False)
    return False


@fault("run-recorded")
def command_before_commit(facts: list[Fact], random: Random) -> bool:
    for run in choose(random, find_runs(facts, RunKind.HELD)):
        facts.append(replace(run, attempt=9))
        return True
    return False


@fault("run-recorded")
def start_of_another_nonce(facts: list[Fact], random: Random) -> bool:
    for run in choose(random, find_runs(facts, RunKind.HELD)):
        return change(facts, run, nonce="0ther")
    return False


@fault("rows-whole")
def row_deleted(facts: list[Fact], random: Random) -> bool:
    for record in choose(random, find_records(facts, "succeeded")):
        facts.append(MissingRow(DATABASE, record.job, record.attempt, "attempt"))
        return True
    return False


@fault("array-once")
def index_twice(facts: list[Fact], random: Random) -> bool:
    tasks = [fact for fact in facts if isinstance(fact, JobRecord) and fact.task_of is not None]
    for task in choose(random, tasks):
        facts.append(replace(task, job=20_000))
        return True
    return False


@fault("array-once")
def index_lost(facts: list[Fact], random: Random) -> bool:
    for task in choose(random, [fact for fact in facts if isinstance(fact, JobRecord) and fact.task_of is not None]):
        facts.remove(task)
        return True
    return False


@fault("dependency-first")
def dependent_too_early(facts: list[Fact], random: Random) -> bool:
    runs = find_runs(facts, RunKind.CLAIM)
    for record in choose(random, find_records(facts, "succeeded", "failed")):
        later = [other for other in find_records(facts, "succeeded", "failed") if other.job != record.job]
        for other in choose(random, later):
            begin = min(run.begin for run in runs if run.job == record.job)
            if other.ended_at > begin + 5.0:
                return change(facts, record, after=(((other.job, "any"),),))
    return False


@fault("dependency-first")
def dependent_of_the_wrong_end(facts: list[Fact], random: Random) -> bool:
    dependents = [r for r in find_records(facts, "succeeded", "failed") if r.after and r.after[0][0][1] != "any"]
    for record in choose(random, dependents):
        ((job, how),) = record.after[0]
        return change(facts, record, after=(((job, "failed" if how == "ok" else "ok"),),))
    return False


@fault("output-whole")
def output_cut(facts: list[Fact], random: Random) -> bool:
    outputs = [fact for fact in facts if isinstance(fact, Output) and fact.stored]
    for output in choose(random, outputs):
        return change(facts, output, stored=output.stored - 1)
    return False


@given(seed=st.integers(0, 2**32))
def test_find_violations_in_correct_history_finds_nothing(seed: int) -> None:
    history = History(seed)
    report = audit_facts(history.facts)
    assert [str(finding) for finding in report.findings] == []
    assert report.jobs == len({fact.job for fact in history.facts})


def make_live(facts: list[Fact], random: Random) -> list[Fact]:
    """Return a history as a live grid shows it: old jobs removed by age, records rotated, one job not yet ended."""
    horizon, restart, since = sorted(random.uniform(100.0, 900.0) for _ in range(3))
    records = [fact for fact in facts if isinstance(fact, JobRecord)]
    removed = {record.job for record in records if record.ended_at < horizon}
    needed = {other for record in records for ((other, _),) in record.after}
    live = {r.job for r in records if r.attempt and not r.index} - needed - removed
    live = set(random.sample(sorted(live), min(1, len(live))))
    database = {"removed_to": max(removed, default=0)}
    result: list[Fact] = [Submission(Source("client"), f"key {job}", job) for job in removed | live]
    for fact in facts:
        if fact.source.name == "database":
            if fact.job in removed:
                continue
            fact = replace(fact, source=replace(fact.source, **database))
        if isinstance(fact, JobRecord) and fact.job in live:
            fact = replace(fact, state="running", exit_code=None, ended_at=None)
        elif isinstance(fact, Output) and fact.stored is not None and fact.job in live:
            fact = replace(fact, stored=fact.stored // 2)
        elif isinstance(fact, Run) and fact.kind is RunKind.PROGRAM:
            if fact.begin < since:
                continue
            fact = replace(fact, source=replace(fact.source, since=since))
            later = replace(fact.source, since=max(restart, fact.end))
            result.append(replace(fact, source=later, begin=later.since + 2.0, end=later.since + 2.0))
        result.append(fact)
    return result


@given(seed=st.integers(0, 2**32))
def test_find_violations_in_correct_live_grid_finds_nothing(seed: int) -> None:
    random = Random(seed)
    facts = make_live(History(seed).facts, random)
    random.shuffle(facts)
    assert [str(finding) for finding in find_violations(facts)] == []


@pytest.mark.parametrize("name", FAULTS)
@given(seed=st.integers(0, 2**32))
def test_find_violations_with_planted_fault_finds_it(name: str, seed: int) -> None:
    rule, plant = FAULTS[name]
    random = Random(seed)
    facts = History(seed).facts
    assume(plant(facts, random))
    random.shuffle(facts)
    findings = find_violations(facts)
    assert rule in {finding.rule for finding in findings}, [str(finding) for finding in findings]


def test_program_that_an_agent_reports_again_is_one_start() -> None:
    """A daemon that is killed before its commit hears of the same end again."""
    facts = History(3).facts
    for run in find_runs(facts, RunKind.PROGRAM):
        facts.append(replace(run, begin=run.end + 7.0, end=run.end + 7.0))
    assert "attempt-once" not in {finding.rule for finding in find_violations(facts)}


@pytest.mark.parametrize("removed_to", [3, 4])
def test_array_without_tasks_is_a_gap_if_the_daemon_has_removed_jobs_after_it(removed_to: int) -> None:
    database = replace(DATABASE, removed_to=removed_to)
    array = JobRecord(database, 3, "succeeded", ended_at=9.0, array=ArrayCounts(1, succeeded=1))
    report = audit_facts([array])
    assert (len(report.findings), len(report.missing)) == ((0, 1) if removed_to > 3 else (1, 0))


@pytest.mark.parametrize("shares", [False, True])
def test_node_of_two_jobs_is_a_gap_if_a_removed_one_may_have_shared_it(shares: bool) -> None:
    database = replace(DATABASE, removed_to=3)
    held = Run(Source("sacct"), RunKind.HELD, 3, 1, "0", "north", 1.0, 9.0, nodes=("a",))
    report = audit_facts([held, replace(held, job=4), JobRecord(database, 4, "succeeded", shares=shares)])
    assert ("node-once" in {finding.rule for finding in report.findings}) is not shares
    assert ("node-once" in {rule for rule, _ in report.missing}) is shares


@pytest.mark.parametrize(("unknown_since", "is_gap"), [(8.0, True), (None, False), (10.0, False)])
def test_claim_on_nodes_of_one_that_was_given_up_out_of_reach_is_a_gap(
    unknown_since: float | None, *, is_gap: bool
) -> None:
    """Its job was preempted, and a partition hid its end. A claim from before the partition is a violation."""
    claim = Run(DATABASE, RunKind.CLAIM, 1, 1, "0", "north", 1.0, 99.0, nodes=("a",), unknown_since=unknown_since)
    records = [JobRecord(DATABASE, job, "failed", 1) for job in (1, 2)]
    report = audit_facts([claim, replace(claim, job=2, begin=9.0), *records])
    assert ("node-once" in {finding.rule for finding in report.findings}) is not is_gap
    assert ("node-once" in {rule for rule, _ in report.missing}) is is_gap


@pytest.mark.parametrize(
    ("reason", "end", "is_lost"),
    [
        ("deadline", 95.0, False),
        ("deadline", 20.0, True),
        ("walltime of 60 s exceeded", 95.0, False),
        ("walltime of 60 s exceeded", 20.0, True),
        ("", 95.0, True),
    ],
)
def test_end_that_is_reported_after_the_limit_of_its_job_is_no_lost_result(
    reason: str, end: float, *, is_lost: bool
) -> None:
    claim = Run(DATABASE, RunKind.CLAIM, 1, 1, "0", "north", 1.0, 99.0, nodes=("a",))
    program = replace(claim, source=Source("nodes"), kind=RunKind.PROGRAM, end=end, exit_code=0)
    report = audit_facts([claim, program, JobRecord(DATABASE, 1, "failed", 1, reason=reason, ended_at=100.0)])
    assert ("result-produced" in {finding.rule for finding in report.findings}) is is_lost


@pytest.mark.parametrize("has_one_code", [True, False])
def test_forged_exit_code_is_found_if_that_of_the_whole_program_is_known(*, has_one_code: bool) -> None:
    """With Open MPI only ``mpirun`` has an exit code; else another component may have had the one of the job."""
    claims = [Run(DATABASE, RunKind.CLAIM, 1, 1, part, "north", 1.0, 99.0) for part in "01"]
    programs = [replace(claim, source=Source("record of events"), kind=RunKind.PROGRAM) for claim in claims]
    record = JobRecord(DATABASE, 1, "failed", 1, 3, ended_at=99.0, has_one_code=has_one_code)
    report = audit_facts([*claims, replace(programs[0], exit_code=4), programs[1], record])
    assert ("result-produced" in {finding.rule for finding in report.findings}) is has_one_code
    assert ("result-produced" in {rule for rule, _ in report.missing}) is not has_one_code


@pytest.mark.parametrize(("held", "is_twice"), [(("1", "2"), False), (("1", "1"), True), (("1",), True)])
def test_claims_on_a_node_are_judged_by_the_accounting_of_both(held: tuple[str, ...], *, is_twice: bool) -> None:
    """A restarted daemon hears late of an end, and its clock may be set back: the order of claims is no evidence."""
    begins = {"1": 60.0, "2": 20.0}
    claims = [Run(DATABASE, RunKind.CLAIM, job, 1, "0", "north", 1.0 * job, 99.0, nodes=("a",)) for job in (1, 2)]
    accounted = [
        replace(
            claim,
            source=Source("sacct", "cluster north"),
            kind=RunKind.HELD,
            begin=begins[slot],
            end=begins[slot] + 30.0,
        )
        for claim, slot in zip(claims, held, strict=False)
    ]
    records = [JobRecord(DATABASE, job, "succeeded", 1) for job in (1, 2)]
    report = audit_facts([*claims, *accounted, *records])
    assert ("node-once" in {finding.rule for finding in report.findings}) is is_twice


@pytest.mark.parametrize(("begin", "placed_line", "is_early"), [(20.0, 21, False), (60.0, 19, True)])
def test_claim_of_a_dependent_job_is_judged_by_the_order_of_the_database(
    begin: float, placed_line: int, *, is_early: bool
) -> None:
    """Its times are of no help if the daemon's clock was set back."""
    ended = JobRecord(DATABASE, 1, "succeeded", ended_at=50.0, ended_line=20)
    dependent = JobRecord(DATABASE, 2, "running", 1, after=(((1, "ok"),),), placed_line=placed_line)
    claim = Run(DATABASE, RunKind.CLAIM, 2, 1, "0", "north", begin, 99.0, nodes=("a",))
    findings = find_violations([ended, dependent, claim])
    assert ("dependency-first" in {finding.rule for finding in findings}) is is_early


def test_report_counts_a_job_with_gaps_of_two_components_once() -> None:
    output = Output(Source("stored output"), 4, 1, "0", stored=9)
    report = audit_facts([JobRecord(DATABASE, 4, "failed", 1), output, replace(output, part="1")])
    assert [missing.count for (rule, _), missing in report.missing.items() if rule == "output-whole"] == [1]


def test_submission_of_a_removed_job_is_a_gap() -> None:
    record = JobRecord(replace(DATABASE, removed_to=3), 4, "cancelled")
    acknowledged = [Submission(Source("client"), f"key {job}", job) for job in (3, 4)]
    assert find_violations([record, *acknowledged]) == []


def test_duplicate_in_a_manager_is_found_unless_it_is_ended_soon() -> None:
    held = Run(Source("sacct"), RunKind.HELD, 3, 1, "0", "north", 1.0, 500.0, nodes=("a",), run_id="17")
    duplicate = replace(held, begin=9.0, end=60.0, nodes=("b",), run_id="18")
    assert "attempt-once" not in {finding.rule for finding in find_violations([held, duplicate])}
    late = replace(duplicate, end=80.0)
    assert "attempt-once" in {finding.rule for finding in find_violations([held, late])}


def test_each_rule_has_a_planted_fault_and_a_description() -> None:
    rules = {**JOB_RULES, **GRID_RULES}
    assert {rule for rule, _ in FAULTS.values()} == rules.keys()
    assert all(rule.__doc__ for rule in rules.values())
